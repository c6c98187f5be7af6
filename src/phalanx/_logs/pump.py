"""Bytes to lines to sinks: follows the workers' log files, and has views show them.

Owns the following (inotify), the turns that files take, and the end. A worker writes to its file and is never held
up: the file is the buffer, and a slow console only falls behind. What goes to a file of ours is a stream of its own: it
is complete whoever reads the console, and however slowly. Runs on the display's loop, and knows nothing of processes.
"""

from __future__ import annotations

import errno
import os
import struct
from collections import deque

from phalanx._base import clock, linux
from phalanx._base.control_chars import sanitise
from phalanx._base.files import UnfitError
from phalanx._base.stderr import tell
from phalanx._base.tty import printable
from phalanx._logs.follower import last_lines
from phalanx._logs.growth import Growth
from phalanx._logs.sink import TURN

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from phalanx._base.deadlines import Deadline
    from phalanx._base.loop import Loop
    from phalanx._logs.follower import Follower
    from phalanx._logs.render import Lane, View
    from phalanx._logs.sink import Sink
    from phalanx._logs.write_index import Timeline

STUCK = 5.0
"""Seconds without any progress after which the end of a group stops waiting for a console that does not read."""

DRAIN = 10.0
"""Seconds after which it stops waiting for one that reads too slowly."""

_MOST_REVEALED = 8  # ranks
_MOST_NAMED = 16  # files
_MOST_OPEN = 256  # descriptors, or a quarter of what may be open; further files are opened anew at each turn
_TURN = 0.02  # seconds after which the files that have not been read yet wait for the next turn
_BLIND = 0.1  # seconds between two looks at the files where there is no inotify to be had, at least;
_BLIND_SHARE = 0.0005  # and for each file: to look at one takes some microseconds
_COUNTED = 64 << 20  # bytes of unread lines that are counted at the end; those beyond are said to be more
_FLUSH = 1.0  # seconds in which what is noted of the times of writing gets to its file
_NO_WATCH = (errno.ENOSPC, errno.ENOMEM)  # inotify_add_watch(2)
_EVENT = struct.Struct("iIII")  # struct inotify_event: wd, mask, cookie, len (inotify(7))
_RENAMED = linux.IN_ATTRIB | linux.IN_MOVE_SELF  # a rotated file gets a second name, and loses its first; or a new one
_GROWS = linux.IN_MODIFY | _RENAMED
_APPEARS = linux.IN_CREATE | linux.IN_MOVED_TO


class Stream:
    """One file of one rank.

    Args:
        follower: The file.
        lanes: The views that are to have it, each with the lane it goes on. None: only its times are noted.
        number: What the timeline calls it: twice the local rank, plus one for stderr.
        spare: A view, and the lane, that are to have its last lines if its rank fails.
    """

    def __init__(
        self,
        follower: Follower,
        lanes: Iterable[tuple[View, Lane]],
        *,
        number: int = -1,
        spare: tuple[View, Lane] | None = None,
    ) -> None:
        self.follower = follower
        self.growth = Growth(follower.path, rotates=follower.rotates)
        self.lanes = tuple(lanes)
        self.number = number
        self.spare = spare
        self.unfit: UnfitError | None = None
        """What was found in the place of the file, and cannot be shown."""

    @property
    def wanted(self) -> bool:
        """Whether anybody sees it."""
        return any(not view.surface.sink.broken for view, _lane in self.lanes)

    @property
    def to_file(self) -> bool:
        """Whether all of it goes to files of ours, which nobody holds up."""
        return all(view.surface.sink.path for view, _lane in self.lanes)

    def step(self, buffer: bytearray) -> bool:
        """Read what its sinks take at a time, and hand it on. Returns whether there may be more."""
        turn = min(view.turn for view, _lane in self.lanes)
        try:
            with memoryview(buffer) as whole:
                count = self.follower.read(whole[:turn])
        except UnfitError as error:
            self.unfit = error
            return False
        except OSError:  # removed, or not there yet
            return False
        more = count == turn or (count > 0 and self.follower.rotates)
        for view, lane in self.lanes:
            view.take(lane, buffer, count, more=more)
        return more

    def fall_behind(self) -> None:
        """There is more to be read, later."""
        for _view, lane in self.lanes:
            lane.behind = True


class Pump:
    """All that a group shows. Lives on a loop, and on no thread of its own.

    Args:
        streams: What is followed.
        views: Where it goes.
        timeline: Where the times of writing are noted; None for nowhere.
        voice: The view for lines of ours, one of them; None if there is none that people read.
        drain: Seconds that the end waits, at most, for a console that reads slowly.
    """

    def __init__(
        self,
        streams: Iterable[Stream],
        views: Iterable[View],
        timeline: Timeline | None = None,
        *,
        voice: View | None = None,
        drain: float = DRAIN,
    ) -> None:
        self._streams = list(streams)
        self._views = list(views)
        self._voice = voice
        self._sinks: list[Sink] = list(dict.fromkeys(view.surface.sink for view in self._views))
        self._timeline = timeline
        self._drain = drain
        self._buffer = bytearray(TURN)
        self._of_lane = {lane: stream for stream in self._streams for _view, lane in stream.lanes}
        self._watches: dict[int, list[Stream]] = {}
        self._missing: dict[int, list[Stream]] = {}  # by the folder in which they, or what leads to them, will appear
        self._dirty: dict[Stream, None] = {}
        self._open: deque[Follower] = deque()
        self._most_open = min(_MOST_OPEN, os.sysconf("SC_OPEN_MAX") // 4)
        self._revealed: set[int] = set()
        self._notify = -1
        self._closed = False
        self._loop: Loop | None = None
        self._timer: Deadline | None = None
        self._scheduled = False
        self._finished: Callable[[], None] | None = None
        self._all_seen = False
        self._to_reveal: set[int] = set()
        self._until = self._stuck = 0.0
        self._progress = 0
        self._gave_up = False  # on who reads, not on our files
        self._blind = False  # whether files are looked at again and again
        self.unfit: set[str] = set()
        """Paths of which it has been said that they cannot be shown."""

    @property
    def speaks(self) -> bool:
        """Whether `say` has somewhere to say it."""
        return self._voice is not None

    @property
    def longest(self) -> float:
        """Seconds that `finish` takes at most: for who reads, and for files of ours."""
        return self._drain + 2 * STUCK + 1

    def open(self, loop: Loop) -> None:
        """Start to follow. Raises OSError, with nothing left open."""
        self._loop = loop
        try:
            for sink in self._sinks:
                sink.open(loop, self._run)
            try:
                self._notify = linux.inotify()
            except OSError as error:  # 128 a user are usual, and editors use them up
                self._go_blind(error)
            else:
                loop.watch(self._notify, self._on_change)
                for stream in self._streams:
                    self._attach(stream)
        except OSError:
            self.close()
            raise
        self._again()

    @property
    def _blind_pause(self) -> float:
        return max(_BLIND, _BLIND_SHARE * len(self._streams))

    def _go_blind(self, error: OSError) -> None:
        """The user has no inotify instance left, or no watch: look at every file's size, again and again."""
        if self._blind or self._loop is None:
            return
        self._blind = True
        tell(f"phalanx: {error.strerror}: log files are looked at {1 / self._blind_pause:.0f} times a second")
        self._loop.call(self._look_blindly)

    def _look_blindly(self) -> None:
        if self._loop is None or self._closed:
            return
        self._loop.after(self._blind_pause, self._look_blindly)
        self.look()

    def look(self) -> None:
        """Look at every file, told or not that it has grown: see `open`, before which this is not called."""
        for stream in self._streams:
            self._grown(stream)
        self._run()

    def add(self, stream: Stream) -> None:
        """Follow one more file, after `open`."""
        self._streams.append(stream)
        self._of_lane |= {lane: stream for _view, lane in stream.lanes}
        if self._notify >= 0:
            self._look_again_at(stream)
        else:
            self._grown(stream)
        self._again()

    def say(self, text: str) -> None:
        """Show a line of ours, above what is unfinished there."""
        if self._loop is None or self._all_seen or self._voice is None:  # not among the others, then
            tell(text)
            return
        self._voice.surface.write(None, sanitise(text).encode(errors="backslashreplace") + b"\n")
        self._again()

    def reveal(self, rank: int) -> None:
        """A local rank has failed: show the last lines of its streams that are hidden, whichever lines are wanted.

        Those of a rotated file at the end: the log writer may not have written them yet.
        """
        if len(self._revealed) >= _MOST_REVEALED or rank in self._revealed:
            return
        for stream in self._streams:
            if stream.spare is not None and stream.number // 2 == rank:
                if stream.follower.rotates and self._finished is None:
                    self._to_reveal.add(rank)
                    return
                self._revealed.add(rank)
                view, lane = stream.spare
                view.reveal_hidden(lane, last_lines(stream.follower.path, rotates=stream.follower.rotates))
        self._again()

    def finish(self, done: Callable[[], None]) -> None:
        """Show what is still in the files, then call ``done``, in bounded time; what was not shown is said."""
        if self._loop is None:  # never opened: the group did not come to start
            done()
            return
        self._finished = done
        for rank in sorted(self._to_reveal):
            self.reveal(rank)
        for stream in self._streams:
            self._grown(stream)
        now = clock.now()
        self._until, self._stuck = now + self._drain, now + STUCK
        self._progress = self._written()
        self._again()

    def close(self) -> None:
        """Give every descriptor back. Idempotent."""
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
            view.surface.forget(self._of_lane)
        for sink in self._sinks:
            sink.close(self._run)
        if self._notify >= 0:
            assert self._loop is not None
            self._loop.forget(self._notify)
            os.close(self._notify)
            self._notify = -1

    # --- what happens to the files

    def _attach(self, stream: Stream) -> None:
        """Watch a file, or the folder where it will appear. Raises OSError."""
        path = stream.follower.path
        while True:
            try:
                try:
                    self._watches.setdefault(linux.inotify_add(self._notify, path, _GROWS), []).append(stream)
                except FileNotFoundError:
                    folder = _existing(path)
                    self._missing.setdefault(linux.inotify_add(self._notify, folder, _APPEARS), []).append(stream)
                    if _existing(path) == folder and not os.path.exists(path):
                        return
                    continue
            except OSError as error:
                if error.errno not in _NO_WATCH:
                    raise
                self._go_blind(error)
            self._grown(stream)
            return

    def _grown(self, stream: Stream) -> None:
        if stream.wanted and not (self._gave_up and not stream.to_file):
            self._dirty[stream] = None
        if self._timeline is not None and stream.number >= 0:
            try:
                sizes = stream.growth.look()
            except OSError:
                return
            for number, size in sizes:
                self._timeline.note(stream.number, size, number)

    def _on_change(self, _events: int) -> None:
        try:
            data = os.read(self._notify, 65536)
        except BlockingIOError:
            return
        place = 0
        while place < len(data):
            watch, mask, _cookie, length = _EVENT.unpack_from(data, place)
            place += _EVENT.size + length
            if mask & linux.IN_Q_OVERFLOW:  # anything may have happened
                for missing in list(self._missing):
                    self._look_again(missing)
                for watched in list(self._watches):
                    self._follow_rotation(watched)
                for stream in self._streams:
                    self._grown(stream)
            elif watch in self._missing:
                self._look_again(watch)
            else:
                for stream in self._watches.get(watch, ()):
                    self._grown(stream)
                if mask & _RENAMED:
                    self._follow_rotation(watch)
        self._run()

    def _look_again(self, watch: int) -> None:
        """Something has appeared in a folder: a file that was missing, perhaps, or what leads to it."""
        linux.inotify_remove(self._notify, watch)
        for stream in self._missing.pop(watch):
            self._look_again_at(stream)

    def _look_again_at(self, stream: Stream) -> None:
        try:
            self._attach(stream)
        except OSError:  # the folder is gone: what is there is shown at the end
            self._grown(stream)

    def _follow_rotation(self, watch: int) -> None:
        """The file has another name now, perhaps: what has its old one is to be watched in its place."""
        for stream in [stream for stream in self._watches.get(watch, ()) if stream.follower.rotates]:
            try:
                new = linux.inotify_add(self._notify, stream.follower.path, _GROWS)
            except FileNotFoundError:  # renamed, and the new one is on its way; or removed
                self._watches[watch].remove(stream)
                self._look_again_at(stream)
                continue
            except OSError as error:
                self._go_blind(error)
                continue
            if new != watch:
                self._watches[watch].remove(stream)
                self._watches.setdefault(new, []).append(stream)
        if watch in self._watches and not self._watches[watch]:  # it grows no more, and watches are counted
            del self._watches[watch]
            linux.inotify_remove(self._notify, watch)

    # --- turns

    def _again(self) -> None:
        """Have `_run` called soon."""
        if not self._scheduled:
            assert self._loop is not None
            self._scheduled = True
            self._loop.call(self._scheduled_run)

    def _scheduled_run(self) -> None:
        self._scheduled = False
        self._run()

    def _run(self) -> None:
        """Serve one chunk of each changed file in turn, as long as its sinks have room; then let the loop breathe."""
        if self._closed:  # it was to be called, and what it wrote to may be open for others
            return
        busy = self._take_turns()
        for view in self._views:
            if view.due <= clock.now():
                view.tick()
            view.settle()
        if self._finished is not None and not self._dirty and not self._all_seen:
            self._end()
        for sink in self._sinks:
            sink.flush()
        if busy:
            self._again()
        elif self._all_seen:
            self._leave_if_idle()
        self._arm()

    def _take_turns(self) -> bool:
        """Returns whether a file has more to be read at once."""
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
            if not all(view.surface.sink.make_room() for view, _lane in stream.lanes):
                self._dirty[stream] = None  # until the sink calls
                stream.fall_behind()
            elif stream.step(self._buffer):
                served[stream] = None
            elif stream.unfit is not None:
                self._pass_over(stream.unfit)
                stream.unfit = None
            self._keep_few_open(stream.follower)
        self._dirty |= served  # after those that have waited
        return bool(served)

    def _pass_over(self, unfit: UnfitError) -> None:
        """Say once what somebody has put in the place of a file."""
        if unfit.filename in self.unfit or len(self.unfit) > _MOST_NAMED:
            return
        self.unfit.add(unfit.filename)
        if len(self.unfit) > _MOST_NAMED:
            tell("phalanx: more files cannot be shown, which are not named")
        else:
            tell(f"phalanx: {printable(unfit.filename)} is not shown: {unfit.strerror}")

    def _in_order(self, dirty: dict[Stream, None]) -> Iterable[Stream]:
        """Streams whose unfinished line stands at the end of a console go first: others would break it."""
        holders = [self._of_lane.get(view.surface.holder) for view in self._views]  # type: ignore[call-overload]  # None has no stream
        first = {stream: None for stream in holders if stream in dirty}
        return (first | dirty) if first else dirty

    def _keep_few_open(self, follower: Follower) -> None:
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
        if self._finished is not None:
            due = min(due, self._until, self._stuck)
        timer = self._timer
        if timer is not None and timer.pending:
            if timer.at <= due:
                return
            timer.cancel()
        if due < float("inf"):
            assert self._loop is not None
            self._timer = self._loop.at(due, self._on_time)

    def _on_time(self) -> None:
        if self._timeline is not None and self._timeline.since + _FLUSH <= clock.now():
            self._timeline.flush()
        if self._finished is not None:
            self._look_at_progress()
        self._run()

    # --- the end

    def _end(self) -> None:
        """Everything has been read."""
        views = [view for view in self._views if view.surface.sink.path or not self._gave_up]
        for stream in self._streams:
            for view, lane in stream.lanes:
                if view in views:
                    view.finish(lane)
        for view in views:
            view.close()
        self._all_seen = True

    def _leave_if_idle(self) -> None:
        sinks = [] if self._gave_up else self._sinks
        if self._finished is not None and not any(sink.holds(self._of_lane) for sink in sinks):
            self._leave()

    def _leave(self) -> None:
        finished, self._finished = self._finished, None
        if finished is not None:
            self._say_what_was_refused()
            finished()

    def _written(self) -> int:
        return sum(sink.written for sink in self._sinks)

    def _look_at_progress(self) -> None:
        now = clock.now()
        if now < self._until and self._written() > self._progress:
            self._progress = self._written()
            self._stuck = now + STUCK
        elif now >= min(self._until, self._stuck):
            self._give_up(now)

    def _give_up(self, now: float) -> None:
        """Let go of who does not read. Files of ours come to their end, unless their disk takes nothing either."""
        self._say_what_is_missing()
        if self._gave_up:
            self._leave()
            return
        self._gave_up = True
        self._dirty = {stream: None for stream in self._dirty if stream.to_file}
        self._until = self._stuck = now + STUCK

    def _say_what_was_refused(self) -> None:
        """A full disk, mostly; a reader that has gone knows it."""
        for sink in self._sinks:
            if sink.refusal is not None:
                where = printable(sink.path) or "the console"
                why = getattr(sink.refusal, "strerror", None) or repr(sink.refusal)
                tell(f"phalanx: {where}: {why}; lines are missing there, the log files have them")

    def _say_what_is_missing(self) -> None:
        left = self._left()
        for view in self._views:
            view.release()
        pending: dict[object, int] = {}
        for sink in self._sinks:
            pending |= sink.pending()
            if not sink.shared and (self._gave_up or not sink.path):  # else it is shown when the reader goes on
                sink.give_up()
        said = 0
        for stream, (unread, beyond) in left.items():
            lines = unread + sum(pending.get(lane, 0) for _view, lane in stream.lanes[:1])
            if lines or beyond:
                said += 1
                if said <= _MOST_NAMED:
                    many = f"{'over ' * beyond}{lines:,} more line{'s' * (lines != 1)}" if lines else "more"
                    tell(f"phalanx: … {many} in {printable(stream.follower.path)}")
        if said > _MOST_NAMED:
            tell(f"phalanx: … and more in {said - _MOST_NAMED} other files")

    def _left(self) -> dict[Stream, tuple[int, bool]]:
        """Lines that have not been read, and whether there are more, of all that are to be shown no longer."""
        left, budget = {}, _COUNTED
        for stream in [stream for stream in self._streams if self._gave_up or not stream.to_file]:
            unread, read, beyond = 0, 0, False
            if stream in self._dirty:
                unread, read, beyond = _lines_left(stream.follower, budget)
                budget -= read
            left[stream] = unread, beyond
            if not unread and not beyond:  # a last line without an end waits like any other, then
                for view, lane in stream.lanes:
                    view.finish(lane)
        return left


def _existing(path: str) -> str:
    """The nearest folder above ``path`` that exists."""
    folder = os.path.dirname(os.path.abspath(path))
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder


def _lines_left(follower: Follower, limit: int) -> tuple[int, int, bool]:
    try:
        return follower.lines_left(limit)
    except OSError:
        return 0, 0, False
