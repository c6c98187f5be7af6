"""One log file that is followed, and the views that show its lines."""

from __future__ import annotations

from collections.abc import Iterable

from phalanx._base.files import UnfitError
from phalanx._logs.follower import Follower
from phalanx._logs.growth import Growth
from phalanx._logs.line_state import Source
from phalanx._logs.render import View


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
            source.line.behind = True
