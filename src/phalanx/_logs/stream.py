"""The log files that are followed, each with the views that show its lines; and the watch for their growth.

Files are watched for growth, rotation and creation with inotify(7); or by looking at their sizes, without it.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Iterable

from phalanx._base import linux
from phalanx._base.files import UnfitError
from phalanx._base.loop import Loop
from phalanx._base.stderr import tell
from phalanx._logs.follower import Follower
from phalanx._logs.lines import Source
from phalanx._logs.render import View
from phalanx._logs.timeline import Growth


class Stream:
    """One file of one rank.

    Args:
        follower: Reads the file.
        views: The views that show it, each with its source there. None: only the times of its growth are noted.
        number: Its number in the timeline: twice the local rank, plus one for stderr.
        hidden_in: A view, and its source there, that shows only the last lines, and only if the rank fails.
    """

    def __init__(
        self,
        follower: Follower,
        views: Iterable[tuple[View, Source]],
        *,
        number: int = -1,
        hidden_in: tuple[View, Source] | None = None,
    ) -> None:
        self.follower = follower
        self.growth = Growth(follower.path, rotates=follower.rotates)
        self.views = tuple(views)
        self.number = number
        self.hidden_in = hidden_in
        self.ends = False
        """Whether nothing is written any more: what is in the file is the rest."""
        self.given_up = False
        """Whether its reader was too slow, and nothing more is shown."""
        self.unfit: UnfitError | None = None
        """Why what stands under the file's name cannot be read."""

    @property
    def all_views(self) -> tuple[tuple[View, Source], ...]:
        """Its views, and the one in which it is hidden."""
        return self.views if self.hidden_in is None else (*self.views, self.hidden_in)

    @property
    def wanted(self) -> bool:
        """Whether any of its views can still be written to."""
        return not self.given_up and any(not view.output.sink.broken for view, _source in self.views)

    @property
    def to_file(self) -> bool:
        """Whether all of its views write to files of ours, which no slow reader blocks."""
        return all(view.output.sink.path for view, _source in self.views)

    def step(self, buffer: bytearray) -> bool:
        """Read as much as its views take at a time, and pass it to them. Returns whether there may be more."""
        turn = min(view.turn for view, _source in self.views)
        try:
            with memoryview(buffer) as whole:
                count = self.follower.read(whole[:turn])
        except UnfitError as error:
            self.unfit = error
            return False
        except OSError:  # removed, or not created yet
            return False
        more = count == turn or (count > 0 and self.follower.rotates)
        for view, source in self.views:
            view.take(source, buffer, count, more=more)
        return more

    def fall_behind(self) -> None:
        """Mark its sources: there is more to be read, later."""
        for _view, source in self.views:
            source.behind = True


_POLL = 0.1  # seconds between two looks at the files where inotify is not available, at least;
_POLL_SHARE = 0.0005  # and for each file: one look takes some microseconds
_NO_WATCH = (errno.ENOSPC, errno.ENOMEM)  # inotify_add_watch(2)
_EVENT = struct.Struct("iIII")  # struct inotify_event: wd, mask, cookie, len (inotify(7))
_RENAMED = linux.IN_ATTRIB | linux.IN_MOVE_SELF  # a rotated file gets a second name and loses its first; or a new name
_GROWS = linux.IN_MODIFY | _RENAMED
_APPEARS = linux.IN_CREATE | linux.IN_MOVED_TO


class FileWatch:
    """Watches the files of some streams, on a loop.

    Args:
        loop: Where it waits for events.
        streams: The streams, a list that the caller owns: it appends one before it calls `add`.
        on_growth: Is called with a stream whose file may have grown, for each such event.
        on_batch: Is called after all events that one read(2) returned.
    """

    def __init__(
        self, loop: Loop, streams: list[Stream], on_growth: Callable[[Stream], None], on_batch: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._streams = streams
        self._on_growth = on_growth
        self._on_batch = on_batch
        self._notify = -1
        self._watches: dict[int, list[Stream]] = {}
        self._missing: dict[int, list[Stream]] = {}  # by the nearest existing folder above each file
        self._polls = False
        self._closed = False

    def open(self) -> None:
        """Begin to watch. Raises OSError, after which `close` has to be called."""
        try:
            self._notify = linux.inotify()
        except OSError as error:  # 128 instances a user are usual, and editors use them up
            self._poll(error)
        else:
            self._loop.watch(self._notify, self._on_events)
            for stream in self._streams:
                self._attach(stream)

    def add(self, stream: Stream) -> None:
        """Watch one more file, after `open`."""
        if self._notify >= 0:
            self._attach_or_read(stream)
        else:
            self._on_growth(stream)

    def look(self) -> None:
        """Look at every file, whether an event has come for it or not."""
        for stream in self._streams:
            self._on_growth(stream)
        self._on_batch()

    def end(self) -> None:
        """Watch no more, before `close`.

        close(2) waits until nothing in the kernel can use the descriptor's watches, for 10 ms and more. One that was
        removed before is waited for by the kernel alone.
        """
        for watch in (*self._watches, *self._missing):
            linux.inotify_remove(self._notify, watch)
        self._watches.clear()
        self._missing.clear()

    def close(self) -> None:
        """Close the inotify descriptor. Idempotent."""
        self._closed = True
        if self._notify >= 0:
            self._loop.forget(self._notify)
            os.close(self._notify)
            self._notify = -1

    def _poll(self, error: OSError) -> None:
        """Look at every file's size periodically: the user has no inotify instance, or no watch, left."""
        if self._polls:
            return
        self._polls = True
        tell(f"phalanx: {error.strerror}: log files are looked at {1 / self._poll_pause:.0f} times a second")
        self._loop.call(self._look_and_repeat)

    @property
    def _poll_pause(self) -> float:
        return max(_POLL, _POLL_SHARE * len(self._streams))

    def _look_and_repeat(self) -> None:
        if self._closed:
            return
        self._loop.after(self._poll_pause, self._look_and_repeat)
        self.look()

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
                self._poll(error)
            self._on_growth(stream)
            return

    def _attach_or_read(self, stream: Stream) -> None:
        try:
            self._attach(stream)
        except OSError:  # the folder was removed: what was in the file is shown at the end
            self._on_growth(stream)

    def _on_events(self, _events: int) -> None:
        try:
            data = os.read(self._notify, 65536)
        except BlockingIOError:
            return
        offset = 0
        while offset < len(data):
            watch, mask, _cookie, length = _EVENT.unpack_from(data, offset)
            offset += _EVENT.size + length
            if mask & linux.IN_Q_OVERFLOW:  # events were lost: anything may have happened
                for missing in list(self._missing):
                    self._on_appearance(missing)
                for watched in list(self._watches):
                    self._follow_rotation(watched)
                for stream in self._streams:
                    self._on_growth(stream)
            elif watch in self._missing:
                self._on_appearance(watch)
            else:
                for stream in self._watches.get(watch, ()):
                    self._on_growth(stream)
                if mask & _RENAMED:
                    self._follow_rotation(watch)
        self._on_batch()

    def _on_appearance(self, watch: int) -> None:
        """Something has appeared in a folder: a missing file, perhaps, or a folder above one."""
        linux.inotify_remove(self._notify, watch)
        for stream in self._missing.pop(watch):
            self._attach_or_read(stream)

    def _follow_rotation(self, watch: int) -> None:
        """Watch the new file under a log's name, if the watched file has been renamed."""
        for stream in [stream for stream in self._watches.get(watch, ()) if stream.follower.rotates]:
            try:
                new = linux.inotify_add(self._notify, stream.follower.path, _GROWS)
            except FileNotFoundError:  # renamed, and the new file will appear; or removed
                self._watches[watch].remove(stream)
                self._attach_or_read(stream)
                continue
            except OSError as error:
                self._poll(error)
                continue
            if new != watch:
                self._watches[watch].remove(stream)
                self._watches.setdefault(new, []).append(stream)
        if watch in self._watches and not self._watches[watch]:  # the rotated file grows no more; watches are limited
            del self._watches[watch]
            linux.inotify_remove(self._notify, watch)


def _existing(path: str) -> str:
    """Return the nearest folder above ``path`` that exists."""
    folder = os.path.dirname(os.path.abspath(path))
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder
