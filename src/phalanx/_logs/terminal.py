"""Outputs: a plain one, to which text is only appended, and a terminal, whose bottom lines can be drawn again.

Owns where unfinished lines stand among whole ones. Takes text that has its prefixes, and writes it to a sink.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Container

from phalanx._base import clock, tty
from phalanx._base.tty import RESET, Colours
from phalanx._logs.lines import Source
from phalanx._logs.sink import Sink

FRAME = 0.05
"""Seconds between two drawings of a terminal's live lines, at least."""

_SHARE = 2  # live lines take at most one in so many of a terminal's rows
_SPACES = bytes.maketrans(b"\t", b" ")
_RESET = RESET.encode()
_BYTES = 64  # for each column: a letter with its accents and the colours before it take no more


class PlainOutput:
    """A pipe, a file, a notebook: text is appended, and never changes."""

    live = False
    """Whether unfinished lines can be shown, and changed, at the bottom."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.holder: object = None
        """The owner of the unfinished line at the end; None if the last line is ended."""

    def write(self, owner: object, *text: bytes | memoryview) -> None:
        """Write whole lines."""
        if self.holder is not None:
            self.sink.write((b"\n",), self.holder)
            self.holder = None
        self.sink.write(text, owner)

    def extend(self, owner: object, prefix: bytes, text: bytes) -> None:
        """Write the beginning of a line, or more of it; the prefix first, and again if others wrote in between."""
        if self.holder is not owner:
            self.write(owner, prefix)
            self.holder = owner
        self.sink.write((text,), owner)

    def end(self, owner: object, prefix: bytes, text: bytes) -> None:
        """Write the end of a line that `extend` began. Nothing, if it is empty and another owner has ended the line."""
        if self.holder is owner or text.strip(b"\r"):
            self.extend(owner, prefix, text)
            self.sink.write((b"\n",), owner)
            self.holder = None

    def forget(self, owners: Container[object]) -> None:
        """End the unfinished line of any of ``owners``, who write no more."""
        if self.holder is not None and self.holder in owners:
            self.sink.write((b"\n",), self.holder)
            self.holder = None


class TerminalOutput(PlainOutput):
    """A terminal: one live line for each source that has an unfinished one, below everything else.

    The live lines are erased before anything is written and drawn again below it, in the same write, so that nothing
    flickers. Autowrap is off while they are drawn (DECAWM; xterm's control sequences): a line that is wider than the
    terminal would take two rows, and the next erasure would miss one. Columns that do not fit are not sent, and an
    unchanged drawing is not sent again: an unfinished line may grow for long beyond the last column.
    """

    live = True

    def __init__(self, sink: Sink, size: Callable[[], tuple[int, int]] | None = None) -> None:
        super().__init__(sink)
        self._size = size or (lambda: tty.size(sink.fd))
        self._live: dict[Source, bytes] = {}
        self._drawn = 0
        self._drawing = b""
        self._erased = False
        self._stale = False
        self._next = 0.0

    def write(self, owner: object, *text: bytes | memoryview) -> None:
        """See `PlainOutput.write`."""
        self.sink.write((self._erasure(), *text), owner)
        self._erased = bool(self._live)

    def extend(self, owner: object, prefix: bytes, text: bytes) -> None:
        """See `PlainOutput.extend`. Each piece of a line that is too long becomes a line: a terminal would wrap it."""
        self.write(owner, prefix, text, b"\n")

    def end(self, owner: object, prefix: bytes, text: bytes) -> None:
        """See `PlainOutput.end`."""
        self.write(owner, prefix, text, b"\n")

    def show(self, owner: Source, line: bytes) -> None:
        """Set the owner's live line; an empty one removes it."""
        if line:
            self._live[owner] = line
            self._stale = True
        elif self._live.pop(owner, None) is not None:
            self._stale = True

    def due(self) -> float:
        """When `draw` has something to do (seconds, monotonic)."""
        if self.sink.blocked:  # the sink calls when there is room again
            return math.inf
        return 0.0 if self._erased else self._next if self._stale else math.inf

    def draw(self) -> None:
        """Draw the live lines if `FRAME` has passed and the sink is not blocked."""
        if self.due() > clock.now():
            return
        columns, rows = self._size()
        most = max(1, rows // _SHARE)
        lines = [line for _source, line in sorted(self._live.items(), key=lambda item: item[0].rank)]
        if len(lines) > most:
            lines[most - 1 :] = [b"... and %d more" % (len(lines) - most + 1)]
        drawing = b"\r\n".join([visible(line, columns) for line in lines])
        if self._erased or not lines or drawing != self._drawing:
            text = self._erasure()
            if lines:
                text += b"\033[?7l" + drawing + b"\033[?7h"
                self._drawn, self._drawing = len(lines), drawing
            self.sink.write((text,))
        self._stale = self._erased = False
        self._next = clock.now() + FRAME

    def forget(self, owners: Container[object]) -> None:
        """See `PlainOutput.forget`. The live lines of other owners stay."""
        for owner in [owner for owner in self._live if owner in owners]:
            del self._live[owner]
            self._stale = True
        if not self._live:
            self.sink.write((self._erasure(),))
            self._stale = self._erased = False
        elif self._stale:
            self._next = 0.0
            self.draw()

    def _erasure(self) -> bytes:
        """Return what erases the live lines and leaves the cursor where the first of them began."""
        drawn, self._drawn = self._drawn, 0
        self._drawing = b""
        if not drawn:
            return b""
        return b"\r\033[J" if drawn == 1 else b"\r\033[%dA\033[J" % (drawn - 1)


def visible(line: bytes, columns: int) -> bytes:
    r"""Return ``line`` without what would move the cursor (see `Colours`), cut to about so many columns.

    Colours stay, and are reset at its end. A letter that is two columns wide counts for one: what then does not fit,
    the terminal drops.

    >>> visible(b"\033[32m 50%\033[0m\033[A\t|", 80)
    b'\x1b[32m 50%\x1b[0m |'
    >>> visible(b"12\033[32m345", 4)
    b'12\x1b[32m34\x1b[0m'
    """
    text = Colours().render(line[: _BYTES * columns].translate(_SPACES, b"\r\n"))
    if len(text) <= columns:
        return text
    text = _cells(columns).match(text)[0]  # type: ignore[index]  # it always matches, if only nothing
    return text + _RESET if b"\033" in text and not text.endswith(_RESET) else text


@functools.lru_cache(8)
def _cells(columns: int) -> re.Pattern[bytes]:
    """Return a pattern for the beginning of a text that fills so many columns. Colours and accents take none.

    A byte that is no UTF-8 takes one column.
    """
    letter = rb"[\0-\277]|[\300-\377][\200-\277]{0,3}+"
    none = rb"(?:\033\[[0-9:;]*m|\314[\200-\277]|\315[\200-\257])*+"  # SGR; U+0300 to U+036F
    return re.compile(rb"(?:" + none + rb"(?:" + letter + rb")){0,%d}+" % columns + none)
