"""Tracebacks that are equal across ranks are shown once. Owns where one begins and ends in a rank's lines.

What comes of a rank after a traceback that is held comes after it. The comparison is the business of `fold`.
"""

from __future__ import annotations

from phalanx._core import clock
from phalanx._core.fold import unmarked

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx._core.fold import Fold
    from phalanx._core.view import Lane

HEAD = b"Traceback (most recent call last):"
_CHAIN = (
    b"During handling of the above exception, another exception occurred:",
    b"The above exception was the direct cause of the following exception:",
)

QUIET = 0.1
"""Seconds after which a traceback is not waited for any longer that has no end, or may go on with another."""

_MOST = 64 * 1024  # bytes of a traceback


class _Open:
    """A traceback that is being written."""

    __slots__ = ("changed", "end", "lines", "size")

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.end = 0  # how many lines there were with that of the exception; 0: it has not come
        self.size = 0
        self.changed = 0.0


class Tracebacks:
    """Takes whole lines of lanes; holds tracebacks, and what comes after them, for their equals. Loses nothing.

    ``show`` is called with a lane and whole lines of it that are not held.
    """

    def __init__(self, fold: Fold, show: Callable[[Lane, bytes], None]) -> None:
        self._fold = fold
        self._show = show
        self._open: dict[Lane, _Open] = {}

    @property
    def due(self) -> float:
        """When `tick` has something to do (seconds, monotonic)."""
        return min([self._fold.due, *(it.changed + QUIET for it in self._open.values())])

    def holds(self, lane: Lane) -> bool:
        """Whether something of a lane is held, which comes before what is shown of it next."""
        return lane in self._open or self._fold.holds(lane)

    def take(self, lane: Lane, block: bytes) -> None:
        """Take whole lines of a lane."""
        if HEAD not in block and not self.holds(lane):
            self._show(lane, block)
            return
        self.tick()
        ahead: list[bytes] = []  # lines that nothing is before
        for line in block.split(b"\n")[:-1]:
            if not (self.holds(lane) or line.endswith(HEAD)):
                ahead.append(line)
                continue
            if ahead:
                self._show(lane, b"\n".join([*ahead, b""]))
                ahead = []
            if not self._keep(lane, line):
                self._fold.add(lane, line)
        if ahead:
            self._show(lane, b"\n".join([*ahead, b""]))
        self._fold.release()

    def tick(self) -> None:
        """Let go of what has waited long enough."""
        now = clock.now()
        for lane in [lane for lane, it in self._open.items() if it.changed + QUIET <= now]:
            self._close(lane)
        self._fold.release()

    def finish(self, lane: Lane) -> None:
        """No more comes of a lane."""
        if lane in self._open:
            self._close(lane)

    def release(self) -> None:
        """Hold nothing back any longer."""
        for lane in list(self._open):
            self._close(lane)
        self._fold.release(everything=True)

    def _keep(self, lane: Lane, line: bytes) -> bool:
        """Whether a line is one of a traceback, or may be."""
        it = self._open.get(lane)
        begins = line.endswith(HEAD)
        plain = unmarked(lane, line)
        if it is not None and it.end and not begins and plain.strip() and plain not in _CHAIN:
            self._close(lane)
            it = None
        if it is None:
            if not begins:
                return False
            it = self._open[lane] = _Open()
        it.lines.append(line)
        it.size += len(line) + 1
        it.changed = clock.now()
        if begins:
            it.end = 0
        elif not it.end and plain.strip() and not plain[:1].isspace():
            it.end = len(it.lines)
        if it.size > _MOST:
            self._close(lane)
        return True

    def _close(self, lane: Lane) -> None:
        """A traceback is whole, as far as can be told: it waits for its equals."""
        it = self._open.pop(lane)
        end = it.end or len(it.lines)
        self._fold.add(lane, b"\n".join(it.lines[:end]))
        for line in it.lines[end:]:
            self._fold.add(lane, line)
