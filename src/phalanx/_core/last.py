"""The last lines of what is written. Owns what is kept of the rest: nothing."""

from __future__ import annotations

from collections import deque

from phalanx._core.sink import Sink

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator


class LastLines(Sink):
    """A sink that writes nothing, and keeps the last ``count`` lines (>= 0)."""

    def __init__(self, count: int) -> None:
        super().__init__(None)
        self._count = count
        self._lines: deque[tuple[bytes, object]] = deque(maxlen=count)
        self._unfinished: list[bytes] = []
        self._owner: object = None

    def write(self, buffers: tuple[bytes | memoryview, ...], owner: object = None) -> None:
        """See `Sink.write`."""
        block = b"".join(buffers)
        end = block.rfind(b"\n") + 1
        if end:
            whole = b"".join((*self._unfinished, block[: end - 1]))
            # Split from the right, as often as lines are kept: the others are not even looked at.
            self._lines.extend((line, owner) for line in whole.rsplit(b"\n", self._count)[-self._count :])
            self._unfinished.clear()
        if block[end:]:
            self._unfinished.append(block[end:])
            self._owner = owner

    def taken(self) -> Iterator[tuple[bytes, object]]:
        """What is kept, with whose it is; an unfinished line last. Nothing is kept after that."""
        while self._lines:
            line, owner = self._lines.popleft()
            yield line + b"\n", owner
        if self._unfinished:
            yield b"".join(self._unfinished), self._owner
            self._unfinished.clear()
