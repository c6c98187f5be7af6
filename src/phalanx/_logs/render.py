"""Turns the bytes of log files into what an output shows: filters, dedup, format, and unfinished lines.

Owns the way of each line from its file's bytes to its output's text, and when an unfinished line is shown. A format
turns a block of whole lines into bytes. Knows nothing of files, processes and descriptors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from phalanx._base import clock
from phalanx._base.tty import escape_json
from phalanx._logs.dedup import Dedup, Tracebacks
from phalanx._logs.lines import LONGEST, Source
from phalanx._logs.search import Only, Search
from phalanx._logs.sink import TURN
from phalanx._logs.terminal import PlainOutput, TerminalOutput


class Text:
    """Lines for people: each after its prefix."""

    def render(self, source: Source, block: bytes, time: Callable[[], float]) -> tuple[bytes | memoryview, ...]:
        """Return whole lines as text. ``time`` returns when they were seen (seconds since the epoch)."""
        prefix = source.label(time)
        if not prefix:
            return (block,)
        # `replace` adds one prefix too many, after the last line end; slicing a memoryview drops it without a copy.
        text = memoryview(block.replace(b"\n", b"\n" + prefix))
        return prefix, text[: -len(prefix)]


class Json:
    r"""Lines for machines: JSON objects (RFC 8259), one a line, with ``time``, ``rank``, ``stream`` and ``text``.

    ``time`` is when the line was seen, ISO 8601 with the local offset. Bytes that are no UTF-8 stand in ``text`` as
    ``\xff`` would in Python. ``host``, if given, comes first. A line that is too long to be held comes in parts:
    ``partial`` is true in all but the last of them, ``continued`` in all but the first.
    """

    def __init__(self, host: str = "") -> None:
        self._host = host

    def render(self, source: Source, block: bytes, time: Callable[[], float]) -> tuple[bytes | memoryview, ...]:
        """Return whole lines as JSON objects. ``time`` returns when they were seen (seconds since the epoch)."""
        import json
        from datetime import datetime

        moment = datetime.fromtimestamp(time()).astimezone()
        host = {"host": self._host} if self._host else {}
        seen = moment.isoformat(timespec="milliseconds")
        fields = {**host, "time": seen, "rank": source.rank, "stream": source.stream, **source.marks}
        head = json.dumps(fields)[:-1] + ', "text": '
        encode = json.JSONEncoder(ensure_ascii=False).encode
        lines = block.replace(b"\r\n", b"\n")[:-1].decode("utf-8", "backslashreplace").split("\n")
        return (escape_json("".join([f"{head}{encode(line)}}}\n" for line in lines])).encode(),)


QUIET = 0.1
"""Seconds without a byte after which an unfinished line is shown."""

STATE = 1.0
"""Seconds between two states of a progress bar, at least, on an output where no line can be drawn again."""

_DEDUP_TURN = 16 * 1024  # bytes at a time, each of which may be a line: that must not take longer than a turn may
_LINES_TURN = 64 * 1024  # where lines are looked at one by one, but not compared


class View:
    """Shows the lines of several sources on one output.

    The pump calls `take` with new bytes, `tick` at the time `due`, and `finish` at the end of each source.

    Args:
        output: Where the lines are written.
        form: `Text` or `Json`.
        select: Chooses the lines that are shown; None for all.
        sanitise: Whether control characters that a terminal would obey are written as escapes: see `tty`.
    """

    def __init__(
        self,
        output: PlainOutput,
        form: Text | Json,
        select: Only | Search | None = None,
        *,
        sanitise: bool = False,
    ) -> None:
        self.output = output
        self.due = math.inf
        """When `tick` is wanted (seconds, monotonic)."""
        self.time: Callable[[], float] = clock.wall
        """Returns the time that new lines get (seconds since the epoch)."""
        self._form = form
        self._select = select
        self._sanitise = sanitise and isinstance(form, Text)  # JSON escapes them anyway
        self._dedup: Dedup | None = None
        self._tracebacks: Tracebacks | None = None
        # JSON, a pattern and a comparison need whole lines.
        self._whole_lines = select is not None or isinstance(form, Json)
        self._draws = output.live and isinstance(form, Text)
        self._unfinished: dict[Source, None] = {}
        self._sources: set[Source] = set()

    @property
    def turn(self) -> int:
        """How many bytes of one file it takes at a time: fewer where each line is looked at."""
        most = _DEDUP_TURN if self._dedup is not None else _LINES_TURN if self._whole_lines else TURN
        return min(self.output.sink.turn, most)

    def dedup_lines_with(self, dedup: Dedup) -> None:
        """Merge equal lines of several sources. ``dedup`` writes them to the output."""
        self._dedup = dedup
        self._whole_lines = True

    def dedup_tracebacks_with(self, dedup: Dedup) -> None:
        """Merge equal tracebacks of several sources. ``dedup`` writes them to the output."""
        self._tracebacks = Tracebacks(dedup, self._write)

    def replay(self, moment: float) -> None:
        """Give the bytes that `take` gets from now on the time ``moment`` (seconds since the epoch)."""
        self.time = lambda: moment
        if self._dedup is not None:
            self._dedup.pass_time()

    def take(self, source: Source, data: bytes | bytearray, count: int = -1, *, more: bool = False) -> None:
        """Take the next ``count`` bytes of a source (< 0: all of ``data``). ``more`` can be read already, or not."""
        source.behind = more
        self._sources.add(source)
        cutter = source.cutter
        block = cutter.cut(data, count)
        if block:
            self._unfinished.pop(source, None)
            if self._terminal is not None:
                self._terminal.show(source, b"")
            elif source.begun:
                end = b""
                if not cutter.withdrawn:
                    end, _, block = block.partition(b"\n")
                self.output.end(source, source.label(self.time), self._escaped(source, end))
                source.begun = False
            elif source.shown:
                shown, source.shown = source.shown, b""
                first, _, others = block.partition(b"\n")
                block = others if first.rstrip(b"\r") == shown else block  # it has just been shown
            block = self._show_last_part(source, block)
            if block:
                self.show(source, block)
        if cutter.held >= LONGEST:
            self._show_piece(source)
        elif cutter.held:
            source.parted &= not cutter.rewritten
            if source.begun and cutter.rewritten:
                self.output.end(source, source.label(self.time), b"")
                source.begun = False
            source.changed = clock.now()
            self._unfinished[source] = None
            self._want(self._due_of(source))

    def skip(self, source: Source, data: bytes) -> None:
        """Drop the next bytes of a source; hold the unfinished line at their end, as far as it can be held."""
        if source.cutter.cut(data):
            source.parted = False
        if source.cutter.held >= LONGEST:
            source.cutter.take_piece()
            source.parted = True

    def show(self, source: Source, block: bytes) -> None:
        """Show those of whole lines that `select` chooses."""
        if self._select is None:
            self.reveal(source, block)
            return
        time, now = self.time, self.time()
        for moment, lines in self._select.choose(source, block, now):
            if moment == now:
                self.reveal(source, lines)
                continue
            self.time = functools.partial(float, moment)  # context lines came earlier
            try:
                self.reveal(source, lines)
            finally:
                self.time = time

    def reveal(self, source: Source, block: bytes) -> None:
        """Show whole lines, chosen by `select` or not."""
        block = self._escaped(source, block)
        if self._dedup is not None:
            self._dedup.add_lines(source, block)
            self._want(self._dedup.due)
        elif self._tracebacks is not None:
            self._tracebacks.take(source, block)
            self._want(self._tracebacks.due)
        else:
            self._write(source, block)

    def reveal_hidden(self, source: Source, block: bytes) -> None:
        """Show whole lines of a source that was not shown so far."""
        if self._tracebacks is not None:
            self._tracebacks.expect(source)
        self.reveal(source, block)

    def _write(self, source: Source, block: bytes) -> None:
        if block:
            self.output.write(source, *self._form.render(source, block, self.time))

    def tick(self) -> None:
        """Show the lines and states whose time has come."""
        now = clock.now()
        if self.due > now:
            return
        self.due = math.inf
        if self._tracebacks is not None:  # first: they came before the unfinished lines
            self._tracebacks.tick()
            self._want(self._tracebacks.due)
        for source in list(self._unfinished):
            when = self._due_of(source)
            if when > now:
                self._want(when)
            else:
                self._show_unfinished(source)
        if self._dedup is not None:
            self._dedup.release()
            self._want(self._dedup.due)

    def settle(self) -> None:
        """End a round of the pump: draw the live lines of a terminal."""
        if self._terminal is not None:
            self._terminal.draw()
            self._want(self._terminal.due())

    def finish(self, source: Source) -> None:
        """End a source: show its last line, which has no line end."""
        rest = source.cutter.take()
        if self._terminal is not None:
            self._terminal.show(source, b"")
        if source.begun:
            self.output.end(source, source.label(self.time), self._escaped(source, rest))
            source.begun = False
        elif rest and rest.rstrip(b"\r") != source.shown:
            self._show_part(source, rest)
        source.shown, source.parted = b"", False
        self._unfinished.pop(source, None)

    def release(self) -> None:
        """Write everything that is held for comparison."""
        if self._tracebacks is not None:
            self._tracebacks.release()
        if self._dedup is not None:
            self._dedup.release(everything=True)

    def close(self) -> None:
        """End the view, after `finish` of every source."""
        self.release()
        self.output.forget(self._sources)

    @property
    def _terminal(self) -> TerminalOutput | None:
        return self.output if self._draws else None  # type: ignore[return-value]  # `live` says that it is one

    def _escaped(self, source: Source, data: bytes) -> bytes:
        """Return the next lines of a source, or a part of one, without what a terminal would obey."""
        return source.colours.render(data) if self._sanitise and data else data

    def _want(self, moment: float) -> None:
        self.due = min(self.due, moment)

    def _due_of(self, source: Source) -> float:
        """When the unfinished line of a source has to be shown (seconds, monotonic)."""
        if source.behind:
            return math.inf
        if self._tracebacks is not None and self._tracebacks.holds(source):
            return self._tracebacks.due
        if source.cutter.rewritten:
            return source.changed if self._terminal is not None else max(source.changed, source.shown_at + STATE)
        return math.inf if self._whole_lines else source.changed + QUIET

    def _show_unfinished(self, source: Source) -> None:
        cutter = source.cutter
        del self._unfinished[source]
        if self._terminal is not None:
            wanted = self._select is None or self._select.wants(cutter.rest + b"\n")
            self._terminal.show(source, source.label(self.time) + cutter.rest if wanted else b"")
        elif cutter.rewritten:
            state = cutter.rest.rstrip(b"\r")
            if state.strip() and state != source.shown:
                source.shown, source.shown_at = state, clock.now()
                self.show(source, state + b"\n")
        else:
            piece = cutter.take_settled()
            if piece:
                self.output.extend(source, source.label(self.time), self._escaped(source, piece))
                source.begun = True
                source.shown_at = clock.now()  # it may turn out to be the first state of a progress bar

    def _show_piece(self, source: Source) -> None:
        """Show a piece of a line that is longer than can be held."""
        piece = source.cutter.take_piece()
        source.shown = b""
        self._unfinished.pop(source, None)
        if self._terminal is not None:
            self._terminal.show(source, b"")
        if self._whole_lines or self._terminal is not None:
            self._show_part(source, piece, partial=True)
            source.parted = True
        else:
            self.output.extend(source, source.label(self.time), self._escaped(source, piece))
            source.begun = True

    def _show_last_part(self, source: Source, block: bytes) -> bytes:
        """Show the last part of a line whose earlier parts have been shown, if there is one. Return the lines after it.

        JSON gets the last part even if it is empty: its reader waits for one without ``partial``.
        """
        if source.parted and not source.cutter.withdrawn:
            end, _, block = block.partition(b"\n")
            if end.rstrip(b"\r") or isinstance(self._form, Json):
                self._show_part(source, end)
        source.parted = False
        return block

    def _show_part(self, source: Source, part: bytes, **marks: bool) -> None:
        """Show a part of a line, or a whole one. `select` judges a part by itself; it is no context of other lines."""
        text = part + b"\n"
        if source.parted:
            marks["continued"] = True
        if not marks:
            self.show(source, text)
        elif self._select is None or self._select.wants(text):
            source.marks = marks
            self.reveal(source, text)
            source.marks = {}
