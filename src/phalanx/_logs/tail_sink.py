"""A sink that keeps the last lines, and drops all others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from phalanx._logs.sink import Sink

MOST_OF_A_LINE = 16 << 20
"""Bytes of a line that are kept. A sparse file of terabytes is one line of zeros, and takes no space on disk."""


class TailSink(Sink):
    """A sink that writes nothing, and keeps the last ``count`` lines (>= 0).

    A line of more than `MOST_OF_A_LINE` bytes is cut; a note in its place says how many bytes are missing.
    """

    def __init__(self, count: int) -> None:
        super().__init__(None)
        self._count = count
        self._lines: deque[tuple[bytes, object]] = deque(maxlen=count)
        self._unfinished: list[bytes] = []
        self._held = self._cut = 0  # bytes of it that are kept, and that are cut
        self._owner: object = None

    def write(self, buffers: tuple[bytes | memoryview, ...], owner: object = None) -> None:
        """See `Sink.write`."""
        block = b"".join(buffers)
        end = block.rfind(b"\n") + 1
        if end:
            whole = block[: end - 1]
            if self._unfinished:
                first, newline, others = whole.partition(b"\n")
                self._hold(first)
                whole = self._taken() + newline + others
            # Split from the right, as often as lines are kept: the others cost nothing.
            self._lines.extend((line, owner) for line in whole.rsplit(b"\n", self._count)[-self._count :])
        if block[end:]:
            self._hold(block[end:])
            self._owner = owner

    def _hold(self, block: bytes) -> None:
        kept = block[: MOST_OF_A_LINE - self._held]
        self._cut += len(block) - len(kept)
        if kept:
            self._unfinished.append(kept)
            self._held += len(kept)

    def _taken(self) -> bytes:
        """Return what is kept of the unfinished line, and keep it no longer."""
        cut = b" ... %d bytes cut ..." % self._cut if self._cut else b""
        line = b"".join((*self._unfinished, cut))
        self._unfinished.clear()
        self._held = self._cut = 0
        return line

    def taken(self) -> Iterator[tuple[bytes, object]]:
        """Yield the kept lines with their owners, an unfinished one last, and keep them no longer."""
        while self._lines:
            line, owner = self._lines.popleft()
            yield line + b"\n", owner
        if self._unfinished:
            yield self._taken(), self._owner
