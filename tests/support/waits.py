"""The waits of launcher and keeper for others, shortened for a test, or as long as a busy machine may need."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType

import pytest

from phalanx._base import interpreter
from phalanx._base.threads import Latch
from phalanx._engine import group_lines, keeper_client, keeper_link, result_receiver, supervisor
from phalanx._stacks import collect, snapshot
from phalanx._timers import escalation, hang_reporter
from tests.support.helpers import TIMEOUT


def shorten(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    """Set ``ANSWER_WAIT``, ``KILL_WAIT`` and others, wherever they are used."""
    for module in (supervisor, keeper_link, keeper_client, group_lines, result_receiver):
        for name, value in seconds.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)


def wait_long_for_stacks(put: Callable[[object, str, object], object] = setattr) -> None:
    """Have nobody go on without the stacks of what hangs, as launcher and keeper do soon on a machine that is busy.

    ``put`` is as for `tell_keepers`.
    """
    put(snapshot, "WAIT", 10.0)
    put(collect.Collection.__init__, "__defaults__", (10.0,))
    put(hang_reporter, "FINISH", 20.0)
    tell_keepers(escalation, "EVIDENCE_WAIT", 15.0, put)


def tell_keepers(
    module: ModuleType, name: str, value: float, put: Callable[[object, str, object], object] = setattr
) -> None:
    """Set a name of a module, in this process and in keepers: those that are its forks, and those that begin anew.

    ``put`` sets an attribute, as ``MonkeyPatch.setattr`` does.
    """
    command = interpreter.command

    def telling(flags: Sequence[str], code: str, before: str = "") -> list[str]:
        if "phalanx._engine.keeper.guard" in code:
            code = f"import {module.__name__} as it;it.{name}={value};{code}"
        return command(flags, code, before)

    put(module, name, value)
    put(interpreter, "command", telling)


def when_we_wait(action: Callable[..., object], *arguments: object) -> threading.Thread:
    """Call something on another thread as soon as this one waits for a group: what a signal interrupts then is known.

    Returns that thread, which has begun.
    """
    waiter = threading.get_ident()

    def waits() -> bool:
        frame = sys._current_frames().get(waiter)
        while frame is not None and frame.f_code is not Latch.wait.__code__:
            frame = frame.f_back
        return frame is not None

    def look() -> None:
        until = time.monotonic() + TIMEOUT
        while not waits() and time.monotonic() < until:
            time.sleep(0.005)
        action(*arguments)

    thread = threading.Thread(target=look)
    thread.start()
    return thread
