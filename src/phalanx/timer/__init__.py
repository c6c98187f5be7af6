"""Expiration timers: a worker that does not leave a block by its deadline is reported, with stacks, and killed.

The names of ``torch.distributed.elastic.timer``, and more: timers in shared memory, which need no set-up under
``phalanx run``, and heartbeats.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from phalanx._timers.specs import TimerSpecs
    from phalanx.timer import debug_info_logging
    from phalanx.timer._beats import NobodyWatchesError, beat, move_stack_signal, progress, rest, waiting
    from phalanx.timer._expires import configure, expires
    from phalanx.timer._file_client import FileTimerClient, FileTimerRequest
    from phalanx.timer._requests import LocalTimerClient, RequestQueue, TimerClient, TimerRequest
    from phalanx.timer._server import TimerServer
    from phalanx.timer._servers import FileTimerServer, LocalTimerServer

_HOMES = {
    "phalanx._timers.specs": ("TimerSpecs",),
    "._beats": ("NobodyWatchesError", "beat", "move_stack_signal", "progress", "rest", "waiting"),
    "._expires": ("configure", "expires"),
    "._file_client": ("FileTimerClient", "FileTimerRequest"),
    "._requests": ("LocalTimerClient", "RequestQueue", "TimerClient", "TimerRequest"),
    "._server": ("TimerServer",),
    "._servers": ("FileTimerServer", "LocalTimerServer"),
    ".debug_info_logging": ("debug_info_logging",),
}

__all__ = [
    "FileTimerClient",
    "FileTimerRequest",
    "FileTimerServer",
    "LocalTimerClient",
    "LocalTimerServer",
    "NobodyWatchesError",
    "RequestQueue",
    "TimerClient",
    "TimerRequest",
    "TimerServer",
    "TimerSpecs",
    "beat",
    "configure",
    "debug_info_logging",
    "expires",
    "move_stack_signal",
    "progress",
    "rest",
    "waiting",
]


def __getattr__(name: str) -> Any:
    """Import the module of one name: a worker that sets a timer loads nothing else."""
    from importlib import import_module

    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    module = import_module(home, __name__)
    value = globals()[name] = module if home.endswith(f".{name}") else getattr(module, name)
    return value
