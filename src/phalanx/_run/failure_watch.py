"""Watches a run's events for failures, so that other machines hear of one before the workers here are gone."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import NamedTuple

from phalanx._events import kinds
from phalanx._events.kinds import Event


class WorkerFailure(NamedTuple):
    """The failure of a worker.

    Attributes:
        attempt: In which attempt.
        local_rank: Whose.
        error: What happened, in one line.
        exitcode: Its exit code, negative for a signal: also that which it is about to have.
        is_hang: Whether a timer has found it.
    """

    attempt: int
    local_rank: int
    error: str
    exitcode: int
    is_hang: bool


class FailureWatch:
    """An observer of a run's events that reports each failure as soon as it is known.

    A worker that a timer kills is reported when it is sent SIGKILL, since it may take long to exit; and again then.

    Args:
        report: Called with each failure, on the thread of the events.
    """

    def __init__(self, report: Callable[[WorkerFailure], None]) -> None:
        self._report = report
        self._hung: dict[tuple[int, int], str] = {}  # by attempt and rank: what its timer has said of a hang

    def __call__(self, events: list[Event]) -> None:
        """Report the failures among these."""
        for event in events:
            if isinstance(event, kinds.WorkerReaped):
                self._hung.setdefault((event.attempt, event.rank), event.what)
                if event.signal == signal.SIGKILL:
                    self._report(WorkerFailure(event.attempt, event.rank, event.what, -signal.SIGKILL, is_hang=True))
            elif isinstance(event, kinds.TimerLeft):
                self._hung.pop((event.attempt, event.rank), None)
            elif isinstance(event, kinds.WorkerExited) and event.state == "failed":
                what = self._hung.get((event.attempt, event.rank), "")
                error = what or event.how
                self._report(WorkerFailure(event.attempt, event.rank, error, event.exitcode, is_hang=bool(what)))
