"""Carries several `Attempts` on one thread, side by side: one wait for all of them.

Owns which of them has something to do, and when. What they do is their own business.
"""

from __future__ import annotations

import math
import os
from collections import deque
from functools import partial

from phalanx._base import clock
from phalanx._base.latch import Latch
from phalanx._engine import host_signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType
    from typing import Self

    from phalanx._agent.attempt_end import Ending
    from phalanx._agent.attempts import Attempts


class SideBySide:
    """Several attempts of teams that have nothing to do with each other. A context manager, which `close`s all.

    Args:
        attempts: What is carried. Each is made with ``signals=False``, and `Attempts.run` of none is called.
        signals: Whether signals to this process raise `SignalException` out of `run`.

    >>> from phalanx._agent.attempts import AttemptEnd, Attempts, Team
    >>> from phalanx._agent.restart_policy import RestartPolicy
    >>> class Succeeds(Team):
    ...     def start(self, attempt, wake): pass
    ...     def ended(self): return AttemptEnd("succeeded")
    ...     def stop(self, death_signal, grace): pass
    ...     def say(self, text): pass
    >>> with SideBySide([Attempts(Succeeds(), RestartPolicy(), signals=False) for _ in range(2)]) as both:
    ...     [ending.state for ending in both.run()]
    ['succeeded', 'succeeded']
    """

    def __init__(self, attempts: Iterable[Attempts], *, signals: bool = True) -> None:
        self.attempts = list(attempts)
        self._signals = signals
        self._owner = os.getpid()
        self._entered = False  # whether `run` has been called
        self._due: dict[Attempts, float] = {}  # when each has something to do again (seconds, monotonic)
        self._woken: deque[Attempts] = deque()  # those whose `wake` was called since
        self._bell = Latch()
        for each in self.attempts:
            each.when_woken(partial(self._note, each))

    def _note(self, attempts: Attempts) -> None:
        """Have `run` look at one of them. Any thread."""
        self._woken.append(attempts)
        self._bell.open()

    def ask_stop(self, death_signal: int, grace: float) -> None:
        """Ask all for an end, see `Attempts.ask_stop`. Returns at once; `run` carries it out."""
        for each in self.attempts:
            each.ask_stop(death_signal, grace)

    def run(self) -> list[Ending]:
        """Carry on until all have ended, and return how each did.

        When an exception leaves it (SignalException: a signal arrived; or what a team raises: its very first start has
        failed, mostly), nothing has been stopped by that: call `ask_stop`, and `run` again. Raises RuntimeError in a
        fork of the process that made this.
        """
        again, self._entered = self._entered, True
        if again:  # what left an earlier call has been delivered, and is not raised again
            host_signals.forget_raised()
        if self._owner != os.getpid():
            msg = "the attempts are not this process's: it is a fork of the one that makes them"
            raise RuntimeError(msg)
        if self._signals:
            host_signals.acquire(self)
        # All are looked at: an exception may have come between the end of a wait and what it was for.
        self._due = dict.fromkeys(self.attempts, -math.inf)
        while any(each.ending is None for each in self.attempts):
            self._turn()
        return [ending for each in self.attempts if (ending := each.ending) is not None]

    def _turn(self) -> None:
        """Let those do something that can; or wait until one can."""
        self._bell = Latch()  # before the looks: what changes after them opens it
        while self._woken:
            self._due[self._woken.popleft()] = -math.inf
        now = clock.now()
        ready = [each for each, moment in self._due.items() if moment <= now and each.ending is None]
        for each in ready:
            self._due[each] = clock.now() + each.advance()
        if not ready:
            left = min(moment for each, moment in self._due.items() if each.ending is None) - now
            with host_signals.delivering():
                self._bell.wait(-1 if left == math.inf else left)

    def close(self) -> None:
        """Release the signals. `run` is not called again."""
        if self._owner == os.getpid():
            host_signals.release(self)
            for each in self.attempts:
                each.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
