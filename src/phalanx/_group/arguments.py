"""The arguments of a group: their defaults, and the checks that refuse bad input before anything starts."""

from __future__ import annotations

import operator
import os
import signal
import time
from types import NoneType

from phalanx._base.text import seconds
from phalanx._logs.console import ConsoleSpecs
from phalanx._logs.layout import Std
from phalanx._logs.specs import DefaultLogsSpecs
from phalanx._placement.placement import Placement
from phalanx._timers.specs import TimerSpecs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from typing import Any

START_METHODS = ("spawn", "forkserver", "fork")

UNSET: Any = object()
"""The value of an argument that was left out, where None has a meaning."""

SETTLE = 0.03
"""Seconds after the first failure in which peers may leave evidence of their own before they are stopped."""

GRACE = 30.0
"""Seconds between the death signal and SIGKILL."""


IMPORT, VALUE = "import", "value"
"""How workers get what the main module defines: they run the module again; or it is sent by value."""


class RanksError(ValueError, RuntimeError):
    """``args`` or ``envs`` does not hold exactly the local ranks 0 to N - 1.

    A ValueError, and a RuntimeError as well: torch raises that.
    """

    __module__ = "phalanx.multiprocessing"  # as people know it, in tracebacks and pickles


def recorded(logs_specs: object) -> DefaultLogsSpecs:
    """Logs that can have a record. Raises ValueError."""
    if logs_specs is None:
        from phalanx._runs.paths import folder_for_new_runs

        return DefaultLogsSpecs(folder_for_new_runs()[0], tee=Std.ALL, run_id=time.strftime("%Y%m%d-%H%M%S"))
    if not isinstance(logs_specs, DefaultLogsSpecs) or logs_specs.root_log_dir is None or not logs_specs.is_kept:
        msg = "record: it is kept in a run's folder; give logs_specs=DefaultLogsSpecs(log_dir, ...), or no logs_specs"
        raise ValueError(msg)
    return logs_specs


def check_options(
    name: object,
    entrypoint: object,
    method: object,
    settle: object,
    grace: object,
    linger: object = 0.0,
    console: object = None,
    placement: object = None,
    timers: object = None,
    main: object = IMPORT,
    *,
    orphan_grace: object = 0.0,
    notice: object = None,
    starts_warm: bool = False,
) -> None:
    """Refuse options with which no group can be started. Raises TypeError, ValueError."""
    if not isinstance(name, str):
        raise TypeError(f"name: expected a string, got {name!r}")
    if not isinstance(entrypoint, str) and not callable(entrypoint):
        raise TypeError(f"entrypoint: expected a callable, or a binary's name, got {entrypoint!r}")
    if method not in START_METHODS:
        raise ValueError(f"start_method: expected one of {', '.join(START_METHODS)}, got {method!r}")
    if main not in (IMPORT, VALUE):
        raise ValueError(f"main: expected {IMPORT!r} or {VALUE!r}, got {main!r}")
    if starts_warm and (isinstance(entrypoint, str) or method != "forkserver"):
        what = "a binary imports nothing" if isinstance(entrypoint, str) else f"start_method is {method!r}"
        raise ValueError(f"preload, warm: only forks have it already, those of start_method='forkserver'; {what}")
    specs = (("console", console, ConsoleSpecs), ("placement", placement, Placement), ("timers", timers, TimerSpecs))
    for option, value, kind in specs:
        if not isinstance(value, (kind, NoneType)):
            raise TypeError(f"{option}: expected a {kind.__name__}, got {value!r}")
    for option, time_span in (("settle", settle), ("grace", grace), ("linger", linger)):
        seconds(option, time_span)
    seconds("orphan_grace", orphan_grace, endless=False)
    checked_notice(notice)


def checked_notice(notice: Any) -> tuple[int, float] | None:
    """Check the notice of a planned stop, a signal's number and seconds, and return it. Raises TypeError, ValueError.

    >>> checked_notice((signal.SIGUSR1, 60))
    (10, 60.0)
    """
    if notice is None:
        return None
    if not isinstance(notice, (tuple, list)) or len(notice) != 2:  # noqa: PLR2004 - a signal and its seconds
        raise TypeError(f"notice: expected a pair of a signal's number and seconds, got {notice!r}")
    number, span = notice
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise TypeError(f"notice: expected a signal's number, like signal.SIGUSR1, got {number!r}")
    number = operator.index(number)
    if number not in signal.valid_signals() or number in (signal.SIGKILL, signal.SIGSTOP):
        raise ValueError(f"notice: expected a signal that a process can handle, got {number}")
    return number, seconds("notice", span, zero=False, endless=False)


def checked_listener(on_event: Any) -> Callable[[dict[str, Any]], object] | None:
    """Check a function that is to be called with events, and return it. Raises TypeError."""
    if on_event is not None and not callable(on_event):
        raise TypeError(f"on_event: expected a function of one dict, got {on_event!r}")
    return on_event  # type: ignore[no-any-return]  # what it takes cannot be checked


def per_rank(args: Any, envs: Any, nprocs: int | None) -> tuple[dict[int, tuple[Any, ...]], dict[int, dict[str, str]]]:
    """Check the arguments and environments of each rank, and return them. Each rank is looked up in a mapping once."""
    if nprocs is not None:
        if isinstance(nprocs, bool) or not hasattr(nprocs, "__index__"):
            raise TypeError(f"nprocs: expected a whole number, got {nprocs!r}")
        nprocs = operator.index(nprocs)  # NumPy has integer types of its own
    if args is UNSET:
        args = ()
    shared = isinstance(args, (tuple, list))
    if shared and nprocs is None and envs is None:
        raise TypeError("nprocs: how many processes? Give nprocs, or args or envs as a mapping from local rank")
    ranks = [] if shared else _ranks("args", args, "a tuple, or one tuple for all ranks")
    env_ranks = [] if envs is None else _ranks("envs", envs, "environment variables")
    count = nprocs if nprocs is not None else len(env_ranks if shared else ranks)
    if count < 1:
        raise ValueError(f"nprocs: expected at least 1 process, got {count}")
    if shared:
        all_args = dict.fromkeys(range(count), args)
    else:
        _check_ranks("args", ranks, count)
        all_args = {rank: args[rank] for rank in range(count)}
    if envs is None:
        return _tuples(all_args), {rank: {} for rank in range(count)}
    _check_ranks("envs", env_ranks, count)
    return _tuples(all_args), {rank: _environment(rank, envs[rank]) for rank in range(count)}


def _ranks(which: str, mapping: Any, what: str) -> list[Any]:
    if not hasattr(mapping, "keys"):
        raise TypeError(f"{which}: expected a mapping from local rank to {what}, got {mapping!r}")
    return list(mapping.keys())


def is_sequence(values: object) -> bool:
    """Whether an object can replace a tuple of arguments: not a string, a mapping or a set."""
    is_other = isinstance(values, (str, bytes, set, frozenset)) or hasattr(values, "keys")
    return hasattr(values, "__iter__") and not is_other


def checked_filters(name: str, value: Any) -> list[str] | None:
    """Check the texts by which lines are selected for one file of all ranks. Raises TypeError, ValueError."""
    if value is None:
        return None
    if not is_sequence(value) or not all(isinstance(part, str) for part in value):
        raise TypeError(f"{name}: expected a list of strings, got {value!r}")
    if not all(value):
        raise ValueError(f"{name}: an empty string is in every line, got {value!r}")
    return list(value)


def checked_whole(name: str, value: Any, least: int) -> int:
    """Check a whole number, ``least`` or more; NumPy has types of its own. Raises TypeError, ValueError.

    >>> checked_whole("max_restarts", 3, 0)
    3
    """
    msg = f"{name}: expected a whole number, {least} or more, got {value!r}"
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(msg)
    if (number := operator.index(value)) < least:
        raise ValueError(msg)
    return number


def _tuples(args: dict[int, Any]) -> dict[int, tuple[Any, ...]]:
    """Return the arguments as tuples. Ranks with the same object get the same tuple, which is then pickled once."""
    for rank, values in args.items():
        if not is_sequence(values):
            raise TypeError(f"args: rank {rank}: expected a tuple of arguments, got {values!r}")
    tuples: dict[int, tuple[Any, ...]] = {}
    for values in args.values():
        if id(values) not in tuples:
            tuples[id(values)] = tuple(values)
    return {rank: tuples[id(values)] for rank, values in args.items()}


def _check_ranks(which: str, ranks: list[Any], count: int) -> None:
    present = {rank for rank in ranks if hasattr(rank, "__index__")}
    missing = [str(rank) for rank in range(count) if rank not in present]
    surplus = [repr(rank) for rank in ranks if not hasattr(rank, "__index__") or not 0 <= rank < count]
    if missing or surplus:
        trouble = [
            f"{', '.join(names)} {what}" for names, what in ((missing, "missing"), (surplus, "too many")) if names
        ]
        raise RanksError(f"{which}: expected exactly the local ranks 0 to {count - 1}: {'; '.join(trouble)}")


def _can_be_encoded(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def _environment(rank: int, env: Any) -> dict[str, str]:
    if not hasattr(env, "items"):
        raise TypeError(f"envs: rank {rank}: expected environment variables by name, got {env!r}")
    held = dict(env.items())
    for name, value in held.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"envs: rank {rank}: {name!r} is {value!r}; names and values must be strings")
        if not name or "=" in name or "\0" in name + value or not _can_be_encoded(name + value):
            raise ValueError(f"envs: rank {rank}: {name!r}={value!r} cannot be an environment variable")
    return held


def check_signal(name: str, value: object) -> int:
    """Return a signal: a `signal.Signals`, or the number of a real-time signal that has no name there.

    >>> check_signal("death_sig", 15), check_signal("death_sig", 35)
    (<Signals.SIGTERM: 15>, 35)

    Raises ValueError if it is none.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # what is no number raises
    except TypeError:
        number = 0
    if number not in signal.valid_signals():
        raise ValueError(f"{name}: expected a signal, like signal.SIGTERM or 15, got {value!r}")
    try:
        return signal.Signals(number)
    except ValueError:
        return number


def check_ranks(ranks: Iterable[int], known: Collection[int]) -> list[int]:
    """Return the ranks. Raises ValueError if one of them is not among those of the group."""
    chosen = list(ranks)
    for rank in chosen:
        if rank not in known:
            raise ValueError(f"ranks: expected local ranks from 0 to {len(known) - 1}, got {rank!r}")
    return chosen


def check_timeout(timeout: float | None) -> None:
    """Refuse NaN, with which a wait would never end. Raises ValueError."""
    if timeout != timeout:  # noqa: PLR0124 - true of NaN alone
        raise ValueError(f"timeout: expected seconds, got {timeout!r}")
