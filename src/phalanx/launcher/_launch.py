"""`LaunchConfig`, `elastic_launch` and `launch_agent`: what a job is, the checks of it, and its run to the end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

from phalanx import metrics
from phalanx._engine.host_signals import SIGNALS_ENV, SignalException
from phalanx._group.arguments import checked_whole
from phalanx._logs.layout import Std
from phalanx._logs.specs import DefaultLogsSpecs, LogsSpecs
from phalanx._placement.placement import Placement
from phalanx._rendezvous.endpoint import BACKENDS, is_here, split_endpoint
from phalanx._timers.specs import TimerSpecs
from phalanx.agent import LocalElasticAgent, RunResult, WorkerSpec
from phalanx.errors import ChildFailedError
from phalanx.rendezvous import (
    ManyMachinesRendezvous,
    OneMachineRendezvous,
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)

SHUTDOWN_TIMEOUT_ENV = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_SHUTDOWN_TIMEOUT = 30
_RENDEZVOUS_TIMEOUT = 900


@dataclass
class LaunchConfig:
    """What a job is, and how it is run. `elastic_launch` checks it, and raises errors that name the field.

    Args:
        min_nodes: The least number of machines, 1 or more.
        max_nodes: The greatest. More than 1: see `phalanx.rendezvous.ManyMachinesRendezvous` for the next few.
        nproc_per_node: How many workers there are on this machine, 1 or more.
        logs_specs: Where output goes; None: a `phalanx.multiprocessing.DefaultLogsSpecs`.
        run_id: The id of the run; "": on one machine, the date and time.
        role: What the workers are called.
        rdzv_endpoint: Where machines meet. On one, ``host`` or ``host:port`` of this machine, or "". With the backend
            "static" these are ``MASTER_ADDR`` and, unless it is 0, ``MASTER_PORT``. Otherwise nothing listens there.
        rdzv_backend: "static", "c10d", "etcd", "etcd-v2" or "etcd-v3": all the same on one machine, where nothing is
            connected to. Or one that `phalanx.rendezvous.rendezvous_handler_registry` knows.
        rdzv_configs: What else the backend takes. On one machine, only ``rank`` is looked at: it is 0, if it is there.
        rdzv_timeout: Seconds for the rendezvous, as ``rdzv_configs["timeout"]``; -1: those of ``rdzv_configs``, or 900.
            Without effect on one machine.
        max_restarts: How many times the workers are started again after failures, 0 or more: on all machines together.
        monitor_interval: Seconds (> 0). Accepted: nothing polls.
        start_method: How workers of a function are started: "spawn", "forkserver" or "fork".
        log_line_prefix_template: See `phalanx.agent.LocalElasticAgent`.
        metrics_cfg: Texts by name, for `phalanx.metrics.initialize_metrics`.
        local_addr: The address of this machine: ``MASTER_ADDR``, unless the backend is "static"; None: 127.0.0.1.
        event_log_handler: The destination of the agent's events, see `phalanx.events`.
        numa_options: A `phalanx.multiprocessing.Placement`: the CPUs and the limits of each worker.
        signals_to_handle: Names of signals with commas between them: on these, the workers are ended. For a launch in
            the main thread they are this process's ``TORCHELASTIC_SIGNALS_TO_HANDLE``, until it has ended.
        duplicate_stdout_filters: See `phalanx.agent.WorkerSpec`.
        duplicate_stderr_filters: Likewise.
        virtual_local_rank: Likewise.
        shutdown_timeout: Seconds (>= 0) between SIGTERM and SIGKILL; None: ``TORCH_ELASTIC_SHUTDOWN_TIMEOUT``, or 30.

    Raises:
        ValueError: ``TORCH_ELASTIC_SHUTDOWN_TIMEOUT`` is no number.

    >>> LaunchConfig(1, 1, 4, rdzv_timeout=60).rdzv_configs
    {'timeout': 60}
    """

    __module__ = "phalanx.launcher"

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    logs_specs: LogsSpecs | None = None
    run_id: str = ""
    role: str = "default_role"
    rdzv_endpoint: str = ""
    rdzv_backend: str = "etcd"
    rdzv_configs: dict[str, Any] = field(default_factory=dict)
    rdzv_timeout: int = -1
    max_restarts: int = 3
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    log_line_prefix_template: str | None = None
    metrics_cfg: dict[str, str] = field(default_factory=dict)
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Placement | None = None
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: int | None = None

    def __post_init__(self) -> None:
        """Fill in what stands for a default of another place."""
        if isinstance(self.rdzv_configs, dict):
            given = (
                self.rdzv_configs.get("timeout", _RENDEZVOUS_TIMEOUT) if self.rdzv_timeout == -1 else self.rdzv_timeout
            )
            self.rdzv_configs = self.rdzv_configs | {"timeout": given}
        if self.logs_specs is None:
            self.logs_specs = DefaultLogsSpecs()
        if self.shutdown_timeout is None:
            text = os.environ.get(SHUTDOWN_TIMEOUT_ENV, "") or str(_SHUTDOWN_TIMEOUT)
            if not text.isdecimal():
                msg = f"{SHUTDOWN_TIMEOUT_ENV}: expected whole seconds, got {text!r}"
                raise ValueError(msg)
            self.shutdown_timeout = int(text)


_TEXTS = ("run_id", "rdzv_endpoint", "rdzv_backend", "signals_to_handle")
_OWN = ("backend", "endpoint", "run_id", "min_nodes", "max_nodes", "local_addr")
_FIELDS = {
    "backend": "rdzv_backend", "endpoint": "rdzv_endpoint", "run_id": "run_id", "max_nodes": "max_nodes",
    "PHALANX_JOB_SECRET": "PHALANX_JOB_SECRET",
}  # fmt: skip
"""What the parameters of a rendezvous are called in a config."""
_MAPPINGS = ("rdzv_configs", "metrics_cfg")
_OF_SPEC = (
    *("max_restarts", "monitor_interval", "local_addr", "event_log_handler", "numa_options", "virtual_local_rank"),
    *("duplicate_stdout_filters", "duplicate_stderr_filters"),
)
"""What a `WorkerSpec` has by the same name."""


def checked(config: Any) -> LaunchConfig:
    """Return a copy, in which ``logs_specs`` and ``shutdown_timeout`` are not None. Raises TypeError.

    A config of torch's has the same fields, and torch's `DefaultLogsSpecs` the same parameters.
    """
    if _is_torchs(config, "LaunchConfig"):
        names = [each.name for each in fields(LaunchConfig) if hasattr(config, each.name)]
        config = LaunchConfig(**{name: getattr(config, name) for name in names})
    if not isinstance(config, LaunchConfig):
        msg = f"config: expected a phalanx.launcher.LaunchConfig, got {config!r}"
        raise TypeError(msg)
    copy = replace(config)
    if _is_torchs(copy.logs_specs, "DefaultLogsSpecs"):
        copy.logs_specs = _logs_specs_of(copy.logs_specs)
    if not isinstance(copy.logs_specs, LogsSpecs):
        msg = f"logs_specs: expected a LogsSpecs, or None, got {config.logs_specs!r}"
        raise TypeError(msg)
    return copy


def _is_torchs(value: object, name: str) -> bool:
    """Whether an object is of the class ``name`` of ``torch.distributed``, and of no subclass."""
    kind = type(value)
    return kind.__name__ == name and kind.__module__.startswith("torch.distributed.")


def _logs_specs_of(theirs: Any) -> DefaultLogsSpecs:
    def streams(given: Any) -> Std | dict[int, Std]:
        return {rank: Std(int(each)) for rank, each in given.items()} if isinstance(given, dict) else Std(int(given))

    redirects, tee, ranks = theirs._redirects, theirs._tee, theirs._local_ranks_filter  # noqa: SLF001 - torch shows them nowhere else
    return DefaultLogsSpecs(theirs.root_log_dir, streams(redirects), streams(tee), ranks)


def rendezvous_of(config: LaunchConfig) -> RendezvousHandler:
    """Check what `phalanx.agent` does not check, and make the rendezvous. Raises TypeError and ValueError."""
    for name, kind, what in [
        *((name, str, "a string") for name in _TEXTS),
        *((name, dict, "a dict") for name in _MAPPINGS),
    ]:
        value = getattr(config, name)
        if not isinstance(value, kind):
            msg = f"{name}: expected {what}, got {value!r}"
            raise TypeError(msg)
    checked_whole("nproc_per_node", config.nproc_per_node, 1)
    least, most = checked_whole("min_nodes", config.min_nodes, 1), checked_whole("max_nodes", config.max_nodes, 1)
    if most < least:
        msg = f"max_nodes: expected min_nodes ({least}) or more, got {most}"
        raise ValueError(msg)
    _check_signals(config.signals_to_handle)
    if most > 1 or config.rdzv_backend not in BACKENDS:
        return _meeting(config)
    if (rank := config.rdzv_configs.get("rank", 0)) not in (0, "0"):
        msg = f"rdzv_configs: expected the rank 0, got {rank!r}: there is no other machine"
        raise ValueError(msg)
    try:
        host, port = split_endpoint(config.rdzv_endpoint)
    except ValueError as error:
        msg = f"rdzv_endpoint: {error}"
        raise ValueError(msg) from None
    if not is_here(host):
        msg = (
            f"rdzv_endpoint: expected an address of this machine, got {config.rdzv_endpoint!r}: the job is on one "
            "machine, for max_nodes is 1"
        )
        raise ValueError(msg)
    if config.rdzv_backend != "static":
        host, port = config.local_addr or "", 0
    return OneMachineRendezvous(config.run_id, host or "127.0.0.1", port, backend=config.rdzv_backend)


def _meeting(config: LaunchConfig) -> RendezvousHandler:
    """Return what brings the machines together. Raises ValueError, which names the field."""
    settings = {name: value for name, value in config.rdzv_configs.items() if name not in _OWN}
    try:
        params = RendezvousParameters(
            config.rdzv_backend, config.rdzv_endpoint, config.run_id, config.min_nodes, config.max_nodes,
            config.local_addr, **settings,
        )  # fmt: skip
        return rendezvous_handler_registry.create_handler(params)
    except ValueError as error:
        name, colon, rest = str(error).partition(": ")
        field = _FIELDS.get(name, f"rdzv_configs: {name}")
        msg = f"{field}{colon}{rest}"
        raise ValueError(msg) from None


def _check_signals(names: str) -> None:
    for name in filter(None, (part.strip() for part in names.split(","))):
        if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
            msg = f"signals_to_handle: expected names of signals that can be handled, like SIGTERM, got {name!r}"
            raise ValueError(msg)


class LaunchedAgent(LocalElasticAgent):
    """The agent of a launched job: its end is that of the job."""

    _is_launched = True

    def error(self, result: RunResult) -> ChildFailedError:
        """Make the error of a run that has failed: with what became of every worker, and where its logs are."""
        return self._failed(result)


class elastic_launch:  # noqa: N801 - torch's name
    """Runs a function or a program on every worker, when it is called with the arguments.

    Args:
        config: What the job is. It may be used again.
        entrypoint: A function; or a program, by its name (found on PATH) or its path.

    >>> from phalanx.launcher import LaunchConfig
    >>> elastic_launch(LaunchConfig(1, 1, 1), "true")()
    {0: None}
    """

    __module__ = "phalanx.launcher"

    def __init__(self, config: LaunchConfig, entrypoint: Callable[..., Any] | str | None) -> None:
        self._config = config
        self._entrypoint = entrypoint

    def __call__(self, *args: Any) -> dict[int, Any]:
        """Run the workers to their end. See `launch_agent`."""
        return launch_agent(self._config, self._entrypoint, list(args))


def launch_agent(
    config: LaunchConfig, entrypoint: Callable[..., Any] | str | None, args: Sequence[Any]
) -> dict[int, Any]:
    """Run a job to its end, with restarts.

    Args:
        config: What the job is. It is not changed.
        entrypoint: See `elastic_launch`.
        args: The positional arguments. In strings, ``${local_rank}`` stands for the worker's local rank.

    Returns:
        What each worker of this machine returned (None for a program), by global rank.

    Raises:
        TypeError, ValueError: What is wrong with which field; nothing has been started.
        phalanx.events.UnknownDestinationError: ``event_log_handler`` names no destination. It is a KeyError.
        ChildFailedError: Workers have failed, on this machine or on another one, and there was no restart left. It has
            the failures of all machines by global rank, and is the same on each of them: the first is the root cause.
        SignalException: A signal arrived. No worker is left. Other machines go on without this one, if they can.
        phalanx.rendezvous.RendezvousError: The machines have not met; or (`RendezvousClosedError`) the job has ended
            otherwise: it was closed, or a machine was lost.
        Exception: What `phalanx.agent.SimpleElasticAgent.run` raises otherwise.
    """
    config = checked(config)
    logs_specs, shutdown_timeout = config.logs_specs, config.shutdown_timeout
    assert logs_specs is not None
    assert shutdown_timeout is not None
    handler = rendezvous_of(config)
    same: dict[str, Any] = {name: getattr(config, name) for name in _OF_SPEC}
    spec = WorkerSpec(config.role, config.nproc_per_node, handler, entrypoint=entrypoint, args=tuple(args), **same)
    agent = LaunchedAgent(
        spec, logs_specs, config.start_method, log_line_prefix_template=config.log_line_prefix_template,
        shutdown_timeout=shutdown_timeout, timers=TimerSpecs(),
    )  # fmt: skip
    metrics.initialize_metrics(metrics.MetricsConfig(config.metrics_cfg))
    ends = True
    try:
        with _handling(config.signals_to_handle):
            result = agent.run()
    except RendezvousClosedError as error:
        if isinstance(error.__cause__, ChildFailedError):  # the report of all machines
            raise error.__cause__ from None
        raise
    except SignalException:  # other machines may go on, and somebody else's handler may end the job for all of them
        ends = isinstance(handler, ManyMachinesRendezvous | OneMachineRendezvous)
        raise
    finally:
        if ends:
            handler.shutdown()
    if result.is_failed():
        raise agent.error(result)
    return result.return_values


@contextmanager
def _handling(names: str) -> Iterator[None]:
    """Have the agent and its workers find these signals in the environment, as torch's do; as before afterwards.

    Not in another thread than the main one, where no handler is set: others may be launching there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = os.environ.get(SIGNALS_ENV)
    os.environ[SIGNALS_ENV] = names
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(SIGNALS_ENV, None)
        else:
            os.environ[SIGNALS_ENV] = before
