"""From log files to outputs: follows the workers' files, and passes what they gain to views.

Owns which file is read when, and the end: the last lines, how long a slow reader is waited for, and the report of the
lines that are not shown. A worker writes to its file and is never blocked: the file is the buffer, and a slow console
only falls behind. A file of ours that lines are copied to has streams of its own: it is complete whoever reads the
console, and however slowly. Runs on the display's loop, and knows nothing of processes.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from phalanx._base import clock
from phalanx._base.files import UnfitError
from phalanx._base.loop import Deadline, Loop
from phalanx._base.stderr import tell
from phalanx._base.text import how_many
from phalanx._base.tty import printable, sanitise
from phalanx._logs.console import DRAIN
from phalanx._logs.follower import Follower, last_lines
from phalanx._logs.lines import Source
from phalanx._logs.render import View
from phalanx._logs.sink import TURN, Sink
from phalanx._logs.stream import FileWatch, Stream
from phalanx._logs.timeline import TimelineWriter

_MOST_NAMED = 16  # files
_MOST_COUNTED = 64 << 20  # bytes of unread lines that are counted; those beyond are reported as more


def report_unfit(unfit: UnfitError, reported: set[str]) -> None:
    """Report a file that cannot be read. Once each: ``reported`` collects the paths, up to a bound."""
    if unfit.filename in reported or len(reported) > _MOST_NAMED:
        return
    reported.add(unfit.filename)
    if len(reported) > _MOST_NAMED:
        tell("phalanx: more files cannot be shown, which are not named")
    else:
        tell(f"phalanx: {printable(unfit.filename)} is not shown: {unfit.strerror}")


def report_refused(sinks: Iterable[Sink]) -> None:
    """Report the sinks that refused a write: a full disk, mostly. A sink whose reader closed it is not reported."""
    for sink in sinks:
        if sink.refusal is not None:
            where = printable(sink.path) or "the console"
            why = getattr(sink.refusal, "strerror", None) or repr(sink.refusal)
            tell(f"phalanx: {where}: {why}; lines are missing there, the log files have them")


def report_missing(left: Mapping[Stream, tuple[int, bool]], pending: Mapping[object, int]) -> None:
    """Report how many lines of each file have not been shown.

    Args:
        left: By stream, the lines that have not been read, and whether there are more.
        pending: By source, the lines that have been read, but wait to be written.
    """
    named = 0
    for stream, (unread, beyond) in left.items():
        lines = unread + sum(pending.get(source, 0) for _view, source in stream.views[:1])
        if lines or beyond:
            named += 1
            if named <= _MOST_NAMED:
                many = f"{'over ' * beyond}{how_many(lines, 'more line')}" if lines else "more"
                tell(f"phalanx: … {many} in {printable(stream.follower.path)}")
    if named > _MOST_NAMED:
        tell(f"phalanx: … and more in {how_many(named - _MOST_NAMED, 'other file')}")


def count_unread(streams: Iterable[Stream], dirty: Mapping[Stream, None]) -> dict[Stream, tuple[int, bool]]:
    """Count the unread lines of each stream, in a bounded number of bytes. Only the streams in ``dirty`` have any.

    Returns them, by stream, and whether there are more.
    """
    left, budget = {}, _MOST_COUNTED
    for stream in streams:
        unread, beyond = 0, False
        if stream in dirty:
            with suppress(OSError):
                unread, read, beyond = stream.follower.lines_left(budget)
                budget -= read
        left[stream] = unread, beyond
    return left


STUCK = 5.0
"""Seconds without any progress after which the end of a group stops waiting for a console that does not read."""


_MOST_REVEALED = 8  # ranks
_MOST_OPEN = 256  # descriptors, or a quarter of what may be open; further files are opened anew at each turn
_TURN = 0.02  # seconds after which the files that have not been read yet wait for the next turn
_FLUSH = 1.0  # seconds after which a record of the timeline is in its file


class Pump:
    """Shows the log files of a group. Lives on a loop, and on no thread of its own.

    Args:
        streams: The files that are followed.
        views: Where their lines go.
        timeline: Notes when the files grow; None: nothing does.
        message_view: The one of the views that also shows our own messages; None: they go to stderr.
        drain: Seconds that the end waits, at most, for a console that reads slowly,
        stuck: and for one that does not read at all.
    """

    def __init__(
        self,
        streams: Iterable[Stream],
        views: Iterable[View],
        timeline: TimelineWriter | None = None,
        *,
        message_view: View | None = None,
        drain: float = DRAIN,
        stuck: float = STUCK,
    ) -> None:
        self._streams = list(streams)
        self._views = list(views)
        self._message_view = message_view
        self._sinks: list[Sink] = list(dict.fromkeys(view.output.sink for view in self._views))
        self._timeline = timeline
        self._drain = drain
        self._stuck = stuck
        self._buffer = bytearray(TURN)
        self._stream_of = {source: stream for stream in self._streams for _view, source in stream.views}
        self._dirty: dict[Stream, None] = {}  # those that may have unread bytes, in the order of their turns
        self._open: deque[Follower] = deque()
        self._most_open = min(_MOST_OPEN, os.sysconf("SC_OPEN_MAX") // 4)
        self._revealed: set[Stream] = set()
        self._to_reveal: dict[Stream, None] = {}
        self._closed = False
        self._loop: Loop | None = None
        self._watch: FileWatch | None = None
        self._timer: Deadline | None = None
        self._scheduled = False
        self._done: Callable[[], None] | None = None  # between `finish` and the end
        self._until = self._stuck_at = 0.0  # when it gives up waiting: at the latest, and if nothing is written
        self._progress = 0  # bytes that all sinks had written when that was computed
        self._gave_up = False  # whether it waits for files of ours only, and for no slow reader
        self._over = False  # whether every line is ended
        self._shown: set[Source] = set()  # whose lines these are
        self.unfit: set[str] = set()
        """Paths of files that have been reported as unreadable."""
        self.readers: dict[Sink, Callable[[], None]] = {}
        """What is called, once, when nobody reads a sink any more."""

    @property
    def shows_messages(self) -> bool:
        """Whether `show_message` has a view."""
        return self._message_view is not None

    @property
    def longest(self) -> float:
        """Seconds that `finish` takes at most: for slow readers, and for files of ours."""
        return self._drain + 2 * STUCK + 1

    def open(self, loop: Loop) -> None:
        """Start to follow. Raises OSError, with nothing left open."""
        self._loop = loop
        self._watch = FileWatch(loop, self._streams, self._note_growth, self._run)
        try:
            for sink in self._sinks:
                sink.open(loop, self._run)
            self._watch.open()
        except OSError:
            self.close()
            raise
        self._run_soon()

    def look(self) -> None:
        """Look at every file for growth, after `open`."""
        assert self._watch is not None
        self._watch.look()

    def add(self, stream: Stream) -> None:
        """Follow one more file, after `open`."""
        assert self._watch is not None
        self._streams.append(stream)
        self._stream_of |= {source: stream for _view, source in stream.views}
        self._watch.add(stream)
        self._run_soon()

    def show_message(self, text: str) -> None:
        """Show a line of ours, above the unfinished lines; on stderr, if there is no view for it."""
        if self._loop is None or self._over or self._message_view is None:
            tell(text)
            return
        self._message_view.output.write(None, sanitise(text).encode(errors="backslashreplace") + b"\n")
        self._run_soon()

    def reveal(self, rank: int) -> None:
        """Show the last lines of the hidden streams of a local rank that failed, whatever the filters choose.

        Those of a log that is rotated are shown at the end: the log writer may not have written them yet.
        """
        for stream in self._streams:
            if stream.hidden_in is None or stream.number // 2 != rank:
                continue
            if stream.follower.rotates and not stream.ends:
                self._to_reveal[stream] = None
            else:
                self._reveal(stream)
        self._run_soon()

    def _reveal(self, stream: Stream) -> None:
        ranks = {each.number // 2 for each in self._revealed}
        if stream not in self._revealed and (len(ranks) < _MOST_REVEALED or stream.number // 2 in ranks):
            assert stream.hidden_in is not None
            self._revealed.add(stream)
            view, source = stream.hidden_in
            view.reveal_hidden(source, last_lines(stream.follower.path, rotates=stream.follower.rotates))

    def finish(self, done: Callable[[], None]) -> None:
        """Show what is still in the files, then call ``done``, in bounded time. Reports lines that are not shown."""
        if self._loop is None:  # never opened: the group did not start
            done()
            return
        self._done, now = done, clock.now()
        self._until, self._stuck_at, self._progress = now + self._drain, now + self._stuck, self._written()
        for stream in self._streams:
            stream.ends = True
            if stream in self._to_reveal:
                self._reveal(stream)
            self._note_growth(stream)
        assert self._watch is not None
        self._watch.end()
        self._run_soon()

    def close(self) -> None:
        """Close every descriptor. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._timeline is not None:
            self._timeline.close()
        for stream in self._streams:
            stream.follower.close()
        for view in self._views:
            view.output.forget(self._stream_of)
        for sink in self._sinks:
            sink.close(self._run)
        if self._watch is not None:
            self._watch.close()
        done, self._done = self._done, None
        if done is not None:
            done()

    def _note_growth(self, stream: Stream) -> None:
        """Have a stream read, and note its size in the timeline."""
        if stream.wanted:
            self._dirty[stream] = None
        timeline = self._timeline
        if timeline is not None and stream.number >= 0:
            try:
                sizes = stream.growth.look()
            except OSError:
                return
            for number, size in sizes:
                timeline.note(stream.number, size, number)

    # --- turns

    def _run_soon(self) -> None:
        """Have `_run` called by the loop."""
        if not self._scheduled:
            assert self._loop is not None
            self._scheduled = True
            self._loop.call(self._scheduled_run)

    def _scheduled_run(self) -> None:
        self._scheduled = False
        self._run()

    def _run(self) -> None:
        """Pass on one chunk of each changed file, as long as its sinks have room; then return to the loop."""
        if self._closed:  # a call that was scheduled before; a sink may be open for other groups
            return
        busy = self._take_turns()
        for view in self._views:
            if view.due <= clock.now():
                view.tick()
            view.settle()
        if self._done is not None and not self._over and not any(stream in self._dirty for stream in self._streams):
            self._end_lines()
        self._flush()
        if busy:
            self._run_soon()
        if self._over and (self._gave_up or not any(sink.holds(self._shown) for sink in self._sinks)):
            self._leave()
        self._arm()

    def _flush(self) -> None:
        for sink in self._sinks:
            sink.flush()
        for sink in [sink for sink in self.readers if sink.has_no_reader]:
            self.readers.pop(sink)()

    def _take_turns(self) -> bool:
        """Read from each dirty stream once. Returns whether one has more to be read at once."""
        dirty, self._dirty = self._dirty, {}
        served: dict[Stream, None] = {}
        end = clock.now() + _TURN
        for stream in self._in_order(dirty):
            if not stream.wanted:
                continue
            if served and clock.now() > end:
                self._dirty[stream] = None
                stream.fall_behind()
                continue
            if not all(view.output.sink.make_room() for view, _source in stream.views):
                self._dirty[stream] = None  # until the sink calls
                stream.fall_behind()
            elif stream.step(self._buffer):
                served[stream] = None
            elif stream.unfit is not None:
                report_unfit(stream.unfit, self.unfit)
                stream.unfit = None
            self._bound_open(stream.follower)
        self._dirty |= served  # after those that have waited
        return bool(served)

    def _in_order(self, dirty: dict[Stream, None]) -> Iterable[Stream]:
        """Put streams first whose unfinished line stands at the end of an output: others would break it."""
        holders = [self._stream_of.get(view.output.holder) for view in self._views]  # type: ignore[call-overload]  # None has no stream
        first = {stream: None for stream in holders if stream in dirty}
        return (first | dirty) if first else dirty

    def _bound_open(self, follower: Follower) -> None:
        """Close the file that was read longest ago, if too many are open."""
        if len(self._streams) > self._most_open:
            self._open.append(follower)
            if len(self._open) > self._most_open:
                oldest = self._open.popleft()
                if oldest not in self._open:
                    oldest.close()

    def _arm(self) -> None:
        """Have `_run` called when there is something to show, to note, or to give up."""
        due = min([view.due for view in self._views], default=float("inf"))
        if self._timeline is not None and self._timeline.unwritten:
            due = min(due, self._timeline.since + _FLUSH)
        if self._done is not None:
            due = min(due, self._until, self._stuck_at)
        timer = self._timer
        if timer is not None and timer.pending:
            if timer.at <= due:
                return
            timer.cancel()
        if due < float("inf"):
            assert self._loop is not None
            self._timer = self._loop.at(due, self._on_time)

    def _on_time(self) -> None:
        now = clock.now()
        timeline = self._timeline
        if timeline is not None and timeline.unwritten and timeline.since + _FLUSH <= now:
            timeline.flush()
        written = self._written()
        if self._done is not None and now < self._until and written > self._progress:
            self._progress, self._stuck_at = written, now + self._stuck
        elif self._done is not None and now >= min(self._until, self._stuck_at):
            self._give_up(now)
        self._run()

    # --- the end

    def _end_lines(self) -> None:
        """End every source: all files have been read."""
        self._over = True
        for stream in self._streams:
            for view, source in stream.views:
                if view.output.sink.path or not self._gave_up:
                    view.finish(source)
        for view in self._views:
            if view.output.sink.path or not self._gave_up:
                view.close()
        self._shown = {source for stream in self._streams for _view, source in stream.all_views}

    def _leave(self) -> None:
        done, self._done = self._done, None
        if done is not None:
            report_refused(self._sinks)
            done()

    def _written(self) -> int:
        return sum(sink.written for sink in self._sinks)

    def _give_up(self, now: float) -> None:
        """Stop waiting for slow readers, then, the second time, for files of ours whose disk takes nothing."""
        self._report_missing()
        if self._gave_up:
            self._leave()
            return
        self._gave_up = True
        self._until = self._stuck_at = now + STUCK
        for stream in self._streams:
            if not stream.to_file:
                stream.given_up = True
                self._dirty.pop(stream, None)

    def _report_missing(self) -> None:
        """Report what is not shown, as far as is waited for, and drop it where nobody else's lines wait, too."""
        left = count_unread([stream for stream in self._streams if self._gave_up or not stream.to_file], self._dirty)
        for stream, unread in left.items():
            if unread == (0, False):  # its last line may have no end: it waits to be written like any other then
                for view, source in stream.views:
                    view.finish(source)
        for view in self._views:
            view.release()
        pending: dict[object, int] = {}
        for sink in self._sinks:
            pending |= sink.pending()
            # One with others' lines goes on when its reader does.
            if not sink.shared and (self._gave_up or not sink.path):
                sink.give_up()
        report_missing(left, pending)
