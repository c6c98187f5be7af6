"""What tests of the pump share: a sink that keeps what it is given, a pump with all around it, and waiting for it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

from phalanx._base import files
from phalanx._base.loop import Loop
from phalanx._engine.keeper.log_writer import Compressor, Rotator
from phalanx._logs.follower import Follower
from phalanx._logs.lines import Source
from phalanx._logs.pump import Pump
from phalanx._logs.render import Text, View
from phalanx._logs.sink import Sink
from phalanx._logs.stream import FileWatch, Stream
from phalanx._logs.terminal import PlainOutput
from tests.support.helpers import TIMEOUT


class Memory(Sink):
    """A sink that is always ready, and keeps everything."""

    def __init__(self) -> None:
        super().__init__(None)
        self.data = b""

    def write(self, buffers: tuple[bytes | memoryview, ...], owner: object = None) -> None:  # noqa: ARG002 - the sink's signature
        self.data += b"".join(buffers)

    def taken(self) -> bytes:
        """What has come since the last call."""
        data, self.data = self.data, b""
        return data


class Rotated:
    """A log file of bounded size, and the end of the pipe that its worker would write into."""

    def __init__(self, path: str, limit: int, keep: int = 0, compressor: Compressor | None = None) -> None:
        file = files.opened_log(path)
        reader, self.writer = os.pipe2(os.O_CLOEXEC)
        self._rotator = Rotator(path, (limit, keep, compressor is not None), file, reader, compressor)

    def write(self, data: bytes) -> None:
        """Into the pipe, and from there into the files."""
        os.write(self.writer, data)
        assert self.drain()

    def drain(self) -> bool:
        """Write all that is in the pipe. Returns whether more may come."""
        while (count := self._rotator.turn()) > 0:
            pass
        return count == 0

    def close_writer(self) -> None:
        """As a worker that ends does."""
        os.close(self.writer)
        self.writer = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give all descriptors back."""
        if self.writer >= 0:
            self.close_writer()
        self._rotator.close()


def source(rank: int = 0, stream: str = "stdout") -> Source:
    return Source(rank, stream, f"[{rank}] ".encode())


def read_all(fd: int) -> bytes:
    """What is there now."""
    data = b""
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(fd, 65536):
            data += chunk
    return data


def until(loop: Loop, condition: Callable[[], bool], timeout: float = TIMEOUT) -> None:
    """Let a loop run until something is so. AssertionError if it is not within ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it has not come to that"
        loop.after(0.2, lambda: None)  # lest it waits for ever
        loop.once()


def append(path: str, data: bytes) -> None:
    """Write at the end of a file, as a worker does."""
    with open(path, "ab", buffering=0) as file:
        file.write(data)


def read_on(follower: Follower, size: int = 4096) -> bytes:
    """All that a follower can read now, in pieces of ``size``."""
    buffer, data = bytearray(size), b""
    while count := follower.read(buffer):
        data += buffer[:count]
    return data


@contextlib.contextmanager
def followed(path: object, **options: Any) -> Iterator[Follower]:
    """A follower of a file."""
    it = Follower(str(path), **options)
    try:
        yield it
    finally:
        it.close()
        it.close()


class Rig:
    """A pump of some files on a loop of its own, and one view of all of them: on paper, as text, unless given."""

    def __init__(
        self,
        paths: list[str],
        target: Any,
        *,
        prefix: str = "[{}] ",
        rotates: bool = False,
        view: View | None = None,
        views: list[View] | None = None,
        streams: list[Stream] | None = None,
        **options: Any,
    ) -> None:
        self.loop = Loop()
        self.view = view or View(PlainOutput(target if isinstance(target, Sink) else Sink(target)), Text())
        self.sources = [Source(rank, "stdout", prefix.format(rank).encode()) for rank in range(len(paths))]
        self.streams = streams or [
            Stream(Follower(path, rotates=rotates), [(self.view, source)], number=2 * rank)
            for rank, (path, source) in enumerate(zip(paths, self.sources, strict=True))
        ]
        self.pump = Pump(self.streams, views or [self.view], message_view=self.view, **options)
        self.done = False

    @property
    def watch(self) -> FileWatch:
        """What the pump, once it is open, watches its files with."""
        assert self.pump._watch is not None
        return self.pump._watch

    def caught_up(self) -> bool:
        """Whether everything has been read."""
        return all(
            os.path.exists(stream.follower.path)
            and stream.follower.left() == 0
            and stream.follower.offset == os.stat(stream.follower.path).st_size
            for stream in self.streams
        )

    def catch_up(self) -> None:
        until(self.loop, self.caught_up)

    def finish(self) -> None:
        """Come to the end of all files."""

        def done() -> None:
            self.done = True

        self.pump.finish(done)
        until(self.loop, lambda: self.done)


@contextlib.contextmanager
def rig(paths: list[str], target: Any, **options: Any) -> Iterator[Rig]:
    it = Rig(paths, target, **options)
    try:
        it.pump.open(it.loop)
        yield it
    finally:
        it.pump.close()
        it.loop.close()
