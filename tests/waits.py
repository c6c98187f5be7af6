"""The waits of launcher and keeper for others, shortened for a test, or as long as a busy machine may need."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING

from phalanx._core import escalation, hang_report, interpreter, silence, stacks, supervisor, witnesses
from phalanx._core.latch import Latch
from tests.helpers import TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pytest


def shorten(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    """Set ``SILENCE``, ``KILL_WAIT`` and others, wherever they are used."""
    for module in (supervisor, silence):
        for name, value in seconds.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)


def wait_long_for_stacks(put: Callable[[object, str, object], object] = setattr) -> None:
    """Have nobody go on without the stacks of what hangs, as launcher and keeper do soon on a machine that is busy.

    ``put`` sets an attribute, as ``MonkeyPatch.setattr`` does. Keepers that begin as an interpreter are told, too.
    """
    command = interpreter.command

    def patient(flags: Sequence[str], code: str, before: str = "") -> list[str]:
        if "phalanx._core.guard" in code:
            code = f"import phalanx._core.escalation as it;it.EVIDENCE_WAIT={escalation.EVIDENCE_WAIT};{code}"
        return command(flags, code, before)

    put(witnesses, "WAIT", 10.0)
    put(stacks.Collection.__init__, "__defaults__", (10.0,))
    put(escalation, "EVIDENCE_WAIT", 15.0)
    put(hang_report, "FINISH", 20.0)
    put(interpreter, "command", patient)


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
