"""Follow log files into a stream, from Python: the names of ``torch.distributed.elastic.multiprocessing.tail_log``.

A group with teed streams needs neither of them: it shows its lines by itself.
"""

from __future__ import annotations

import errno
import os

from phalanx._base import tty, unpatched
from phalanx._base.files import ANY_LINK
from phalanx._base.loop import Loop
from phalanx._logs.follower import Follower
from phalanx._logs.group_pump import target_of
from phalanx._logs.lines import Source
from phalanx._logs.pump import Pump
from phalanx._logs.render import Text, View
from phalanx._logs.search import Only
from phalanx._logs.sink import Sink
from phalanx._logs.stream import Stream
from phalanx._logs.terminal import PlainOutput

TYPE_CHECKING = False
if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping
    from typing import Any, Self, TextIO

__all__ = ["TailLog", "tail_logfile"]


class TailLog:
    r"""Shows what is appended to files, whole lines at a time, until it is stopped. Files may be created later.

    One thread follows all files, and sleeps until one of them grows. If ``dst`` has a descriptor, it gets the bytes of
    the files, else text with replacement characters. A terminal gets control sequences as escapes, except colours. A
    last line without an end gets one.

    Args:
        name: Names the thread, and each file's prefix: ``[{name}{rank}]:``.
        log_files: Rank → path.
        dst: Where lines go: a file, a pipe, a terminal, or anything with ``write``. None to do nothing.
        log_line_prefixes: Rank → prefix of each line, in place of the above. A number is ignored: this argument was
            the interval once.
        interval_sec: Without effect.
        log_line_filter: Is called with each line, and returns whether to show it. None: all are shown.

    >>> import io, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     seen = io.StringIO()
    ...     tail = TailLog("trainer", {0: f"{folder}/0.log"}, seen).start()
    ...     with open(f"{folder}/0.log", "w") as log:
    ...         written = log.write("ready\n")
    ...     tail.stop()
    >>> seen.getvalue()
    '[trainer0]:ready\n'
    """

    def __init__(
        self,
        name: str,
        log_files: Mapping[int, str | os.PathLike[str]],
        dst: TextIO | None,
        log_line_prefixes: Mapping[int, str] | float | None = None,
        interval_sec: float = 0.1,  # noqa: ARG002 - historical
        log_line_filter: Callable[[str], bool] | None = None,
    ) -> None:
        self._name = name
        self._files = {rank: os.fspath(path) for rank, path in log_files.items()}
        self._dst = dst
        if log_line_prefixes is None or isinstance(log_line_prefixes, (int, float)):
            log_line_prefixes = {}
        self._prefixes = log_line_prefixes
        self._filter = log_line_filter
        self._loop: Loop | None = None
        self._pump: Pump | None = None
        self._thread: threading.Thread | None = None
        self._stopped = False

    def start(self) -> Self:
        """Start to follow. Returns itself.

        Raises:
            IsADirectoryError: One of the paths is a folder.
            OSError: The files cannot be watched.
            RuntimeError: It was started before.
        """
        if self._loop is not None:
            raise RuntimeError("a TailLog is started once")
        if self._files and self._dst is not None:
            for path in self._files.values():
                if os.path.isdir(path):
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            loop = self._loop = Loop()
            pump = self._pump = self._make(self._dst)
            try:
                pump.open(loop)
                self._thread = unpatched.thread(target=self._run, name=f"TailLog_{self._name}")
                self._thread.start()
            except BaseException:
                pump.close()
                loop.close()
                raise
        return self

    def stop(self) -> None:
        """Show what is in the files by now, and stop. Returns in bounded time, as a group's end does. Idempotent."""
        if self._thread is not None:
            loop, pump = self._loop, self._pump
            assert loop is not None
            assert pump is not None
            if not self._stopped:
                loop.call(lambda: pump.finish(loop.stop))
            self._thread.join()
        self._stopped = True

    def stopped(self) -> bool:
        """Whether `stop` has been called and has returned."""
        return self._stopped

    def _run(self) -> None:
        assert self._loop is not None
        assert self._pump is not None
        try:
            self._loop.run()
        finally:
            self._pump.close()
            self._loop.close()

    def _make(self, dst: Any) -> Pump:
        select = None if self._filter is None else Only(_select(self._filter))
        target = target_of(dst)
        view = View(PlainOutput(Sink(target)), Text(), select, sanitise=tty.is_terminal(target))
        streams = []
        for rank, path in self._files.items():
            prefix = self._prefixes.get(rank, f"[{self._name}{rank}]:")
            source = Source(rank, "stdout", prefix.encode("utf-8", "surrogateescape"))
            streams.append(Stream(Follower(path, links=ANY_LINK), [(view, source)]))
        return Pump(streams, [view])


def tail_logfile(
    header: str,
    file: str | os.PathLike[str],
    dst: TextIO,
    finished: threading.Event,
    interval_sec: float = 0.1,
    log_line_filter: Callable[[str], bool] | None = None,
) -> None:
    """Show what is appended to one file until ``finished`` is set, then what is left of it, and return.

    Args:
        header: The prefix of each line.
        file: The path; it may be created later, or never.
        dst: Where lines go, as for `TailLog`.
        finished: Set it once nothing more will be written.
        interval_sec: Without effect: nothing polls.
        log_line_filter: Is called with each line, and returns whether to show it. None: all are shown (the original
            shows none then).

    Raises:
        IsADirectoryError: The path is a folder.
    """
    tail = TailLog("", {0: file}, dst, {0: header}, interval_sec, log_line_filter).start()
    try:
        finished.wait()
    finally:
        tail.stop()


def _select(wanted: Callable[[str], bool]) -> Callable[[bytes], bytes]:
    def select(block: bytes) -> bytes:
        lines = block.decode("utf-8", "surrogateescape").split("\n")[:-1]
        return "".join([f"{line}\n" for line in lines if wanted(f"{line}\n")]).encode("utf-8", "surrogateescape")

    return select
