"""Emits the events of one group: makes them of what the keeper reports, in its order.

The `keeper_link` calls `heard` after the `mirror` has taken a message; that is one append. The events are made later,
on the threads of those who observe. What an exit means is read from the mirror: a worker's record does not change once
its exit is known.
"""

from __future__ import annotations

from functools import partial

from phalanx._base import clock
from phalanx._engine import start_errors
from phalanx._engine.mirror import leftover_of
from phalanx._events import kinds
from phalanx._events.stream import PATIENCE
from phalanx._timers.hang import Hang

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from phalanx._engine.mirror import Mirror, WorkerRecord
    from phalanx._events.kinds import Event
    from phalanx._events.stream import EventStream


class GroupEvents:
    """One group's. Methods may be called from any thread, and return at once.

    Args:
        stream: Where its events go.
        attempt: The number of its attempt.
        is_own: Whether the stream is this group's alone.
    """

    def __init__(self, stream: EventStream, attempt: int, *, is_own: bool = False) -> None:
        self.stream = stream
        self.attempt = attempt
        self._is_own = is_own
        self._late: tuple[str, ...] = ()  # who is waited for no longer

    def emit(self, kind: type[Event], **fields: Any) -> None:
        """Emit an event that happens now."""
        self.stream.emit(kind, self.attempt, clock.now_ns(), **fields)

    def heard(self, verb: str, fields: list[Any], mirror: Mirror) -> None:
        """Emit what a message of the keeper says, which ``mirror`` has taken already."""
        make = _OF_MESSAGE.get(verb)
        if make is not None:
            self.stream.emit(make, self.attempt, clock.now_ns(), mirror, *fields)

    def not_started(self, kind: object, error: BaseException | None, trace: object = None) -> None:
        """Emit that the workers could not be started. Can be used as an `__exit__`."""
        del trace
        self.emit(kinds.GroupNotStarted, error=str(error) or str(kind))

    def gone(self, mirror: Mirror, not_started: BaseException | None, lost: BaseException | None) -> None:
        """Emit that no process of the group is left."""
        if not_started is not None:
            self.not_started(type(not_started), not_started)
            return
        survivors = [worker.rank for worker in mirror.workers.values() if worker.abandoned]
        self.emit(kinds.GroupGone, survivors=survivors, lost="" if lost is None else str(lost))

    def ended(self, state: str, exitcode: int, cause: str, result: object, lost: BaseException | None) -> None:
        """Emit what became of the group."""
        if lost is not None:
            state, exitcode, cause = "failed", exitcode or 1, str(lost)
        is_lost = lost is not None
        self.emit(kinds.GroupEnded, state=state, exitcode=exitcode, cause=cause, lost=is_lost, result=result)

    def wait_for_users(self, announce: Callable[[str], None]) -> None:
        """Wait for the user's functions, if the stream is this group's alone. Announce that they take too long."""
        if self._is_own and self.stream.drain(PATIENCE, (self.stream.USERS,)):
            self._late = (self.stream.USERS,)
            announce(f"on_event has not taken all events for {PATIENCE:g} s after the end")

    def close(self, announce: Callable[[str], None]) -> None:
        """Wait for the observers, and end their threads, if the stream is this group's alone. Announce who is late."""
        late = self.stream.close(PATIENCE, but=self._late) if self._is_own else []
        if late:
            announce(f"not all events were taken in {PATIENCE:g} s by {', '.join(late)}")

    def end(self) -> None:
        """End the observers' threads likewise, once they have nothing left to do. Returns at once."""
        if self._is_own:
            self.stream.end()


def _exited(attempt: int, worker: WorkerRecord) -> Event:
    assert worker.exit is not None
    return kinds.WorkerExited(
        attempt,
        worker.exit_ns,
        rank=worker.rank,
        pid=worker.pid,
        state=worker.state,
        how=worker.exit.description,
        exitcode=worker.exit.returncode,
        signal_sent=worker.signalled,
        notice=worker.noticed,
        timer_signal=worker.struck,
        oom=worker.oom,
        max_rss_kib=worker.max_rss_kib,
        cpu_seconds=worker.cpu_seconds,
    )


def _signalled(
    kind: type[Event], attempt: int, _now: int, mirror: Mirror, number: int, moment: int, ranks: list[int]
) -> list[Event]:
    return [kind(attempt, moment, rank=rank, pid=mirror.workers[rank].pid, signal=number) for rank in ranks]


def _orphans(attempt: int, now: int, mirror: Mirror, entries: list[tuple[Any, ...]], _beyond: int) -> list[Event]:
    workers = {worker.pid: worker for worker in mirror.workers.values() if worker.exit is not None}
    swept: list[Event] = [
        _exited(attempt, workers[left.pid])  # of a guard's, see `Mirror.left_behind`
        if left.pid in workers
        else kinds.Swept(
            attempt, now, rank=left.local_rank, pid=left.pid, command=left.command, age=left.age,
            signal=left.signal_sent, exitcode=left.exitcode,
        )
        for left in map(leftover_of, entries)
        if left.pid in workers or left.signal_sent
    ]  # fmt: skip
    beyond = mirror.leftovers_beyond
    return [*swept, kinds.SweptMore(attempt, now, count=beyond)] if beyond else swept


def _of_timers(
    kind: type[Event], attempt: int, moment: int, packed: list[tuple[Any, ...]], **fields: Any
) -> list[Event]:
    events = []
    for hang in map(Hang.from_tuple, packed):
        timer = hang.timer
        known = {"rank": hang.rank, "pid": hang.pid, "scope": timer.scope or timer.location, "place": timer.location}
        events.append(kind(attempt, moment, **known, what=hang.message, **{"overdue": hang.overdue(moment)} | fields))
    return events


_OF_MESSAGE: dict[str, Callable[..., list[Event]]] = {
    "started": lambda attempt, _now, _mirror, pids, moment: [
        kinds.WorkerStarted(attempt, moment, rank=rank, pid=pid) for rank, pid in pids
    ],
    "running": lambda attempt, _now, _mirror, moment, _log_writer: [kinds.GroupRunning(attempt, moment)],
    "state": lambda attempt, _now, _mirror, name, moment: [kinds.GroupState(attempt, moment, state=name)],
    "exits": lambda attempt, _now, mirror, reports: [_exited(attempt, mirror.workers[report[0]]) for report in reports],
    "paused": lambda attempt, now, _mirror, is_on: [kinds.GroupPaused(attempt, now, paused=is_on)],
    "signalled": partial(_signalled, kinds.WorkerSignalled),
    "noticed": partial(_signalled, kinds.WorkerNoticed),
    "orphans": _orphans,
    "helper_lost": lambda attempt, now, _mirror, who, returncode, decided: (
        [kinds.GroupLost(attempt, now, error=start_errors.of_helper(who, returncode))] if decided else []
    ),  # else `ended_by_loss` follows
    "ended_by_loss": lambda attempt, now, _mirror, who, returncode: [
        kinds.GroupLost(attempt, now, error=start_errors.of_helper(who, returncode))
    ],
    "lost": lambda attempt, now, _mirror, error: [kinds.GroupLost(attempt, now, error=str(error))],
    "armed": lambda attempt, _now, _mirror, moment, packed: _of_timers(
        kinds.TimerArmed, attempt, moment, packed, overdue=0.0
    ),
    "stands": lambda attempt, _now, _mirror, moment, packed: _of_timers(
        kinds.TimerBreakpoint, attempt, moment, packed, overdue=0.0
    ),
    "expired": lambda attempt, _now, _mirror, moment, packed: _of_timers(kinds.TimerExpired, attempt, moment, packed),
    "left": lambda attempt, _now, _mirror, moment, packed: _of_timers(kinds.TimerLeft, attempt, moment, packed),
    "struck": lambda attempt, _now, _mirror, number, moment, packed: _of_timers(
        kinds.WorkerReaped, attempt, moment, packed, signal=number
    ),
    "refused": lambda attempt, now, _mirror, pid, scope, location: [
        kinds.RequestRefused(attempt, now, pid=pid, scope=scope, place=location)
    ],
    "unwatched": lambda attempt, now, _mirror, why: [kinds.TimersUnwatched(attempt, now, why=why)],
}
"""By the verb of the message, see `protocol`; ``lost`` is the link's own: both helpers have died."""
