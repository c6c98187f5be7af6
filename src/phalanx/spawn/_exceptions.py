"""Turns the failures of a group into an exception: the first failure is raised, the others are its notes.

Owns the exceptions and their texts. Knows nothing of how a group is run.
"""

from __future__ import annotations

import copyreg

from phalanx._base.control_chars import plain, sanitise
from phalanx._base.one_line import SHORT, one_line
from phalanx._outcomes.outcome import signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any

    from phalanx._outcomes.failure import ProcessFailure
    from phalanx.multiprocessing import RunProcsResult


class ProcessException(Exception):  # noqa: N818 - torch's name
    """A process of a group has failed. It can be pickled and copied, notes included.

    The notes tell what else is known, and which other processes failed by themselves.

    Attributes:
        msg: The message.
        error_index: The process's index, 0 and up.
        error_pid: Its process id.
    """

    __module__ = "phalanx.spawn"

    def __init__(self, msg: str, error_index: int, error_pid: int) -> None:
        super().__init__(msg)
        self.msg = msg
        self.error_index = error_index
        self.error_pid = error_pid

    def __repr__(self) -> str:
        last = one_line(plain(self.msg.rstrip()).rpartition("\n")[2], SHORT)
        return f"<{type(self).__name__} of process {self.error_index}, pid {self.error_pid}: {last}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return copyreg.__newobj__, (type(self), self.msg), self.__dict__  # type: ignore[attr-defined]  # typeshed lacks it


class ProcessRaisedException(ProcessException):
    """The function raised: the message ends with the process's traceback."""

    __module__ = "phalanx.spawn"


class ProcessExitedException(ProcessException):
    """The process was ended by a signal, or left with an exit code other than 0.

    Attributes:
        exit_code: As `subprocess` gives it, negative for a signal.
        signal_name: Like ``"SIGKILL"``; None for an exit code.
    """

    __module__ = "phalanx.spawn"

    def __init__(
        self, msg: str, error_index: int, error_pid: int, exit_code: int, signal_name: str | None = None
    ) -> None:
        super().__init__(msg, error_index, error_pid)
        self.exit_code = exit_code
        self.signal_name = signal_name


def failed(result: RunProcsResult) -> ProcessException:
    """Make the exception for the first failure, with the others as notes, one note for equal ones."""
    first, *others = sorted(result.failures.values(), key=lambda failure: failure.first_key)
    stopped = {rank for rank, outcome in result.outcomes.items() if outcome.exitcode == -(outcome.signal_sent or 0)}
    error = _exception(first, stopped)
    if not others:
        return error
    from phalanx._base.rank_ranges import format_ranks
    from phalanx._outcomes.report import DIFFERENT, first_line, signature

    same = signature(first)
    by_signature: dict[object, list[ProcessFailure]] = {same: []}
    for failure in others:
        by_signature.setdefault(signature(failure), []).append(failure)
    for number, (kind, failures) in enumerate(by_signature.items()):
        if failures:
            indices = [failure.local_rank for failure in failures]
            what = _what(failures[0], stopped)
            if kind == same:
                what = "terminated with the same error" if first.traceback else _how(first.exitcode)
            elif number > DIFFERENT:
                what = f"{_how(failures[0].exitcode)}: {first_line(failures[0])}"
            error.add_note(f"-- Process{'es' if len(indices) > 1 else ''} {format_ranks(indices)} {what}")
    return error


def _exception(failure: ProcessFailure, stopped: Collection[int]) -> ProcessException:
    index, pid = failure.local_rank, failure.pid
    if _has_raised(failure, stopped):
        return ProcessRaisedException(f"\n\n-- Process {index} {_what(failure, stopped)}", index, pid)
    error = exited(index, pid, failure.exitcode)
    for more in (failure.detail, failure.traceback, failure.stderr_tail):
        if more:
            error.add_note(sanitise(more))
    return error


def exited(index: int, pid: int, code: int) -> ProcessExitedException:
    """Make the exception for a process that ended with an exit code other than 0, or by a signal."""
    name = _signal(code) if code < 0 else None
    return ProcessExitedException(f"process {index} {_how(code)}", index, pid, code, name)


def _has_raised(failure: ProcessFailure, stopped: Collection[int]) -> bool:
    """Whether the traceback is the cause. A process stopped by us while it was tearing down had raised before.

    One that left by ``sys.exit`` has not, though there may be an exception that it was handling.
    """
    raised = failure.traceback and not failure.message.startswith("exited with code ")
    return bool(raised) and (failure.exitcode >= 0 or failure.local_rank in stopped)


def _what(failure: ProcessFailure, stopped: Collection[int]) -> str:
    if _has_raised(failure, stopped):
        return f"terminated with the following error:\n{sanitise(failure.traceback)}"
    more = sanitise(failure.detail or failure.traceback)
    return _how(failure.exitcode) + (f":\n{more}" if more else "")


def _how(code: int) -> str:
    return f"terminated with signal {_signal(code)}" if code < 0 else f"terminated with exit code {code}"


def _signal(code: int) -> str:
    name = signal_name(-code)
    return f"<Unknown signal {-code}>" if name.startswith("<") else name
