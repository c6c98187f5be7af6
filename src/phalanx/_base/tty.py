"""Terminals: whether a stream is one, its size and colours; and what of a text a terminal would obey."""

from __future__ import annotations

import functools
import os
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TextIO

_SIZE = (80, 24)  # of a terminal that reports 0, or none


def size(fd: int) -> tuple[int, int]:
    """Read columns and rows of the terminal ``fd``; where it reports none, ``COLUMNS`` and ``LINES``, or 80 and 24."""
    try:
        found = tuple(os.get_terminal_size(fd))
    except OSError:
        found = (0, 0)
    columns, rows = [
        number or (int(text) if (text := os.environ.get(name, "")).isascii() and text.isdecimal() else 0) or usual
        for number, name, usual in zip(found, ("COLUMNS", "LINES"), _SIZE, strict=True)
    ]
    return columns, rows


def is_terminal(stream: Any) -> bool:
    """Whether a descriptor is a terminal, or a stream's ``isatty`` returns true. Never raises."""
    try:
        return stream is not None and bool(os.isatty(stream) if isinstance(stream, int) else stream.isatty())
    except Exception:  # noqa: BLE001 - closed; or an object of the host's, which may raise anything
        return False


def obeys_controls(stream: int | TextIO | None) -> bool:
    """Whether this is a terminal that knows control sequences: ``TERM`` is neither dumb nor empty. Never raises."""
    try:
        known = stream is not None and is_terminal(stream if isinstance(stream, int) else stream.fileno())
    except Exception:  # noqa: BLE001 - see above
        return False
    return known and os.environ.get("TERM", "") not in ("", "dumb")


def use_colour(stream: int | TextIO | None, choice: str = "auto") -> bool:
    """Whether to write colours to a descriptor, or to a stream.

    ``choice`` is "always", "never" or "auto". For "auto", ``NO_COLOR`` (no-color.org) decides, then ``FORCE_COLOR``
    (force-color.org), either with any value but an empty one, and then whether it is a terminal that knows colours.
    """
    if choice != "auto":
        return choice == "always"
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or obeys_controls(stream)


def printable(text: str) -> str:
    r"""Replace by escapes what a terminal would obey, and what the encoding of stdout cannot express.

    >>> print(printable("a\tb\x1b[2Jc"))
    a\tb\x1b[2Jc
    """
    import sys

    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    text = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return text.encode(encoding, "backslashreplace").decode(encoding)


RESET = "\033[0m"

_KEPT = b"\t\n\r"
_CONTROLS = tuple(code for code in (*range(32), 127) if code not in _KEPT)  # C0, DEL
_REORDERING = (0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))  # UAX 9
_BREAKS = (0x2028, 0x2029)  # separators of lines and paragraphs
_MARKS = (b"\xc2", b"\xd8\x9c", b"\xe2\x80", b"\xe2\x81")  # how C1, and all of the above, begin in UTF-8
_LONE = 0xDC00  # what a byte that is no UTF-8 is decoded to, less that byte: see "surrogateescape"
_MOST_OPEN = 256  # characters of the colours that go on in the next line

# Patterns are compiled when they are first used, by `re`, which keeps them: a launcher that shows nothing uses none.

_SGR = r"\033\[[0-9:;]*m"
_LEFT_OUT = r"\033\[(?:[0-9;]{0,8}[A-GK]|0?J|\?25[hl])|\033\(B"
"""The moves and erasures of progress bars (CUU to CHA, EL, ED to the end), hiding the cursor, and what tput(1) switches
to ASCII with, besides the colours."""
_PASSING = rf"(\033\[[0-9:;]{{0,64}}m)\017?|{_LEFT_OUT}"
"""Colours, which pass and are group 1, and what is left out."""
_SEQUENCES = r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])"
_COLOUR = rb"\033\[[0-9:;]{0,64}m"
_LEFT_OPEN = rb"\033\[(?!0?m)[0-9:;]{0,64}m[^\033\n]*(?:\n|\Z)"
"""A line from the last of its colours on, if that is no reset."""
_OFF = r"\033\[{off}(?:;{off})*m".format(off="(?:0*|2[2-9]|39|49|5[459])")
"""A sequence that only switches colours off."""
_OUTSIDE_JSON = f"[\x7f-\x9f{''.join(map(chr, (*_REORDERING, *_BREAKS)))}]"
"""What JSON may hold unescaped, and a terminal would obey."""


class Colours:
    r"""Sanitises one stream's text piece by piece. Colours continue in the stream's next line, and only there.

    >>> colours = Colours()
    >>> colours.render(b"\033[31mred\nand\033[0m so on\n\033]0;title\007")
    b'\x1b[31mred\x1b[0m\n\x1b[31mand\x1b[0m so on\n\\x1b]0;title\\x07'
    """

    __slots__ = ("_open",)

    def __init__(self) -> None:
        self._open = ""  # the colours that the next line begins with

    def render(self, data: bytes) -> bytes:
        """Sanitise the next piece: whole lines, or a part of one. Bytes that are no UTF-8, and no controls, pass."""
        if not self._open and (
            # Nothing may have to be replaced, but colours that end in their line; b"" would join bytes to letters.
            not _is_suspect(data)
            or (b"\033" in data and not re.search(_LEFT_OPEN, data) and not _is_suspect(re.sub(_COLOUR, b" ", data)))
        ):
            return data
        return self.render_text(data.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")

    def render_text(self, text: str) -> str:
        """As `render`, for text that was decoded with "surrogateescape"."""
        text = escape(text)
        if self._open or "\033" in text:
            text = "\n".join([self._closed(line) for line in text.split("\n")])
        return text

    def _closed(self, line: str) -> str:
        """Begin a line with the colours that are on, and end it with a reset."""
        start = self._open
        last = ""
        for last in re.findall(_SGR, line):
            if re.fullmatch(_OFF, last):
                self._open = ""
            elif last.startswith(("\033[0;", "\033[;")) or len(self._open) > _MOST_OPEN:
                self._open = last
            else:
                self._open = self._open.replace(last, "") + last
        if not line or not (start or last):
            return line
        return start + line + ("" if last in (RESET, "\033[m") else RESET)


def sanitise(text: str) -> str:
    r"""Sanitise lines of ours that hold text of others.

    >>> sanitise("rank 0: \033[1mbold\033[0m\b, 10%\r20%\r\n")
    'rank 0: \x1b[1mbold\x1b[0m\\x08, 10%\\r20%\n'
    """
    if "\r" in text:
        text = "\n".join([line.rstrip("\r").replace("\r", "\\r") for line in text.split("\n")])
    return Colours().render_text(text)


def escape(text: str) -> str:
    """Replace what a terminal would obey by escapes; colours, tabs and ends of lines pass."""
    parts = re.split(_PASSING, text)
    table = _table()
    parts[::2] = [part.translate(table) for part in parts[::2]]
    return "".join([part for part in parts if part])


def plain(text: str) -> str:
    r"""Make text of others harmless, without colours: of a line that carriage returns overwrote, its last state.

    >>> plain("\033[31mred\033[0m\n 5%\r10%\r\n\b")
    'red\n10%\n\\x08'
    """
    text = re.sub(_SEQUENCES, "", text).replace("\r\n", "\n")
    if "\r" in text:
        text = "\n".join(line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.split("\n"))
    text = escape(text.replace("\x1b", "\\x1b"))
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def escape_json(text: str) -> str:
    r"""Replace the same characters in JSON by JSON's own escapes. The values stay the same.

    >>> escape_json('"a\u202eb"')
    '"a\\u202eb"'
    """
    if text.isascii() and "\x7f" not in text:
        return text
    return re.sub(_OUTSIDE_JSON, lambda found: f"\\u{ord(found[0]):04x}", text)


def _is_suspect(data: bytes) -> bool:
    """Whether a character may have to be replaced. Lines arrive by the gigabyte: this is memchr(3), many times."""
    for code in _CONTROLS:
        if code in data:
            return True
    if data.isascii():
        return False
    try:
        data.decode()
    except UnicodeDecodeError:
        return True
    return any(mark in data for mark in _MARKS)


@functools.cache
def _table() -> dict[int, str]:
    alone = {code: f"\\x{code:02x}" for code in (*_CONTROLS, *range(0x80, 0xA0))}
    lone = {_LONE + code: f"\\x{code:02x}" for code in range(0x80, 0xA0)}  # C1 in a byte, or half a letter
    return alone | lone | {code: f"\\u{code:04x}" for code in (*_REORDERING, *_BREAKS)}
