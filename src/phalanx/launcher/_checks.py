"""Refuses what cannot be launched, by the name of the field, before anything starts; and makes the rendezvous."""

from __future__ import annotations

import operator
import signal
from dataclasses import fields, replace
from typing import Any

from phalanx._agent.endpoint import BACKENDS, is_here, split_endpoint
from phalanx._logs.layout import Std
from phalanx._logs.specs import DefaultLogsSpecs, LogsSpecs
from phalanx.launcher._config import LaunchConfig
from phalanx.rendezvous import (
    OneMachineRendezvous,
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)

_TEXTS = ("run_id", "rdzv_endpoint", "rdzv_backend", "signals_to_handle")
_OWN = ("backend", "endpoint", "run_id", "min_nodes", "max_nodes", "local_addr")
_FIELDS = {
    "backend": "rdzv_backend", "endpoint": "rdzv_endpoint", "run_id": "run_id", "max_nodes": "max_nodes",
    "PHALANX_JOB_SECRET": "PHALANX_JOB_SECRET",
}  # fmt: skip
"""What the parameters of a rendezvous are called in a config."""
_MAPPINGS = ("rdzv_configs", "metrics_cfg")


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
    _whole("nproc_per_node", config.nproc_per_node)
    least, most = _whole("min_nodes", config.min_nodes), _whole("max_nodes", config.max_nodes)
    if most < least:
        msg = f"max_nodes: expected min_nodes ({least}) or more, got {most}"
        raise ValueError(msg)
    if most > 1 or config.rdzv_backend not in BACKENDS:
        _check_signals(config.signals_to_handle)
        return _meeting(config)
    if (rank := config.rdzv_configs.get("rank", 0)) not in (0, "0"):
        msg = f"rdzv_configs: expected the rank 0, got {rank!r}: there is no other machine"
        raise ValueError(msg)
    _check_signals(config.signals_to_handle)
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


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        msg = f"{name}: expected a whole number, 1 or more, got {value!r}"
        raise TypeError(msg)
    if (number := operator.index(value)) < 1:
        msg = f"{name}: expected a whole number, 1 or more, got {value!r}"
        raise ValueError(msg)
    return number


def _check_signals(names: str) -> None:
    for name in filter(None, (part.strip() for part in names.split(","))):
        if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
            msg = f"signals_to_handle: expected names of signals that can be handled, like SIGTERM, got {name!r}"
            raise ValueError(msg)
