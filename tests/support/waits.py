"""The waits of launcher and keeper for others, shortened for a test, or as long as a busy machine may need."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType, ModuleType

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
    return _when(lambda frame: frame.f_code is Latch.wait.__code__, action, *arguments)


def when_we_select(action: Callable[..., object], *arguments: object) -> threading.Thread:
    """Call something likewise as soon as this thread waits in a selector, that of an event loop too.

    A signal that comes just before the wait is noticed with the next event only; and what is raised in a callback, the
    loop itself swallows.
    """
    return _when(lambda frame: frame.f_code.co_filename.endswith("selectors.py"), action, *arguments, times=3)


def _when(
    is_it: Callable[[FrameType], bool], action: Callable[..., object], *arguments: object, times: int = 1
) -> threading.Thread:
    """Call something once this thread has been seen in such a frame so many times in a row."""
    waiter = threading.get_ident()

    def waits() -> bool:
        frame = sys._current_frames().get(waiter)
        while frame is not None and not is_it(frame):
            frame = frame.f_back
        return frame is not None

    def look() -> None:
        seen, until = 0, time.monotonic() + TIMEOUT
        while seen < times and time.monotonic() < until:
            time.sleep(0.005)
            seen = seen + 1 if waits() else 0
        action(*arguments)

    thread = threading.Thread(target=look)
    thread.start()
    return thread
