"""Functions that the tests of warm starts run as workers. To import it is as cheap as `tests.support.workers`."""

from __future__ import annotations

import os
import random
import sys
import uuid
from typing import Any


def has(*names: str) -> tuple[int, list[bool]]:
    """Our pid, and which of the modules are here already."""
    return os.getpid(), [name in sys.modules for name in names]


def touch(path: str) -> None:
    with open(path, "w"):
        pass


def folder_is_there(module: str, note: str) -> bool:
    """Have a finalizer write a note at our end. Return whether the module's temporary folder is there."""
    import importlib
    import weakref

    weakref.finalize(touch, touch, note)
    return os.path.isdir(importlib.import_module(module).FOLDER.name)


def leave_finalizer(_rank: int, note: str) -> None:
    """Have a finalizer write a note at our end."""
    import weakref

    weakref.finalize(touch, touch, note)


def multiply(size: int) -> float:
    """Have numpy use its threads."""
    import numpy as np

    matrix = np.ones((size, size))
    return float((matrix @ matrix).sum())


def chances() -> dict[str, Any]:
    """What no two workers should draw alike."""
    numbers = sys.modules["numpy.random"]
    return {"random": random.random(), "uuid": str(uuid.uuid4()), "numpy": float(numbers.random())}  # noqa: S311 - no secret


def draw_of_torch() -> Any:
    return sys.modules["torch"].default_generator.initial_seed()


def place(variable: str) -> dict[str, Any]:
    """Print a line, and return what of our surroundings the launcher decides."""
    print("here")  # noqa: T201 - it is looked for
    umask = os.umask(0)
    os.umask(umask)
    return {"cwd": os.getcwd(), "umask": umask, "env": os.environ.get(variable)}


def signals_with(module: str, *numbers: int) -> tuple[dict[int, str], set[int], list[int]]:
    """What we do on signals once a module is imported, which are blocked, and the pids that each has reached."""
    import importlib
    import signal

    numbers_reached = importlib.import_module(module).reached
    for number in numbers:
        signal.raise_signal(number)
    handlers = {int(number): str(signal.getsignal(number)) for number in signal.valid_signals()}
    handlers = {number: text.partition(" at 0x")[0] for number, text in handlers.items()}
    return handlers, set(signal.pthread_sigmask(signal.SIG_BLOCK, ())), list(numbers_reached)
