"""What became of a group that has ended: which rank failed by itself, which was stopped by us, what each left behind.

Owns the meaning of exits, evidence and return values taken together. Starts, stops and waits for nothing.
"""

from __future__ import annotations

import os
import signal

from phalanx._core import evidence
from phalanx._core.value import Value
from phalanx.errors import Outcome, ProcessFailure, signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

    from phalanx._core.supervisor import Worker
    from phalanx.multiprocessing._logs import LogsDest

_TAIL_LINES = 20
_TAIL_BYTES = 8192
_STACK_SIGNALS = (signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL)


class RunProcsResult(Value):
    """What became of a group that has ended.

    Attributes:
        return_values: What each rank returned that succeeded (None for a binary).
        failures: Each rank that failed by itself, never one that we stopped.
        stdouts, stderrs: The files of each rank's streams (``""``: the launcher's own stream).
        root_cause: The failure that came first: by the moment at which its evidence was recorded in the worker, else
            by its exit, in the order in which the kernel reported it; None when there is none.
        outcomes: For every rank: succeeded, failed, stopped by us, or abandoned.
    """

    __slots__ = (  # noqa: RUF023 - the order is that of the arguments
        "return_values", "failures", "stdouts", "stderrs", "root_cause", "outcomes",
    )  # fmt: skip

    return_values: dict[int, Any]
    failures: dict[int, ProcessFailure]
    stdouts: dict[int, str]
    stderrs: dict[int, str]
    root_cause: ProcessFailure | None
    outcomes: dict[int, Outcome]

    def __init__(
        self,
        return_values: dict[int, Any] | None = None,
        failures: dict[int, ProcessFailure] | None = None,
        stdouts: dict[int, str] | None = None,
        stderrs: dict[int, str] | None = None,
        outcomes: dict[int, Outcome] | None = None,
    ) -> None:
        failures = failures or {}
        self._store(
            return_values=return_values or {},
            failures=failures,
            stdouts=stdouts or {},
            stderrs=stderrs or {},
            root_cause=min(failures.values(), key=lambda failure: failure.first_key, default=None),
            outcomes=outcomes or {},
        )

    def is_failed(self) -> bool:
        """Whether any rank failed by itself."""
        return bool(self.failures)


def collect(
    workers: Iterable[Worker],
    logs: LogsDest,
    envs: Mapping[int, Mapping[str, str]],
    value_of: Callable[[Worker], Any],
) -> RunProcsResult:
    """Judge every worker. ``value_of`` gives what a worker that succeeded returned, and may raise anything."""
    values: dict[int, Any] = {}
    failures: dict[int, ProcessFailure] = {}
    outcomes: dict[int, Outcome] = {}
    for worker in sorted(workers, key=lambda worker: (worker.order < 0, worker.order)):
        state, failure = "abandoned", None
        if worker.exit is not None and worker.exit.ok:
            state, failure = _judge_success(worker, logs, values, value_of)
        elif worker.exit is not None:
            failure = _failure(worker, logs, envs[worker.rank].get("RANK", ""))
            state = "failed"
            # Evidence from before our signal is of a failure of its own, whatever the signal did then.
            sent = worker.signalled_ns if worker.signalled is not None else None
            if sent is not None and (failure.evidence_ns is None or failure.evidence_ns > sent):
                state, failure = "stopped", None
        code = None if worker.exit is None else worker.exit.returncode
        outcomes[worker.rank] = Outcome(worker.rank, worker.pid, state, code, worker.signalled)
        if failure is not None:
            failures[worker.rank] = failure
    return RunProcsResult(
        dict(sorted(values.items())), failures, logs.stdouts, logs.stderrs, dict(sorted(outcomes.items()))
    )


def _judge_success(
    worker: Worker, logs: LogsDest, values: dict[int, Any], value_of: Callable[[Worker], Any]
) -> tuple[str, ProcessFailure | None]:
    if worker.signalled is not None and worker.result is None:
        return "stopped", None
    try:
        values[worker.rank] = value_of(worker)
    except Exception as error:  # noqa: BLE001 - unpickling runs code of the user's
        error.add_note(f"The return value of rank {worker.rank} could not be unpickled in the launcher.")
        _write_evidence(worker, logs, *evidence.describe(error))
        return "failed", _failure(worker, logs, "")
    return "succeeded", None


def _failure(worker: Worker, logs: LogsDest, global_rank: str) -> ProcessFailure:
    assert worker.exit is not None
    rank, path, number = worker.rank, logs.error_files[worker.rank], worker.exit.signal
    if number in _STACK_SIGNALS and not os.path.exists(path) and (stack := evidence.read_fatal(path)):
        _write_evidence(worker, logs, f"Signal {number} ({signal_name(number)}) received by PID {worker.pid}", stack)
    return ProcessFailure(
        rank,
        worker.pid,
        worker.exit.returncode,
        path,
        rank=int(global_rank) if global_rank.isascii() and global_rank.isdigit() else None,
        observed_ns=worker.exit_ns,
        detail=evidence.seen_by_timer(path) or worker.hang or _detail(worker),
        stderr_tail=_tail(logs.stderrs[rank]),
        stdout_file=logs.stdouts[rank],
        stderr_file=logs.stderrs[rank],
    )


def _detail(worker: Worker) -> str:
    killed = worker.exit is not None and worker.exit.signal == signal.SIGKILL
    return (worker.oom or "SIGKILL, not sent by us") if killed else ""


def _write_evidence(worker: Worker, logs: LogsDest, message: str, stack: str) -> None:
    path = logs.error_files[worker.rank]
    try:
        evidence.write_error_file(
            path, message, stack, monotonic_ns=worker.exit_ns, pid=worker.pid, observer="launcher"
        )
    except OSError:  # the log folder is gone, or its disk full: the failure still has its exit
        return


def _tail(path: str) -> str:
    """Read the last lines of a file, as text; "" when there is none."""
    if not path:
        return ""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            data = file.read(_TAIL_BYTES)
    except OSError:
        return ""
    return "\n".join(data.decode("utf-8", "backslashreplace").rstrip().splitlines()[-_TAIL_LINES:])
