"""How long guard and keeper may say nothing, and what is done about it: the launcher's last say in a group's life.

Owns their replacement: a keeper that misses its own last deadline is woken, then killed, so that the guard takes over;
and when that does not answer either, the group has no helpers any more.
"""

from __future__ import annotations

from phalanx._base import clock
from phalanx._engine.lifecycle import DRAIN_WAIT, KILL_WAIT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx._base.deadlines import Deadline
    from phalanx._base.loop import Loop
    from phalanx._base.process import Process
    from phalanx._engine.keeper_client import Launch

SILENCE = 2.0
"""Seconds beyond its own last deadline after which a keeper that says nothing is taken for stopped, and once more for
lost; and after a wish until it is woken, should somebody have stopped it."""


class Silence:
    """Watches one group's helpers.

    Args:
        loop: The loop of the group's thread.
        launch: The helpers.
        listen: Takes what they have said and nobody has heard yet. Returns how many messages; -1 after the last word.
        lose: Called, with why or without, when there are no helpers any more.
    """

    def __init__(self, loop: Loop, launch: Launch, listen: Callable[[], int], lose: Callable[[str], None]) -> None:
        self.killed = False
        """Whether the keeper was killed by us."""
        self._loop = loop
        self._launch = launch
        self._listen = listen
        self._lose = lose
        self._taken_over = False
        self._next: Deadline | None = None

    def expect(self, seconds: float) -> None:
        """Something is to be said within ``seconds``, and `SILENCE`."""
        until = clock.now() + seconds + SILENCE
        self._at(until, lambda: self.over(until))

    def watch(self, process: Process) -> None:
        """See the end of guard or keeper: a fork of the host may hold the socket, which would not tell of it then."""

        def gone(_events: int) -> None:
            self._loop.forget(process.pidfd)
            known, both = self._launch.keeper is not None, self._launch.helpers_gone()
            heard = self._listen()
            if heard < 0:
                return
            if both and (known or not heard):  # a keeper that has only just said that it is up, says more
                self._lose("")
            else:  # the other one finishes
                self._taken_over = process is self._launch.keeper
                self._launch.wake()
                self.expect(KILL_WAIT + DRAIN_WAIT)

        self._loop.watch(process.pidfd, gone)

    def end(self) -> None:
        """The last word has been said."""
        if self._next is not None:
            self._next.cancel()
        for process in (self._launch.guard, self._launch.keeper):
            if process is not None:
                self._loop.forget(process.pidfd)

    def over(self, until: float) -> None:
        """Nothing was said ``until`` now. The keeper may have been stopped by somebody: then it goes on now."""
        if self._hears():
            return
        if clock.now() - until > SILENCE / 2:  # we have been stopped ourselves, and so has the keeper, perhaps
            self.expect(0)
            return
        self._launch.wake()
        self._at(clock.now() + SILENCE, self.replace)

    def replace(self) -> None:
        """Let the guard take over from a keeper that does not answer, and after that, do without."""
        if self._hears():
            return
        if self._taken_over:  # the guard does not answer either
            self._give_up()
            return
        self.killed = self._launch.kill_keeper()
        self._at(clock.now() + KILL_WAIT + SILENCE, self._give_up)

    def _give_up(self) -> None:
        if not self._hears():
            self._lose("the group's keeper answered no more, and was killed")

    def _at(self, moment: float, action: Callable[[], None]) -> None:
        if self._next is not None:
            self._next.cancel()
        self._next = self._loop.at(moment, action)

    def _hears(self) -> bool:
        """Whether something has been said that nobody has listened to yet: then there is time once more."""
        planned = self._next
        count = self._listen()
        if count > 0 and self._next is planned:
            self.expect(0)
        return count != 0
