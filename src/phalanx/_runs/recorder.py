"""Writes the ``run.json`` of a run when it starts and when it ends.

Owns when the record is written, and that no error in it harms the run. `record_writer` makes it.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import weakref

from phalanx._base import clock, procfs
from phalanx._base.background import SerialExecutor
from phalanx._base.one_line import one_line
from phalanx._outcomes.outcome import Outcome
from phalanx._outcomes.result import RunProcsResult, verdict
from phalanx._runs import record_writer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from phalanx._engine.leftovers import Leftover
    from phalanx._engine.mirror import Mirror
    from phalanx._engine.supervisor import Supervisor
    from phalanx._logs.layout import LogsDest
    from phalanx._runs.record_writer import RankState, State

    Record = dict[str, Any]
    Seen = tuple[dict[int, int], RunProcsResult | None]

PATIENCE = 5.0
"""Seconds that the end of a run waits, at most, for the disk."""

_MOST_ATTEMPTS = 1000  # that are kept in the record; of all but the latest two, only the ranks that failed


class Recorder:
    """Writes the record of one run. Made before the run's start.

    Args:
        name: The name of the script, module or function.
        envs: The environment variables of each local rank.
        logs: Returns the group's files.
        look: Returns the pids of the workers that were started, and the group's result or None. It is called on another
            thread, and must not raise.
        run_id: The run's id.
        command: The command line: texts, or whatever else a program has put into its `sys.argv`.
        warn: Shows a line to the user: if the record cannot be written, once; and which runs were removed.
        keep_runs: How many runs are kept in this run's folder of runs; None: all.
    """

    def __init__(
        self,
        name: str,
        envs: Mapping[int, Mapping[str, str]],
        logs: Callable[[], LogsDest],
        look: Callable[[], Seen],
        *,
        run_id: str,
        command: Sequence[object],
        warn: Callable[[str], None],
        keep_runs: int | None = None,
    ) -> None:
        self._name = name
        self._envs = envs
        self._logs = logs
        self._look = look
        self._run_id = run_id
        self._command = command
        self._warn = warn
        self._keep_runs = keep_runs
        self._started = time.time()
        self._run: Record | None = None
        self._earlier: list[Record] = []
        self._cause = ""
        self._pruned = False
        self._failed = False
        self._aside = SerialExecutor("phalanx-record")
        self._pruning = SerialExecutor("phalanx-prune")

    def record_start(self) -> None:
        """Write that the run goes on, and begin to remove old runs. Returns at once."""
        look, logs = self._look, self._logs()
        self._write(lambda: self._start_record(look, logs))
        if self._keep_runs is not None and not self._pruned:
            self._pruned = True
            self._pruning.submit(self._prune)

    def follow(self, logs: Callable[[], LogsDest], look: Callable[[], Seen]) -> None:
        """Record another attempt from now on. Arguments as of the constructor."""
        self._logs, self._look = logs, look

    def record_not_started(self, number: int) -> None:
        """Write that an attempt has begun of which no worker could be started. Returns at once."""
        self._look = look = _nothing
        logs = self._logs()
        self._write(lambda: self._start_record(look, logs, number))

    def record_restart(self, cause: str, step: int | None) -> None:
        """Write how an attempt ended that another follows. Returns at once."""
        look, logs = self._look, self._logs()
        self._write(lambda: self._restart_record(look, logs, one_line(cause), step))

    def record_end_and_wait(self, state: State, exit_code: int, cause: str = "") -> None:
        """Write how the run ended. Returns when that is written, after `PATIENCE` seconds at most."""
        self.record_end(state, exit_code, cause)
        self.finish()

    def record_end(self, state: State, exit_code: int, cause: str = "") -> None:
        """Write how the run ended, once all of its processes have. Returns at once."""
        look, logs = self._look, self._logs()
        self._write(lambda: self._end_record(look, logs, state, exit_code, cause))

    def finish(self) -> None:
        """Wait until all is written, for `PATIENCE` seconds at most."""
        if not self._aside.drain(PATIENCE):
            self._refuse(f"the disk has not answered for {PATIENCE:g} s")
        self._pruning.drain(PATIENCE)  # runs that are left are removed by the next run

    def command(self) -> list[str]:
        """Return the command line as texts."""
        return [_text(part) for part in self._command]

    def _folder(self) -> str:
        """Return the run's folder; "" if it has none, or none yet."""
        return os.path.dirname(os.path.dirname(self._logs().timeline))

    def _write(self, make: Callable[[], Record]) -> None:
        folder = self._folder()
        if not folder:  # the start was refused before it was made
            return

        def write() -> None:
            try:
                if self._run is None and os.path.lexists(os.path.join(folder, record_writer.FILE)):
                    self._earlier = _earlier(folder)
                self._run = make()
                record_writer.write(folder, self._run)
            except Exception as error:  # noqa: BLE001 - whatever it is, a run of days must not end for a note on it
                self._refuse(error)

        # A disk that does not answer must delay neither a signal nor the end.
        if not self._aside.submit(write):
            write()

    def _prune(self) -> None:
        """Remove the oldest runs beyond ``keep_runs``. It may take long; the run's end waits for `PATIENCE` at most."""
        from phalanx._base import byte_size
        from phalanx._runs.prune import prune

        assert self._keep_runs is not None
        try:
            removed, freed, failed = prune(os.path.dirname(self._folder()), self._keep_runs)
        except OSError as error:
            self._warn(f"--keep-runs: {error}")
            return
        if removed:
            what = f"{removed} run{'s' * (removed > 1)}, {byte_size.format_size(freed)}"
            self._warn(f"--keep-runs {self._keep_runs}: removed {what}")
        if failed:
            more = f", and {len(failed) - 1} more" * (len(failed) > 1)
            self._warn(f"--keep-runs {self._keep_runs}: could not be removed: {failed[0]}{more}")

    def _refuse(self, why: object) -> None:
        if not self._failed:
            self._failed = True
            self._warn(f"the run goes on, but its run.json cannot be written: {why}")

    def _start_record(self, look: Callable[[], Seen], logs: LogsDest, number: int | None = None) -> Record:
        if number is None:
            attempt = os.path.basename(os.path.dirname(logs.timeline)).removeprefix("attempt_")
            number = int(attempt) if attempt.isdecimal() else 0
        return record_writer.begin(
            run_id=self._run_id,
            name=self._name,
            command=self.command(),
            started=self._started if self._run is None else time.time(),
            nprocs=len(self._envs),
            ranks=self._ranks(look()[0], {}, "running"),
            number=number,
            earlier=[one for one in self._earlier if one["number"] < number],
            cause=self._cause,
        )

    def _restart_record(self, look: Callable[[], Seen], logs: LogsDest, cause: str, step: int | None) -> Record:
        run, ranks, leftovers = self._last_look(look, logs)
        run = record_writer.end_attempt(run, ranks=ranks, leftovers=leftovers, cause=cause, step=step)
        *earlier, last = run["attempts"]
        self._earlier, self._cause = [*map(_brief, earlier), last][-_MOST_ATTEMPTS:], cause
        return {**run, "cause": cause}

    def _end_record(self, look: Callable[[], Seen], logs: LogsDest, state: State, exit_code: int, cause: str) -> Record:
        run, ranks, leftovers = self._last_look(look, logs)
        return record_writer.end(
            run, state=state, exit_code=exit_code, cause=one_line(cause), ranks=ranks, leftovers=leftovers
        )

    def _last_look(self, look: Callable[[], Seen], logs: LogsDest) -> tuple[Record, list[Record], Sequence[Leftover]]:
        run = self._run or self._start_record(look, logs)
        pids, result = look()
        ranks = self._ranks(pids, {} if result is None else result.outcomes, "lost")
        return run, ranks, () if result is None else result.leftovers

    def _ranks(self, pids: dict[int, int], outcomes: dict[int, Outcome], otherwise: RankState) -> list[Record]:
        """Return every rank that was started, with its outcome, or with the state ``otherwise``."""
        before = [] if self._run is None else self._run["attempts"][-1]["ranks"]
        starts = {(rank["local_rank"], rank["pid"]): rank["pid_started"] for rank in before}
        ranks = []
        for local_rank, pid in pids.items():
            rank = int(self._envs[local_rank].get("RANK") or local_rank)
            outcome = outcomes.get(local_rank)
            state: Any = otherwise if outcome is None else outcome.state
            start = starts[local_rank, pid] if (local_rank, pid) in starts else start_of(pid)
            facts: dict[str, Any] = {}
            if outcome is not None:
                facts = {"exitcode": outcome.exitcode, "signal_sent": outcome.signal_sent, "early": outcome.early}
                if outcome.ended_ns is not None:
                    facts["ended"] = clock.to_wall(outcome.ended_ns / clock.NS)
            ranks.append(
                record_writer.rank(rank=rank, local_rank=local_rank, pid=pid, pid_started=start, state=state, **facts)
            )
        return ranks


def _nothing() -> Seen:
    """What is seen of a group that was not started."""
    return {}, None


class GroupRecorder:
    """Writes the record of a group that Python code started, whether or not somebody waits for the group.

    The first record is written before the workers start: otherwise that of an earlier attempt in the same folder would
    say that the run has ended. It refers to the group's supervisor, and not to the group: so a group that is no longer
    referenced ends. In a fork of the process that started the group, it does nothing.
    """

    def __init__(
        self, name: str, envs: Mapping[int, Mapping[str, str]], logs: LogsDest, supervisor: Supervisor, run_id: str
    ) -> None:
        self._supervisor = supervisor
        self._result: RunProcsResult | None = None
        command = [part for part in sys.argv if part] or [name]
        self._recorder = Recorder(
            name, envs, lambda: logs, self._look, run_id=run_id, command=command, warn=supervisor.announce
        )
        self._recorder.record_start()
        _recorders.add(self)

    def started(self) -> None:
        """Note that the workers run, or will; and write the record again when they have ended."""
        self._recorder.record_start()
        self._supervisor.ended.then(self._note_end)

    def not_started(self, kind: object, error: BaseException | None, trace: object = None) -> None:
        """Write that the workers could not be started. Can be used as an `__exit__`."""
        del trace
        self._recorder.record_end("failed", 1, str(error) or str(kind))

    def set_result(self, result: RunProcsResult) -> None:
        """Write the group's result, which names the causes."""
        if self._supervisor.owner == os.getpid():
            self._result = result
            self._note_end()

    def finish(self) -> None:
        """Wait until all is written, for `PATIENCE` seconds at most."""
        if self._supervisor.owner == os.getpid():
            self._recorder.finish()

    def _note_end(self) -> None:
        lost = None if self._supervisor.result_stands else self._supervisor.keeper_error
        judged = self._result
        result = judged or _result_of_exits(self._supervisor.mirror)
        code, cause = verdict(result)
        if lost is not None:
            self._recorder.record_end("failed", code or 1, str(lost))
        else:
            state: State = "stopped" if result.state == "stopped" else "failed" if code else "succeeded"
            self._recorder.record_end(state, code, cause)
        if self._result is not judged:  # another thread has set it, and may have written first
            self._note_end()

    def _look(self) -> Seen:
        mirror = self._supervisor.mirror
        pids = {rank: worker.pid for rank, worker in sorted(mirror.workers.items())}
        return pids, self._result or (_result_of_exits(mirror) if self._supervisor.ended else None)


_recorders: weakref.WeakSet[GroupRecorder] = weakref.WeakSet()


@atexit.register
def _finish_all() -> None:
    """Wait for the last records of groups that were not closed."""
    for recorder in list(_recorders):
        recorder.finish()


def _result_of_exits(mirror: Mirror) -> RunProcsResult:
    """Return a result from the workers' exits alone, before the group has collected its own."""
    outcomes = {}
    for rank, worker in sorted(mirror.workers.items()):
        state = "abandoned"
        if worker.exit is not None:
            state = "stopped" if worker.asked is not None else "failed" if worker.failed else "succeeded"
        code = None if worker.exit is None else worker.exit.returncode
        ended = None if worker.exit is None else worker.exit_ns
        outcomes[rank] = Outcome(rank, worker.pid, state, code, worker.signalled, ended, notice=worker.noticed)
    return RunProcsResult(outcomes=outcomes, leftovers=mirror.leftovers)


def _earlier(folder: str) -> list[Record]:
    """Return the attempts of the record that is there: the run is started again. None, if it cannot be read."""
    from phalanx._runs import record

    try:
        return [record.to_object(attempt) for attempt in record.read(folder).attempts]
    except record.UnreadableRecordError:
        return []


def _brief(attempt: Record) -> Record:
    """Return an attempt with the ranks alone that say something: thousands of ranks in many attempts fill a record."""
    return {**attempt, "ranks": [rank for rank in attempt["ranks"] if rank["state"] not in ("succeeded", "stopped")]}


def start_of(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 if that cannot be known."""
    try:
        return procfs.Stat(pid).start
    except OSError:  # it has exited, or /proc hides it (hidepid, proc(5))
        return 0


def _text(part: object) -> str:
    """Return an argument as a text.

    >>> _text(b"train.py"), _text(0.1)
    ('train.py', '0.1')
    """
    if isinstance(part, str):
        return part
    return os.fsdecode(part) if isinstance(part, bytes) else str(part)
