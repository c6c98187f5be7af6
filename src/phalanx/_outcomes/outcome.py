"""What became of one worker: `Outcome`; and exit codes and signals in words."""

from __future__ import annotations

import signal

from phalanx._base.clock import format_duration
from phalanx._base.frozen import Value

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

    __slots__ = (  # noqa: RUF023 (the order is that of the arguments)
        "local_rank", "pid", "state", "exitcode", "signal_sent", "ended_ns", "early", "notice",
    )  # fmt: skip

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
