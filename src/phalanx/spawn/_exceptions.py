"""Turns the failures of a group into an exception: the first failure is raised, the others are lines of it.

Owns the exceptions and their texts. Knows nothing of how a group is run.
"""

from __future__ import annotations

import copyreg

from phalanx._base.text import SHORT_LINE, one_line
from phalanx._base.tty import plain, sanitise
from phalanx._outcomes.failure import signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from typing import Any

    from phalanx._outcomes.failure import ProcessFailure
    from phalanx.multiprocessing import RunProcsResult


_HANDLED = " while handling "  # see `_evidence.recording.note_exit`


class ProcessException(Exception):  # noqa: N818 - torch's name
    """A process of a group has failed. It can be pickled and copied, notes included.

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
        last = one_line(plain(self.msg.rstrip()).rpartition("\n")[2], SHORT_LINE)
        return f"<{type(self).__name__} of process {self.error_index}, pid {self.error_pid}: {last}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return copyreg.__newobj__, (type(self), self.msg), self.__dict__  # type: ignore[attr-defined]  # typeshed lacks it


class ProcessRaisedException(ProcessException):
    """The function raised: the message ends with the process's traceback. Before, other failures have a line each."""

    __module__ = "phalanx.spawn"


class ProcessExitedException(ProcessException):
    """The process was ended by a signal, or left with an exit code other than 0.

    Its notes are the other failures, a line each, and what else is known of this one.

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
    """Make the exception for the first failure: its last line is the cause, with a line before for each other failure.

    Equal ones share a line. An exception's text has these lines; those of an exit or a signal are notes, as is what
    else is known of it, because its text is the cause alone.
    """
    first, *others = sorted(result.failures.values(), key=lambda failure: failure.first_key)
    stopped = {rank for rank, outcome in result.outcomes.items() if outcome.exitcode == -(outcome.signal_sent or 0)}
    lines = _lines(first, others, stopped) if others else []
    index, pid = first.local_rank, first.pid
    if _has_raised(first, stopped):
        text = f"-- Process {index} terminated with the following error:\n{sanitise(first.traceback)}"
        return ProcessRaisedException("\n\n" + "\n".join([*lines, text]), index, pid)
    error = exited(index, pid, first.exitcode)
    notes = [*lines, *(sanitise(more) for more in (first.stderr_tail, first.traceback) if more)]
    if notes or first.detail:
        notes.append(sanitise(first.detail) or error.msg)
    for note in notes:
        error.add_note(note)
    return error


def _lines(first: ProcessFailure, others: Iterable[ProcessFailure], stopped: Collection[int]) -> list[str]:
    from phalanx._base.text import format_ranks
    from phalanx._outcomes.report import signature

    alike: dict[object, list[ProcessFailure]] = {}
    for failure in others:
        alike.setdefault(signature(failure), []).append(failure)
    lines, same = [], signature(first)
    for kind, failures in alike.items():
        one, indices = failures[0], [failure.local_rank for failure in failures]
        cause = one_line(plain(one.message))
        if _has_raised(one, stopped):
            what = "terminated with the same error" if kind == same else f"raised {cause}"
        else:
            exit_of = f"exited with code {one.exitcode}"
            what = _how(one.exitcode) + (cause.removeprefix(exit_of) if cause.startswith(exit_of + _HANDLED) else "")
        lines.append(sanitise(f"-- Process{'es' if len(indices) > 1 else ''} {format_ranks(indices)} {what}"))
    return lines


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


def _how(code: int) -> str:
    return f"terminated with signal {_signal(code)}" if code < 0 else f"terminated with exit code {code}"


def _signal(code: int) -> str:
    name = signal_name(-code)
    return f"<Unknown signal {-code}>" if name.startswith("<") else name
