"""Writes the ``run.json`` of a run, from the run's events alone; and beside it the job file and the report.

Owns when these are written, and that no error in it harms the run. `record` has their format.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from phalanx._base import clock, disk, procfs
from phalanx._base.text import how_many, one_line
from phalanx._base.threads import SerialExecutor
from phalanx._events import agent_kinds, kinds
from phalanx._events.event_file import EventLog
from phalanx._events.kinds import Event
from phalanx._events.stream import EventStream
from phalanx._outcomes.failure import Outcome
from phalanx._outcomes.result import RunProcsResult, verdict
from phalanx._runs import record
from phalanx._runs.record import Attempt, Leftover, Rank, Run, State

PATIENCE = 5.0
"""Seconds that the end of a run waits, at most, for the disk."""

FILES = "phalanx-record"
"""The thread that writes a run's files."""

_MOST_ATTEMPTS = 1000  # that are kept in the record; of all but the latest two, only the ranks that failed


class Recorder:
    """Writes the record of one run. An observer of the run's `EventStream`: its thread may wait for a disk.

    Args:
        name: The name of the script, module or function.
        envs: The environment variables of each local rank.
        run_id: The run's id.
        command: The command line: texts, or whatever else a program has put into its `sys.argv`.
        warn: Shows a line to the user: if the record cannot be written, once; and which runs were removed.
        keep_runs: How many runs are kept in this run's folder of runs; None: all.
        is_one_group: Whether the end of a group is that of the run: no `RunEnded` comes.
        argv: The whole command line of this process; None: `sys.argv`.
        config: The job file that is written beside the record; "": none.

    Attributes:
        report: The report on failures of workers, set before `RunEnded` is emitted; "": the record says what there is.
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
        is_one_group: bool = False,
        argv: Sequence[object] | None = None,
        config: str = "",
    ) -> None:
        self._name = name
        self._envs = envs
        self._run_id = run_id
        self._command = command
        self._warn = warn
        self._keep_runs = keep_runs
        self._is_one_group = is_one_group
        self._argv = sys.argv if argv is None else argv
        self._config = config
        self.report = ""
        self._has_report = False  # that is to be written
        self._has_begun = False  # an attempt, of which that is not seen to
        self._folder = ""
        self._run: Run | None = None
        self._ranks: dict[int, Rank] = {}  # of the latest attempt, by local rank
        self._outcomes: dict[int, Outcome] = {}  # of those that have exited
        self._leftovers: list[Leftover] = []
        self._earlier: list[Attempt] = []
        self._cause = ""
        self._has_changed = self._is_over = False
        self._pruned = False
        self._failed = False
        self._pruning = SerialExecutor("phalanx-prune")

    def __call__(self, events: list[Event]) -> None:
        """Note these, and write the record if they change what readers want to know at once."""
        for event in events:
            note = _NOTES.get(type(event))
            try:
                if note is not None:
                    note(self, event)
            except Exception as error:  # noqa: BLE001 - whatever it is, a run of days must not end for a note on it
                self._refuse(error)
        if self._has_changed and self._run is not None:
            # The texts first: the record says that the run has ended.
            for name, write in (
                (record.CONFIG, self._write_config),
                (record.REPORT, self._write_report),
                (record.FILE, self._write_record),
            ):
                try:
                    write(self._run)
                except Exception as error:  # noqa: BLE001 - as above
                    self._refuse(error, name)

    def _write_config(self, _run: Run) -> None:
        """Write the job file, where an attempt has begun in a folder without one: logs may go elsewhere meanwhile."""
        due, self._has_begun = self._has_begun and self._config, False
        if due and not os.path.lexists(os.path.join(self._folder, record.CONFIG)):
            write_text(self._folder, record.CONFIG, self._config)

    def _write_report(self, run: Run) -> None:
        due, self._has_report = self._has_report, False
        if due:
            from phalanx._runs.run_report import describe_run  # for which no start is to wait

            text = self.report or describe_run(record.to_object(run), self._folder)
            write_text(self._folder, record.REPORT, text)

    def _write_record(self, run: Run) -> None:
        record.write(self._folder, run)
        self._has_changed = False

    def finish(self, stream: EventStream) -> None:
        """Wait until all that was emitted is written, for `PATIENCE` seconds at most, and old runs are removed."""
        if FILES in stream.drain(PATIENCE, (FILES,)):
            self._refuse(f"the disk has not answered for {PATIENCE:g} s")
        self._pruning.drain(PATIENCE)  # runs that are left are removed by the next run

    # --- what happens

    def on_starting(self, event: kinds.GroupStarting) -> None:
        """Begin an attempt."""
        if not event.folder:
            return
        if event.folder != self._folder:
            self._folder, self._run = event.folder, None
        if self._run is not None and self._run.attempts[-1].ended is None:  # no failure has ended it
            self._keep_attempt("", None, event.time)
        self._begin(event.attempt, event.time)
        if self._keep_runs is not None and not self._pruned:
            self._pruned = True
            self._pruning.submit(self._prune)

    def _begin(self, number: int, started: float) -> None:
        """Begin the record of an attempt."""
        if self._run is None and os.path.lexists(os.path.join(self._folder, record.FILE)):
            self._earlier = _earlier(self._folder)
            with suppress(OSError):  # none was written; or it cannot be removed, and so not be replaced either
                os.unlink(os.path.join(self._folder, record.REPORT))
        self._ranks, self._outcomes, self._leftovers = {}, {}, []
        self._is_over = False
        self._has_begun = True
        self._run = record.begin(
            run_id=self._run_id,
            name=self._name,
            command=[_text(part) for part in self._command],
            started=started,
            nprocs=len(self._envs),
            ranks=[],
            number=number,
            nodes=max((_number(env.get("GROUP_WORLD_SIZE", "")) for env in self._envs.values()), default=1),
            earlier=[one for one in self._earlier if one.number < number],
            cause=self._cause,
            argv=[_text(part) for part in self._argv],
        )
        self._has_changed = True

    def on_started(self, event: kinds.WorkerStarted) -> None:
        """Note a worker."""
        self._ranks[event.rank] = Rank(
            rank=int(self._envs[event.rank].get("RANK") or event.rank),
            local_rank=event.rank,
            pid=event.pid,
            pid_started=_start_of(event.pid),
            state="running",
        )

    def on_running(self, event: kinds.GroupRunning) -> None:  # noqa: ARG002 - that it has come is enough
        """Write that the workers run."""
        self._note_ranks()

    def on_exited(self, event: kinds.WorkerExited) -> None:
        """Note how a worker has ended."""
        self._outcomes[event.rank] = Outcome(
            event.rank, event.pid, event.state, event.exitcode, event.signal_sent, event.moment, notice=event.notice
        )

    def on_swept(self, event: kinds.Swept) -> None:
        """Note what it left behind."""
        self._leftovers.append(
            Leftover(
                pid=event.pid, command=event.command, local_rank=event.rank, age=event.age,
                signal_sent=event.signal, exitcode=event.exitcode,
            )
        )  # fmt: skip

    def on_gone(self, event: kinds.GroupGone) -> None:
        """End the record of a run of one group: what its result is may never be asked."""
        for rank in event.survivors:
            self._outcomes[rank] = Outcome(rank, self._ranks[rank].pid, "abandoned")
        if self._is_one_group and not self._is_over:
            outcomes = dict(sorted(self._outcomes.items()))
            for rank, known in self._ranks.items() if not event.lost else ():
                outcomes.setdefault(rank, Outcome(rank, known.pid, "abandoned"))
            result = RunProcsResult(outcomes=outcomes)
            if event.lost:
                self._end("failed", verdict(result)[0] or 1, event.lost, event.time)
            else:
                self._end_group(result.state, *verdict(result), event.time)

    def on_ended(self, event: kinds.GroupEnded) -> None:
        """Note the result, which knows more than the exits."""
        found: dict[int, Outcome] = event.result.outcomes
        self._outcomes = {rank: one for rank, one in found.items() if not event.lost or one.state != "abandoned"}
        if self._is_one_group:
            self.report = self._of_failures(event.result)
            self._end_group(event.state, event.exitcode, event.cause, event.time)
        else:
            self._note_ranks()

    def on_not_started(self, event: kinds.GroupNotStarted) -> None:
        """End the record of a run of one group."""
        if self._is_one_group:
            self._end("failed", 1, event.error, event.time)

    def on_attempt_ended(self, event: agent_kinds.AttemptEnded) -> None:
        """Have an attempt in the record of which not even the start had begun; and who was stopped with the run."""
        if self._run is None:
            return
        if event.attempt > self._run.attempts[-1].number:
            self._begin(event.attempt, event.time - event.seconds)
        if event.attempt == self._run.attempts[-1].number:
            self._run = record.change_attempt(self._run, step=event.step)
        if event.state == "stopped":  # nobody has failed, though that was not known when they exited
            for rank, outcome in self._outcomes.items():
                if outcome.state == "failed":
                    self._outcomes[rank] = outcome.replace(state="stopped")
            self._note_ranks()

    def on_restart(self, event: agent_kinds.RestartDecided) -> None:
        """End an attempt that another follows."""
        if self._run is not None:
            self._cause = one_line(event.cause)
            self._run = self._run.replace(cause=self._cause)
            self._keep_attempt(self._cause, event.step, event.time)

    def on_run_ended(self, event: agent_kinds.RunEnded) -> None:
        """End the record."""
        self._end(cast("State", event.state), event.exitcode, event.cause, event.time)

    # --- the record

    def _end_group(self, state: str, exitcode: int, cause: str, when: float) -> None:
        """End the record of a run of one group."""
        self._end("stopped" if state == "stopped" else "failed" if exitcode else "succeeded", exitcode, cause, when)

    def _end(self, state: State, exit_code: int, cause: str, when: float) -> None:
        if self._run is not None:
            self._run = record.end(
                self._run, state=state, exit_code=exit_code, cause=one_line(cause), ranks=self._known("lost"),
                leftovers=self._leftovers, when=when,
            )  # fmt: skip
            self._has_changed = self._has_report = self._is_over = True

    def _of_failures(self, result: RunProcsResult) -> str:
        """Return the report on the failures of a group; "": there are none."""
        if not result.failures:
            return ""
        from phalanx._outcomes.report import format_report  # as above

        number = {rank: int(env.get("RANK") or rank) for rank, env in self._envs.items()}
        failures = {number[rank]: failure for rank, failure in result.failures.items()}
        outcomes = {number[rank]: outcome for rank, outcome in result.outcomes.items()}
        return format_report(self._name, failures, outcomes=outcomes, log_dir=self._folder)

    def _keep_attempt(self, cause: str, step: int | None, when: float) -> None:
        """End an attempt, and keep it with those before it."""
        assert self._run is not None
        self._run = record.end_attempt(
            self._run, ranks=self._known("lost"), leftovers=self._leftovers, cause=cause, step=step, when=when
        )
        *earlier, last = self._run.attempts
        # Of those before, the ranks alone that say something: thousands of ranks in many attempts fill a record.
        brief = [
            attempt.replace(ranks=[rank for rank in attempt.ranks if rank.state not in ("succeeded", "stopped")])
            for attempt in earlier
        ]
        self._earlier = [*brief, last][-_MOST_ATTEMPTS:]
        self._has_changed = True

    def _note_ranks(self) -> None:
        if self._run is not None:
            self._run = record.change_attempt(self._run, ranks=self._known("running"))
            self._has_changed = True

    def _known(self, otherwise: str) -> list[Rank]:
        """Return every rank that was started, with its outcome, or with the state ``otherwise``."""
        ranks = []
        for local_rank, known in sorted(self._ranks.items()):
            outcome = self._outcomes.get(local_rank)
            facts: dict[str, Any] = {"state": otherwise}
            if outcome is not None:
                facts = {name: getattr(outcome, name) for name in ("state", "exitcode", "signal_sent", "early")}
                if outcome.ended_ns is not None:
                    facts["ended"] = clock.to_wall(outcome.ended_ns / clock.NS)
            ranks.append(known.replace(**facts))
        return ranks

    def _prune(self) -> None:
        """Remove the oldest runs beyond ``keep_runs``. It may take long; the run's end waits for `PATIENCE` at most."""
        from phalanx._base.text import format_size
        from phalanx._runs.prune import prune

        assert self._keep_runs is not None
        try:
            removed, freed, failed = prune(os.path.dirname(self._folder), self._keep_runs)
        except OSError as error:
            self._warn(f"--keep-runs: {error}")
            return
        if removed:
            what = f"{how_many(removed, 'run')}, {format_size(freed)}"
            self._warn(f"--keep-runs {self._keep_runs}: removed {what}")
        if failed:
            more = f", and {len(failed) - 1} more" * (len(failed) > 1)
            self._warn(f"--keep-runs {self._keep_runs}: could not be removed: {failed[0]}{more}")

    def _refuse(self, why: object, what: str = record.FILE) -> None:
        if not self._failed:
            self._failed = True
            is_full = isinstance(why, OSError) and disk.is_full(why.errno)
            lines = "; lines may be missing from the logs" if is_full else ""
            text = disk.in_words(why, self._folder) if isinstance(why, OSError) else why
            self._warn(f"{what} cannot be written: {text}{lines}")


_NOTES: dict[type[Event], Callable[[Recorder, Any], None]] = {
    kinds.GroupStarting: Recorder.on_starting,
    kinds.WorkerStarted: Recorder.on_started,
    kinds.GroupRunning: Recorder.on_running,
    kinds.WorkerExited: Recorder.on_exited,
    kinds.Swept: Recorder.on_swept,
    kinds.GroupGone: Recorder.on_gone,
    kinds.GroupEnded: Recorder.on_ended,
    kinds.GroupNotStarted: Recorder.on_not_started,
    agent_kinds.AttemptEnded: Recorder.on_attempt_ended,
    agent_kinds.RestartDecided: Recorder.on_restart,
    agent_kinds.RunEnded: Recorder.on_run_ended,
}


def write_text(folder: str, name: str, text: str) -> None:
    """Write a text of a run's folder in one step. Raises OSError."""
    record.write_file(folder, name, f"{text.rstrip()}\n".encode("utf-8", "backslashreplace"))


def observe(stream: EventStream, warn: Callable[[str], None], recorder: Callable[[list[Event]], None] | None) -> None:
    """Have the events of a stream written: all to `EVENTS`, and, with a ``recorder``, what they say to ``run.json``."""
    log = EventLog(warn)

    def take(events: list[Event]) -> None:
        try:
            log(events)
        finally:
            if recorder is not None:
                recorder(events)

    stream.subscribe(FILES, take)


def _earlier(folder: str) -> list[Attempt]:
    """Return the attempts of the record that is there: the run is started again. None, if it cannot be read."""
    try:
        return record.read(folder).attempts
    except record.UnreadableRecordError:
        return []


def _start_of(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 if that cannot be known."""
    try:
        return procfs.Stat(pid).start
    except OSError:  # it has exited, or /proc hides it (hidepid, proc(5))
        return 0


def _number(text: str) -> int:
    """Return a number of an environment; 1, if it is none."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 1  # noqa: PLR2004 - of 32 bits


def _text(part: object) -> str:
    """Return an argument as a text.

    >>> _text(b"train.py"), _text(0.1)
    ('train.py', '0.1')
    """
    if isinstance(part, str):
        return part
    return os.fsdecode(part) if isinstance(part, bytes) else str(part)
