"""What became of one worker: its `Outcome`, and its failure, if it failed by itself; exit codes and signals in words.

A `ProcessFailure` is made from the worker's exit and its error file. It knows nothing of how workers are started and
stopped, nor of how a failure is shown (`report`).
"""

from __future__ import annotations

import os
import signal
import time

from phalanx._base import clock
from phalanx._base.clock import format_duration
from phalanx._base.frozen import Value
from phalanx._base.text import SHORT_LINE, one_line
from phalanx._base.tty import plain
from phalanx._evidence.describe import truncate, truncate_data
from phalanx._evidence.error_file import (
    SOON_NS,
    file_at,
    handled_at,
    has_left,
    is_observed,
    message_of,
    read_error_file,
    recorded_at,
    wall_clock,
    written_at,
    written_by,
)
from phalanx._evidence.recording import read_exit
from phalanx._evidence.stack_signals import FATAL_SIGNALS, fatal_path, read_fatal_stacks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

WHILE_LEAVING = "came while it was leaving"
NOT_EXITED = "had not exited"
"""The end of a detail that names the signal of ours by which a process died that had failed before."""

_NO_DATA = {"message": "<NONE>"}  # the `error_file_data` of a failure without an error file

_NO_MOMENT = 1 << 63  # the `first_key` of a failure of which no moment is known

_EXIT_NOTICED_NS = 5_000_000  # see `ProcessFailure.first_key`
KILL_NOTICED_NS = 100_000_000
"""By so much later than its connections close, the exit of a killed process may be noticed."""

_YEAR_10000 = 253402300800  # the first moment that ISO 8601 needs a fifth digit for


class ProcessFailure(Value):
    """A worker that failed by itself: a frozen value, made from its exit and its error file.

    Reading the error file never raises and never blocks; if it is missing or damaged, less is known. Of a text of more
    than 32 Ki characters the two ends are kept, and the number of characters between them; the file has all of it.

    Args:
        local_rank: The worker's rank in its group, 0 and up.
        pid: Its process.
        exitcode: As `subprocess` has it: negative for a signal.
        error_file: The worker's error file, or ``"<N/A>"`` if it had none. The attribute is ``"<N/A>"`` if there is no
            such file.
        rank: Its rank in the whole job; None if that is the local rank.
        host: Where it ran. Default: this machine's name.
        observed_ns: When its exit was seen, on CLOCK_MONOTONIC, in nanoseconds.
        detail: What else is known, such as "killed by the kernel's OOM killer".
        stderr_tail: The last lines that it wrote to a redirected or teed stderr.
        stdout_file: Where its stdout is, or ``""``.
        stderr_file: Where its stderr is, or ``""``.
        dated_ns: When it began to fail, on CLOCK_MONOTONIC, in nanoseconds, if something other than its error file
            shows that; else None.
        told: The message, the traceback and the moment (CLOCK_MONOTONIC, in nanoseconds) of the failure, which the
            process sent because it could not write its error file; or None. A later error file of its own replaces it.
        signalled_ns: When we first sent it a signal, on CLOCK_MONOTONIC, in nanoseconds; None if we sent none.

    Attributes:
        error_file_data: The parsed error file, with long texts cut as above; ``{"message": "<NONE>"}`` without one.
        message: The message of the error file, or of ``told``. Without both it is ``"Signal N (NAME) received by PID
            n"`` or a line on the exit code, with the last line of ``stderr_tail``. If the process recorded an exception
            and went on, it is a line on the exit, and ``detail`` mentions that exception.
        timestamp: Unix time in whole seconds: of what ``message`` describes, else of the exit; of construction if
            neither is known.
        traceback: The traceback of the error file, or of ``told``, or the stacks of a fatal signal; ``""`` if there is
            none.
        unreadable: Why the error file could not be read; ``""`` if it could.
        evidence_ns: When this process recorded its failure, or left by ``sys.exit``, on CLOCK_MONOTONIC, in
            nanoseconds; or None. For an error file of another format without a pid: when it was written, if that was
            just before the end.

    >>> failure = ProcessFailure(1, 4242, -9, "<N/A>")
    >>> failure.message, failure.signal_name(), failure.error_file_data
    ('Signal 9 (SIGKILL) received by PID 4242', 'SIGKILL', {'message': '<NONE>'})
    """

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
        data, problem = read_error_file(path) if named else (None, "missing")
        if data is not None:
            data = truncate_data(data, path)
        message, timestamp, traceback = _contents(data)
        left = read_exit(path, pid) if named else None
        left_ns = left[1] if left else None
        is_cause, written, remark = attribute(
            data, path, pid=pid, exitcode=exitcode, observed_ns=observed_ns, left_ns=left_ns, signalled_ns=signalled_ns
        )
        if told is not None and (written_by(data) != pid or _is_later(told[2], data)):
            message, traceback, written = truncate(_text(told[0])), truncate(_text(told[1])), told[2]
            timestamp = wall_clock(written)
        else:
            detail = "\n".join(filter(None, (detail, remark)))
            if not is_cause:
                message, timestamp = _exit_in_words(exitcode, pid), None
                traceback = traceback if written is not None else ""
        if not traceback and -exitcode in FATAL_SIGNALS and named:
            traceback = truncate(read_fatal_stacks(path), fatal_path(path))
        if timestamp is None:
            timestamp = wall_clock(left_ns or observed_ns or time.monotonic_ns())
        moments = [moment for moment in (written, left_ns) if moment is not None]
        self._store(
            local_rank=local_rank,
            pid=pid,
            exitcode=exitcode,
            error_file=NOT_AVAILABLE if problem == "missing" else path,
            rank=rank,
            host=host or os.uname().nodename,
            observed_ns=observed_ns,
            detail=truncate(detail),
            stderr_tail=truncate(stderr_tail, stderr_file),
            stdout_file=stdout_file,
            stderr_file=stderr_file,
            error_file_data=dict(_NO_DATA) if data is None else data,
            message=message or _exit_message(exitcode, pid, stderr_tail, stderr_name(stdout_file, stderr_file)),
            timestamp=timestamp,
            traceback=traceback,
            unreadable=problem if problem != "missing" else "",
            evidence_ns=min(moments, default=None),
            dated_ns=dated_ns,
        )

    def __repr__(self) -> str:
        rank = self.local_rank if self.rank is None else self.rank
        how = f"signal {self.signal_name()}" if self.exitcode < 0 else f"exit code {self.exitcode}"
        text = one_line(plain(self.message), SHORT_LINE)
        return f"<{type(self).__name__} of rank {rank}, pid {self.pid}, {how}: {text}>"

    @property
    def first_key(self) -> int:
        """The moment that orders failures, in nanoseconds on CLOCK_MONOTONIC: of the evidence, else of the exit.

        The kernel closes a dying process's connections before it reports the exit, so a peer may already have recorded
        its broken pipe. An exit without evidence is therefore dated back: by 5 ms, in which no process fails of a
        peer's exception, dies and is reaped; and by 100 ms for SIGKILL, which can be the cause of a peer's exception,
        but not its consequence. Without any moment it is 2**63.
        """
        moments = [moment for moment in (self.dated_ns, self.evidence_ns) if moment is not None]
        if moments:
            return min(moments if self.observed_ns is None else [*moments, self.observed_ns])
        if self.observed_ns is None:
            return _NO_MOMENT
        return self.observed_ns - (KILL_NOTICED_NS if self.exitcode == -signal.SIGKILL else _EXIT_NOTICED_NS)

    def signal_name(self) -> str:
        """The signal that ended the worker, or ``"<N/A>"``."""
        return signal_name(-self.exitcode) if self.exitcode < 0 else NOT_AVAILABLE

    def timestamp_isoformat(self) -> str:
        """`timestamp` in local time, as ``YYYY-MM-DD_HH:MM:SS``."""
        return time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(self.timestamp))

    def __hash__(self) -> int:
        return hash((self.local_rank, self.pid, self.exitcode, self.error_file, self.timestamp))

    __eq__ = Value.__eq__


def stderr_name(stdout_file: str, stderr_file: str) -> str:
    """What a stderr is called that may be in the file of stdout, as it is at a terminal."""
    return "its output" if stderr_file and stderr_file == stdout_file else "stderr"


def _exit_message(exitcode: int, pid: int, stderr_tail: str, name: str) -> str:
    words = _exit_in_words(exitcode, pid)
    if exitcode < 0:
        return words
    last = next((line for line in reversed(plain(stderr_tail).splitlines()) if line.strip()), "")
    return f"{words}; {name} ends with: {one_line(last)}" if last else f"{words}; no error was recorded"


def _exit_in_words(exitcode: int, pid: int) -> str:
    if exitcode < 0:
        return f"Signal {-exitcode} ({signal_name(-exitcode)}) received by PID {pid}"
    return describe_exit(exitcode)


def _is_later(moment: int, data: dict[str, Any] | None) -> bool:
    recorded = recorded_at(data)
    return not is_observed(data) and recorded is not None and moment > recorded


def _contents(data: dict[str, Any] | None) -> tuple[str, int | None, str]:
    """Return message, timestamp and traceback of error file data, each only if it has the right type."""
    message = (data or {}).get("message")
    info = message.get("extraInfo") if isinstance(message, dict) else data  # a flat file has them beside its message
    info = info if isinstance(info, dict) else {}
    return _text(message_of(data)), _timestamp(info.get("timestamp")), _text(info.get("py_callstack"))


def _text(value: object) -> str:
    """Return a value if it is text, else "". Lone surrogates, which JSON allows, become escapes."""
    return value.encode("utf-8", "backslashreplace").decode("utf-8") if isinstance(value, str) else ""


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


STATES = ("succeeded", "failed", "stopped", "abandoned")
"""The states of an `Outcome`."""

NOT_AVAILABLE = "<N/A>"
"""The name of no signal, for an exit by code; and the path of no error file."""

_HINTS = {
    120: "Python could not write out its last output when it left",
    126: "found, but it could not be executed",
    127: "command not found",
}

_SHELL = 128  # a shell's exit code for a signal is this much more


def signal_name(number: int) -> str:
    """Return the name of a signal.

    Args:
        number: The signal, 1 and up.

    Returns:
        Its name, with real-time signals counted from SIGRTMIN; ``"<N/A>"`` if there is no such signal.

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
    """Describe an exit.

    Args:
        exitcode: As `subprocess` has it: negative for a signal.

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
        exitcode: As `subprocess` has it, negative for a signal; None if no exit was seen.
        signal_sent: The last signal that we sent it, or None.
        ended_ns: When it ended, in nanoseconds on CLOCK_MONOTONIC; None if no exit was seen.
        early: Seconds for which the others went on after it had succeeded, if that is long; else 0.
        notice: The signal of the notice that it was given of a planned stop, or None.

    Raises:
        ValueError: There is no such state.

    >>> Outcome(0, 4242, "stopped", -15, 15).describe()
    'stopped by us (SIGTERM)'
    """

    local_rank: int
    pid: int
    state: str
    exitcode: int | None
    signal_sent: int | None
    ended_ns: int | None
    early: float
    notice: int | None

    def __init__(
        self,
        local_rank: int,
        pid: int,
        state: str,
        exitcode: int | None = None,
        signal_sent: int | None = None,
        ended_ns: int | None = None,
        early: float = 0.0,
        notice: int | None = None,
    ) -> None:
        if state not in STATES:
            raise ValueError(f"state must be one of {', '.join(STATES)}; got {state!r}")
        self._store(
            local_rank=local_rank, pid=pid, state=state, exitcode=exitcode, signal_sent=signal_sent,
            ended_ns=ended_ns, early=early, notice=notice,
        )  # fmt: skip

    def describe(self) -> str:
        """Describe the outcome in one line, without the rank, so that ranks with equal lines can be grouped.

        >>> Outcome(0, 4242, "stopped", 0, 15).describe()
        'stopped by us (SIGTERM), exited with code 0'
        >>> Outcome(0, 4242, "stopped", 0, notice=10).describe()
        'stopped by us (notice SIGUSR1), exited with code 0'
        >>> Outcome(0, 4242, "stopped", -15, 15, notice=10).describe()
        'stopped by us (notice SIGUSR1, SIGTERM)'
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
        noticed = "" if self.notice is None else f"notice {signal_name(self.notice)}"
        signals = [name for name in (noticed, sent) if name]
        by = f"stopped by us ({', '.join(signals)})" if signals else "stopped by us"
        last = self.notice if self.signal_sent is None else self.signal_sent
        expected = self.exitcode is None or (last is not None and self.exitcode == -last)
        return by if expected else f"{by}, {ending}"


_UNCAUGHT = 1  # the exit code of an interpreter that an exception has left
_TICK_NS = 10_000_000  # a file's time is early by so much, at the most
_TEXT = 200  # characters of a message that is quoted


def attribute(
    data: dict[str, Any] | None,
    path: str,
    *,
    pid: int,
    exitcode: int,
    observed_ns: int | None,
    left_ns: int | None,
    signalled_ns: int | None,
) -> tuple[bool, int | None, str]:
    """Decide whether error file data tell the cause of a process's end.

    An exception that is not known to have left the main function may have been handled. It is taken for the cause if
    the end came soon after it (`SOON_NS`), if the exit code is that of an uncaught exception, or if we had sent the
    process a signal: the exception may have been on its way up. An exception that is known to have been freed is taken
    for the cause only if the end came soon after it, by an exit or by our signal: ``except Exception: return 1`` frees
    it, too.

    ``left_ns`` is when the process left by ``sys.exit``. Moments are nanoseconds on CLOCK_MONOTONIC. Returns whether
    the data tell the cause; when the failure began, as far as the data tell; a remark for the report.
    """
    author = written_by(data)
    if data is None or (author in (None, pid) and is_observed(data)):
        return True, written_at(data), ""
    ends = [moment for moment in (left_ns, observed_ns, signalled_ns) if moment is not None]
    # Another process's evidence may have been copied from a machine with another clock.
    recorded = recorded_at(data) if author == pid else file_at(path)
    age = min(ends) - recorded if ends and recorded is not None else 0
    soon = age <= SOON_NS
    before = f"{format_duration(age / clock.NS)} before" if ends else "before"
    if author is None:  # torch's, or the user's own: its timestamps are in seconds
        remark = "" if soon else f"its error file was written {before} its end"
        dated = recorded is not None and _TICK_NS <= age <= SOON_NS
        return True, recorded + _TICK_NS if dated and recorded else written_at(data), remark
    if author != pid:
        is_cause = soon or exitcode > 0 or signalled_ns is not None
        remark = f"recorded by process {author}, below the worker, {before} its end"
        return is_cause, None, remark if is_cause else f"{remark}: {_short(data)}"
    if has_left(data):
        return True, written_at(data), ""
    handled = handled_at(data) is not None
    killed_by_others = exitcode < 0 and signalled_ns is None and left_ns is None  # of a signal that was not ours
    may_be_uncaught = exitcode == _UNCAUGHT or signalled_ns is not None
    if left_ns is None and not (handled and killed_by_others) and (soon or (may_be_uncaught and not handled)):
        return True, written_at(data), ""
    remark = f"it had recorded {_short(data)} {before}, and gone on"
    return False, written_at(data) if soon and not killed_by_others else None, remark


def _short(data: dict[str, Any] | None) -> str:
    text = (message_of(data) or "").split("\n")[0]
    return text if len(text) <= _TEXT else f"{text[:_TEXT]} …"
