"""Bytes to lines. Owns the cutting, and what a carriage return means; pure, and knows nothing of files or consoles."""

from __future__ import annotations

import functools

TYPE_CHECKING = False
if TYPE_CHECKING:
    import re

_ESCAPE = 0x1B
_UP = b"\033[A"

LONGEST = 256 * 1024
"""Bytes of an unfinished line that are held. The rest of a longer one is given out as it comes."""


class Cutter:
    r"""Cuts a stream of bytes at its line ends, and holds what is not ended yet.

    A line ends with a line feed; a carriage return before it belongs to it. Any other carriage return takes back what
    stands before it in its line, as it would on a terminal: that is how progress bars are drawn. So do a move up a row
    (CUU, ``ESC [ A``) and the line feed that follows it, for the bars of nested loops. Nothing is decoded.

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
        self._pieces: list[bytes] = []  # what is held, as it came: to join it with each more of it would be quadratic
        self.held = 0
        """Bytes of `rest`."""
        self.rewritten = False
        """Whether that line is one that is written again and again."""
        self.withdrawn = False
        """Whether the first of the lines that `cut` returned last has taken back what `take` had taken of it."""

    @property
    def rest(self) -> bytes:
        """What has come of the line that is not ended yet, as far as `take` has not taken it."""
        if len(self._pieces) > 1:
            self._pieces = [b"".join(self._pieces)]
        return self._pieces[0] if self._pieces else b""

    def cut(self, data: bytes | bytearray, count: int = -1) -> bytes:
        """Take the first ``count`` bytes of ``data`` (< 0: all). Returns the lines that are whole with them."""
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
        """Take all that is held of the unfinished line, to show it now."""
        rest = self.rest
        self._hold(b"")
        self.rewritten = False
        return rest

    def take_settled(self) -> bytes:
        """Take it but for the returns at its end: they may be half a line end, or take back what stands before them."""
        rest = self.rest
        line = rest.rstrip(b"\r")
        self._hold(rest[len(line) :])
        return line

    def take_piece(self) -> bytes:
        """Take as much of it as can stand by itself: no half line end, and no half letter (UTF-8). Never nothing."""
        line = self.take_settled()
        half = half_letter(line)
        if not line.strip(b"\r") or half == len(line):
            return line + self.take()
        self._hold(line[len(line) - half :] + self.rest)
        self.rewritten = False
        return line[: len(line) - half]

    def _without_moves(self, block: bytes) -> bytes:
        """Whole lines, in which those are one that a move up and a line feed stand between. Holds what is not whole."""
        block = _moves().sub(_one_row, block)
        end = block.rfind(b"\n") + 1
        if end < len(block):
            self._add(block[end:])
        return block[:end]

    def _hold(self, rest: bytes) -> None:
        self._pieces = [rest] if rest else []
        self.held = len(rest)

    def _add(self, more: bytes) -> None:
        """More of the unfinished line. What is held has no return but at its end."""
        state = last_state(more) if b"\r" in more else more
        pieces = self._pieces
        if len(state) < len(more) or (pieces and pieces[-1][-1:] == b"\r" and more.strip(b"\r")):
            self._pieces, self.held, self.rewritten = [state], len(state), True
        else:
            pieces.append(more)
            self.held += len(more)


def half_letter(data: bytes) -> int:
    r"""How many bytes at the end of ``data`` begin a letter (UTF-8) that ends beyond it; 0 if none does.

    >>> half_letter("aé€".encode()[:-1]), half_letter(b"a"), half_letter(b"\x80\x80")
    (2, 0, 0)
    """
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:  # noqa: PLR2004 - 10xxxxxx goes on with a letter, others begin one
            return back if (0xC2 <= byte <= 0xF4) and back < 2 + (byte >= 0xE0) + (byte >= 0xF0) else 0  # noqa: PLR2004 - 110xxxxx, 1110xxxx, 11110xxx
    return 0


def _one_row(moves: re.Match[bytes]) -> bytes:
    """What moves up and line feeds after them come to: of each pair, a return."""
    up, down = len(moves[1]) // len(_UP), moves[2].count(b"\n")
    return _UP * (up - down) + b"\r" + b"\n" * (down - up)


@functools.cache
def _moves() -> re.Pattern[bytes]:
    import re

    return re.compile(rb"((?:\033\[A)+)((?:\r*\n)+)")


def last_state(line: bytes) -> bytes:
    r"""What is left to see of a line without its line feed, or what may be left: its last returns may be its end.

    >>> last_state(b" 10%\r 20%\r")
    b' 20%\r'
    """
    seen = line.rstrip(b"\r")
    start = seen.rfind(b"\r") + 1
    return line[start:] if start else line


def settled(block: bytes) -> bytes:
    r"""Whole lines with nothing in them that they have taken back.

    >>> settled(b"a\r\n  5%\r100%\nb\n")
    b'a\r\n100%\nb\n'
    """
    return b"\n".join([last_state(line) if b"\r" in line else line for line in block.split(b"\n")])
