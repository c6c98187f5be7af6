"""Call one function in N processes that fall together: the names of ``torch.multiprocessing``.

`spawn` calls ``fn(i, *args)`` in process i. When one fails, the others are stopped, and the failure that came first is
raised, with its traceback. The engine and the guarantees are those of `phalanx.multiprocessing`. This module owns the
exceptions, the handle on each process, and what becomes of a group at the interpreter's exit.

``import phalanx.spawn as mp`` replaces ``import torch.multiprocessing as mp``: everything that the standard
`multiprocessing` exports is here as well. The sharing strategies of tensors (``set_sharing_strategy``, …)
are not: import ``torch.multiprocessing`` beside this module for them.

>>> import phalanx.spawn as mp
>>> queue = mp.get_context("spawn").SimpleQueue()
>>> def work(i, queue, power):
...     queue.put(i**power)
>>> mp.spawn(work, args=(queue, 2), nprocs=3)
>>> sorted(queue.get() for _ in range(3))
[0, 1, 4]
>>> queue.close()
"""

from __future__ import annotations

import os
import signal
from types import NoneType

from phalanx._group.arguments import GRACE, IMPORT, SETTLE, check_options, is_sequence, per_rank, recorded
from phalanx.multiprocessing import DefaultLogsSpecs, LogsSpecs
from phalanx.spawn._context import ProcessContext, SpawnContext, SpawnedProcess, SpawnGroup
from phalanx.spawn._exceptions import ProcessException, ProcessExitedException, ProcessRaisedException

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from multiprocessing import *  # noqa: F403 - what `__getattr__` finds there, for type checkers
    from typing import Any, Literal, TypedDict, Unpack, overload

    from phalanx._group.warm import Warm
    from phalanx._placement.placement import Placement
    from phalanx.multiprocessing import ConsoleSpecs
    from phalanx.timer import TimerSpecs

__all__ = [
    "Array",
    "AuthenticationError",
    "Barrier",
    "BoundedSemaphore",
    "BufferTooShort",
    "Condition",
    "Event",
    "JoinableQueue",
    "Lock",
    "Manager",
    "Pipe",
    "Pool",
    "Process",
    "ProcessContext",
    "ProcessError",
    "ProcessException",
    "ProcessExitedException",
    "ProcessRaisedException",
    "Queue",
    "RLock",
    "RawArray",
    "RawValue",
    "Semaphore",
    "SimpleQueue",
    "SpawnContext",
    "SpawnedProcess",
    "TimeoutError",
    "Value",
    "active_children",
    "allow_connection_pickling",
    "cpu_count",
    "current_process",
    "freeze_support",
    "get_all_start_methods",
    "get_context",
    "get_logger",
    "get_start_method",
    "log_to_stderr",
    "parent_process",
    "reducer",
    "set_executable",
    "set_forkserver_preload",
    "set_start_method",
    "spawn",
    "start_processes",
]


if TYPE_CHECKING:

    class Options(TypedDict, total=False):
        """The arguments of `spawn` that torch's has not."""

        envs: Mapping[int, Mapping[str, str]] | None
        logs_specs: LogsSpecs | None
        settle: float
        grace: float
        linger: float
        preload: Sequence[str] | None
        warm: Warm | None
        writable: bool
        main: str
        placement: Placement | None
        timers: TimerSpecs | None
        console: ConsoleSpecs | None
        record: bool


if TYPE_CHECKING:  # apart from the above: mypy wants a block of overloads alone

    @overload
    def spawn(
        fn: Callable[..., object],
        args: Iterable[Any] = (),
        nprocs: int = 1,
        join: Literal[True] = True,
        daemon: bool = False,
        start_method: str = "spawn",
        **options: Unpack[Options],
    ) -> None: ...
    @overload
    def spawn(
        fn: Callable[..., object],
        args: Iterable[Any] = (),
        nprocs: int = 1,
        *,
        join: Literal[False],
        daemon: bool = False,
        start_method: str = "spawn",
        **options: Unpack[Options],
    ) -> ProcessContext: ...
    @overload
    def spawn(
        fn: Callable[..., object],
        args: Iterable[Any] = (),
        nprocs: int = 1,
        join: bool = True,
        daemon: bool = False,
        start_method: str = "spawn",
        **options: Unpack[Options],
    ) -> ProcessContext | None: ...


def spawn(
    fn: Callable[..., object],
    args: Iterable[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
    *,
    envs: Mapping[int, Mapping[str, str]] | None = None,
    logs_specs: LogsSpecs | None = None,
    settle: float = SETTLE,
    grace: float = GRACE,
    linger: float = 0.0,
    preload: Sequence[str] | None = None,
    warm: Warm | None = None,
    writable: bool = False,
    main: str = IMPORT,
    placement: Placement | None = None,
    timers: TimerSpecs | None = None,
    console: ConsoleSpecs | None = None,
    record: bool = False,
) -> ProcessContext | None:
    """Call ``fn(i, *args)`` in process i, for i from 0 to ``nprocs`` - 1. What it returns is dropped.

    `start_processes` is the same function under its other name.

    Args:
        fn: Any callable: also a lambda, a closure, or a function of a notebook, which are sent by value (cloudpickle).
        args: The arguments after the index, the same for all; pickled once.
        nprocs: How many processes, at least 1.
        join: Whether to wait until all have ended, and to raise when one fails. A Ctrl-C stops the group before
            KeyboardInterrupt is raised.
        daemon: With ``join=False``: whether the exit of the interpreter (or of the `multiprocessing.Process` that calls
            this) stops the processes (SIGTERM, grace, SIGKILL) or waits for them. If it is killed, they are killed in
            either case.
        start_method: "spawn" (a fresh interpreter each), "forkserver" (forks of one fresh interpreter) or "fork" (forks
            of this process: nothing is pickled).
        envs: A mapping from each index to environment variables, which are added to the caller's.
        logs_specs: Where output goes. By default the processes have the caller's own streams.
        settle: Seconds (>= 0) after the first failure before the others are stopped.
        grace: Seconds (>= 0) between SIGTERM and SIGKILL.
        linger: Seconds (>= 0) for which processes that these have left behind may go on after all have ended well.
        preload: Modules to import once, with "forkserver": the processes are forks that have them already.
        warm: An entered `phalanx.multiprocessing.warm` to start from, with "forkserver".
        writable: Whether ``fn`` may write to large arrays (1 MiB or more) in ``args``, which are shared otherwise.
        main: "import" or "value": see `phalanx.multiprocessing.start_processes`.
        placement: Where the processes run, and within which limits; default: as the caller.
        timers: A `phalanx.timer.TimerSpecs`, to watch the timers that the processes take, and their heartbeats.
        console: How the console shows the streams that ``logs_specs`` tees.
        record: Whether ``phalanx runs``, ``logs`` and ``stack`` serve the group: see
            `phalanx.multiprocessing.start_processes`.

    Returns:
        None after a join, else the context. It may be dropped: the processes go on. A failure is logged as an ERROR of
        the logger ``phalanx`` when it is known; one that no `join` has raised is written to stderr at the
        interpreter's exit.

    Raises:
        ProcessRaisedException: The first failure was an exception: see `ProcessContext.join`.
        ProcessExitedException: The first failure was a signal or an exit code.
        KeeperLostError: The group's helper process was killed, and with it the group.
        TypeError: An argument has a wrong type, or cannot be pickled (the message names it). Nothing was started.
        ValueError: An argument has a wrong value. Nothing was started.
        OSError: A process could not be started; those that had been are gone.

    >>> try:
    ...     spawn(lambda i, n: n / (1 - i), args=(12,), nprocs=2)
    ... except ProcessRaisedException as error:
    ...     index, text = error.error_index, str(error)
    >>> index, text.splitlines()[-1]
    (1, 'ZeroDivisionError: division by zero')
    """
    if not callable(fn):
        raise TypeError(f"fn: expected a callable, got {fn!r}")
    if not is_sequence(args):
        raise TypeError(f"args: expected a tuple of arguments, got {args!r}")
    all_args, all_envs = per_rank(tuple(args), envs, nprocs)
    name = str(getattr(fn, "__qualname__", None) or type(fn).__qualname__)
    check_options(
        name, fn, start_method, settle, grace, linger, console, placement, timers, main,
        starts_warm=bool(preload or warm),
    )  # fmt: skip
    if not isinstance(logs_specs, (LogsSpecs, NoneType)):
        raise TypeError(f"logs_specs: expected a LogsSpecs, got {logs_specs!r}")
    if record:
        specs: LogsSpecs = recorded(logs_specs)
    else:
        specs = DefaultLogsSpecs(os.devnull) if logs_specs is None else logs_specs
    options: dict[str, Any] = {"settle": settle, "grace": grace, "linger": linger, "preload": preload, "warm": warm}
    options |= {"writable": writable, "main": main, "placement": placement, "timers": timers, "console": console}
    options |= {"record": record, "announces": not join}
    group = SpawnGroup(name, fn, all_args, all_envs, start_method, specs, daemon=daemon, **options)
    try:
        group.start()
        context = (SpawnContext if start_method == "spawn" else ProcessContext)(group)
        if join:
            context.join()
            return None
        group.keep()
    except KeyboardInterrupt:
        group.interrupt()
        raise
    except BaseException:
        group.end(signal.SIGTERM)
        raise
    return context


start_processes = spawn


_OF_TENSORS = ("get_all_sharing_strategies", "get_sharing_strategy", "set_sharing_strategy")


if not TYPE_CHECKING:  # type checkers would accept every name

    def __getattr__(name: str) -> object:
        """What `multiprocessing` has, loaded when first used."""
        if not name.startswith("_"):
            import multiprocessing

            if hasattr(multiprocessing, name):
                return getattr(multiprocessing, name)
        if name in _OF_TENSORS:
            raise AttributeError(f"{name} is about tensors, and stays torch's: call torch.multiprocessing.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
