"""`WorkerSpec`: what the workers of an agent are. Refuses what cannot be run, before anything starts."""

from __future__ import annotations

import operator
import sys
import warnings
from collections.abc import Callable
from typing import Any

from phalanx._base.frozen import Value
from phalanx._base.text import seconds
from phalanx._group.arguments import is_sequence
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
    __slots__ = (  # noqa: RUF023 - the order is that of the arguments
        "role", "local_world_size", "rdzv_handler", "fn", "entrypoint", "args", "max_restarts", "monitor_interval",
        "master_port", "master_addr", "local_addr", "event_log_handler", "numa_options", "duplicate_stdout_filters",
        "duplicate_stderr_filters", "virtual_local_rank",
    )  # fmt: skip

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
        port = None if master_port is None else _whole("master_port", master_port, 0)
        if port is not None and port > _MOST_PORT:
            msg = f"master_port: expected a port, 0 to {_MOST_PORT}, got {master_port!r}"
            raise ValueError(msg)
        self._store(
            role=role,
            local_world_size=_whole("local_world_size", local_world_size, 1),
            rdzv_handler=OneMachineRendezvous() if rdzv_handler is None else _checked_handler(rdzv_handler),
            fn=fn,
            entrypoint=_checked_entrypoint(fn, entrypoint),
            args=_checked_args(args),
            max_restarts=_whole("max_restarts", max_restarts, 0),
            monitor_interval=seconds("monitor_interval", monitor_interval, zero=False, endless=False),
            master_port=port,
            master_addr=master_addr,
            local_addr=local_addr,
            event_log_handler=event_log_handler,
            numa_options=numa_options,
            duplicate_stdout_filters=_checked_filters("duplicate_stdout_filters", duplicate_stdout_filters),
            duplicate_stderr_filters=_checked_filters("duplicate_stderr_filters", duplicate_stderr_filters),
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


def _whole(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        msg = f"{name}: expected a whole number, {least} or more, got {value!r}"
        raise TypeError(msg)
    if (number := operator.index(value)) < least:
        msg = f"{name}: expected a whole number, {least} or more, got {value!r}"
        raise ValueError(msg)
    return number


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


def _checked_filters(name: str, value: Any) -> list[str] | None:
    if value is None:
        return None
    if not is_sequence(value) or not all(isinstance(part, str) for part in value):
        msg = f"{name}: expected a list of strings, got {value!r}"
        raise TypeError(msg)
    if not all(value):
        msg = f"{name}: an empty string is in every line, got {value!r}"
        raise ValueError(msg)
    return list(value)


def name_of(spec: WorkerSpec) -> str:
    """Return what a report calls the job: the script, where the program is this Python."""
    if spec.entrypoint == sys.executable:
        return next((str(arg) for arg in spec.args if not str(arg).startswith("-")), sys.executable)
    return spec.get_entrypoint_name()
