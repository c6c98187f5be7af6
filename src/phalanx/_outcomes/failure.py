"""What became of a worker: `Outcome` for every worker, `ProcessFailure` for one that failed.

Owns the meaning of exit codes, signals and error files as a failure tells them. Refuses to know how workers are
started, watched or stopped, and how a failure is shown.
"""

from __future__ import annotations

import os
import signal
import time

from phalanx._base.clock import format_duration
from phalanx._base.frozen import Value
from phalanx._evidence import evidence
from phalanx._evidence.standing import standing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

NOT_AVAILABLE = "<N/A>"
"""Stands for an absent error file, and for the signal of an exit that was not by one."""

NONE = "<NONE>"
"""Stands for the message in the `error_file_data` of a failure without an error file."""

WHILE_LEAVING = "came while it was leaving"
"""How a detail ends that says which signal of ours ended a process that had failed by then."""

STATES = ("succeeded", "failed", "stopped", "abandoned")
"""The states of an `Outcome`."""

LATEST = 1 << 63
"""The `first_key` of a failure of which no moment is known."""

# The signals at which the interpreter's fault handler writes stacks.
_FATAL = frozenset({signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL})

_EXIT_NOTICED_NS = 5_000_000
_KILL_NOTICED_NS = 100_000_000

_HINTS = {
    120: "Python could not write out its last output when it left",
    126: "found, but it could not be executed",
    127: "command not found",
}

_SHELL = 128  # a shell's exit code for a signal is this much more

_YEAR_10000 = 253402300800  # the first moment that ISO 8601 needs a fifth digit for


def signal_name(number: int) -> str:
    """The name of a signal.

    Args:
        number: The signal, 1 and up.

    Returns:
        Its name, real-time signals counted from SIGRTMIN; ``"<N/A>"`` when there is no such signal.

    >>> signal_name(9), signal_name(0)
    ('SIGKILL', '<N/A>')
    >>> signal_name(signal.SIGRTMIN + 3)
    'SIGRTMIN+3'
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        if signal.SIGRTMIN < number < signal.SIGRTMAX:
            return f"SIGRTMIN+{number - signal.SIGRTMIN}"
        return NOT_AVAILABLE


def describe_exit(exitcode: int) -> str:
    """An exit in words.

    Args:
        exitcode: As `subprocess` gives it: negative for a signal.

    >>> describe_exit(3)
    'exited with code 3'
    >>> describe_exit(-15)
    'died of signal 15 (SIGTERM)'
    >>> describe_exit(137)
    'exited with code 137 (a shell says so of a command that died of SIGKILL)'
    """
    if exitcode < 0:
        return f"died of signal {-exitcode} ({signal_name(-exitcode)})"
    hint = _HINTS.get(exitcode, "")
    if exitcode > _SHELL and (name := signal_name(exitcode - _SHELL)) != NOT_AVAILABLE:
        hint = f"a shell says so of a command that died of {name}"
    return f"exited with code {exitcode}" + (f" ({hint})" if hint else "")


class Outcome(Value):
    """What became of one worker, failed or not.

    Args:
        local_rank: The worker's rank in its group, 0 and up.
        pid: Its process.
        state: ``"succeeded"``; ``"failed"`` by itself; ``"stopped"`` by us, because of another's failure or on request;
            or ``"abandoned"``, when it outlived even SIGKILL.
        exitcode: As `subprocess` gives it, negative for a signal; None when no exit was seen.
        signal_sent: The last signal that we sent it, or None.
        ended_ns: When it ended, in nanoseconds on CLOCK_MONOTONIC; None when no exit was seen.
        early: Seconds for which the others went on after it had succeeded, where that is long; else 0.

    Raises:
        ValueError: There is no such state.

    >>> Outcome(0, 4242, "stopped", -15, 15).describe()
    'stopped by us (SIGTERM)'
    """

    __slots__ = (  # noqa: RUF023 (the order is that of the arguments)
        "local_rank", "pid", "state", "exitcode", "signal_sent", "ended_ns", "early",
    )  # fmt: skip

    local_rank: int
    pid: int
    state: str
    exitcode: int | None
    signal_sent: int | None
    ended_ns: int | None
    early: float

    def __init__(
        self,
        local_rank: int,
        pid: int,
        state: str,
        exitcode: int | None = None,
        signal_sent: int | None = None,
        ended_ns: int | None = None,
        early: float = 0.0,
    ) -> None:
        if state not in STATES:
            raise ValueError(f"state must be one of {', '.join(STATES)}; got {state!r}")
        self._store(
            local_rank=local_rank, pid=pid, state=state, exitcode=exitcode, signal_sent=signal_sent,
            ended_ns=ended_ns, early=early,
        )  # fmt: skip

    def describe(self) -> str:
        """The outcome as one line, without the rank. Equal lines may be grouped.

        >>> Outcome(0, 4242, "stopped", 0, 15).describe()
        'stopped by us (SIGTERM), exited with code 0'
        >>> Outcome(0, 4242, "failed", 3).describe()
        'failed: exited with code 3'
        >>> Outcome(0, 4242, "abandoned", None, 9).describe()
        'abandoned: pid 4242 still there after SIGKILL'
        >>> Outcome(0, 4242, "succeeded", 0, early=7500.0).describe()
        'succeeded, 2h05m before the rest'
        """
        sent = "" if self.signal_sent is None else signal_name(self.signal_sent)
        ending = "" if self.exitcode is None else describe_exit(self.exitcode)
        if self.state == "succeeded":
            return f"succeeded, {format_duration(self.early)} before the rest" if self.early else "succeeded"
        if self.state == "abandoned":
            return f"abandoned: pid {self.pid} still there" + (f" after {sent}" if sent else "")
        if self.state == "failed":
            return f"failed: {ending}" if ending else "failed"
        by = f"stopped by us ({sent})" if sent else "stopped by us"
        expected = self.exitcode is None or (self.signal_sent is not None and self.exitcode == -self.signal_sent)
        return by if expected else f"{by}, {ending}"


class ProcessFailure(Value):
    """A worker that failed by itself: a frozen value, derived from its exit and from the error file it left.

    Reading the error file never raises and never blocks: if it is missing or damaged, less is known. Of each text, the
    beginning and the end are kept, 32 Ki characters together, with a note how much was cut. The file has all of it.

    Args:
        local_rank: The worker's rank in its group, 0 and up.
        pid: Its process.
        exitcode: As `subprocess` gives it: negative for a signal.
        error_file: The path that the worker was told to leave its evidence in, or ``"<N/A>"``. The attribute is
            ``"<N/A>"`` when there is no such file.
        rank: Its rank in the whole job; None when that is the local rank.
        host: Where it ran. Default: this machine's name.
        observed_ns: When its exit was seen, on CLOCK_MONOTONIC, in nanoseconds.
        detail: What else is known, such as "killed by the kernel's OOM killer".
        stderr_tail: The last lines that it wrote to a captured stderr.
        stdout_file: Where its stdout is, or ``""``.
        stderr_file: Where its stderr is, or ``""``.
        dated_ns: When it began to end, as far as that is known other than by evidence of its own, on CLOCK_MONOTONIC,
            in nanoseconds.
        told: What the process has reported of its failure without an error file: the message, the traceback, and the
            moment on CLOCK_MONOTONIC, in nanoseconds. A later error file of its own is used instead.
        signalled_ns: When we had first sent it a signal, on CLOCK_MONOTONIC, in nanoseconds; None: not at all.

    Attributes:
        error_file_data: The error file as parsed, ``{"message": "<NONE>"}`` without one; long texts cut, as above.
        message: The error file's message, or the one ``told``; without both, ``"Signal N (NAME) received by PID n"``
            or a line about the exit code. The latter also if the process has recorded an exception and gone on;
            ``detail`` has that exception.
        timestamp: When it happened, else the time of construction: Unix time, whole seconds.
        traceback: The error file's traceback, or the one ``told``, or the stacks that a fatal signal left; ``""`` when
            there is none.
        unreadable: Why the error file could not be used, ``""`` otherwise.
        evidence_ns: When this very process recorded its evidence, or left by ``sys.exit``, on CLOCK_MONOTONIC, in
            nanoseconds, or None. Of a file that is not ours, and does not say whose it is: when it was written, if
            that was just before the end.

    >>> failure = ProcessFailure(1, 4242, -9, "<N/A>")
    >>> failure.message, failure.signal_name(), failure.error_file_data
    ('Signal 9 (SIGKILL) received by PID 4242', 'SIGKILL', {'message': '<NONE>'})
    """

    __slots__ = (  # noqa: RUF023 (the order is that of the arguments)
        "local_rank",
        "pid",
        "exitcode",
        "error_file",
        "rank",
        "host",
        "observed_ns",
        "detail",
        "stderr_tail",
        "stdout_file",
        "stderr_file",
        "error_file_data",
        "message",
        "timestamp",
        "traceback",
        "unreadable",
        "evidence_ns",
        "dated_ns",
    )

    local_rank: int
    pid: int
    exitcode: int
    error_file: str
    rank: int | None
    host: str
    observed_ns: int | None
    detail: str
    stderr_tail: str
    stdout_file: str
    stderr_file: str
    error_file_data: dict[str, Any]
    message: str
    timestamp: int
    traceback: str
    unreadable: str
    evidence_ns: int | None
    dated_ns: int | None

    def __init__(
        self,
        local_rank: int,
        pid: int,
        exitcode: int,
        error_file: str | os.PathLike[str],
        *,
        rank: int | None = None,
        host: str = "",
        observed_ns: int | None = None,
        detail: str = "",
        stderr_tail: str = "",
        stdout_file: str = "",
        stderr_file: str = "",
        dated_ns: int | None = None,
        told: tuple[str, str, int] | None = None,
        signalled_ns: int | None = None,
    ) -> None:
        path = os.fspath(error_file)
        named = path not in ("", NOT_AVAILABLE)
        data, problem = evidence.read(path) if named else (None, "missing")
        if data is not None:
            data = evidence.bounded(data, path)
        message, timestamp, traceback = _contents(data)
        left = evidence.read_exit(path, pid) if named else None
        left_ns = left[1] if left else None
        stands, written, said = standing(
            data, path, pid=pid, exitcode=exitcode, observed_ns=observed_ns, left_ns=left_ns, signalled_ns=signalled_ns
        )
        if told is not None and (evidence.written_by(data) != pid or _is_later(told[2], data)):
            message, traceback, written = evidence.kept(_text(told[0])), evidence.kept(_text(told[1])), told[2]
            timestamp = _wall_clock(written)
        else:
            detail = "\n".join(filter(None, (detail, said)))
            if not stands:
                message, timestamp = _exit_in_words(exitcode, pid), _wall_clock_if(left_ns or observed_ns)
                traceback = traceback if written is not None else ""
        if not traceback and -exitcode in _FATAL and named:
            traceback = evidence.kept(evidence.read_fatal(path), evidence.fatal_path(path))
        moments = [moment for moment in (written, left_ns) if moment is not None]
        self._store(
            local_rank=local_rank,
            pid=pid,
            exitcode=exitcode,
            error_file=NOT_AVAILABLE if problem == "missing" else path,
            rank=rank,
            host=host or os.uname().nodename,
            observed_ns=observed_ns,
            detail=evidence.kept(detail),
            stderr_tail=evidence.kept(stderr_tail, stderr_file),
            stdout_file=stdout_file,
            stderr_file=stderr_file,
            error_file_data={"message": NONE} if data is None else data,
            message=message or _exit_message(exitcode, pid),
            timestamp=int(time.time()) if timestamp is None else timestamp,
            traceback=traceback,
            unreadable=problem if problem != "missing" else "",
            evidence_ns=min(moments, default=None),
            dated_ns=dated_ns,
        )

    @property
    def first_key(self) -> int:
        """The moment by which failures are ordered, in nanoseconds on CLOCK_MONOTONIC.

        It is the moment of the evidence; without evidence, that of the exit; without either, `LATEST`.

        The kernel closes a dying process's connections before it reports the exit, so that a peer may have recorded
        its broken pipe by then. An exit without evidence is therefore dated back: by 5 ms, in which nobody has failed,
        died and been noticed because of another's exception; and by 100 ms if it was by a SIGKILL, which can be the
        cause of a peer's exception, but not its consequence.
        """
        moments = [moment for moment in (self.dated_ns, self.evidence_ns) if moment is not None]
        if moments:
            return min(moments if self.observed_ns is None else [*moments, self.observed_ns])
        if self.observed_ns is None:
            return LATEST
        return self.observed_ns - (_KILL_NOTICED_NS if self.exitcode == -signal.SIGKILL else _EXIT_NOTICED_NS)

    def signal_name(self) -> str:
        """The signal that ended the worker, or ``"<N/A>"``."""
        return signal_name(-self.exitcode) if self.exitcode < 0 else NOT_AVAILABLE

    def timestamp_isoformat(self) -> str:
        """`timestamp` in local time, as ``YYYY-MM-DD_HH:MM:SS``."""
        return time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(self.timestamp))

    def __hash__(self) -> int:
        return hash((self.local_rank, self.pid, self.exitcode, self.error_file, self.timestamp))

    __eq__ = Value.__eq__


def _exit_message(exitcode: int, pid: int) -> str:
    return _exit_in_words(exitcode, pid) + ("" if exitcode < 0 else "; no error was recorded")


def _exit_in_words(exitcode: int, pid: int) -> str:
    if exitcode < 0:
        return f"Signal {-exitcode} ({signal_name(-exitcode)}) received by PID {pid}"
    return describe_exit(exitcode)


def _is_later(moment: int, data: dict[str, Any] | None) -> bool:
    recorded = evidence.recorded_at(data)
    return not evidence.is_observed(data) and recorded is not None and moment > recorded


def _contents(data: dict[str, Any] | None) -> tuple[str, int | None, str]:
    """Message, timestamp and traceback of error file data, each only if it has the right shape."""
    message = (data or {}).get("message")
    info = message.get("extraInfo") if isinstance(message, dict) else data  # a flat file has them beside its message
    info = info if isinstance(info, dict) else {}
    return _text(evidence.message_of(data)), _timestamp(info.get("timestamp")), _text(info.get("py_callstack"))


def _text(value: object) -> str:
    """`value` if it is text. JSON can carry lone surrogates, which no terminal accepts: they become escapes."""
    return value.encode("utf-8", "backslashreplace").decode("utf-8") if isinstance(value, str) else ""


def _wall_clock(moment: int) -> int:
    """A moment of CLOCK_MONOTONIC, in nanoseconds, as Unix time."""
    return int(time.time() - (time.monotonic_ns() - moment) / 1e9)


def _wall_clock_if(moment: int | None) -> int | None:
    return None if moment is None else _wall_clock(moment)


def _timestamp(value: object) -> int | None:
    try:
        seconds = int(float(value)) if isinstance(value, (str, int, float)) else -1
    except (ValueError, OverflowError):
        return None
    return seconds if 0 <= seconds < _YEAR_10000 else None


def first_failure(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Return the failure that came first, with its rank: the one with the least `ProcessFailure.first_key`.

    Of failures with equal keys, it is the one with the least ``timestamp``; if these are equal too, the one that stands
    first in the mapping.

    Args:
        failures: The failures, by rank.

    Returns:
        The rank, and its failure.

    Raises:
        ValueError: ``failures`` is empty.
    """
    return min(failures.items(), key=lambda item: (item[1].first_key, item[1].timestamp))
