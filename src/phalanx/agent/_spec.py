"""`WorkerSpec`: what the workers of an agent are; `WorkerGroup` and `RunResult`: who they are, and what became of them.

Refuses what cannot be run, before anything starts.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from enum import Enum
from typing import Any

from phalanx._base.frozen import Value
from phalanx._base.text import SHORT_LINE, how_many, one_line, seconds
from phalanx._group.arguments import checked_filters, checked_whole, is_sequence
from phalanx._outcomes.failure import ProcessFailure
from phalanx._placement.placement import Placement
from phalanx.rendezvous import OneMachineRendezvous, RendezvousHandler

_MOST_PORT = 65535


class WorkerSpec(Value):
    """What the workers of an agent are, and how often they are started again. A frozen value.

    Args:
        role: What they are called: ``ROLE_NAME``, and the name of the group in reports.
        local_world_size: How many there are on this machine, 1 or more.
        rdzv_handler: How the agent finds those of other machines; None: there are none.
        fn: The older name of ``entrypoint``; deprecated.
        entrypoint: What they run: a function; or a program, by its name (found on PATH) or its path.
        args: The positional arguments. In strings, ``${local_rank}`` stands for the worker's local rank.
        max_restarts: How many times the group is started again after failures, 0 or more.
        monitor_interval: Seconds (> 0) between two calls of a `_monitor_workers` of your own. `LocalElasticAgent` polls
            nothing: the kernel tells of exits.
        master_port: ``MASTER_PORT``; None or 0: that of the rendezvous.
        master_addr: ``MASTER_ADDR``; None: that of the rendezvous.
        local_addr: The address of this machine, for the rendezvous; None: its name. Without effect on one machine.
        event_log_handler: Where events go: a destination of `phalanx.events`. Each is posted on a thread of its own.
        numa_options: A `phalanx.multiprocessing.Placement`: the CPUs and the limits of each worker.
        duplicate_stdout_filters: A list of strings. Lines of any rank's redirected stdout that contain one of them are
            also written to one file.
        duplicate_stderr_filters: The same for stderr.
        virtual_local_rank: Whether each worker sees one device, at index 0, and ``LOCAL_RANK`` 0.

    Raises:
        TypeError, ValueError: What is wrong with which argument.

    >>> WorkerSpec("trainer", 0, None, entrypoint=print)
    Traceback (most recent call last):
    ValueError: local_world_size: expected a whole number, 1 or more, got 0
    """

    __module__ = "phalanx.agent"

    role: str
    local_world_size: int
    rdzv_handler: RendezvousHandler
    fn: Callable[..., Any] | None
    entrypoint: Callable[..., Any] | str
    args: tuple[Any, ...]
    max_restarts: int
    monitor_interval: float
    master_port: int | None
    master_addr: str | None
    local_addr: str | None
    event_log_handler: str
    numa_options: Placement | None
    duplicate_stdout_filters: list[str] | None
    duplicate_stderr_filters: list[str] | None
    virtual_local_rank: bool

    def __init__(
        self,
        role: str,
        local_world_size: int,
        rdzv_handler: RendezvousHandler | None,
        fn: Callable[..., Any] | None = None,
        entrypoint: Callable[..., Any] | str | None = None,
        args: tuple[Any, ...] = (),
        max_restarts: int = 3,
        monitor_interval: float = 0.1,
        master_port: int | None = None,
        master_addr: str | None = None,
        local_addr: str | None = None,
        event_log_handler: str = "null",
        numa_options: Placement | None = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
        virtual_local_rank: bool = False,  # noqa: FBT001, FBT002 - the historical signature, by position
    ) -> None:
        for name, text, missing in (
            ("role", role, False), ("event_log_handler", event_log_handler, False), ("master_addr", master_addr, True),
            ("local_addr", local_addr, True),
        ):  # fmt: skip
            if not isinstance(text, str) and not (missing and text is None):
                msg = f"{name}: expected a string, got {text!r}"
                raise TypeError(msg)
        if numa_options is not None:
            check_type("numa_options", numa_options, Placement)
        port = None if master_port is None else checked_whole("master_port", master_port, 0)
        if port is not None and port > _MOST_PORT:
            msg = f"master_port: expected a port, 0 to {_MOST_PORT}, got {master_port!r}"
            raise ValueError(msg)
        self._store(
            role=role,
            local_world_size=checked_whole("local_world_size", local_world_size, 1),
            rdzv_handler=OneMachineRendezvous() if rdzv_handler is None else _checked_handler(rdzv_handler),
            fn=fn,
            entrypoint=_checked_entrypoint(fn, entrypoint),
            args=_checked_args(args),
            max_restarts=checked_whole("max_restarts", max_restarts, 0),
            monitor_interval=seconds("monitor_interval", monitor_interval, zero=False, endless=False),
            master_port=port,
            master_addr=master_addr,
            local_addr=local_addr,
            event_log_handler=event_log_handler,
            numa_options=numa_options,
            duplicate_stdout_filters=checked_filters("duplicate_stdout_filters", duplicate_stdout_filters),
            duplicate_stderr_filters=checked_filters("duplicate_stderr_filters", duplicate_stderr_filters),
            virtual_local_rank=bool(virtual_local_rank),
        )

    def get_entrypoint_name(self) -> str:
        """Return the name of the function, or the program as it was given."""
        if isinstance(self.entrypoint, str):
            return self.entrypoint
        return str(getattr(self.entrypoint, "__qualname__", None) or repr(self.entrypoint))


def check_type(name: str, value: object, kind: type) -> None:
    """Refuse a value of another type. Raises TypeError."""
    if not isinstance(value, kind):
        msg = f"{name}: expected a {kind.__name__}, got {value!r}"
        raise TypeError(msg)


def _checked_handler(handler: Any) -> Any:
    """A handler of another library will do as well, if it has the methods."""
    if not isinstance(handler, RendezvousHandler):
        absent = [name for name in ("next_rendezvous", "get_run_id", "num_nodes_waiting") if not hasattr(handler, name)]
        if absent:
            msg = f"rdzv_handler: expected a RendezvousHandler, or None, got {handler!r}, which has no {absent[0]}"
            raise TypeError(msg)
    return handler


def _checked_entrypoint(fn: Any, entrypoint: Any) -> Any:
    if fn is not None:
        if entrypoint is not None and entrypoint is not fn:
            msg = "fn, entrypoint: expected one of them, got both; fn is the older name"
            raise ValueError(msg)
        warnings.warn("fn: deprecated; give the function as entrypoint", DeprecationWarning, stacklevel=4)
        entrypoint = fn
    if not isinstance(entrypoint, str) and not callable(entrypoint):
        msg = f"entrypoint: expected a callable, or a program's name, got {entrypoint!r}"
        raise TypeError(msg)
    return entrypoint


def _checked_args(args: Any) -> tuple[Any, ...]:
    if not is_sequence(args):
        msg = f"args: expected a tuple of arguments, got {args!r}"
        raise TypeError(msg)
    return tuple(args)


def name_of(spec: WorkerSpec) -> str:
    """Return what a report calls the job: the script, where the program is this Python."""
    if spec.entrypoint == sys.executable:
        return next((str(arg) for arg in spec.args if not str(arg).startswith("-")), sys.executable)
    return spec.get_entrypoint_name()


class WorkerState(str, Enum):  # noqa: UP042 - its text is that of torch's: WorkerState.HEALTHY
    """The state of a group of workers: all of them change it together."""

    __module__ = "phalanx.agent"

    UNKNOWN = "UNKNOWN"
    """Not known: the agent cannot go on."""
    INIT = "INIT"
    """Nothing has been started."""
    HEALTHY = "HEALTHY"
    """The workers run."""
    UNHEALTHY = "UNHEALTHY"
    """The workers run, but make no headway: the group is to be restarted."""
    STOPPED = "STOPPED"
    """The agent has stopped them."""
    SUCCEEDED = "SUCCEEDED"
    """Every worker has exited with 0."""
    FAILED = "FAILED"
    """A worker has failed."""

    @staticmethod
    def is_running(state: WorkerState) -> bool:
        """Whether workers in ``state`` run: HEALTHY and UNHEALTHY ones do.

        >>> [state.value for state in WorkerState if WorkerState.is_running(state)]
        ['HEALTHY', 'UNHEALTHY']
        """
        return state in (WorkerState.HEALTHY, WorkerState.UNHEALTHY)


class Worker:
    """One worker of a group. Its ranks are assigned anew before each attempt.

    Args:
        local_rank: Its rank on this machine.
        global_rank: Its rank in the whole job; -1: not assigned yet, as of the others.
        role_rank: Its rank among the workers of its role.
        world_size: How many workers the job has.
        role_world_size: How many workers the role has.

    Attributes:
        id: What `_start_workers` has returned for it: the process id, for `LocalElasticAgent`. None before.
    """

    __module__ = "phalanx.agent"
    __slots__ = ("global_rank", "id", "local_rank", "role_rank", "role_world_size", "world_size")

    def __init__(
        self,
        local_rank: int,
        global_rank: int = -1,
        role_rank: int = -1,
        world_size: int = -1,
        role_world_size: int = -1,
    ) -> None:
        self.id: Any = None
        self.local_rank = local_rank
        self.global_rank = global_rank
        self.role_rank = role_rank
        self.world_size = world_size
        self.role_world_size = role_world_size

    def __repr__(self) -> str:
        return (
            f"Worker(id={self.id!r}, local_rank={self.local_rank}, global_rank={self.global_rank}, "
            f"role_rank={self.role_rank}, world_size={self.world_size}, role_world_size={self.role_world_size})"
        )


class WorkerGroup:
    """The workers of an agent, as of the latest attempt.

    Args:
        spec: What they are.

    Attributes:
        workers: One `Worker` for each local rank, in order.
        store: What the agents share, see `phalanx.rendezvous.RendezvousInfo`; None on one machine.
        group_rank: The agent's rank among the agents; None before the first rendezvous, as the next three.
        group_world_size: How many agents there are.
        master_addr: Where the workers meet.
        master_port: The port.
        state: Their `WorkerState`.
    """

    __module__ = "phalanx.agent"
    __slots__ = (
        *("group_rank", "group_world_size", "master_addr", "master_port", "spec", "state", "store", "workers"),
    )

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.workers = [Worker(local_rank=rank) for rank in range(spec.local_world_size)]
        self.store: Any = None
        self.group_rank: int | None = None
        self.group_world_size: int | None = None
        self.master_addr: str | None = None
        self.master_port: int | None = None
        self.state = WorkerState.INIT

    def __repr__(self) -> str:
        return f"<WorkerGroup {self.spec.role!r}, {self.state.value}, {how_many(len(self.workers), 'worker')}>"


class RunResult(Value):
    """What became of the workers; or, as `_monitor_workers` returns it, how they are.

    Args:
        state: Their state.
        return_values: If all succeeded: what each returned (None for a program), by global rank.
        failures: If any failed: the failures of those that failed by themselves, by global rank.

    >>> RunResult(WorkerState.SUCCEEDED, {0: "done"}).return_values[0]
    'done'
    """

    __module__ = "phalanx.agent"

    state: WorkerState
    return_values: dict[int, Any]
    failures: dict[int, ProcessFailure]

    def __init__(
        self,
        state: WorkerState,
        return_values: dict[int, Any] | None = None,
        failures: dict[int, ProcessFailure] | None = None,
    ) -> None:
        self._store(
            state=WorkerState(state),
            return_values={} if return_values is None else return_values,
            failures={} if failures is None else failures,
        )

    def __repr__(self) -> str:
        text = super().__repr__()
        if len(text) < 3 * SHORT_LINE and "\n" not in text:
            return text
        failed = min(self.failures.values(), key=lambda one: getattr(one, "first_key", 0), default=None)
        cause = "" if failed is None else f", first {one_line(repr(failed), 2 * SHORT_LINE)}"
        counts = f"{how_many(len(self.return_values), 'return value')}, {how_many(len(self.failures), 'failure')}"
        return f"<{type(self).__name__} {self.state.value}: {counts}{cause}>"

    def is_failed(self) -> bool:
        """Whether the state is FAILED."""
        return self.state == WorkerState.FAILED
