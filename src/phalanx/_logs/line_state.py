"""The state of one stream's current line: what is held of it, and what of it has been written already."""

from __future__ import annotations

from collections.abc import Callable

from phalanx._base.tty import Colours
from phalanx._logs.lines import Cutter


class LineState:
    """The current line of one stream in one view."""

    __slots__ = ("begun", "behind", "changed", "colours", "cutter", "marks", "parted", "shown", "shown_at")

    def __init__(self) -> None:
        self.cutter = Cutter()
        """Cuts the stream into lines, and holds the unfinished one."""
        self.colours = Colours()
        """The colours that are in force where the last written text ended."""
        self.begun = False
        """Whether its beginning has been written to the output, and is no longer held."""
        self.behind = False
        """Whether more bytes of the file can be read already."""
        self.parted = False
        """Whether its beginning has been written as a line of its own, because the line is too long to be held."""
        self.marks: dict[str, bool] = {}
        """The JSON fields of such a part ("partial", "continued"), while that part is written."""
        self.changed = 0.0
        """When its last bytes came (seconds, monotonic)."""
        self.shown = b""
        """The state of a progress bar that was written last, as a line of its own;"""
        self.shown_at = 0.0
        """and when (seconds, monotonic)."""


class Source:
    """One stream of one rank as one view has it: whose lines they are, their prefix, and the state of the current one.

    Args:
        rank: The rank whose lines these are: the global one.
        stream: "stdout" or "stderr".
        prefix: What stands before each line; or a function that returns it for a time (seconds since the epoch).
    """

    __slots__ = ("line", "prefix", "rank", "stream")

    def __init__(self, rank: int, stream: str, prefix: bytes | Callable[[float], bytes] = b"") -> None:
        self.rank = rank
        self.stream = stream
        self.prefix = prefix
        self.line = LineState()

    def label(self, time: Callable[[], float]) -> bytes:
        """Return the prefix. ``time`` is called only if the prefix contains a time."""
        return self.prefix if isinstance(self.prefix, bytes) else self.prefix(time())
