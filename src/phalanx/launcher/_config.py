"""`LaunchConfig`: what a job is. A mutable dataclass, as it is for torch; it is checked when a job is launched."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from phalanx._logs.specs import DefaultLogsSpecs, LogsSpecs
from phalanx._placement.placement import Placement

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
