"""Keeps the ``run.json`` of a run while it goes on.

Owns when it is written, and that no failure of it can harm the run. What it looks like is `_record`'s business, which
is loaded when the workers run: msgspec is not on the way to the start.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
import weakref

from phalanx._base import clock, procfs
from phalanx._base.background import SerialExecutor
from phalanx._outcomes.outcome import Outcome
from phalanx._outcomes.result import RunProcsResult, verdict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from phalanx._engine.mirror import Mirror
    from phalanx._engine.supervisor import Supervisor
    from phalanx._logs.specs import LogsDest
    from phalanx._runs.record import Attempt, Rank, RankState, Run, State

    Seen = tuple[dict[int, int], RunProcsResult | None]

PATIENCE = 5.0
"""Seconds that the end of a run waits for a disk that does not answer."""

_CAUSE_LIMIT = 500


class Recorder:
    """The record of one run, made before its start.

    Args:
        name: What is run.
        envs: The environment variables of each local rank.
        logs: Where the group's files are, or will be.
        look: The pids of the workers, as far as they were started, and the group's result, once it is known. It is
            called on another thread, and must not raise.
        run_id: What the run is called.
        command: The command line.
        say: Tells a person a line. It is called at most once: when the record cannot be written.
        keep_runs: How many runs are kept in the folder where this one is; None: all.
    """

    def __init__(
        self,
        name: str,
        envs: Mapping[int, Mapping[str, str]],
        logs: Callable[[], LogsDest],
        look: Callable[[], Seen],
        *,
        run_id: str,
        command: list[str],
        say: Callable[[str], None],
        keep_runs: int | None = None,
    ) -> None:
        self._name = name
        self._envs = envs
        self._logs = logs
        self._look = look
        self._run_id = run_id
        self._command = command
        self._say = say
        self._keep_runs = keep_runs
        self._started = time.time()
        self._run: Run | None = None
        self._earlier: list[Attempt] = []
        self._failed = False
        self._aside = SerialExecutor("phalanx-record")
        self._pruning = SerialExecutor("phalanx-prune")

    def running(self) -> None:
        """The workers run. Returns at once."""
        self._write(self._begun)
        if self._keep_runs is not None:
            self._pruning.submit(self._prune)

    def ended(self, state: State, exit_code: int, cause: str = "") -> None:
        """The run is over, and all of its processes are gone. Returns when that is written, or takes too long."""
        self.over(state, exit_code, cause)
        self.finish()

    def over(self, state: State, exit_code: int, cause: str = "") -> None:
        """The same, and returns at once."""
        self._write(lambda: self._over(state, exit_code, cause))

    def finish(self) -> None:
        """Return when all is written, or that takes too long."""
        if not self._aside.drain(PATIENCE):
            self._refuse(f"the disk has not answered for {PATIENCE:g} s")
        self._pruning.drain(PATIENCE)  # what is left goes with the next one

    def _folder(self) -> str:
        """The run's folder; "": it has none, or none yet."""
        return os.path.dirname(os.path.dirname(self._logs().timeline))

    def _write(self, make: Callable[[], Run]) -> None:
        folder = self._folder()
        if not folder:  # refused before it had one
            return

        def write() -> None:
            try:
                from phalanx._runs import record

                if self._run is None:
                    with contextlib.suppress(record.UnreadableRecordError):  # mostly, there is none
                        self._earlier = record.read(folder).attempts
                self._run = make()
                record.write(folder, self._run)
            except Exception as error:  # noqa: BLE001 - whatever it is, a run of days must not end for a note on it
                self._refuse(error)

        # A disk that does not answer must hold back neither a signal nor the end.
        if not self._aside.submit(write):
            write()

    def _prune(self) -> None:
        """Remove runs that are one too many. It may take long; the run's end does not wait for it for long."""
        from phalanx._base import byte_size
        from phalanx._runs.prune import prune

        assert self._keep_runs is not None
        try:
            removed, freed, failed = prune(os.path.dirname(self._folder()), self._keep_runs)
        except OSError as error:
            self._say(f"--keep-runs: {error}")
            return
        if removed:
            what = f"{removed} run{'s' * (removed > 1)}, {byte_size.format_size(freed)}"
            self._say(f"--keep-runs {self._keep_runs}: removed {what}")
        if failed:
            more = f", and {len(failed) - 1} more" * (len(failed) > 1)
            self._say(f"--keep-runs {self._keep_runs}: could not be removed: {failed[0]}{more}")

    def _refuse(self, why: object) -> None:
        if not self._failed:
            self._failed = True
            self._say(f"the run goes on, but its run.json cannot be written: {why}")

    def _begun(self) -> Run:
        from phalanx._runs import record

        attempt = os.path.basename(os.path.dirname(self._logs().timeline)).removeprefix("attempt_")
        number = int(attempt) if attempt.isdecimal() else 0
        return record.begin(
            run_id=self._run_id,
            name=self._name,
            command=self._command,
            started=self._started,
            nprocs=len(self._envs),
            ranks=self._ranks(self._look()[0], {}, "running"),
            number=number,
            earlier=[one for one in self._earlier if one.number < number],
        )

    def _over(self, state: State, exit_code: int, cause: str) -> Run:
        from phalanx._runs import record

        run = self._run or self._begun()
        pids, result = self._look()
        ranks = self._ranks(pids, {} if result is None else result.outcomes, "lost")
        leftovers = [] if result is None else [record.Leftover.of(leftover) for leftover in result.leftovers]
        return record.end(
            run, state=state, exit_code=exit_code, cause=_one_line(cause), ranks=ranks, leftovers=leftovers
        )

    def _ranks(self, pids: dict[int, int], outcomes: dict[int, Outcome], otherwise: RankState) -> list[Rank]:
        """Every rank that was started, with its outcome as far as there is one."""
        from phalanx._runs.record import Rank

        known = (
            {} if self._run is None else {rank.local_rank: rank.pid_started for rank in self._run.attempts[-1].ranks}
        )
        ranks = []
        for local_rank, pid in pids.items():
            rank = int(self._envs[local_rank].get("RANK") or local_rank)
            outcome = outcomes.get(local_rank)
            state: Any = otherwise if outcome is None else outcome.state
            start = known[local_rank] if local_rank in known else _started(pid)
            said: dict[str, Any] = {}
            if outcome is not None:
                said = {"exitcode": outcome.exitcode, "signal_sent": outcome.signal_sent, "early": outcome.early}
                if outcome.ended_ns is not None:
                    said["ended"] = clock.to_wall(outcome.ended_ns / clock.NS)
            ranks.append(Rank(rank=rank, local_rank=local_rank, pid=pid, pid_started=start, state=state, **said))
        return ranks


class Diary:
    """Has the record of a group of Python code written, as the group goes on, whoever waits for it, or nobody.

    It is begun before the workers start: in the folder of an earlier attempt, a record says that this one is over. It
    holds nothing of the group but what its supervisor has: a group that is dropped ends. In a fork of the process that
    has started the group, it does nothing.
    """

    def __init__(
        self, name: str, envs: Mapping[int, Mapping[str, str]], logs: LogsDest, supervisor: Supervisor, run_id: str
    ) -> None:
        self._supervisor = supervisor
        self._result: RunProcsResult | None = None
        command = [part for part in sys.argv if part] or [name]
        self._recorder = Recorder(
            name, envs, lambda: logs, self._look, run_id=run_id, command=command, say=supervisor.announce
        )
        self._recorder.running()
        _diaries.add(self)

    def started(self) -> None:
        """The workers run, or will."""
        self._recorder.running()
        self._supervisor.ended.then(self._note_end)

    def not_started(self, kind: object, error: BaseException | None, trace: object = None) -> None:
        """They will not: an `__exit__`."""
        del trace
        self._recorder.over("failed", 1, str(error) or str(kind))

    def judged(self, result: RunProcsResult) -> None:
        """The group's result is known, with its causes."""
        if self._supervisor.owner == os.getpid():
            self._result = result
            self._note_end()

    def finish(self) -> None:
        """Return when all is written, or that takes too long."""
        if self._supervisor.owner == os.getpid():
            self._recorder.finish()

    def _note_end(self) -> None:
        lost = None if self._supervisor.result_stands else self._supervisor.keeper_error
        judged = self._result
        result = judged or _seen(self._supervisor.mirror)
        code, cause = verdict(result)
        if lost is not None:
            self._recorder.over("failed", code or 1, str(lost))
        else:
            state: State = "stopped" if result.state == "stopped" else "failed" if code else "succeeded"
            self._recorder.over(state, code, cause)
        if self._result is not judged:  # another thread has said it meanwhile, and perhaps before this one
            self._note_end()

    def _look(self) -> Seen:
        mirror = self._supervisor.mirror
        pids = {rank: worker.pid for rank, worker in sorted(mirror.workers.items())}
        return pids, self._result or (_seen(mirror) if self._supervisor.ended else None)


_diaries: weakref.WeakSet[Diary] = weakref.WeakSet()


@atexit.register
def _finish_all() -> None:
    """Have the last words written of groups that nobody has closed."""
    for diary in list(_diaries):
        diary.finish()


def _seen(mirror: Mirror) -> RunProcsResult:
    """What the ends of a group's workers say by themselves, before anybody has asked for its result."""
    outcomes = {}
    for rank, worker in sorted(mirror.workers.items()):
        state = "abandoned"
        if worker.exit is not None:
            state = "stopped" if worker.signalled is not None else "failed" if worker.failed else "succeeded"
        code = None if worker.exit is None else worker.exit.returncode
        ended = None if worker.exit is None else worker.exit_ns
        outcomes[rank] = Outcome(rank, worker.pid, state, code, worker.signalled, ended)
    return RunProcsResult(outcomes=outcomes, leftovers=mirror.leftovers)


def _started(pid: int) -> int:
    try:
        return procfs.Stat(pid).start
    except OSError:  # it has exited, or /proc hides it (hidepid)
        return 0


def _one_line(text: str) -> str:
    r"""The first line that says anything.

    >>> _one_line("\n  ValueError: bad shape\n  (see above)")
    'ValueError: bad shape'
    """
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= _CAUSE_LIMIT else f"{line[: _CAUSE_LIMIT - 1]}…"
