"""Bytes to lines. Owns the cutting, and what a carriage return means; pure, and knows nothing of files or consoles."""

from __future__ import annotations

LONGEST = 256 * 1024
"""Bytes of an unfinished line that are held. The rest of a longer one is given out as it comes."""


class Cutter:
    r"""Cuts a stream of bytes at its line ends, and holds what is not ended yet.

    A line ends with a line feed; a carriage return before it belongs to it. Any other carriage return takes back what
    stands before it in its line, as it would on a terminal: that is how progress bars are drawn. Nothing is decoded.

    >>> cutter = Cutter()
    >>> cutter.cut(b"one\ntwo\nthr"), cutter.rest
    (b'one\ntwo\n', b'thr')
    >>> cutter.cut(b"ee\n"), cutter.rest
    (b'three\n', b'')
    >>> cutter.cut(b" 10%\r 20%\r 30%"), cutter.rest, cutter.rewritten
    (b'', b' 30%', True)
    """

    __slots__ = ("rest", "rewritten", "withdrawn")

    def __init__(self) -> None:
        self.rest = b""
        """What has come of the line that is not ended yet, as far as `take` has not taken it."""
        self.rewritten = False
        """Whether that line is one that is written again and again."""
        self.withdrawn = False
        """Whether the first of the lines that `cut` returned last has taken back what `take` had taken of it."""

    def cut(self, data: bytes | bytearray, count: int = -1) -> bytes:
        """Take the first ``count`` bytes of ``data`` (< 0: all). Returns the lines that are whole with them."""
        if count < 0:
            count = len(data)
        end = data.rfind(b"\n", 0, count) + 1
        with memoryview(data) as view:
            if end:
                # One copy, in C, whether something was held or not: lines arrive by the gigabyte.
                block = b"".join((self.rest, view[:end]))
                self.rest = bytes(view[end:count])
                self.rewritten = False
            else:
                block = b""
                self.rest = b"".join((self.rest, view[:count]))
        if b"\r" in self.rest:
            held = len(self.rest)
            self.rest = last_state(self.rest)
            self.rewritten |= len(self.rest) < held
        self.withdrawn = False
        if b"\r" not in block:
            return block
        first = block[: block.index(b"\n")]
        self.withdrawn = len(last_state(first)) < len(first)
        return settled(block)

    def take(self) -> bytes:
        """Take all that is held of the unfinished line, to show it now."""
        rest, self.rest = self.rest, b""
        self.rewritten = False
        return rest

    def take_settled(self) -> bytes:
        """Take it but for the returns at its end: they may be half a line end, or take back what stands before them."""
        line = self.rest.rstrip(b"\r")
        self.rest = self.rest[len(line) :]
        return line


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
