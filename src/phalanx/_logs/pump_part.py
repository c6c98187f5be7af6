"""What one of several groups has in a pump that they share."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from phalanx._logs.render import View
    from phalanx._logs.stream import Stream
    from phalanx._logs.timeline_writer import TimelineWriter


class PumpPart:
    """The streams of one of several groups that share a pump.

    Args:
        streams: The files that are followed.
        views: Where their lines go, and nobody else's.
        timeline: Notes when the files grow; None: nothing does. Parts may share it.
        rotated: The paths of those of its files that are rotated, by the number of their stream.
        shared: Views that the pump does not have yet, and that stay when the part ends.
    """

    def __init__(
        self,
        streams: list[Stream],
        views: list[View],
        timeline: TimelineWriter | None = None,
        *,
        rotated: Mapping[int, str],
        shared: list[View],
    ) -> None:
        self.streams = streams
        self.views = views
        self.timeline = timeline
        self.rotated = rotated
        self.shared = shared
        self.added = False
        for stream in streams:
            stream.timeline = timeline
