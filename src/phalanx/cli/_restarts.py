"""The options of `phalanx run` about restarts and signals, and what they say."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping
from contextlib import suppress

import click

from phalanx._base.text import parse_duration
from phalanx._group.restart_policy import RestartPolicy
from phalanx._run.config import RunConfig
from phalanx.cli._declare import NUMBER, RESTARTS, TEXT, WHOLE, Declared, Maybe, Option
from phalanx.cli._options import Count, time_of

DEFAULT_FORWARDED = [signal.SIGUSR1, signal.SIGUSR2]
"""The signals that are passed on if nobody says which."""

_UNFORWARDED = (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD)  # that no process handles; and what the kernel sends
_UNHANDLED = {
    **dict.fromkeys((signal.SIGKILL, signal.SIGSTOP), "cannot be handled by any process"),
    signal.SIGCHLD: "tells of children that end, and would stop every run",
}

_MOST = 1 << 63  # of what a job file can hold


def read_budget(text: str) -> tuple[int, float | None]:
    """Read ``--max-restarts``: how many, and within how many seconds; None: in all. Raises ValueError.

    >>> read_budget("3"), read_budget("5/1h")
    ((3, None), (5, 3600.0))
    """
    count, slash, within = text.partition("/")
    window = None
    right = count.strip().isdecimal() and int(count) < _MOST
    if right and slash:
        with suppress(ValueError):
            window = parse_duration(within, zero=False)
        right = window is not None
    if not right:
        msg = f"{text!r}: expected a number of restarts, like 3, or so many within a time, like 5/1h"
        raise ValueError(msg)
    return int(count), window


def read_pair(text: str) -> tuple[float, float | None]:
    """Read one time, or two with a colon between them. Raises ValueError.

    >>> read_pair("1"), read_pair("1:60"), read_pair("30s:1h")
    ((1.0, None), (1.0, 60.0), (30.0, 3600.0))
    """
    first, colon, second = text.partition(":")
    return parse_duration(first), parse_duration(second) if colon else None


def read_starts(text: str) -> tuple[float, int]:
    """Read ``--min-uptime``. Raises ValueError.

    >>> read_starts("30"), read_starts("1m:5")
    ((30.0, 3), (60.0, 5))
    """
    first, colon, second = text.partition(":")
    if colon and not (second.strip().isdecimal() and int(second)):
        raise ValueError(f"{text!r}: expected a time, and how many times in a row, like 30s:3")
    return parse_duration(first), int(second) if colon else 3


def read_codes(text: str) -> list[int]:
    """Read exit codes, and names of signals. Raises ValueError.

    >>> read_codes("2,64"), read_codes("SIGKILL,term")
    ([2, 64], [-9, -15])
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    right = "expected exit codes, 1 to 255, or names of signals, like 3,SIGKILL"
    codes = []
    for part in parts:
        if part.isdecimal() and 0 < int(part) < 256:  # noqa: PLR2004 - exit codes have eight bits
            codes.append(int(part))
        else:
            codes.append(-signal_of(part, f"{part!r}: {right}"))
    if not codes:
        raise ValueError(f"{text!r}: {right}")
    return codes


def read_signals(text: str) -> list[signal.Signals]:
    """Read names of signals that are passed on; "none" is none. Raises ValueError.

    >>> [number.name for number in read_signals("USR1,SIGUSR2")], read_signals("none")
    (['SIGUSR1', 'SIGUSR2'], [])
    """
    return _signals(text, "USR1,WINCH", dict.fromkeys(_UNFORWARDED, "cannot be passed on"))


def read_handled(text: str) -> list[signal.Signals]:
    """Read names of signals that stop a run; "none" is none. Raises ValueError.

    >>> [number.name for number in read_handled("SIGTERM,INT")], read_handled("none")
    (['SIGTERM', 'SIGINT'], [])
    """
    return _signals(text, "SIGTERM,SIGINT", _UNHANDLED)


def _signals(text: str, like: str, refused: Mapping[signal.Signals, str]) -> list[signal.Signals]:
    """Read names of signals, each once. ``refused``: those that cannot be, and why. Raises ValueError."""
    if text.strip().lower() == "none":
        return []
    wrong = f"{text!r}: expected names of signals, like {like}, or none"
    numbers = dict.fromkeys(signal_of(part, wrong) for part in text.split(",") if part.strip())
    if not numbers:
        raise ValueError(wrong)
    for number in numbers:
        if number in refused:
            raise ValueError(f"{text!r}: {number.name} {refused[number]}")
    return list(numbers)


def signal_of(name: str, wrong: str) -> signal.Signals:
    """Return the signal of this name, in any case, with SIG or without. Raises ValueError: ``wrong``."""
    try:
        return signal.Signals[f"SIG{name.strip().upper().removeprefix('SIG')}"]
    except KeyError:
        raise ValueError(wrong) from None


def _fraction(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1
    if not 0 <= number <= 1:
        raise ValueError(f"{text!r}: expected a part, 0 to 1")
    return number


class RestartOptions(Declared, section=RESTARTS):
    """When a group is started again."""

    max_restarts = Option(
        read_budget,
        default="0",
        metavar="N[/TIME]",
        written=TEXT + WHOLE,
        sentence="Restart all workers when one fails, at most N times: 3; 5/1h: within any hour.",
    )
    backoff = Option(
        read_pair,
        default="0",
        metavar="TIME[:MOST]",
        written=TEXT + NUMBER,
        sentence="Delay before a restart, doubled after each further failure in a row, up to MOST (5m).",
    )
    backoff_jitter = Option(
        _fraction,
        default="0.1",
        metavar="PART",
        written=NUMBER,
        sentence="Shorten each delay at random by up to this fraction.",
    )
    min_uptime = Maybe(
        read_starts,
        metavar="TIME[:TIMES]",
        written=TEXT + NUMBER,
        sentence="Give up when TIMES attempts in a row (3) have failed within TIME of their start.",
    )
    max_no_progress = Count(
        least=1, sentence="Give up after N failures in a row without progress (phalanx.timer.progress())."
    )
    never_restart_on = Maybe(
        read_codes,
        metavar="CODE,...",
        sentence="Do not restart after these exit codes and signals of the root cause: 2,SIGILL.",
    )
    always_restart_on = Maybe(
        read_codes, metavar="CODE,...", sentence="Always restart after these, uncounted by --max-restarts: 75."
    )
    monitor_interval = Maybe(
        time_of(),
        section="",
        metavar="TIME",
        written=TEXT + NUMBER,
        sentence="Accepted without effect: Phalanx does not poll.",
    )


def restart_policy(chosen: RunConfig) -> RestartPolicy:
    """What the options say. Raises UsageError."""
    least, times = chosen.min_uptime or (0.0, 3)
    (restarts, window), (first, most) = chosen.max_restarts, chosen.backoff
    if most is not None and most < first:
        msg = f"--backoff: {first:g}:{most:g}: the second time is the longest, and cannot be below the first"
        raise click.UsageError(msg)
    try:
        return RestartPolicy(
            restarts, window=window, backoff=first,
            backoff_cap=300.0 if most is None else most, jitter=chosen.backoff_jitter, min_uptime=least,
            failing_starts=times, never_on=chosen.never_restart_on or (), always_on=chosen.always_restart_on or (),
            without_progress=chosen.max_no_progress,
        )  # fmt: skip
    except ValueError as error:
        text = str(error).replace("never_on", "--never-restart-on").replace("always_on", "--always-restart-on")
        raise click.UsageError(text) from None


_OF_RESTARTS = (
    RestartOptions.backoff, RestartOptions.backoff_jitter, RestartOptions.min_uptime, RestartOptions.max_no_progress,
    RestartOptions.never_restart_on,
)  # fmt: skip


def check_heeded(chosen: RunConfig, policy: RestartPolicy, typed: Collection[str]) -> list[str]:
    """Return what is to be said of options about restarts where there are none. Raises UsageError: one was typed.

    Job files and the environment may hold for several runs, of which some have no restarts.
    """
    if policy.may_restart:
        return []
    given = [each for each in _OF_RESTARTS if getattr(chosen, each.name) != each.default_value()]
    for each in given:
        if each.name in typed:
            msg = f"{each.long}: nothing is restarted without --max-restarts N; give that, too, like --max-restarts 3"
            raise click.UsageError(msg)
    return [f"without effect without --max-restarts: {', '.join(each.long for each in given)}"] if given else []


def forwarded(chosen: list[signal.Signals], handled: list[signal.Signals]) -> list[signal.Signals]:
    """Return the signals to be passed on. Raises UsageError for one that stops the run."""
    if chosen == DEFAULT_FORWARDED:  # nobody has asked for these, and somebody for those
        return [number for number in chosen if number not in handled]
    for number in chosen:
        if number in handled:
            raise click.UsageError(f"--signals-forward: {number.name} stops the run, see --signals-to-handle")
    return chosen
