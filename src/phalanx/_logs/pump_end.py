"""The end of what a pump follows: the last lines, and how long a slow reader is waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from phalanx._base import clock
from phalanx._logs import unshown
from phalanx._logs.line_state import Source
from phalanx._logs.render import View
from phalanx._logs.sink import Sink
from phalanx._logs.stream import Stream

STUCK = 5.0
"""Seconds without any progress after which the end of a group stops waiting for a console that does not read."""


class PumpEnd:
    """The end of a pump's streams.

    Args:
        streams: These. Nothing is written to their files any more.
        views: The views that end with them.
        drain: Seconds that it waits, at most, for a console that reads slowly.
        done: Called when all is shown, or waited for no longer.
        stuck: Seconds after which it does not wait on if nothing is written.

    Attributes:
        until: When it gives up waiting at the latest (seconds, monotonic);
        stuck: and when, if nothing is written.
        gave_up: Whether it has given up waiting for sinks with a slow reader, not for files of ours.
    """

    def __init__(
        self,
        streams: list[Stream],
        views: list[View],
        drain: float,
        done: Callable[[], None],
        *,
        stuck: float = STUCK,
    ) -> None:
        self.done = done
        self._streams = streams
        self.until = self.stuck = 0.0
        self.gave_up = False
        self._views = views
        self._drain = drain
        self._longest_rest = stuck
        self._progress = 0  # bytes that all sinks had written at the last look
        self._shown: set[Source] = set()  # once all has been read

    def begin(self, written: int) -> None:
        """Begin to wait. The sinks have ``written`` so many bytes."""
        now = clock.now()
        self.until, self.stuck = now + self._drain, now + self._longest_rest
        self._progress = written

    def end_lines(self) -> None:
        """End every source: all files have been read."""
        for stream in self._streams:
            for view, source in stream.views:
                if view.output.sink.path or not self.gave_up:
                    view.finish(source)
        for view in self._views:
            if view.output.sink.path or not self.gave_up:
                view.close()
        self._shown = {source for stream in self._streams for _view, source in stream.all_views}

    def waits(self, sinks: Iterable[Sink]) -> bool:
        """Whether any of the lines waits to be written to one of the pump's ``sinks``."""
        return not self.gave_up and any(sink.holds(self._shown) for sink in sinks)

    def is_late(self, now: float, written: int) -> bool:
        """Whether it is time to give up. If not, note the bytes that the sinks have ``written``."""
        if now < self.until and written > self._progress:
            self._progress = written
            self.stuck = now + self._longest_rest
            return False
        return now >= min(self.until, self.stuck)

    def give_up(self, now: float) -> None:
        """Wait only for files of ours from now on."""
        self.gave_up = True
        self.until = self.stuck = now + STUCK

    def report_missing(self, dirty: Mapping[Stream, None], views: Iterable[View], sinks: Iterable[Sink]) -> None:
        """Report what is not shown, as far as is waited for, and drop it where nobody else's lines wait, too.

        ``dirty`` has the streams with unread bytes, ``views`` and ``sinks`` are the pump's.
        """
        streams = [stream for stream in self._streams if self.gave_up or not stream.to_file]
        left = unshown.count_unread(streams, dirty)
        for stream, unread in left.items():
            if unread == (0, False):  # its last line may have no end: it waits to be written like any other then
                for view, source in stream.views:
                    view.finish(source)
        for view in views:
            view.release()
        pending: dict[object, int] = {}
        for sink in sinks:
            pending |= sink.pending()
            # One with others' lines goes on when its reader does.
            if not sink.shared and (self.gave_up or not sink.path):
                sink.give_up()
        unshown.report_missing(left, pending)
