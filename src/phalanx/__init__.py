"""Phalanx: groups of worker processes that start together, live together and fall together, the true cause named.

The public names live in the modules that carry them: `phalanx.multiprocessing`, `phalanx.multiprocessing.errors`,
`phalanx.spawn`, `phalanx.launcher`, `phalanx.agent`, `phalanx.rendezvous`, `phalanx.timer`, `phalanx.metrics`,
`phalanx.events`, `phalanx.run`, and the command ``phalanx run``. The modules, `phalanx.attach`, `phalanx.warm` and
`phalanx.should_stop` are at hand here, and loaded when they are first used: importing this package alone imports
nothing else.

>>> import phalanx
>>> with phalanx.warm(preload=["json"]) as process:
...     process.preload
('json',)
>>> phalanx.should_stop()  # a worker asks it at each step, and saves if it is true
False
>>> phalanx.timer.beat()  # without a group that watches heartbeats: nothing
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from phalanx import agent as agent
    from phalanx import errors as errors
    from phalanx import events as events
    from phalanx import launcher as launcher
    from phalanx import metrics as metrics
    from phalanx import multiprocessing as multiprocessing
    from phalanx import rendezvous as rendezvous
    from phalanx import run as run
    from phalanx import spawn as spawn
    from phalanx import timer as timer
    from phalanx._engine.stop_flag import should_stop
    from phalanx._run.attached import attach
    from phalanx.multiprocessing import warm

__all__ = [
    "__version__",
    "agent",
    "attach",
    "errors",
    "events",
    "launcher",
    "metrics",
    "multiprocessing",
    "rendezvous",
    "run",
    "should_stop",
    "spawn",
    "timer",
    "warm",
]

__version__ = "0.2.0"


def __getattr__(name: str) -> "Any":
    if name == "warm":
        from phalanx.multiprocessing import warm

        return warm
    if name == "should_stop":
        from phalanx._engine.stop_flag import should_stop

        globals()[name] = should_stop  # from now on it is found without this function
        return should_stop
    if name == "attach":
        from phalanx._run.attached import attach

        return attach
    if name in __all__:
        import importlib

        return importlib.import_module(f"phalanx.{name}")
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
