"""`start_processes`: reads both historical signatures, and refuses bad input before anything starts."""

from __future__ import annotations

import os

from phalanx._engine.host_signals import SignalException
from phalanx._group.arguments import GRACE, IMPORT, SETTLE, UNSET, check_options, is_sequence, per_rank, recorded
from phalanx._group.command_group import SubprocessContext
from phalanx._group.function_group import MultiprocessContext
from phalanx._logs.specs import DefaultLogsSpecs, FolderLogsSpecs, LogsSpecs
from phalanx._logs.std import Std

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
) -> PContext:
    r"""Start N copies of a function or of a binary, as one group.

    Both historical forms work, positionally too::

        start_processes(name, entrypoint, args, envs, logs_specs, log_line_prefixes=None, start_method="spawn")
        start_processes(name, entrypoint, args, envs, log_dir, start_method="spawn", redirects=Std.NONE, tee=Std.NONE)

    Args:
        name: What the group is called, in reports.
        entrypoint: A callable, or the name (found on PATH) or path of a binary. A callable may also be a lambda, a
            closure, or a function of a notebook: what a worker cannot import is sent by value, with cloudpickle.
        args: Local rank → tuple of positional arguments, for exactly the ranks 0 to N - 1; or one tuple for all ranks,
            with ``nprocs``. A binary's arguments that are no strings are cast with ``str()``.
        envs: Local rank → environment variables on top of the caller's, for the same ranks; may be left out.
        logs_specs: A `LogsSpecs` (default: a `DefaultLogsSpecs` with nothing redirected), or, in the second form, the
            path of an existing, empty folder.
        *rest: What follows by position: see the two forms above.
        nprocs: N, at least 1. Needed only where ``args`` is one tuple, or left out.
        log_line_prefixes: Local rank → what stands before each teed line; default ``[rank] ``.
        start_method: "spawn" (a fresh interpreter each), "forkserver" (forks of one fresh interpreter) or "fork" (forks
            of this process: nothing is pickled). Without effect on binaries.
        redirects: Second form only: the streams that go to files only.
        tee: Second form only: the streams that go to files and to the console.
        log_dir: The folder of the second form, by its name.
        settle: Seconds (>= 0) after the first failure in which the others may leave evidence, before they are stopped.
        grace: Seconds (>= 0) between SIGTERM and SIGKILL when a failure stops the others.
        linger: Seconds (>= 0) for which processes that workers left behind (an upload, say) may go on when every worker
            has succeeded. Then they get SIGTERM and, 50 ms later, SIGKILL; `RunProcsResult.leftovers` says which.
        duplicate_stdout_filters: Strings; the lines of all ranks' redirected stdout that hold one of them are also
            written to one file, ``LogsDest.filtered_stdout``.
        duplicate_stderr_filters: The same for stderr.
        console: How the console shows the teed streams.
        preload: Modules that are imported once, for workers that are forks of where they are: for a callable, with
            ``start_method="forkserver"``.
        warm: An entered `warm`, to start from; default: the one around, if it has all of ``preload``.
        writable: Whether workers may write to large arrays among their arguments (1 MiB or more), which they share
            otherwise, and may read only. What a worker writes to, it has a copy of.
        main: How functions, classes and globals of the main module come to the workers of start methods "spawn" and
            "forkserver": "import", they run the module again as ``__mp_main__``, as those of `multiprocessing` do, so
            it needs ``if __name__ == "__main__":`` around what starts processes; or "value", they are sent by value.
            What cannot be run again (a notebook, the REPL, ``-c``) is sent by value in any case.
        placement: Where the workers run (CPUs, nice value), and within which limits; default: as the caller.
        timers: A `phalanx.timer.TimerSpecs`: the group watches the timers that its workers take with
            `phalanx.timer.expires`, and their heartbeats. Default: it does not.
        record: Whether a ``run.json`` in the run's folder says what becomes of the group, so that ``phalanx runs``,
            ``phalanx logs`` and ``phalanx stack`` serve it. Without ``logs_specs``, its logs are where those of
            ``phalanx run`` are, and all streams are teed; else these are a `DefaultLogsSpecs` with a ``log_dir``.

    Returns:
        The started group.

    Raises:
        RanksError: ``args`` or ``envs`` does not hold exactly the ranks 0 to N - 1 (a ValueError and a RuntimeError).
        TypeError: A wrong type, or something that cannot be pickled (the message names it).
        ValueError: An unknown start method, a negative time, ``nprocs`` below 1, a placement that this machine does not
            allow, logs that cannot have a record.
        FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError, RuntimeError: The binary or the log
            folder is not what it should be.
        OSError: A worker could not be started; those that had been are gone, and the message says what ran out.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     args = {0: ("hello", 0), 1: ("hello", 1)}
    ...     with start_processes("greet", "/bin/echo", args, log_dir=folder, redirects=Std.ALL) as group:
    ...         result = group.wait()
    ...     with open(result.stdouts[1]) as stream:
    ...         stream.read()
    'hello 1\n'
    """
    given: dict[str, Any] = {
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
        if given[option] is not UNSET:
            msg = f"start_processes() got {option!r} twice, by position and by name"
            raise TypeError(msg)
        given[option] = value
    method = "spawn" if given["start_method"] is UNSET else given["start_method"]
    prefixes = None if given["log_line_prefixes"] is UNSET else given["log_line_prefixes"]

    check_options(
        name, entrypoint, method, settle, grace, linger, console, placement, timers, main,
        starts_warm=bool(preload or warm),
    )  # fmt: skip
    all_args, all_envs = per_rank(args, envs, nprocs)
    if record and logs_specs is log_dir is None and given["redirects"] is given["tee"] is UNSET:
        specs: LogsSpecs = recorded(None)
    else:
        specs = _logs_specs(logs_specs, log_dir, given["redirects"], given["tee"])
        if record:
            specs = recorded(specs)
    options: dict[str, Any] = {"settle": settle, "grace": grace, "linger": linger}
    options |= {"console": console, "placement": placement, "timers": timers, "record": record}
    options["duplicate_stdout_filters"] = _strings("duplicate_stdout_filters", duplicate_stdout_filters)
    options["duplicate_stderr_filters"] = _strings("duplicate_stderr_filters", duplicate_stderr_filters)
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
    except BaseException:  # a signal handler's own exception: nobody else can close it
        context.close(timeout=grace)
        raise
    return context


def _strings(name: str, value: Any) -> list[str] | None:
    if value is not None and (not is_sequence(value) or not all(isinstance(part, str) for part in value)):
        msg = f"{name}: expected a list of strings, got {value!r}"
        raise TypeError(msg)
    if value is not None and not all(value):
        msg = f"{name}: an empty string is in every line, got {value!r}"
        raise ValueError(msg)
    return None if value is None else list(value)


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
        msg = f"logs_specs: expected a LogsSpecs or the path of a folder, got {logs_specs!r}"
        raise TypeError(msg)
    if redirects or tee:
        raise TypeError("redirects, tee: they belong into the logs specs that are given")
    return logs_specs
