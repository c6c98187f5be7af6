"""Cuts bytes into lines, and keeps the state of each stream's current one. Owns what a carriage return means.

Pure: knows nothing of files or consoles.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from phalanx._base.tty import Colours

_ESCAPE = 0x1B
_UP = b"\033[A"
_MOVES = re.compile(rb"((?:\033\[A)+)((?:\r*\n)+)")

LONGEST = 256 * 1024
"""Bytes of an unfinished line that are held. A longer line is passed on in pieces."""


class Cutter:
    r"""Cuts a stream of bytes at its line ends, and holds the unfinished line.

    A line ends with a line feed; a carriage return before it belongs to the end. Any other carriage return erases what
    stands before it in its line, as on a terminal: that is how progress bars are drawn. So does a move up a row (CUU,
    ``ESC [ A``) with the line feed that follows it, for the bars of nested loops. Nothing is decoded.

    >>> cutter = Cutter()
    >>> cutter.cut(b"one\ntwo\nthr"), cutter.rest
    (b'one\ntwo\n', b'thr')
    >>> cutter.cut(b"ee\n"), cutter.rest
    (b'three\n', b'')
    >>> cutter.cut(b" 10%\r 20%\r 30%"), cutter.rest, cutter.rewritten
    (b'', b' 30%', True)
    """

    __slots__ = ("_pieces", "held", "rewritten", "withdrawn")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []  # the held bytes, as they came: joining them each time would be quadratic
        self.held = 0
        """Bytes of `rest`."""
        self.rewritten = False
        """Whether the unfinished line has erased earlier states of itself: a progress bar."""
        self.withdrawn = False
        """Whether the first line that `cut` returned last has erased what `take` had returned of it."""

    @property
    def rest(self) -> bytes:
        """The held bytes of the unfinished line, without what `take` has returned of it."""
        if len(self._pieces) > 1:
            self._pieces = [b"".join(self._pieces)]
        return self._pieces[0] if self._pieces else b""

    def cut(self, data: bytes | bytearray, count: int = -1) -> bytes:
        """Take the first ``count`` bytes of ``data`` (< 0: all). Returns the lines that are now whole."""
        if count < 0:
            count = len(data)
        end = data.rfind(b"\n", 0, count) + 1
        block = b""
        with memoryview(data) as view:
            if end:
                # One copy, in C, whether something was held or not: lines arrive by the gigabyte.
                block = b"".join((*self._pieces, view[:end]))
                self._pieces, self.held, self.rewritten = [], 0, False
                if _ESCAPE in block and _UP in block:
                    block = self._without_moves(block)
            if end < count:
                self._add(bytes(view[end:count]))
        self.withdrawn = False
        if b"\r" not in block:
            return block
        first = block[: block.index(b"\n")]
        self.withdrawn = len(last_state(first)) < len(first)
        return settled(block)

    def take(self) -> bytes:
        """Return all that is held of the unfinished line, and hold it no longer."""
        rest = self.rest
        self._hold(b"")
        self.rewritten = False
        return rest

    def take_settled(self) -> bytes:
        """As `take`, without the returns at the end: they may be half a line end, or erase what stands before them."""
        rest = self.rest
        line = rest.rstrip(b"\r")
        self._hold(rest[len(line) :])
        return line

    def take_piece(self) -> bytes:
        """As `take`, without half a line end or half a letter (UTF-8) at the end. It returns at least one byte."""
        line = self.take_settled()
        half = half_letter(line)
        if not line.strip(b"\r") or half == len(line):
            return line + self.take()
        self._hold(line[len(line) - half :] + self.rest)
        self.rewritten = False
        return line[: len(line) - half]

    def _without_moves(self, block: bytes) -> bytes:
        """Join lines that are separated by a move up and a line feed. Returns the whole lines, and holds the rest."""

        def one_row(moves: re.Match[bytes]) -> bytes:
            """Replace each pair of a move up and a line feed by a carriage return."""
            up, down = len(moves[1]) // len(_UP), moves[2].count(b"\n")
            return _UP * (up - down) + b"\r" + b"\n" * (down - up)

        block = _MOVES.sub(one_row, block)
        end = block.rfind(b"\n") + 1
        if end < len(block):
            self._add(block[end:])
        return block[:end]

    def _hold(self, rest: bytes) -> None:
        self._pieces = [rest] if rest else []
        self.held = len(rest)

    def _add(self, more: bytes) -> None:
        """Hold more of the unfinished line. The held bytes have returns at the end only."""
        state = last_state(more) if b"\r" in more else more
        pieces = self._pieces
        if len(state) < len(more) or (pieces and pieces[-1][-1:] == b"\r" and more.strip(b"\r")):
            self._pieces, self.held, self.rewritten = [state], len(state), True
        else:
            pieces.append(more)
            self.held += len(more)


def half_letter(data: bytes) -> int:
    r"""Return how many bytes at the end of ``data`` begin a letter (UTF-8) that ends beyond it; 0 if none do.

    >>> half_letter("aé€".encode()[:-1]), half_letter(b"a"), half_letter(b"\x80\x80")
    (2, 0, 0)
    """
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:  # noqa: PLR2004 - 10xxxxxx goes on with a letter, others begin one
            return back if (0xC2 <= byte <= 0xF4) and back < 2 + (byte >= 0xE0) + (byte >= 0xF0) else 0  # noqa: PLR2004 - 110xxxxx, 1110xxxx, 11110xxx
    return 0


def last_state(line: bytes) -> bytes:
    r"""Return the part of a line (without its line feed) that is not erased. Returns at its end may belong to its end.

    >>> last_state(b" 10%\r 20%\r")
    b' 20%\r'
    """
    seen = line.rstrip(b"\r")
    start = seen.rfind(b"\r") + 1
    return line[start:] if start else line


def settled(block: bytes) -> bytes:
    r"""Return whole lines without the parts that they have erased.

    >>> settled(b"a\r\n  5%\r100%\nb\n")
    b'a\r\n100%\nb\n'
    """
    return b"\n".join([last_state(line) if b"\r" in line else line for line in block.split(b"\n")])


class Source:
    """One stream of one rank as one view has it: whose lines they are, their prefix, and the state of the current one.

    Args:
        rank: The rank whose lines these are: the global one.
        stream: "stdout" or "stderr".
        prefix: What stands before each line; or a function that returns it for a time (seconds since the epoch).
    """

    __slots__ = (
        *("rank", "stream", "prefix", "cutter", "colours", "begun", "behind"),
        *("parted", "marks", "changed", "shown", "shown_at"),
    )

    def __init__(self, rank: int, stream: str, prefix: bytes | Callable[[float], bytes] = b"") -> None:
        self.rank = rank
        self.stream = stream
        self.prefix = prefix
        self.cutter = Cutter()
        """Cuts the stream into lines, and holds the unfinished one."""
        self.colours = Colours()
        """The colours that are in force where the last written text ended."""
        self.begun = False
        """Whether the line's beginning has been written to the output, and is no longer held."""
        self.behind = False
        """Whether more bytes of the file can be read already."""
        self.parted = False
        """Whether the line's beginning has been written as a line of its own, because it is too long to be held."""
        self.marks: dict[str, bool] = {}
        """The JSON fields of such a part ("partial", "continued"), while that part is written."""
        self.changed = 0.0
        """When the line's last bytes came (seconds, monotonic)."""
        self.shown = b""
        """The state of a progress bar that was written last, as a line of its own;"""
        self.shown_at = 0.0
        """and when (seconds, monotonic)."""

    def label(self, time: Callable[[], float]) -> bytes:
        """Return the prefix. ``time`` is called only if the prefix contains a time."""
        return self.prefix if isinstance(self.prefix, bytes) else self.prefix(time())
