"""Writes the record of a run whose workers are started again one by one, from the run's events.

Attempt 2 of such a run has the workers that were started for the third time, while others are in their first attempt.
"""

from __future__ import annotations

from typing import cast

from phalanx._base import clock
from phalanx._base.one_line import one_line
from phalanx._events import agent_kinds, kinds
from phalanx._outcomes.result import RunProcsResult
from phalanx._runs import record_writer
from phalanx._runs.recorder import Recorder, start_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from phalanx._events.kinds import Event
    from phalanx._runs.record_writer import State
    from phalanx._runs.recorder import Record

_MOST = 4000  # entries, of workers and their attempts; beyond, each worker's latest two stay


class WorkersRecorder(Recorder):
    """Writes the record of such a run. An observer of the run's `EventStream`. Arguments as of `Recorder`."""

    def __init__(
        self,
        name: str,
        envs: Mapping[int, Mapping[str, str]],
        *,
        run_id: str,
        command: Sequence[object],
        warn: Callable[[str], None],
        keep_runs: int | None = None,
        argv: Sequence[object] | None = None,
        config: str = "",
    ) -> None:
        super().__init__(
            name, envs, run_id=run_id, command=command, warn=warn, keep_runs=keep_runs, argv=argv, config=config
        )
        self._local = {self.global_rank(rank): rank for rank in envs}
        self._attempts: dict[int, Record] = {}  # by number; "ranks" is a dict, by local rank
        self._latest: dict[int, int] = {}  # the latest attempt of each local rank
        self._count = 0
        self._ending: Record = {}  # how the run has ended

    def _note(self, event: Event) -> None:
        note = _NOTES.get(type(event))
        if note is not None:
            note(self, event)

    def on_starting(self, event: kinds.GroupStarting) -> None:
        """Begin the record with the first of all groups."""
        if event.folder and self._run is None:
            self._folder = event.folder
            self._begin(event.attempt, event.time)
            self._prune_once()

    def on_started(self, event: kinds.WorkerStarted) -> None:
        """Note that an attempt of a worker runs."""
        attempt = self._attempts.setdefault(event.attempt, _attempt(event))
        attempt["ranks"][event.rank] = record_writer.rank(
            rank=self.global_rank(event.rank), local_rank=event.rank, pid=event.pid, pid_started=start_of(event.pid),
            state="running",
        )  # fmt: skip
        attempt["ended"] = None
        self._latest[event.rank] = event.attempt
        self._count += 1
        if self._count > _MOST:
            self._forget_old()
        self._has_changed = True

    def on_exited(self, event: kinds.WorkerExited) -> None:
        """Note how it ended."""
        facts = {"state": event.state, "exitcode": event.exitcode, "signal_sent": event.signal_sent}
        self._know(event.attempt, event.rank, **facts, ended=event.time)

    def on_swept(self, event: kinds.Swept) -> None:
        """Note what a worker left behind."""
        if event.attempt in self._attempts:
            self._attempts[event.attempt]["leftovers"].append({
                "pid": event.pid, "command": event.command, "local_rank": event.rank, "age": event.age,
                "signal_sent": event.signal, "exitcode": event.exitcode,
            })  # fmt: skip

    def on_gone(self, event: kinds.GroupGone) -> None:
        """Note a worker that has outlived SIGKILL."""
        for rank in event.survivors:
            self._know(event.attempt, rank, state="abandoned", ended=event.time)

    def on_ended(self, event: kinds.GroupEnded) -> None:
        """Note the result, which knows more than the exit."""
        for rank, outcome in event.result.outcomes.items():
            if not event.lost or outcome.state != "abandoned":
                ended = event.time if outcome.ended_ns is None else clock.to_wall(outcome.ended_ns / clock.NS)
                facts = {name: getattr(outcome, name) for name in ("state", "exitcode", "signal_sent")}
                self._know(event.attempt, rank, **facts, ended=ended)

    def on_attempt_ended(self, event: agent_kinds.AttemptEnded) -> None:
        """Note that an attempt of a worker is over, and if it failed, why."""
        assert event.worker is not None
        cause = ""
        if event.state in ("failed", "not started"):
            cause = one_line(f"rank {event.worker}: attempt {event.attempt}: {event.error}")
            self._cause = cause
        rank = self._local[event.worker]
        entry = self._entry(event.attempt, rank)
        if entry is not None:
            more: dict[str, Any] = {}
            if entry["state"] == "running":
                more = {"state": "lost", "ended": event.time}
            elif entry["state"] == "failed" and event.state == "stopped":  # it was not known when it exited
                more = {"state": "stopped"}
            self._know(event.attempt, rank, cause=cause, **more)
            attempt = self._attempts[event.attempt]
            attempt["step"] = max((it for it in (attempt["step"], event.step) if it is not None), default=None)
            if all(each["state"] != "running" for each in attempt["ranks"].values()):
                attempt["ended"] = max(event.time, attempt["started"])
        self._has_changed = True

    def on_run_ended(self, event: agent_kinds.RunEnded) -> None:
        """End the record."""
        self._end(cast("State", event.state), event.exitcode, event.cause, event.time)

    def global_rank(self, local_rank: int) -> int:
        """Return the rank in the job."""
        return int(self._envs[local_rank].get("RANK") or local_rank)

    def _entry(self, number: int, local_rank: int) -> Record | None:
        attempt = self._attempts.get(number)
        return None if attempt is None else attempt["ranks"].get(local_rank)

    def _know(self, number: int, local_rank: int, **facts: Any) -> None:
        entry = self._entry(number, local_rank)
        if entry is not None:
            entry.update(facts)

    def _forget_old(self) -> None:
        for number in sorted(self._attempts):
            ranks = self._attempts[number]["ranks"]
            for rank in [rank for rank in ranks if self._latest[rank] > number + 1]:
                del ranks[rank]
                self._count -= 1
            if not ranks:
                del self._attempts[number]
            if self._count <= _MOST:
                return

    def _end(self, state: State, exit_code: int, cause: str, when: float) -> None:
        if self._run is not None:
            ended = max(when, self._run["started"])
            self._ending = {"state": state, "ended": ended, "exit_code": exit_code, "cause": one_line(cause)}
            self._has_changed = self._has_report = True

    def _record(self) -> Record:
        assert self._run is not None
        attempts = [
            {**one, "ranks": [self._known_of(entry) for _rank, entry in sorted(one["ranks"].items())]}
            for _number, one in sorted(self._attempts.items())
        ] or self._run["attempts"]  # none was started
        return {**self._run, "restart": "worker", "attempts": attempts, "cause": self._cause, **self._ending}

    def _known_of(self, entry: Record) -> Record:
        return {**entry, "state": "lost"} if self._ending and entry["state"] == "running" else entry


_NOTES: dict[type[Event], Callable[[WorkersRecorder, Any], None]] = {
    kinds.GroupStarting: WorkersRecorder.on_starting,
    kinds.WorkerStarted: WorkersRecorder.on_started,
    kinds.WorkerExited: WorkersRecorder.on_exited,
    kinds.Swept: WorkersRecorder.on_swept,
    kinds.GroupGone: WorkersRecorder.on_gone,
    kinds.GroupEnded: WorkersRecorder.on_ended,
    agent_kinds.AttemptEnded: WorkersRecorder.on_attempt_ended,
    agent_kinds.RunEnded: WorkersRecorder.on_run_ended,
}


def _attempt(event: kinds.WorkerStarted) -> Record:
    began = {"number": event.attempt, "started": event.time, "ended": None}
    return {**began, "ranks": {}, "leftovers": [], "cause": "", "step": None}


def result_of(results: Mapping[int, RunProcsResult]) -> RunProcsResult:
    """Join the results of groups of one worker each, by local rank, into one.

    >>> result_of({}).state
    'succeeded'
    """
    joined: dict[str, Any] = {
        name: {rank: value for result in results.values() for rank, value in getattr(result, name).items()}
        for name in ("return_values", "failures", "stdouts", "stderrs", "outcomes")
    }
    return RunProcsResult(**joined, leftovers=[left for result in results.values() for left in result.leftovers])
