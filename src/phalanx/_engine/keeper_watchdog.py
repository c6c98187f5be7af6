"""Watches guard and keeper: wakes and kills a keeper that sends nothing by its own deadline, and sees their deaths.

A keeper that misses its own last deadline is woken (SIGCONT), then killed, so that the guard takes over. When that does
not answer either, the group has no helper processes any more.
"""

from __future__ import annotations

from phalanx._base import clock
from phalanx._engine.protocol import ANSWER_WAIT, DRAIN_WAIT, KILL_WAIT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx._base.loop import Deadline, Loop
    from phalanx._base.process import Process
    from phalanx._engine.keeper_client import KeeperClient


class KeeperWatchdog:
    """Watches one group's helpers.

    Args:
        loop: The loop of the group's thread.
        client: The helpers.
        receive: Receives what has arrived. Returns how many messages; -1 after the last message.
        lose: Called, with why or without, when there are no helpers any more.
    """

    def __init__(
        self, loop: Loop, client: KeeperClient, receive: Callable[[], int], lose: Callable[[str], None]
    ) -> None:
        self.killed = False
        """Whether the keeper was killed by us."""
        self._loop = loop
        self._keeper = client
        self._receive = receive
        self._lose = lose
        self._taken_over = False
        self._next: Deadline | None = None

    def expect(self, seconds: float) -> None:
        """Expect a message within ``seconds`` and `ANSWER_WAIT`."""
        until = clock.now() + seconds + ANSWER_WAIT
        self._at(until, lambda: self.over(until))

    def expect_nothing(self) -> None:
        """Let the keeper send nothing for as long as it likes: every worker runs."""
        if self._next is not None:
            self._next.cancel()

    def watch(self, process: Process) -> None:
        """Watch the pidfd of guard or keeper: EOF may not come, for a fork of the host may hold their socket."""

        def gone(_events: int) -> None:
            self._loop.forget(process.pidfd)
            known, both = self._keeper.keeper is not None, self._keeper.helpers_gone()
            count = self._receive()
            if count < 0:
                return
            if both and (known or not count):  # a keeper that has only just sent `up` sends more
                self._lose("")
            else:  # the other one ends the group
                self._taken_over = process is self._keeper.keeper
                self._keeper.wake()
                self.expect(KILL_WAIT + DRAIN_WAIT)

        self._loop.watch(process.pidfd, gone)

    def end(self) -> None:
        """Watch no more: the last message has come."""
        if self._next is not None:
            self._next.cancel()
        for process in (self._keeper.guard, self._keeper.keeper):
            if process is not None:
                self._loop.forget(process.pidfd)

    def over(self, until: float) -> None:
        """Wake the keeper, which has sent nothing ``until`` now: it may have been stopped (SIGSTOP)."""
        if self._answers():
            return
        if clock.now() - until > ANSWER_WAIT / 2:  # this process was stopped, and the keeper perhaps as well
            self.expect(0)
            return
        self._keeper.wake()
        self._at(clock.now() + ANSWER_WAIT, self.replace)

    def replace(self) -> None:
        """Kill a keeper that does not answer: the guard takes over. If that does not answer, give up."""
        if self._answers():
            return
        if self._taken_over:  # the guard does not answer either
            self._give_up()
            return
        self.killed = self._keeper.kill_keeper()
        self._at(clock.now() + KILL_WAIT + ANSWER_WAIT, self._give_up)

    def _give_up(self) -> None:
        if not self._answers():
            self._lose("the group's keeper answered no more, and was killed")

    def _at(self, moment: float, action: Callable[[], None]) -> None:
        if self._next is not None:
            self._next.cancel()
        self._next = self._loop.at(moment, action)

    def _answers(self) -> bool:
        """Whether a message was waiting, or the last one has come: then the wait begins again."""
        planned = self._next
        count = self._receive()
        if count > 0 and self._next is planned:
            self.expect(0)
        return count != 0
