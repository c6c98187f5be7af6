"""What of the workers' lines is shown, and how: filters, prefixes, formats.

Owns the way of each line from its file's bytes to its surface's text, and when an unfinished one is shown. Knows
nothing of files, processes and descriptors.
"""

from __future__ import annotations

import functools
import math

from phalanx._base import clock
from phalanx._base.control_chars import Colours, escape_json
from phalanx._logs.lines import LONGEST, Cutter
from phalanx._logs.sink import TURN

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx._logs.dedup import Fold
    from phalanx._logs.search import Only, Search
    from phalanx._logs.terminal import Paper, Screen
    from phalanx._logs.tracebacks import Tracebacks

QUIET = 0.1
"""Seconds without a byte after which an unfinished line is shown."""

STATE = 1.0
"""Seconds between two states of a progress bar, at least, where no line can be drawn again."""

_FOLDED = 16 * 1024  # bytes at a time, each of which may be a line: that must not take longer than a turn may
_WHOLE = 64 * 1024


class Lane:
    """One stream of one rank, on its way to one view.

    Args:
        rank: The rank that the lines are said to be of.
        stream: "stdout" or "stderr".
        prefix: What stands before each line; or what gives it at a time (seconds since the epoch).
    """

    __slots__ = (
        "begun", "behind", "changed", "colours", "cutter", "marks", "parted", "prefix", "rank", "said", "stated",
        "stream",
    )  # fmt: skip

    def __init__(self, rank: int, stream: str, prefix: bytes | Callable[[float], bytes] = b"") -> None:
        self.rank = rank
        self.stream = stream
        self.prefix = prefix
        self.cutter = Cutter()
        self.colours = Colours()
        self.begun = False  # whether the beginning of the unfinished line has been written, and is no longer held
        self.behind = False  # whether more of it can be read already
        self.parted = False  # whether its beginning has been shown as a line of its own, being too long to be held
        self.marks: dict[str, bool] = {}  # what is to be said of such a part, while it is shown
        self.changed = 0.0  # when more of it came
        self.said = b""  # the state of it that was written last
        self.stated = 0.0  # and when

    def label(self, time: Callable[[], float]) -> bytes:
        """The prefix, at a time that is asked for if it matters."""
        return self.prefix if isinstance(self.prefix, bytes) else self.prefix(time())


class Text:
    """Lines for people: each after its prefix."""

    def render(self, lane: Lane, block: bytes, time: Callable[[], float]) -> tuple[bytes | memoryview, ...]:
        """The text of whole lines, seen at a time (seconds since the epoch)."""
        prefix = lane.label(time)
        if not prefix:
            return (block,)
        # After the last line end stands a prefix too many: a view of what is before it is not one more copy.
        text = memoryview(block.replace(b"\n", b"\n" + prefix))
        return prefix, text[: -len(prefix)]


class Json:
    r"""Lines for machines: JSON objects (RFC 8259), one a line, with ``time``, ``rank``, ``stream`` and ``text``.

    ``time`` is when the line was seen, ISO 8601 with the local offset. What is no UTF-8 stands in ``text`` as
    ``\xff`` would in Python. ``host`` comes first where there is more than one. A line that is too long to be held
    comes in parts: ``partial`` is true where it goes on in another object, ``continued`` where it began in one before.
    """

    def __init__(self, host: str = "") -> None:
        self._host = host

    def render(self, lane: Lane, block: bytes, time: Callable[[], float]) -> tuple[bytes | memoryview, ...]:
        """The text of whole lines, seen at a time (seconds since the epoch)."""
        import json
        from datetime import datetime

        moment = datetime.fromtimestamp(time()).astimezone()
        host = {"host": self._host} if self._host else {}
        fields = {**host, "time": moment.isoformat(timespec="milliseconds"), "rank": lane.rank, "stream": lane.stream}
        fields |= lane.marks
        head = json.dumps(fields)[:-1] + ', "text": '
        encode = json.JSONEncoder(ensure_ascii=False).encode
        lines = block.replace(b"\r\n", b"\n")[:-1].decode("utf-8", "backslashreplace").split("\n")
        return (escape_json("".join([f"{head}{encode(line)}}}\n" for line in lines])).encode(),)


class View:
    """Shows lanes on one surface. The pump calls `take` for what has come, `tick` when it is `due`, and `finish`.

    Args:
        surface: Where.
        form: `Text` or `Json`.
        select: Chooses the lines that are to be shown; None for all.
        harmless: Whether what a terminal would obey is shown in place of sent: see `harmless`.
    """

    def __init__(
        self,
        surface: Paper,
        form: Text | Json,
        select: Only | Search | None = None,
        *,
        harmless: bool = False,
    ) -> None:
        self.surface = surface
        self.due = math.inf
        """When `tick` is wanted (seconds, monotonic)."""
        self.time: Callable[[], float] = clock.wall
        """What time the lines are of (seconds since the epoch)."""
        self._form = form
        self._select = select
        self._harmless = harmless and isinstance(form, Text)  # JSON is, anyway
        self._fold: Fold | None = None
        self._tracebacks: Tracebacks | None = None
        # Half a line is nothing to a machine, to a pattern, and to a comparison.
        self._whole = select is not None or isinstance(form, Json)
        self._lively = surface.live and isinstance(form, Text)
        self._unfinished: dict[Lane, None] = {}
        self._lanes: set[Lane] = set()

    @property
    def turn(self) -> int:
        """Bytes of one file that it is to be given at a time: what goes line by line takes longer."""
        return min(self.surface.sink.turn, _FOLDED if self._fold is not None else _WHOLE if self._whole else TURN)

    def fold_into(self, fold: Fold) -> None:
        """Have lines that are equal made one, by ``fold``, which writes to the surface."""
        self._fold = fold
        self._whole = True

    def fold_tracebacks(self, fold: Fold) -> None:
        """Have tracebacks that are equal made one, by ``fold``, which writes to the surface."""
        from phalanx._logs.tracebacks import Tracebacks

        self._tracebacks = Tracebacks(fold, self._write)

    def replay(self, moment: float) -> None:
        """What is taken from now on was written at ``moment`` (seconds since the epoch), not now."""
        self.time = lambda: moment
        if self._fold is not None:
            self._fold.pass_time()

    def take(self, lane: Lane, data: bytes | bytearray, count: int = -1, *, more: bool = False) -> None:
        """Take the next ``count`` bytes of a lane (< 0: all of ``data``). There is ``more`` to be read, or not."""
        lane.behind = more
        self._lanes.add(lane)
        cutter = lane.cutter
        block = cutter.cut(data, count)
        if block:
            self._unfinished.pop(lane, None)
            if self._live is not None:
                self._live.show(lane, b"")
            elif lane.begun:
                end = b""
                if not cutter.withdrawn:
                    end, _, block = block.partition(b"\n")
                self.surface.end(lane, lane.label(self.time), self._sent(lane, end))
                lane.begun = False
            elif lane.said:
                said, lane.said = lane.said, b""
                first, _, others = block.partition(b"\n")
                block = others if first.rstrip(b"\r") == said else block  # it has just been shown
            block = self._show_last_part(lane, block)
            if block:
                self.show(lane, block)
        if cutter.held >= LONGEST:
            self._give_out(lane)
        elif cutter.held:
            lane.parted &= not cutter.rewritten
            if lane.begun and cutter.rewritten:
                self.surface.end(lane, lane.label(self.time), b"")
                lane.begun = False
            lane.changed = clock.now()
            self._unfinished[lane] = None
            self._want(self._when(lane))

    def skip(self, lane: Lane, data: bytes) -> None:
        """Pass over the next bytes of a lane, but for what they leave unfinished, as far as it can be held."""
        if lane.cutter.cut(data):
            lane.parted = False
        if lane.cutter.held >= LONGEST:
            lane.cutter.take_piece()
            lane.parted = True

    def show(self, lane: Lane, block: bytes) -> None:
        """Show those of whole lines that are wanted."""
        if self._select is None:
            self.reveal(lane, block)
            return
        time, now = self.time, self.time()
        for moment, lines in self._select.choose(lane, block, now):
            if moment == now:
                self.reveal(lane, lines)
                continue
            self.time = functools.partial(float, moment)  # context, which came before
            try:
                self.reveal(lane, lines)
            finally:
                self.time = time

    def reveal(self, lane: Lane, block: bytes) -> None:
        """Show whole lines, wanted or not."""
        block = self._sent(lane, block)
        if self._fold is not None:
            self._fold.add_lines(lane, block)
            self._want(self._fold.due)
        elif self._tracebacks is not None:
            self._tracebacks.take(lane, block)
            self._want(self._tracebacks.due)
        else:
            self._write(lane, block)

    def reveal_hidden(self, lane: Lane, block: bytes) -> None:
        """Show whole lines of a lane that was not shown so far."""
        if self._tracebacks is not None:
            self._tracebacks.expect(lane)
        self.reveal(lane, block)

    def _write(self, lane: Lane, block: bytes) -> None:
        if block:
            self.surface.write(lane, *self._form.render(lane, block, self.time))

    def tick(self) -> None:
        """Show what it is time to show."""
        now = clock.now()
        if self.due > now:
            return
        self.due = math.inf
        if self._tracebacks is not None:  # before what came after them
            self._tracebacks.tick()
            self._want(self._tracebacks.due)
        for lane in list(self._unfinished):
            when = self._when(lane)
            if when > now:
                self._want(when)
            else:
                self._show_unfinished(lane)
        if self._fold is not None:
            self._fold.release()
            self._want(self._fold.due)

    def settle(self) -> None:
        """The end of a round: nothing more is to be written at once."""
        if self._live is not None:
            self._live.draw()
            self._want(self._live.due())

    def finish(self, lane: Lane) -> None:
        """The lane has come to its end: show what nobody has ended."""
        rest = lane.cutter.take()
        if self._live is not None:
            self._live.show(lane, b"")
        if lane.begun:
            self.surface.end(lane, lane.label(self.time), self._sent(lane, rest))
            lane.begun = False
        elif rest and rest.rstrip(b"\r") != lane.said:
            self._show_part(lane, rest)
        lane.said, lane.parted = b"", False
        self._unfinished.pop(lane, None)

    def release(self) -> None:
        """Hold nothing back any longer."""
        if self._tracebacks is not None:
            self._tracebacks.release()
        if self._fold is not None:
            self._fold.release(everything=True)

    def close(self) -> None:
        """All lanes have come to their ends."""
        self.release()
        self.surface.forget(self._lanes)

    @property
    def _live(self) -> Screen | None:
        return self.surface if self._lively else None  # type: ignore[return-value]  # `live` says that it is one

    def _sent(self, lane: Lane, data: bytes) -> bytes:
        """What is written of the next lines of a lane, or of a part of one."""
        return lane.colours.render(data) if self._harmless and data else data

    def _want(self, moment: float) -> None:
        self.due = min(self.due, moment)

    def _when(self, lane: Lane) -> float:
        """When the unfinished line of a lane is to be shown."""
        if lane.behind:
            return math.inf
        if self._tracebacks is not None and self._tracebacks.holds(lane):
            return self._tracebacks.due
        if lane.cutter.rewritten:
            return lane.changed if self._live is not None else max(lane.changed, lane.stated + STATE)
        return math.inf if self._whole else lane.changed + QUIET

    def _show_unfinished(self, lane: Lane) -> None:
        cutter = lane.cutter
        del self._unfinished[lane]
        if self._live is not None:
            wanted = self._select is None or self._select.wants(cutter.rest + b"\n")
            self._live.show(lane, lane.label(self.time) + cutter.rest if wanted else b"")
        elif cutter.rewritten:
            state = cutter.rest.rstrip(b"\r")
            if state.strip() and state != lane.said:
                lane.said, lane.stated = state, clock.now()
                self.show(lane, state + b"\n")
        else:
            piece = cutter.take_settled()
            if piece:
                self.surface.extend(lane, lane.label(self.time), self._sent(lane, piece))
                lane.begun = True
                lane.stated = clock.now()  # it may yet turn out to be the first state of a progress bar

    def _give_out(self, lane: Lane) -> None:
        """Show a piece of a line that is longer than can be held."""
        piece = lane.cutter.take_piece()
        lane.said = b""
        self._unfinished.pop(lane, None)
        if self._live is not None:
            self._live.show(lane, b"")
        if self._whole or self._live is not None:
            self._show_part(lane, piece, partial=True)
            lane.parted = True
        else:
            self.surface.extend(lane, lane.label(self.time), self._sent(lane, piece))
            lane.begun = True

    def _show_last_part(self, lane: Lane, block: bytes) -> bytes:
        """Show the end of a line whose beginning has been shown, if there is one. Returns the lines after it."""
        if lane.parted and not lane.cutter.withdrawn:
            end, _, block = block.partition(b"\n")
            if end.rstrip(b"\r") or isinstance(self._form, Json):  # a machine waits for it
                self._show_part(lane, end)
        lane.parted = False
        return block

    def _show_part(self, lane: Lane, part: bytes, **marks: bool) -> None:
        """Show a part of a line, which is wanted by itself or not, and is no context of others; or a whole one."""
        line = part + b"\n"
        if lane.parted:
            marks["continued"] = True
        if not marks:
            self.show(lane, line)
        elif self._select is None or self._select.wants(line):
            lane.marks = marks
            self.reveal(lane, line)
            lane.marks = {}
