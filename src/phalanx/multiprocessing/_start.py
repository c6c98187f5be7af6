"""`start_processes`: reads both historical signatures, and refuses bad input before anything starts."""

from __future__ import annotations

import os

from phalanx._engine.host_signals import SignalException
from phalanx._group.arguments import GRACE, IMPORT, SETTLE, UNSET, check_options, checked_filters, per_rank, recorded
from phalanx._group.command_group import SubprocessContext
from phalanx._group.function_group import MultiprocessContext
from phalanx._logs.layout import Std
from phalanx._logs.specs import DefaultLogsSpecs, FolderLogsSpecs, LogsSpecs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from phalanx._group.context import PContext
    from phalanx._group.warm import Warm
    from phalanx._logs.console import ConsoleSpecs
    from phalanx._placement.placement import Placement
    from phalanx._timers.specs import TimerSpecs


def start_processes(
    name: str,
    entrypoint: Callable[..., Any] | str,
    args: Mapping[int, tuple[Any, ...]] | tuple[Any, ...] = UNSET,
    envs: Mapping[int, Mapping[str, str]] | None = None,
    logs_specs: LogsSpecs | str | os.PathLike[str] | None = None,
    *rest: Any,
    nprocs: int | None = None,
    log_line_prefixes: Mapping[int, str] | None = UNSET,
    start_method: str = UNSET,
    redirects: Std | Mapping[int, Std] = UNSET,
    tee: Std | Mapping[int, Std] = UNSET,
    log_dir: str | os.PathLike[str] | None = None,
    settle: float = SETTLE,
    grace: float = GRACE,
    linger: float = 0.0,
    orphan_grace: float = 0.0,
    notice: tuple[int, float] | None = None,
    duplicate_stdout_filters: list[str] | None = None,
    duplicate_stderr_filters: list[str] | None = None,
    console: ConsoleSpecs | None = None,
    preload: Sequence[str] | None = None,
    warm: Warm | None = None,
    writable: bool = False,
    main: str = IMPORT,
    placement: Placement | None = None,
    timers: TimerSpecs | None = None,
    record: bool = False,
    on_event: Callable[[dict[str, Any]], object] | None = None,
) -> PContext:
    r"""Start N copies of a function or of a program as one group, and return the group.

    The workers are numbered from 0 to N - 1; a worker's number is its local rank. When one of them fails by itself, the
    others are stopped. Use the group as a context manager, which closes it, and call `PContext.wait` for the result:

    >>> with start_processes("powers", pow, args={0: (2, 3), 1: (3, 2)}) as group:
    ...     result = group.wait()
    >>> result.return_values
    {0: 8, 1: 9}

    One tuple of arguments serves all ranks when ``nprocs`` says how many there are. A program is started by its name:

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     logs = DefaultLogsSpecs(folder, redirects=Std.ALL)
    ...     with start_processes("greet", "echo", ("hello",), nprocs=2, logs_specs=logs) as group:
    ...         result = group.wait()
    ...     with open(result.stdouts[1]) as stream:
    ...         stream.read()
    'hello\n'

    A failure is not silent, whether the result is looked at or not: a function prints its traceback to its stderr at
    once, and the logger ``phalanx`` has one ERROR when the first failure is known.

    By position, the arguments of torch's function of this name are understood, in its newer and in its older form::

        start_processes(name, entrypoint, args=(), envs=None, logs_specs=None,
                        log_line_prefixes=None, start_method="spawn")
        start_processes(name, entrypoint, args=(), envs=None, log_dir=None,
                        start_method="spawn", redirects=Std.NONE, tee=Std.NONE)

    Args:
        name: The name of the group, for reports.
        entrypoint: A callable; or a program, by its name (found on PATH) or its path. What a worker cannot import (a
            lambda, a closure, a function of a notebook) is sent by value, with cloudpickle.
        args: The positional arguments: a mapping from each local rank to a tuple, or one tuple for all ranks, with
            ``nprocs``. Arguments of a program that are no strings are converted with ``str()``.
        envs: A mapping from each local rank to environment variables, which are added to the caller's.
        logs_specs: Where output goes; default: a `DefaultLogsSpecs` that redirects nothing. In the older form, the
            path of an existing, empty folder.
        *rest: What follows by position: see the two forms above.
        nprocs: N, at least 1. Needed if neither ``args`` nor ``envs`` is a mapping.
        log_line_prefixes: A mapping from local rank to what stands before each line on the console; a rank that it
            leaves out has ``[rank] ``.
        start_method: How workers of a callable are started: "spawn" (a fresh interpreter each), "forkserver" (forks of
            one fresh interpreter) or "fork" (forks of this process; nothing is pickled). No effect on programs.
        redirects: Older form only: the streams that go to files and not to the console.
        tee: Older form only: the streams that go to files and to the console.
        log_dir: Older form only: the folder, given by name.
        settle: Seconds (>= 0) between the first failure and the stop of the others. In this time, they may fail too and
            leave tracebacks of their own. If the first failure is a lost connection, it is 1 s at least (0 stays 0).
        grace: Seconds (>= 0) between SIGTERM and SIGKILL when the others are stopped.
        linger: Seconds (>= 0) for which processes that workers left behind (an upload, say) may go on after every
            worker has succeeded. Then they get SIGTERM and, 50 ms later, SIGKILL; `RunProcsResult.leftovers` has them.
        orphan_grace: When this process is killed: seconds (>= 0, finite) between the SIGTERM that every worker gets
            then and SIGKILL. Default: SIGKILL at once.
        notice: A signal's number and seconds (> 0), like ``(signal.SIGUSR1, 60)``: what a planned stop, a
            `PContext.close`, begins with. The workers that handle the signal get it, `phalanx.should_stop` turns true
            in all of them, and they have so long before SIGTERM. Default: none.
        duplicate_stdout_filters: A list of strings. Lines of any rank's redirected stdout that contain one of them are
            also written to one file, `LogsDest.filtered_stdout`.
        duplicate_stderr_filters: The same for stderr.
        console: How the console shows streams that are teed.
        preload: Import these modules once: the workers start as forks that have them. For a callable, with
            ``start_method="forkserver"``.
        warm: An entered `warm` to fork the workers from; default: the innermost one that is open, if it has imported
            all of ``preload``.
        writable: Whether workers may write to large arrays (1 MiB or more) among their arguments. If so, each worker
            has its own copy of what it writes to. If not, all share one read-only copy.
        main: How workers ("spawn", "forkserver") get what the main module defines. "import": they run the module again
            as ``__mp_main__``, as those of `multiprocessing` do, so the module must start processes under
            ``if __name__ == "__main__":`` only. "value": it is sent by value. A main module that cannot be run again
            (a notebook, the REPL, ``-c``) is sent by value in either case.
        placement: On which CPUs, with which nice value and within which limits the workers run; default: those of the
            caller.
        timers: How timers (`phalanx.timer.expires`) and heartbeats (`phalanx.timer.beat`) of the workers are watched;
            default: not at all.
        record: Whether to keep a ``run.json`` in the run's folder, so that ``phalanx runs``, ``phalanx logs`` and
            ``phalanx stack`` find the group. Needs a `DefaultLogsSpecs` with a ``log_dir``, or no ``logs_specs``: then
            all streams are teed, and the logs are where those of ``phalanx run`` are.
        on_event: Called with each event of the group, a dict: a line of ``events.jsonl``, see the guide to logs. On a
            thread of its own, in order: it holds up no worker and no stop, but `PContext.wait` waits for it, 5 s at
            most. The first exception that it raises is logged.

    Returns:
        The started group: a `MultiprocessContext` for a callable, a `SubprocessContext` for a program.

    Raises:
        RanksError: ``args`` or ``envs`` does not hold exactly the ranks 0 to N - 1 (a ValueError and a RuntimeError).
        TypeError: An argument has a wrong type.
        UnpicklableError: Something cannot be pickled; the message names it (a TypeError).
        ValueError: An unknown start method, a negative time, ``nprocs`` below 1, a placement that this machine does not
            allow, or logs that cannot have a record.
        PreloadError: A module of ``preload`` cannot be imported.
        FileNotFoundError: The program, or the folder of the older form, does not exist.
        PermissionError: The program must not be executed, or the logs must not be written.
        NotADirectoryError: The log folder is a file.
        IsADirectoryError: The program is a folder.
        RuntimeError: The folder of the older form is not empty.
        OSError: A worker could not be started. Those that had been are gone, and the message says what ran out.
    """
    historical: dict[str, Any] = {
        "start_method": start_method,
        "redirects": redirects,
        "tee": tee,
        "log_line_prefixes": log_line_prefixes,
    }
    by_path = isinstance(logs_specs, (str, os.PathLike))
    order = ("start_method", "redirects", "tee") if by_path else ("log_line_prefixes", "start_method")
    if len(rest) > len(order):
        most = 5 + len(order)
        msg = f"start_processes() takes at most {most} positional arguments in this form, got {5 + len(rest)}"
        raise TypeError(msg)
    for option, value in zip(order, rest, strict=False):
        if historical[option] is not UNSET:
            raise TypeError(f"start_processes() got {option!r} twice, by position and by name")
        historical[option] = value
    method = "spawn" if historical["start_method"] is UNSET else historical["start_method"]
    prefixes = None if historical["log_line_prefixes"] is UNSET else historical["log_line_prefixes"]

    check_options(
        name, entrypoint, method, settle, grace, linger, console, placement, timers, main,
        orphan_grace=orphan_grace, notice=notice, starts_warm=bool(preload or warm),
    )  # fmt: skip
    all_args, all_envs = per_rank(args, envs, nprocs)
    if record and logs_specs is log_dir is None and historical["redirects"] is historical["tee"] is UNSET:
        specs: LogsSpecs = recorded(None)
    else:
        specs = _logs_specs(logs_specs, log_dir, historical["redirects"], historical["tee"])
        if record:
            specs = recorded(specs)
    options: dict[str, Any] = {"settle": settle, "grace": grace, "linger": linger, "orphan_grace": orphan_grace}
    options |= {"notice": notice, "console": console, "placement": placement, "timers": timers, "record": record}
    options["on_event"] = on_event
    options["duplicate_stdout_filters"] = checked_filters("duplicate_stdout_filters", duplicate_stdout_filters)
    options["duplicate_stderr_filters"] = checked_filters("duplicate_stderr_filters", duplicate_stderr_filters)
    context: PContext
    if isinstance(entrypoint, str):
        context = SubprocessContext(name, entrypoint, all_args, all_envs, specs, prefixes, **options)
    else:
        options |= {"preload": preload, "warm": warm, "writable": writable, "main": main}
        context = MultiprocessContext(name, entrypoint, all_args, all_envs, method, specs, prefixes, **options)
    try:
        context.start()
    except SignalException as error:
        context.close(error.sigval, grace)
        raise
    except BaseException:  # such as a signal handler's exception: the caller has no group to close
        context.close(timeout=grace)
        raise
    return context


def _logs_specs(logs_specs: Any, log_dir: Any, redirects: Any, tee: Any) -> LogsSpecs:
    if log_dir is not None:
        if logs_specs is not None:
            raise TypeError("log_dir: give either logs_specs or log_dir")
        logs_specs = log_dir
    redirects, tee = (Std.NONE if value is UNSET else value for value in (redirects, tee))
    if isinstance(logs_specs, (str, os.PathLike)):
        return FolderLogsSpecs(os.fspath(logs_specs), redirects, tee)
    if logs_specs is None:
        return DefaultLogsSpecs(redirects=redirects, tee=tee)
    if not isinstance(logs_specs, LogsSpecs):
        raise TypeError(f"logs_specs: expected a LogsSpecs or the path of a folder, got {logs_specs!r}")
    if redirects or tee:
        raise TypeError("redirects, tee: they belong into the logs specs that are given")
    return logs_specs
