"""Writes the record of a run whose workers are started again one by one: `record_writer` makes it, `recorder` writes.

Attempt 2 of such a run has the workers that were started for the third time, while others are in their first attempt.
"""

from __future__ import annotations

import time
from _thread import allocate_lock

from phalanx._base import clock
from phalanx._base.one_line import one_line
from phalanx._logs.layout import LogsDest
from phalanx._outcomes.result import RunProcsResult
from phalanx._runs import record_writer
from phalanx._runs.recorder import Recorder, start_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from phalanx._engine.leftovers import Leftover
    from phalanx._outcomes.outcome import Outcome
    from phalanx._runs.record_writer import State
    from phalanx._runs.recorder import Record, Seen

_MOST = 20_000  # entries, of workers and their attempts; beyond, each worker's latest two stay


class WorkersRecorder(Recorder):
    """Writes the record of such a run. Arguments as of `Recorder`; any thread may call it.

    Attributes:
        logs: The files of one of its groups; without a timeline, as long as there is none.
    """

    def __init__(
        self,
        name: str,
        envs: Mapping[int, Mapping[str, str]],
        *,
        run_id: str,
        command: Sequence[object],
        warn: Callable[[str], None],
        keep_runs: int | None = None,
    ) -> None:
        self.logs = LogsDest()
        super().__init__(
            name,
            envs,
            lambda: self.logs,
            lambda: ({}, None),
            run_id=run_id,
            command=command,
            warn=warn,
            keep_runs=keep_runs,
        )
        self._one = allocate_lock()
        self._attempts: dict[int, Record] = {}  # by number; "ranks" is a dict, by local rank
        self._latest: dict[int, int] = {}  # the latest attempt of each local rank
        self._count = 0
        self._asked = False  # whether the record will be written anyway
        self._why = ""

    def record_worker_start(self, local_rank: int, number: int, pid: int) -> None:
        """Write that an attempt of a worker runs. Returns at once."""
        entry = record_writer.rank(
            rank=self.global_rank(local_rank), local_rank=local_rank, pid=pid, pid_started=0, state="running"
        )
        with self._one:
            first = not self._latest
            attempt = self._attempts.setdefault(number, _attempt(number))
            attempt["ranks"][local_rank] = entry
            attempt["ended"] = None
            self._latest[local_rank] = number
            self._count += 1
            if self._count > _MOST:
                self._forget_old()
        if first:
            self.record_start()
        self._write_soon()

    def record_worker_end(
        self,
        local_rank: int,
        number: int,
        outcome: Outcome | None,
        *,
        leftovers: Sequence[Leftover] = (),
        cause: str = "",
        step: int | None = None,
    ) -> None:
        """Write how an attempt of a worker ended, and if it failed, why. Returns at once."""
        with self._one:
            attempt = self._attempts.get(number)
            entry = None if attempt is None else attempt["ranks"].get(local_rank)
            if attempt is not None and entry is not None:
                ended = time.time()
                facts: dict[str, Any] = {"state": "lost"}
                if outcome is not None:
                    facts = {"state": outcome.state, "exitcode": outcome.exitcode, "signal_sent": outcome.signal_sent}
                    if outcome.ended_ns is not None:
                        ended = clock.to_wall(outcome.ended_ns / clock.NS)
                attempt["ranks"][local_rank] = {**entry, **facts, "ended": ended, "cause": one_line(cause)}
                attempt["leftovers"] += [found.__getstate__() for found in leftovers]
                attempt["step"] = max((it for it in (attempt["step"], step) if it is not None), default=None)
                if all(rank["state"] != "running" for rank in attempt["ranks"].values()):
                    attempt["ended"] = max(time.time(), attempt["started"])
            self._why = one_line(cause) or self._why
        self._write_soon()

    def global_rank(self, local_rank: int) -> int:
        """Return the rank in the job."""
        return int(self._envs[local_rank].get("RANK") or local_rank)

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

    def _write_soon(self) -> None:
        """Have the record written: once for what comes while it waits."""
        if not self._asked:
            self._asked = True
            self._write(self._record)

    def _start_record(self, look: Callable[[], Seen], logs: LogsDest, number: int | None = None) -> Record:  # noqa: ARG002 - as of `Recorder`
        return self._record()

    def _end_record(self, look: Callable[[], Seen], logs: LogsDest, state: State, exit_code: int, cause: str) -> Record:  # noqa: ARG002 - likewise
        run = self._record(otherwise="lost")
        ended = max(time.time(), run["started"])
        return {**run, "state": state, "ended": ended, "exit_code": exit_code, "cause": one_line(cause)}

    def _record(self, otherwise: str = "running") -> Record:
        """Make the record, on the thread that writes. Who is not known to have ended is in the state ``otherwise``."""
        with self._one:
            self._asked = False
            found = [(number, list(one["ranks"].items())) for number, one in self._attempts.items()]
        starts = {  # which takes a look at /proc for each
            (number, rank): start_of(entry["pid"])
            for number, ranks in found
            for rank, entry in ranks
            if entry["state"] == "running" and not entry["pid_started"]
        }
        with self._one:
            for (number, rank), start in starts.items():
                entry = self._attempts[number]["ranks"][rank]
                self._attempts[number]["ranks"][rank] = {**entry, "pid_started": start}
            attempts = [
                {**one, "ranks": [_ended(entry, otherwise) for _rank, entry in sorted(one["ranks"].items())]}
                for _number, one in sorted(self._attempts.items())
            ]
            why = self._why
        run = self._run or record_writer.begin(
            run_id=self._run_id, name=self._name, command=self.command(), started=self._started, nprocs=len(self._envs),
            ranks=[],
        )  # fmt: skip
        return {**run, "restart": "worker", "attempts": attempts, "cause": why}


def _attempt(number: int) -> Record:
    began = {"number": number, "started": time.time(), "ended": None}
    return {**began, "ranks": {}, "leftovers": [], "cause": "", "step": None}


def _ended(entry: Record, otherwise: str) -> Record:
    return {**entry, "state": otherwise} if entry["state"] == "running" else entry


def result_of(results: Mapping[int, RunProcsResult]) -> RunProcsResult:
    """Join the results of groups of one worker each, by local rank, into one.

    >>> result_of({}).state
    'succeeded'
    """
    joined: dict[str, dict[int, Any]] = {
        name: {rank: value for result in results.values() for rank, value in getattr(result, name).items()}
        for name in ("return_values", "failures", "stdouts", "stderrs", "outcomes")
    }
    return RunProcsResult(**joined, leftovers=[left for result in results.values() for left in result.leftovers])
