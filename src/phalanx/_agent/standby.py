"""A standby: the group of the next attempt, made ready while the present one runs.

Its interpreters have booted in the environment of that attempt, and wait before anything of the program is read. So a
restart need not wait for a keeper and for interpreters. What goes wrong with it is no failure of the run: it is
dropped, and the attempt is started in the ordinary way.
"""

from __future__ import annotations

from phalanx._base import clock
from phalanx._engine.host_signals import SignalException

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx._group.context import PContext

AFTER = 1.0
"""Seconds after the start of an attempt in which nothing is made ready: a group that fails at once costs no standby."""

_SIGKILL = 9


class Standby:
    """The standby of one run; one at a time.

    Args:
        make: Makes the group of an attempt, which follows another. It is not started. May raise: there is none then.
    """

    def __init__(self, make: Callable[[int, PContext], PContext]) -> None:
        self._make = make
        self._attempt = -1  # that is to be made ready, or is
        self._before: PContext | None = None  # the group that it follows; None: nothing is to be made ready
        self._due = 0.0
        self._group: PContext | None = None

    @property
    def group(self) -> PContext | None:
        """The group that is parked, or has been; None: there is none."""
        return self._group

    def expect(self, attempt: int, before: PContext) -> None:
        """The attempt ``attempt`` may follow the group ``before``, which runs: make it ready soon."""
        self._attempt, self._before, self._due = attempt, before, clock.now() + AFTER

    def tend(self) -> float | None:
        """Make the group ready, if it is time. Returns in how many seconds it will be; None: there is nothing to do."""
        if self._before is None:
            return None
        left = self._due - clock.now()
        if left > 0:
            return left
        before, self._before = self._before, None
        try:
            self._group = self._make(self._attempt, before)
            self._group.park()
        except SignalException:
            raise
        except Exception:  # noqa: BLE001 - whatever it is, the attempt will be started without it, and tell
            self.close()
        return None

    def take(self, attempt: int) -> PContext | None:
        """Return the group of ``attempt``, if it is parked, for its `start`; it is the caller's then. Else drop it."""
        self._before = None
        group, ready = self._group, self._attempt == attempt
        if group is None or not (ready and group.is_open):
            self.close()
            return None
        self._group = None
        return group

    def drop(self) -> None:
        """Order the end of it, for no other attempt follows. Does not wait, and does not raise."""
        self._before = None
        if self._group is not None:
            self._group.order_close(_SIGKILL)

    def close(self) -> None:
        """End it. Idempotent: a signal may interrupt it."""
        self.drop()
        if self._group is not None:
            self._group.close(_SIGKILL)
            self._group = None
