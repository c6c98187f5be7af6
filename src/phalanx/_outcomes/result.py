"""The result of a group that has ended: which ranks succeeded, which failed by themselves, which we stopped.

It is judged from exits, error files and return values. Nothing here starts, stops or waits for a process.
"""

from __future__ import annotations

import errno
import os
import signal

from phalanx._base import clock, disk
from phalanx._base.clock import format_duration
from phalanx._base.frozen import Value
from phalanx._base.text import SHORT_LINE, how_many, one_line
from phalanx._base.tty import plain
from phalanx._engine.host_signals import SignalException
from phalanx._evidence.describe import describe
from phalanx._evidence.error_file import (
    has_left,
    has_lost_connection,
    message_of,
    read_error_file,
    recorded_at,
    timer_detail,
    write_error_file,
    written_by,
)
from phalanx._evidence.recording import exit_path, read_exit, reads_as_lost_connection, write_record
from phalanx._evidence.stack_signals import FATAL_SIGNALS, fatal_at, read_fatal_stacks
from phalanx._outcomes.failure import KILL_NOTICED_NS, NOT_EXITED, WHILE_LEAVING, Outcome, ProcessFailure, signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import Any, Self

    from phalanx._engine.mirror import Leftover, WorkerRecord
    from phalanx._logs.layout import LogsDest

EARLY = 10.0
"""A rank ended early if it ended at least so many seconds before the rest, and"""

EARLY_SHARE = 0.1
"""if these are at least this share of the time for which the rest ran."""

_LONGEST_RELEASE = 600_000_000_000  # nanoseconds at the most from a fatal signal to the exit: core dumps are large
_LEAVING = 1_000_000_000  # nanoseconds at the most between a process's closed connections and its evidence, or its end

_SERVER_GONE = r"^(Dist(Network|Store)Error|ConnectionRefusedError)\b|connection refused"
"""Messages of exceptions that a server's end may cause beside those: torch's store, and what is connected to anew."""

_LEFT_WELL = "when it was stopped, and then left with code 0"


class RunProcsResult(Value):
    """The result of a group that has ended.

    Attributes:
        return_values: What each rank that succeeded returned (None for a binary), by rank.
        failures: The ranks that failed by themselves; never one that we stopped.
        stdouts: The file of each rank's stdout (``""``: the launcher's own stream).
        stderrs: The same for stderr.
        root_cause: The failure that came first: by the moment at which the worker recorded its exception, else by its
            exit, in the order in which the kernel reported exits. None if no rank failed.
        outcomes: The outcome of every rank: succeeded, failed, stopped by us, or abandoned.
        leftovers: The processes that workers left behind, and that were killed when no worker was left, see `Leftover`.
        name: The group's name; ``""`` if that is not known.
        log_dir: The folder in which the files of the group are, those of each rank in one of its own; ``""``: none.
    """

    return_values: dict[int, Any]
    failures: dict[int, ProcessFailure]
    stdouts: dict[int, str]
    stderrs: dict[int, str]
    root_cause: ProcessFailure | None
    outcomes: dict[int, Outcome]
    leftovers: tuple[Leftover, ...]
    name: str
    log_dir: str

    def __init__(
        self,
        return_values: dict[int, Any] | None = None,
        failures: dict[int, ProcessFailure] | None = None,
        stdouts: dict[int, str] | None = None,
        stderrs: dict[int, str] | None = None,
        outcomes: dict[int, Outcome] | None = None,
        leftovers: Iterable[Leftover] = (),
        *,
        name: str = "",
        log_dir: str = "",
    ) -> None:
        failures = failures or {}
        self._store(
            return_values=return_values or {},
            failures=failures,
            stdouts=stdouts or {},
            stderrs=stderrs or {},
            root_cause=min(failures.values(), key=lambda failure: failure.first_key, default=None),
            outcomes=outcomes or {},
            leftovers=tuple(leftovers),
            name=name,
            log_dir=log_dir,
        )

    def __repr__(self) -> str:
        name = f" {one_line(self.name, SHORT_LINE)!r}" if self.name else ""
        ranks = how_many(len(self.outcomes), "rank")
        cause = one_line(plain(verdict(self)[1]), SHORT_LINE)
        return f"<{type(self).__name__}{name}: {self.state}, {'; '.join(filter(None, (ranks, cause)))}>"

    @property
    def state(self) -> str:
        """The outcome of the group in one word.

        ``"failed"``: a rank failed by itself. Else ``"abandoned"``: a rank outlived SIGKILL. Else ``"stopped"``: we
        stopped a rank, because the group was closed. Else ``"succeeded"``: every rank succeeded.

        >>> RunProcsResult(outcomes={0: Outcome(0, 4242, "stopped", -15, 15)}).state
        'stopped'
        """
        states = {outcome.state for outcome in self.outcomes.values()} | ({"failed"} if self.failures else set())
        return next((state for state in ("failed", "abandoned", "stopped") if state in states), "succeeded")

    @property
    def succeeded(self) -> bool:
        """Whether every rank succeeded, so that all return values are there."""
        return self.state == "succeeded"

    def is_failed(self) -> bool:
        """Whether any rank did not succeed: it failed, was stopped because the group was closed, or was abandoned.

        ``failures`` and ``root_cause`` have those that failed by themselves; `state` tells these cases apart.
        """
        return not self.succeeded

    def raise_if_failed(self) -> Self:
        """Return this result if every rank succeeded.

        Raises:
            ChildFailedError: A rank failed by itself: `phalanx.errors.ChildFailedError`, whose text is the report.
            RuntimeError: None did, but not all succeeded: the group was closed, or a rank outlived SIGKILL.

        >>> RunProcsResult({0: "done"}, outcomes={0: Outcome(0, 4242, "succeeded", 0)}).raise_if_failed().return_values
        {0: 'done'}
        """
        if self.failures:
            from phalanx._outcomes.child_failed import ChildFailedError

            raise ChildFailedError(
                self.name or "the group", self.failures, outcomes=self.outcomes, log_dir=self.log_dir
            )
        if not self.succeeded:
            raise RuntimeError(f"the group {self.name!r} was {self.state}: {verdict(self)[1]}")
        return self


def collect(
    workers: Iterable[WorkerRecord],
    logs: LogsDest,
    found: Mapping[int, ProcessFailure | None],
    value_of: Callable[[WorkerRecord], Any],
    leftovers: Iterable[Leftover] = (),
    began_ns: int = 0,
    *,
    name: str = "",
    log_dir: str = "",
) -> RunProcsResult:
    """Judge every worker of a group that has ended.

    ``found`` is what `failures_of` has returned; ``value_of`` returns what a worker that succeeded returned, and may
    raise anything; ``began_ns`` is when all workers had been started (CLOCK_MONOTONIC, nanoseconds; 0: that is not
    known).
    """
    values: dict[int, Any] = {}
    failures: dict[int, ProcessFailure] = {}
    outcomes: dict[int, Outcome] = {}
    workers = list(workers)
    for worker in sorted(workers, key=lambda worker: (worker.order < 0, worker.order)):
        state, failure = "abandoned", None
        if worker.ended_well and (worker.asked is None or worker.result is not None):
            state, failure = _judge_success(worker, logs, values, value_of)
        elif worker.exit is not None:
            failure = found[worker.rank]
            state = "stopped" if failure is None else "failed"
        code = None if worker.exit is None else worker.exit.returncode
        ended = None if worker.exit is None else worker.exit_ns
        outcomes[worker.rank] = Outcome(
            worker.rank, worker.pid, state, code, worker.signalled, ended, notice=worker.noticed
        )
        if failure is not None:
            failures[worker.rank] = failure
    by_rank = {worker.rank: worker for worker in workers}
    _date_back(failures, by_rank)
    _name_disks(failures, by_rank, logs)
    for rank, seconds in _early(outcomes, began_ns):
        outcomes[rank] = outcomes[rank].replace(early=seconds)
    return RunProcsResult(
        dict(sorted(values.items())), failures, logs.stdouts, logs.stderrs, dict(sorted(outcomes.items())), leftovers,
        name=name, log_dir=log_dir,
    )  # fmt: skip


def failures_of(
    workers: Iterable[WorkerRecord], logs: LogsDest, envs: Mapping[int, Mapping[str, str]]
) -> dict[int, ProcessFailure | None]:
    """Return the failure of each worker that has not ended well; None: we stopped it, or it has not failed yet.

    Some may still run, or leave. Return values are not looked at.
    """
    workers = list(workers)
    found = {
        worker.rank: (_leaving if worker.exit is None else _own_failure)(worker, logs, envs)
        for worker in workers
        if not worker.ended_well or (worker.asked is not None and worker.result is None)
    }
    _name_server(found, workers, envs)
    return found


def first_of(workers: Iterable[WorkerRecord], found: Mapping[int, ProcessFailure | None]) -> ProcessFailure | None:
    """Return the failure that came first of those that `failures_of` has ``found``; None: there is none."""
    records = {worker.rank: worker for worker in workers}
    ordered = sorted(found, key=lambda rank: (records[rank].order < 0, records[rank].order))
    failures = {rank: failure for rank in ordered if (failure := found[rank]) is not None}
    _date_back(failures, records)
    return min(failures.values(), key=lambda failure: failure.first_key, default=None)


def verdict(result: RunProcsResult) -> tuple[int, str]:
    """Return the exit code of a program that has run a group, and, if that is not 0, the cause.

    >>> verdict(RunProcsResult(outcomes={0: Outcome(0, 4242, "stopped", -15, 15)}))
    (1, 'rank 0: stopped by us (SIGTERM)')
    """
    root = result.root_cause
    if root is not None:
        rank = root.local_rank if root.rank is None else root.rank
        return 128 - root.exitcode if root.exitcode < 0 else root.exitcode or 1, f"rank {rank}: {root.message}"
    for rank, outcome in result.outcomes.items():
        if outcome.state != "succeeded":
            return 1, f"rank {rank}: {outcome.describe()}"
    return 0, ""


def _early(outcomes: Mapping[int, Outcome], began_ns: int) -> Iterator[tuple[int, float]]:
    """Return the ranks that succeeded long before half of the others had ended, each with the seconds in between.

    This is no failure, but a sign of data that was not divided evenly.
    """
    ends = sorted(outcome.ended_ns for outcome in outcomes.values() if outcome.ended_ns is not None)
    if not ends or not began_ns:
        return
    middle = ends[len(ends) // 2]  # for a rank that ended before it, the median of the others
    for rank, outcome in outcomes.items():
        if outcome.state == "succeeded" and outcome.ended_ns is not None:
            gap = (middle - outcome.ended_ns) / clock.NS
            if gap >= max(EARLY, EARLY_SHARE * (middle - began_ns) / clock.NS):
                yield rank, gap


def _stopped(worker: WorkerRecord, failure: ProcessFailure) -> bool:
    """Whether a worker ended because we stopped it, and had not failed by itself before that."""
    if worker.asked is None or worker.exit is None or worker.leaving:
        return False
    number, asked_ns = worker.asked
    # Evidence from before our signal is of a failure of its own, whatever the signal did after that.
    began = failure.first_key if failure.evidence_ns is not None or failure.dated_ns is not None else None
    if began is not None and began <= asked_ns:
        return False
    # So is an exit that had begun before it, unless it was by that signal, or with code 0.
    began_to_exit = 0 < worker.exiting_ns <= asked_ns
    return not (began_to_exit and worker.exit.signal != number) or worker.exit.ok


def _date_back(failures: dict[int, ProcessFailure], workers: Mapping[int, WorkerRecord]) -> None:
    """Date a failure of another kind before the failures of peers that lost a connection.

    A failing process closes its connections, by its own handlers or in the kernel, before its evidence is recorded or
    its exit is seen, and the kernel may take long to release its memory or GPU. In that time a peer sees the
    connection close, fails and exits.
    """
    cut_off = {rank for rank, failure in failures.items() if is_cut_off(failure)}
    for rank in failures.keys() - cut_off:
        failure, worker = failures[rank], workers[rank]
        began = [moment for moment in (failure.evidence_ns, failure.dated_ns) if moment is not None]
        before = []
        for peer in cut_off:
            moment = failures[peer].first_key
            if began:
                is_first = min(began) <= moment + _LEAVING
            else:
                # The exit of a killed process is seen late: the kernel releases its memory first. If it is seen later
                # than that, it may follow from the failure of the peer.
                seen = max(moment, workers[peer].exit_ns) + KILL_NOTICED_NS
                is_killed = failure.exitcode == -signal.SIGKILL and worker.exit_ns <= seen
                earlier = is_killed or worker.order < workers[peer].order
                is_first = worker.exiting_early or (earlier and worker.exit_ns <= moment + _LEAVING)
            if is_first:
                before.append(moment - 1)
        if before:
            failures[rank] = failure.replace(dated_ns=min([*before, *began]))


def is_cut_off(failure: ProcessFailure) -> bool:
    """Whether a worker has recorded that it lost a connection, or an exception that follows from that."""
    if failure.evidence_ns is None:
        return False
    data = failure.error_file_data
    known = has_lost_connection(data) and failure.message == message_of(data)  # not what it had handled
    return known or reads_as_lost_connection(failure.message)


def lost_connection(worker: WorkerRecord, logs: LogsDest) -> bool:
    """Whether a worker that fails has recorded that it lost a connection: the cause may be recorded later than that."""
    path, code = logs.error_files[worker.rank], 1 if worker.exit is None else worker.exit.returncode
    told = _told(worker)
    return is_cut_off(
        ProcessFailure(worker.rank, worker.pid, code, path, observed_ns=worker.exit_ns or None, told=told)
    )


def _told(worker: WorkerRecord) -> tuple[str, str, int] | None:
    """Return message, traceback and moment of evidence that the worker has sent, because no file took it; or None."""
    sent = worker.sent_evidence
    return None if sent is None else (sent.message, sent.stack, sent.moment)


def _judge_success(
    worker: WorkerRecord, logs: LogsDest, values: dict[int, Any], value_of: Callable[[WorkerRecord], Any]
) -> tuple[str, ProcessFailure | None]:
    try:
        values[worker.rank] = value_of(worker)
    except SignalException:  # a signal to this process, which has to do with another group
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - unpickling runs code of the user's
        if isinstance(worker.result, bytes):
            error.add_note(f"The return value of rank {worker.rank} could not be unpickled in the launcher.")
        _write_evidence(worker, logs, *describe(error))
        return "failed", _failure(worker, logs, "", is_value_lost=True)
    return "succeeded", None


def _own_failure(worker: WorkerRecord, logs: LogsDest, envs: Mapping[int, Mapping[str, str]]) -> ProcessFailure | None:
    """Return the failure of a worker that has not ended well; None: we stopped it."""
    if _died_of_stop(worker, logs.error_files[worker.rank]):
        return None
    failure = _failure(worker, logs, envs[worker.rank].get("RANK", ""))
    return None if _stopped(worker, failure) else failure


def _died_of_stop(worker: WorkerRecord, path: str) -> bool:
    """Whether a worker died of our signal, and has left nothing on a failure before it: what most do that we stop."""
    number = None if worker.exit is None else worker.exit.signal
    if worker.asked is None or number != worker.asked[0] or number in FATAL_SIGNALS or worker.leaving:
        return False
    return worker.sent_evidence is None and not (os.path.exists(path) or os.path.exists(exit_path(path)))


def _leaving(worker: WorkerRecord, logs: LogsDest, envs: Mapping[int, Mapping[str, str]]) -> ProcessFailure | None:
    """Return the failure of a worker that has recorded one, and not exited yet; None: it has not, or was stopped."""
    path = logs.error_files[worker.rank]
    left = read_exit(path, worker.pid) or _raised(path, worker.pid)
    if left is None or (worker.signalled is not None and left[1] > worker.signalled_ns):
        return None
    return ProcessFailure(
        worker.rank, worker.pid, left[0], path, rank=_number(envs[worker.rank].get("RANK", "")), observed_ns=None
    )


def _number(rank: str) -> int | None:
    return int(rank) if rank.isascii() and rank.isdigit() else None


def _failure(worker: WorkerRecord, logs: LogsDest, global_rank: str, *, is_value_lost: bool = False) -> ProcessFailure:
    assert worker.exit is not None
    rank, path, number = worker.rank, logs.error_files[worker.rank], worker.exit.signal
    told = _told(worker)
    if told is not None:
        _write_evidence_sent(path, worker.pid, *told)
    if number in FATAL_SIGNALS and not os.path.exists(path) and (stack := read_fatal_stacks(path)):
        _write_evidence(worker, logs, f"Signal {number} ({signal_name(number)}) received by PID {worker.pid}", stack)
    code, detail = worker.exit.returncode, timer_detail(path) or worker.hang or _detail(worker)
    raised = _raised(path, worker.pid)
    left = read_exit(path, worker.pid) or raised
    if worker.leaving and left is None:  # no file took its evidence
        left = 1, worker.signalled_ns or worker.exit_ns
    if left is not None and worker.asked is not None and number == worker.asked[0] and left[1] <= worker.asked[1]:
        code, detail = left[0], f"{signal_name(number or 0)}, sent by us, {WHILE_LEAVING}"
        if worker.leaving and number == signal.SIGKILL:
            where = f", in {worker.where}" if worker.where else ""
            seconds = (worker.asked[1] - left[1]) / clock.NS
            since = f"{seconds:.{int(seconds < 1)}f} s after its {'exception' if raised else 'sys.exit'}"
            detail = f"{NOT_EXITED} {since}{where}: SIGKILL, sent by us"
    if code == 0 and worker.struck:  # it survived the signal of an expired timer
        code = 1
        seen = timer_detail(path) or worker.hang.removeprefix(worker.hung).lstrip()
        struck = f"it was sent {signal_name(worker.struck)} for that, and exited with code 0"
        detail = f"{seen}\n{struck}".lstrip()
        told = told or (worker.hung or "Hang: a timer of it had expired", "", worker.exit_ns)
    elif code == 0 and is_value_lost:
        code, detail = 1, "it exited with code 0"
    elif code == 0:  # after its failure, or by its own handler for our signal
        code = 1 if left is None else left[0]
        detail = "it had failed " + ("before it exited with code 0" if worker.asked is None else _LEFT_WELL)
    return ProcessFailure(
        rank,
        worker.pid,
        code,
        path,
        rank=_number(global_rank),
        observed_ns=worker.exit_ns,
        dated_ns=_fatal_at(worker, path),
        signalled_ns=None if worker.signalled is None else worker.signalled_ns,
        told=told,
        detail=detail,
        stderr_tail=_tail(logs.stderrs[rank], rotates=bool(logs.max_size)),
        stdout_file=logs.stdouts[rank].removeprefix(os.devnull),
        stderr_file=logs.stderrs[rank].removeprefix(os.devnull),
    )


def _raised(path: str, pid: int) -> tuple[int, int] | None:
    """Return exit code 1 and the moment of the record, if an exception has left the process's main function."""
    data = read_error_file(path)[0]
    moment = recorded_at(data)
    if written_by(data) != pid or not has_left(data) or moment is None:
        return None
    # At a KeyboardInterrupt the interpreter ends itself by SIGINT.
    return None if (message_of(data) or "").startswith("KeyboardInterrupt") else (1, moment)


def _fatal_at(worker: WorkerRecord, path: str) -> int | None:
    """Return when a worker got the fatal signal that it died of, by the time of the file with its stacks; or None."""
    moment = fatal_at(path) if worker.exit is not None and worker.exit.signal in FATAL_SIGNALS else None
    # If the wall clock was set meanwhile, the moment may be impossible.
    return moment if moment is not None and worker.exit_ns - _LONGEST_RELEASE <= moment <= worker.exit_ns else None


def _detail(worker: WorkerRecord) -> str:
    if worker.exit is not None and worker.exit.signal == signal.SIGXFSZ:
        return "a file that it wrote has reached the limit on the size of a file: see ulimit -f"
    killed = worker.exit is not None and worker.exit.signal == signal.SIGKILL
    return (worker.oom or "SIGKILL, not sent by us") if killed else ""


def _name_disks(failures: dict[int, ProcessFailure], workers: Mapping[int, WorkerRecord], logs: LogsDest) -> None:
    """Add to failures that the disk of their logs takes no more: it may be the cause, and lines are missing there."""
    from resource import RLIMIT_FSIZE, getrlimit

    found: dict[str, int] = {}  # with what each folder refuses a write now
    limit = getrlimit(RLIMIT_FSIZE)[0]
    for rank, failure in failures.items():
        path = logs.error_files[rank]
        paths = [log for log in (logs.stdouts[rank], logs.stderrs[rank]) if log not in ("", os.devnull)]
        folder = os.path.dirname(logs.timeline or path)
        if folder not in found:
            found[folder] = disk.shortage(folder)
        sent = workers[rank].sent_evidence
        known = sent.number if sent is not None and disk.is_full(sent.number) else 0
        if any(_size(log) >= limit >= 0 for log in paths):
            known = errno.EFBIG
        number = known or found[folder]
        if number and (paths or known):
            lines = "lines are missing from" if known else "lines may be missing from"
            text = disk.explain(number, folder) + f"; {lines} its logs" * bool(paths)
            failures[rank] = failure.replace(detail="\n".join(filter(None, (failure.detail, text))))


def _name_server(
    found: dict[int, ProcessFailure | None], workers: Iterable[WorkerRecord], envs: Mapping[int, Mapping[str, str]]
) -> None:
    """Add to connections that were lost or refused that rank 0 had ended well before, if a store of torch's was in it.

    Under torchrun, the store is the launcher's, and outlives rank 0.
    """
    import re

    server = next((worker for worker in workers if envs[worker.rank].get("RANK") == "0" and worker.ended_well), None)
    if server is None or server.rank in found or "MASTER_PORT" not in envs[server.rank]:
        return
    if envs[server.rank].get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    for rank, failure in found.items():
        if failure is None or failure.evidence_ns is None or server.exit_ns > failure.evidence_ns + _LEAVING:
            continue
        if is_cut_off(failure) or re.search(_SERVER_GONE, failure.message, re.IGNORECASE):
            before = (failure.evidence_ns - server.exit_ns) / clock.NS
            when = f"had ended {format_duration(before)} before" if before >= 0 else "was leaving"
            text = f"rank 0 {when}, and with it what it served (torch's store, at MASTER_PORT)"
            found[rank] = failure.replace(detail="\n".join(filter(None, (failure.detail, text))))


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


def _write_evidence(worker: WorkerRecord, logs: LogsDest, message: str, stack: str) -> None:
    path = logs.error_files[worker.rank]
    try:
        write_error_file(path, message, stack, monotonic_ns=worker.exit_ns, pid=worker.pid, observer="launcher")
    except OSError:  # the log folder is gone, or its disk full: the failure still has its exit
        return


def _write_evidence_sent(path: str, pid: int, message: str, stack: str, moment: int) -> None:
    """Write the evidence that a worker could not write, because of a limit, perhaps, that we do not have."""
    data = read_error_file(path)[0]
    if written_by(data) == pid and (recorded_at(data) or 0) >= moment:
        return
    try:
        write_record(path, message, stack, data, began=moment, recorded=moment, pid=pid, left=True)
    except OSError:  # the disk is full for us as well
        return


def _tail(path: str, *, rotates: bool) -> str:
    """Return the last lines of a file as text; "" if there is none."""
    if not path:
        return ""
    from phalanx._logs.follower import last_text

    return last_text(path, rotates=rotates)
