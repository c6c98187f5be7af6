"""How the attempts of a group ended, the lines on them, and whether another one follows, and when.

Pure: it decides, and acts on nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from phalanx._base import clock
from phalanx._base.clock import format_duration
from phalanx._base.frozen import Value
from phalanx._base.text import how_many, seconds
from phalanx._group.arguments import checked_whole

_MOST_CODE, _MOST_SIGNAL = 255, 64  # of exit codes, and of signals
_LONGEST_EXPONENT = 64  # of the delay: more would overflow a float, and the cap holds long before


class AttemptEnd(NamedTuple):
    """How one attempt of a group ended.

    Attributes:
        state: "succeeded"; "failed"; "stopped", because somebody asked for it; or "not started".
        rank: The global rank of the root cause; None: it has no rank, or none failed.
        exitcode: Its exit code, negative for a signal; None: not known.
        error: What went wrong, in one line (see `one_line`); "": nothing.
        step: The highest step that any rank has reported, see `phalanx.timer.progress`; None: none has.
        survivors: How many workers have outlived SIGKILL (uninterruptible sleep).
        number: The attempt, from 0 on.
        began: When its start began, in seconds (monotonic).
        ended: When no process of it was left, likewise.
        is_hang: Whether a timer has found the root cause.
    """

    state: str
    rank: int | None = None
    exitcode: int | None = None
    error: str = ""
    step: int | None = None
    survivors: int = 0
    number: int = 0
    began: float = 0.0
    ended: float = 0.0
    is_hang: bool = False

    @property
    def uptime(self) -> float:
        """Seconds from its start to its end."""
        return max(0.0, self.ended - self.began)

    @property
    def failed(self) -> bool:
        """Whether it counts as a failure."""
        return self.state in ("failed", "not started")

    def describe(self) -> str:
        """Return who failed, and how, in one line.

        >>> AttemptEnd("failed", 2, 1, "ValueError: bad batch", 120).describe()
        'rank 2, ValueError: bad batch, step 120'
        """
        parts = [f"rank {self.rank}"] if self.rank is not None else []
        parts += [self.error] if self.error else [self.state] if not parts else []
        parts += [f"step {self.step}"] if self.step is not None else []
        return ", ".join(parts)


def describe_failure(end: AttemptEnd) -> str:
    """Return a line on an attempt that has failed.

    >>> describe_failure(AttemptEnd("failed", 2, 1, "ValueError: bad batch", ended=3.0))
    'attempt 0 failed after 3.0s: rank 2, ValueError: bad batch'
    """
    return f"attempt {end.number} {end.state} after {format_duration(end.uptime)}: {end.describe()}"


def describe_restart(attempt: int, delay: float, count: str) -> str:
    """Return which attempt follows, in how many seconds from now. ``count``: see `RestartPolicy.describe_count`.

    Attempts are numbered from 0, as in options, folders and events; restarts are counted.

    >>> describe_restart(1, 0, "restart 1 of at most 2"), describe_restart(3, 2.5, "not counted as a restart")
    ('attempt 1 follows (restart 1 of at most 2)', 'attempt 3 follows in 2.5s (not counted as a restart)')
    >>> describe_restart(2, 90, "restart 2 of at most 2")
    'attempt 2 follows in 1m30s (restart 2 of at most 2)'
    """
    when = f" in {format_duration(delay)}" if delay else ""
    return f"attempt {attempt} follows{when} ({count})"


def describe_attempts(ends: Sequence[AttemptEnd]) -> list[str]:
    """Return a line for each attempt: when it ended, after which time, who failed, how, and at which step.

    Attempts in a row that the same rank ended in the same way have one line: process ids and addresses in the error do
    not count, see `mask`.

    >>> first = AttemptEnd("failed", 2, 1, "ValueError: bad batch", 7)
    >>> [line.partition(": ")[2] for line in describe_attempts([first, first._replace(step=8, number=1)])]
    ['rank 2, ValueError: bad batch, steps 7, 8']
    """
    from phalanx._outcomes.report import Earlier, describe_earlier, mask  # not at the start of every run

    history = []
    for end in ends:
        bare, moment = end._replace(step=None), clock.to_wall(end.ended)
        masked = bare._replace(error=mask(end.error)).describe()
        how = end.state, end.exitcode
        history.append(Earlier(end.number, bare.describe(), masked, how, end.step, end.uptime, moment))
    return describe_earlier(history)


class RestartPolicy(Value):
    """When a group that has failed is started again.

    A group's attempt is counted as a failure if a worker failed, or if a later attempt could not be started. A stop, or
    a restart that somebody asked for, is none.

    Args:
        max_restarts: How many times the group may be started again after failures: 0 or more.
        window: Seconds in which there may be so many restarts; older ones do not count. None: in all.
        backoff: Seconds before the first restart; doubled with each further failure in a row. 0: at once. With the
            failure of an attempt that ran for longer than ``backoff_cap``, the row begins anew.
        backoff_cap: Seconds that the delay never exceeds.
        jitter: By which part (0 to 1) of itself the delay is shortened at random, at most: many jobs that failed
            together then do not start together.
        min_uptime: Seconds. A group that fails earlier than this after its start is failing on start;
        failing_starts: after so many of these in a row (1 or more), it is not started again. Without effect if
            ``min_uptime`` is 0.
        never_on: Exit codes after which the group is not started again: of the root cause, 0 to 255; -n: signal n.
        always_on: Exit codes after which it is, without being counted in ``max_restarts``.
        without_progress: How many failures in a row without progress end it: no step beyond those of all attempts
            before was reported by `phalanx.timer.progress`. None: progress is not asked for.

    ``never_on``, ``without_progress`` and ``failing_starts`` hold for the exit codes of ``always_on``, too. Of a number
    of failures in a row, an attempt that was stopped, or restarted on request, is passed over.

    Raises:
        TypeError, ValueError: What is wrong with which argument.

    >>> RestartPolicy(3).max_restarts
    3
    >>> RestartPolicy(-1)
    Traceback (most recent call last):
    ValueError: max_restarts: expected a whole number, 0 or more, got -1
    """

    max_restarts: int
    window: float | None
    backoff: float
    backoff_cap: float
    jitter: float
    min_uptime: float
    failing_starts: int
    never_on: frozenset[int]
    always_on: frozenset[int]
    without_progress: int | None

    def __init__(
        self,
        max_restarts: int = 0,
        *,
        window: float | None = None,
        backoff: float = 0.0,
        backoff_cap: float = 300.0,
        jitter: float = 0.1,
        min_uptime: float = 0.0,
        failing_starts: int = 3,
        never_on: Collection[int] = (),
        always_on: Collection[int] = (),
        without_progress: int | None = None,
    ) -> None:
        backoff = seconds("backoff", backoff, endless=False)
        never, always = _codes("never_on", never_on), _codes("always_on", always_on)
        both = sorted(never & always)
        if both:
            msg = f"never_on, always_on: exit code {both[0]} is in both"
            raise ValueError(msg)
        self._store(
            max_restarts=checked_whole("max_restarts", max_restarts, 0),
            window=None if window is None else seconds("window", window, zero=False, endless=False),
            backoff=backoff,
            backoff_cap=max(backoff, seconds("backoff_cap", backoff_cap, endless=False)),
            jitter=_part("jitter", jitter),
            min_uptime=seconds("min_uptime", min_uptime, endless=False),
            failing_starts=checked_whole("failing_starts", failing_starts, 1),
            never_on=never,
            always_on=always,
            without_progress=None
            if without_progress is None
            else checked_whole("without_progress", without_progress, 1),
        )

    def describe_count(self, ages: Sequence[float], *, counted: bool) -> str:
        """Return which of how many restarts one is that was decided, in words.

        Args:
            ages: Before how many seconds restarts were decided that count, this one included.
            counted: Whether this one does.

        >>> RestartPolicy(3).describe_count([60, 0], counted=True), RestartPolicy(0).describe_count([], counted=False)
        ('restart 2 of at most 3', 'not counted as a restart')
        >>> RestartPolicy(5, window=3600).describe_count([4000, 0], counted=True)
        'restart 1 of at most 5 within 1h00m'
        """
        if not counted:
            return "not counted as a restart"
        used = sum(self.window is None or age < self.window for age in ages)
        within = "" if self.window is None else f" within {format_duration(self.window)}"
        return f"restart {used} of at most {self.max_restarts}{within}"

    def describe(self) -> str:
        """Return it as the options of `phalanx run`: ``--max-restarts``, and those that differ from their defaults.

        Where nothing is restarted, these have no effect, and are not there.

        >>> RestartPolicy(backoff=2).describe()
        '--max-restarts 0'
        >>> RestartPolicy(3).describe(), RestartPolicy(5, window=3600, backoff=0.5, never_on=[2, -4]).describe()
        ('--max-restarts 3', '--max-restarts 5/3600 --backoff 0.5:300 --never-restart-on SIGILL,2')
        """
        usual = RestartPolicy()
        if not self.may_restart:
            return "--max-restarts 0"
        codes = {name: ",".join(map(_code_name, sorted(getattr(self, name)))) for name in ("never_on", "always_on")}
        window = "" if self.window is None else f"/{self.window:g}"
        backoff = (self.backoff, self.backoff_cap) != (0.0, usual.backoff_cap)
        uptime = (self.min_uptime, self.failing_starts) != (0.0, usual.failing_starts)
        found = {
            "--max-restarts": f"{self.max_restarts}{window}",
            "--backoff": f"{self.backoff:g}:{self.backoff_cap:g}" if backoff else "",
            "--backoff-jitter": f"{self.jitter:g}" if self.jitter != usual.jitter else "",
            "--min-uptime": f"{self.min_uptime:g}:{self.failing_starts}" if uptime else "",
            "--max-no-progress": "" if self.without_progress is None else str(self.without_progress),
            "--never-restart-on": codes["never_on"],
            "--always-restart-on": codes["always_on"],
        }
        return " ".join(f"{name} {value}" for name, value in found.items() if value)

    @property
    def may_restart(self) -> bool:
        """Whether any failure may be followed by another attempt."""
        return self.max_restarts > 0 or bool(self.always_on)


class Decision(NamedTuple):
    """What follows a failure.

    Attributes:
        retries: Whether another attempt follows.
        delay: Seconds before it.
        counted: Whether it counts in ``max_restarts``.
        why: Why no other follows; or what is to be said of this failure; "": nothing.
    """

    retries: bool
    delay: float = 0.0
    counted: bool = True
    why: str = ""


def decide(
    policy: RestartPolicy, ends: Sequence[AttemptEnd], restarts: Sequence[float], now: float, chance: float = 0.0
) -> Decision:
    """Decide what follows the failure of the last of ``ends``.

    Args:
        policy: The policy.
        ends: How the attempts so far have ended, the latest last. Those that did not fail are passed over.
        restarts: When it was decided to restart, of the restarts that count (monotonic seconds).
        now: The present moment, likewise.
        chance: A random number, 0 to 1, for the jitter.
    """
    last = ends[-1]
    failures = [end for end in ends if end.failed]
    code = last.exitcode
    if last.survivors:
        what = how_many(last.survivors, "worker")
        return Decision(retries=False, why=f"{what} outlived SIGKILL, and may hold what another attempt needs")
    if code is not None and code in policy.never_on:
        return Decision(retries=False, why=f"{_name(code)} is one after which nothing is restarted")
    idle = 0 if policy.without_progress is None else _without_progress(failures, ends)
    if policy.without_progress is not None and idle >= policy.without_progress:
        best = max((end.step for end in ends if end.step is not None), default=None)
        where = "no step was reported" if best is None else f"step {best} was not passed"
        return Decision(retries=False, why=f"no progress in {how_many(idle, 'attempt')}: {where}")
    early = _count_last(failures, lambda end: end.uptime < policy.min_uptime)
    if policy.min_uptime and early >= policy.failing_starts:
        within = format_duration(policy.min_uptime)
        return Decision(retries=False, why=f"failing on start: {how_many(early, 'attempt')} ended within {within}")
    counted = code is None or code not in policy.always_on
    used = sum(policy.window is None or moment > now - policy.window for moment in restarts)
    if counted and used >= policy.max_restarts:
        within = "" if policy.window is None else f" within {format_duration(policy.window)}"
        used_up = f"{policy.max_restarts} of {how_many(policy.max_restarts, 'restart')}{within} used"
        return Decision(retries=False, why=used_up if policy.max_restarts else "")
    same = next((end.number for end in failures[-2:-1] if end.step is not None and end.step == last.step), None)
    why = "" if same is None else f"same step as attempt {same}"
    return Decision(retries=True, delay=_delay(policy, failures, chance), counted=counted, why=why)


def _without_progress(failures: Sequence[AttemptEnd], ends: Sequence[AttemptEnd]) -> int:
    """Count the last failures in a row that have reported no step beyond those of all attempts before."""
    count = 0
    for end in reversed(failures):
        before = [each.step for each in ends if each.number < end.number and each.step is not None]
        if end.step is not None and (not before or end.step > max(before)):
            break
        count += 1
    return count


def _count_last(failures: Sequence[AttemptEnd], holds: Callable[[AttemptEnd], bool]) -> int:
    count = 0
    for end in reversed(failures):
        if not holds(end):
            break
        count += 1
    return count


def _delay(policy: RestartPolicy, failures: Sequence[AttemptEnd], chance: float) -> float:
    short = _count_last(failures, lambda end: end.uptime <= policy.backoff_cap)
    doubled = max(0, short - (short == len(failures)))  # a long attempt before these is the first of the row
    delay = min(policy.backoff_cap, policy.backoff * 2.0 ** min(doubled, _LONGEST_EXPONENT))
    return delay * (1 - policy.jitter * chance)


def _name(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    from phalanx._outcomes.failure import signal_name

    return f"signal {signal_name(-code)}"


def _part(name: str, value: object) -> float:
    msg = f"{name}: expected a part of the delay, 0 to 1, got {value!r}"
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise TypeError(msg)
    number = float(value)
    if not 0 <= number <= 1:
        raise ValueError(msg)
    return number


def _code_name(code: int) -> str:
    """Return an exit code as an option has it: a signal by its name."""
    if code >= 0:
        return str(code)
    import signal

    try:
        return signal.Signals(-code).name
    except ValueError:  # a real-time signal
        return str(-code + 128)


def _codes(name: str, values: Collection[int]) -> frozenset[int]:
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        msg = f"{name}: expected exit codes, like [1, 75], got {values!r}"
        raise TypeError(msg)
    codes = []
    for value in values:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            msg = f"{name}: expected exit codes, like [1, 75]; {value!r} is none"
            raise TypeError(msg)
        codes.append(int(value.__index__()))
        if not -_MOST_SIGNAL <= codes[-1] <= _MOST_CODE or codes[-1] == 0:
            msg = f"{name}: expected exit codes, 1 to {_MOST_CODE}, or -1 to -{_MOST_SIGNAL} for signals, got {value!r}"
            raise ValueError(msg)
    return frozenset(codes)
