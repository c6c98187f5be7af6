"""The workers of `phalanx run --restart worker`: each is a group of its own, and is started again by itself."""

from __future__ import annotations

import os
from contextlib import contextmanager
from functools import partial

import click

from phalanx._agent.attempts import Attempts
from phalanx._agent.common_stop import CommonStop
from phalanx._agent.side_by_side import SideBySide
from phalanx._agent.worker_team import WorkerTeam
from phalanx._base import interrupts
from phalanx._group.run_lines import RunLines
from phalanx._runs.workers_recorder import WorkersRecorder
from phalanx.cli._run_record import RunRecord
from phalanx.cli._say import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
    from typing import Any

    from phalanx._agent.attempt_end import AttemptEnd, Ending
    from phalanx._agent.restart_policy import RestartPolicy
    from phalanx._logs.console import ConsoleSpecs
    from phalanx._outcomes.result import RunProcsResult
    from phalanx._placement.placement import Placement
    from phalanx.cli._attempt_groups import AttemptGroups
    from phalanx.cli._node_check import NodeCheck
    from phalanx.cli._run_logs import RunLogs
    from phalanx.cli._run_record import Asked, Observers
    from phalanx.multiprocessing import PContext
    from phalanx.multiprocessing.errors import ChildFailedError


_EACH, _FEW = 16, 128  # descriptors that a group takes, with its timers, and a start of one again; and all else


class OneWorker(WorkerTeam):
    """The attempts of one worker.

    Args:
        rank: Its local rank.
        make: Makes the group of an attempt.
        speak: Shows a line while no group of it does.
        signals: Those that stop the run.
        check: See `RunTeam`.

    Attributes:
        last_result: How the last attempt has ended; None: it runs, or was not started.
    """

    def __init__(
        self,
        rank: int,
        make: Callable[[int, PContext | None], PContext],
        speak: Callable[[str], None],
        signals: Iterable[int],
        check: NodeCheck | None,
    ) -> None:
        super().__init__(make, speak=speak, common=CommonStop(signals))
        self.rank = rank
        self._check = check
        self.last_result: RunProcsResult | None = None

    def begin(self, attempt: int) -> None:
        """See `Team`."""
        super().begin(attempt)
        self.last_result = None

    def start(self, attempt: int, wake: Callable[[], None]) -> None:
        """See `Team`. The worker is started when the machine has passed its check: one that is under way counts.

        The first attempts of all workers share one check: none starts on a machine that fails it.
        """
        if self._check is not None:
            self._check.begin(f"attempt {attempt}", wake, self, once=attempt == 0)
        super().start(attempt, wake)

    def _may_start(self) -> bool:
        if self._check is None:
            return super()._may_start()
        try:
            has_passed = self._check.has_passed()
        finally:
            self.poll_seconds = self._check.seconds_left
        return has_passed and super()._may_start()

    def stop(self, death_signal: int, grace: float) -> None:
        """See `Team`."""
        if self._check is not None:
            self._check.stop(death_signal, grace)
        super().stop(death_signal, grace)

    def is_up(self) -> bool:
        """See `Team`."""
        is_up = super().is_up()
        if is_up:  # now, and whole: see `RunTeam.start`
            with interrupts.deferred():
                from phalanx._runs.run_report import describe_run  # noqa: F401 - at the end, no descriptor may be left
                from phalanx.errors import format_report  # noqa: F401 - likewise
        return is_up

    def ended(self) -> AttemptEnd | None:
        """See `Team`. A worker waits for no check that it has not begun: a signal may have come before."""
        if self.group is None and self._check is not None and self._check.is_awaited_by(self):
            self.poll_seconds = self._check.seconds_left
            return None
        end = super().ended()
        if end is not None and self.result is not None:
            self.last_result = self.result
        return end


class WorkerTeams:
    """The teams of all workers, and their record.

    Args:
        groups: Makes the groups.
        specs: Where output goes.
        policy: When a worker is started again.
        console: How the console shows the lines.
        run_id: The run's id.
        keep_runs: See `Recorder`.
        limits: Resource limits of the workers, where the user has given none.
        observers: See `RunRecord`.
        signals: Those that stop the run.
        asked: What was asked for.
        check: See `RunTeam`.
    """

    def __init__(
        self,
        groups: AttemptGroups,
        specs: RunLogs,
        policy: RestartPolicy,
        console: ConsoleSpecs,
        *,
        run_id: str,
        keep_runs: int | None,
        limits: Mapping[str, Any],
        observers: Observers,
        signals: Collection[int],
        asked: Asked,
        check: NodeCheck | None = None,
    ) -> None:
        specs.ranks_come_singly, specs.workers = True, len(groups.envs)
        self.name = groups.script
        self.error: ChildFailedError | None = None
        """What the report is about, if workers have failed."""
        self.policy = policy
        self.lines = RunLines(groups.envs, console, lambda stream: self.record.reader_gone(self._latest(), stream))
        recorder = WorkersRecorder(
            groups.script, groups.envs, run_id=run_id, command=groups.command, warn=self._warn, keep_runs=keep_runs,
            argv=asked.argv, config=asked.config,
        )  # fmt: skip
        self.record = RunRecord(recorder, self._warn, observers)
        self.number = recorder.global_rank
        """Returns the rank in the job of a local rank."""
        groups.emit_into(self.record.stream)
        self._groups = groups
        self.check = check
        self._own = _placed(groups, limits)
        self.teams = {
            rank: OneWorker(rank, partial(self._make, rank), self._speak, signals, check)
            for rank in sorted(groups.envs)
        }
        self.attempts = {
            rank: Attempts(team, policy, signals=False, events=self.record.stream, worker=self.number(rank))
            for rank, team in self.teams.items()
        }
        self.side_by_side = SideBySide(self.attempts.values())

    def _make(self, rank: int, attempt: int, before: PContext | None) -> PContext:
        self._groups.warm_up()
        # There are no others that could leave evidence, or that it has to stop.
        group = self._groups.make_one(rank, attempt, before, settle=0.0, run_lines=self.lines, **self._own[rank])
        if self.check is not None:
            self.check.write(self._groups.log_dir)
        return group

    def record_end(self, state: str, exitcode: int, cause: str = "", report: str = "") -> None:
        """Record how the run has ended, see `RunRecord.end`."""
        self.record.end(self._latest(), state, exitcode, cause, report)

    def _latest(self) -> int:
        return max(each.number for each in self.attempts.values())

    def _speak(self, text: str) -> None:
        if not self.lines.say(text):
            say(text.removeprefix("phalanx: "))

    def _warn(self, text: str) -> None:
        self._speak(f"phalanx: {text}")

    def say(self, text: str) -> None:
        """Show a line of ours, above the live lines of a terminal. Does not wait."""
        self._speak(text)

    def signal(self, number: signal.Signals | int) -> None:
        """Send a signal to every worker that runs, see `PContext.signal`."""
        for team in self.teams.values():
            team.signal(number)

    @property
    def endings(self) -> dict[int, Ending]:
        """How the workers have ended that have, by local rank."""
        return {rank: ending for rank, each in self.attempts.items() if (ending := each.ending) is not None}

    @property
    def results(self) -> dict[int, RunProcsResult]:
        """How the latest attempt of each worker has ended, by local rank."""
        return {rank: team.last_result for rank, team in self.teams.items() if team.last_result is not None}

    @property
    def any_group(self) -> PContext | None:
        """A group of one of the workers; None: there is none."""
        return next((team.group for team in self.teams.values() if team.group is not None), None)

    def close(self) -> None:
        """Close all groups: what has not ended is killed. Returns when all lines are shown, or after 10 s each."""
        for team in self.teams.values():
            if team.group is not None:
                team.group.order_close(9)  # before the waits for consoles
        for team in self.teams.values():
            team.close()
        self.lines.close()
        if self.check is not None:
            self.check.close()


@contextmanager
def more_descriptors(count: int) -> Iterator[dict[str, Any]]:
    """Raise this process's soft limit on open files, if it is too low for so many groups.

    Returns limits for the workers, who are to have it as it was. Raises UsageError: the hard limit is too low.
    """
    needed = _FEW + _EACH * count
    if needed <= os.sysconf("SC_OPEN_MAX"):
        yield {}
        return
    from resource import RLIM_INFINITY, RLIMIT_NOFILE, getrlimit, setrlimit

    soft, hard = getrlimit(RLIMIT_NOFILE)
    if hard not in (RLIM_INFINITY, max(hard, needed)):
        msg = f"--restart worker: {count} workers take {needed} open files, and the limit is {hard} (ulimit -Hn)"
        raise click.UsageError(msg)
    setrlimit(RLIMIT_NOFILE, (needed, hard))
    try:
        yield {"nofile": (soft, "unlimited" if hard == RLIM_INFINITY else hard)}
    finally:
        setrlimit(RLIMIT_NOFILE, (soft, hard))


def _placed(groups: AttemptGroups, limits: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the options of each worker's group that say where it runs: its part of what is for all."""
    placement: Placement = groups.options["placement"]
    lists = placement.cpu_bind.split(";") if placement.cpu_bind != "none" else []
    devices = placement.environment(groups.envs)
    placement = placement.replace(virtual_local_rank=False, rlimits={**limits, **dict(placement.rlimits)})
    own: dict[int, dict[str, Any]] = {}
    for index, rank in enumerate(sorted(groups.envs)):
        cpus = {"cpu_bind": lists[index]} if lists else {}
        own[rank] = {"placement": placement.replace(**cpus)}
        groups.envs[rank].update(devices[rank])
    return own
