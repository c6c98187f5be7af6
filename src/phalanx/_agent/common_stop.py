"""Tells workers that a signal to all processes of a job has ended from workers that have failed. Pure.

A scheduler, an init system or a user may send a signal to the launcher and to its workers at once. Which of them gets
it first is chance: a worker may have died of it, and its end may have been seen, before the launcher knows that the job
is to stop. So the launcher waits a moment before it calls such a death a failure.
"""

from __future__ import annotations

from collections.abc import Iterable

from phalanx._base import clock

WITHIN = 0.5
"""Seconds between the two, at most. Who sends a signal to many processes does so in some milliseconds."""

_WITHIN_NS = int(WITHIN * clock.NS)
_SHELL = 128  # a shell's exit code for a signal is this much more


class CommonStop:
    """Whether a signal has stopped this process, and what that explains. Moments: nanoseconds, monotonic.

    Several signals may be sent at once (systemd's ``SendSIGHUP=yes``): a worker may die of another one of them than the
    one that this process has acted on.

    Args:
        signals: Those that stop this process. By default there are none, and nothing is explained.

    >>> stop = CommonStop([15])
    >>> stop.seconds_left(-15, 1_000_000_000, now_ns=1_100_000_000), stop.seconds_left(1, 1_000_000_000, now_ns=0)
    (0.4, 0.0)
    >>> stop.note(1_200_000_000)
    >>> stop.seconds_left(-15, 1_000_000_000, now_ns=1_200_000_000), stop.explains(-15, 1_000_000_000)
    (0.0, True)
    >>> stop.explains(1, 1_000_000_000), stop.explains(-1, 1_000_000_000), stop.explains(-15, 100_000_000)
    (False, False, False)
    """

    def __init__(self, signals: Iterable[int] = ()) -> None:
        self._signals = frozenset(signals)
        self._got: int | None = None

    def note(self, now_ns: int) -> None:
        """Note that this process was sent one of the signals. Those after the first say nothing new."""
        if self._got is None:
            self._got = now_ns

    @property
    def has_come(self) -> bool:
        """Whether this process was sent one of the signals."""
        return self._got is not None

    def may_explain(self, exitcode: int) -> bool:
        """Whether an exit (negative: by a signal) may come from a signal that this process has not got yet."""
        return self._got is None and self._is_by_one(exitcode)

    def seconds_left(self, exitcode: int, moment_ns: int, now_ns: int) -> float:
        """Return for how long it is not known whether an exit is a failure; 0: it is known.

        Args:
            exitcode: Negative: by a signal.
            moment_ns: When it came.
            now_ns: The present moment.
        """
        left_ns = moment_ns + _WITHIN_NS - now_ns if self.may_explain(exitcode) else 0
        return max(0, left_ns) / clock.NS

    def explains(self, exitcode: int, moment_ns: int) -> bool:
        """Whether an exit is the effect of what was sent to this process, too."""
        return self._got is not None and self._is_by_one(exitcode) and moment_ns >= self._got - _WITHIN_NS

    def _is_by_one(self, exitcode: int) -> bool:
        return -exitcode in self._signals or exitcode - _SHELL in self._signals
