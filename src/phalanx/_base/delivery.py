"""Calls handlers of others on a thread of their own, in order, so that nobody waits for them.

Owns the queues, also after a fork, and the wait for them at the interpreter's exit.
"""

from __future__ import annotations

import atexit
import logging  # noqa: F401 - before `atexit.register`: it closes handlers at the exit, which is to come after the wait
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable

from phalanx._base import clock, handler_guard
from phalanx._base.handler_guard import Guard
from phalanx._base.threads import SerialExecutor

LONGEST_QUEUE = 100_000
"""How many calls may wait."""

EXIT_WAIT = 2.0
"""Seconds for which the interpreter's exit waits, for all deliveries together."""

_begun: list[weakref.ref[Delivery]] = []
_gave_up = 0  # the process whose end has waited in vain


class Delivery:
    """A queue of calls of handlers, and the thread that makes them.

    Args:
        name: The thread's name.
        guard: What reports exceptions, and calls that are dropped.
        most: How many calls may wait. Those beyond are dropped.

    A forked child has a queue of its own, which is empty at first: what waited at the fork is its parent's to deliver.
    """

    def __init__(self, name: str, guard: Guard, most: int = LONGEST_QUEUE) -> None:
        self._name = name
        self._guard = guard
        self._most = most
        self._executors: dict[int, SerialExecutor] = {}  # by process: one here, and after a fork that of the parent
        self._delivering = 0  # the ident of the thread that makes a call
        self.dropped = 0
        """How many calls were dropped, about: threads that drop at once may count as one."""
        self._told = False  # that calls were dropped
        _begun.append(weakref.ref(self, _begun.remove))

    def post(self, whose: object, action: Callable[..., object], *args: object) -> bool:
        """Have ``action(*args)`` called after the calls before it. Returns at once.

        Args:
            whose: The handler that it calls, or a text: whose fault it is when it raises.
            action: Makes the call.
            args: Its arguments.

        Returns:
            False when it is dropped: too many wait, or no thread can be started.
        """
        nested = handler_guard.depth()
        if self._executor().submit(lambda: self._call(nested, whose, action, args)):
            return True
        self.dropped += 1
        if not self._told:
            self._told = True
            what = "is too slow, or has no thread: what finds no room in its queue is dropped"
            # Not here: logging calls handlers, too, and the caller does not wait for them.
            SerialExecutor(f"{self._name}-dropped").submit(lambda: self._guard.report(whose, what))
        return False

    def flush(self, seconds: float) -> bool:
        """Wait until all calls have returned, for at most ``seconds``. Returns whether they have.

        On the thread that makes the calls it does not wait, and returns False.
        """
        executor = self._executors.get(os.getpid())
        if executor is None:
            return True
        if self._delivering == threading.get_ident():
            return False
        return executor.drain(max(0.0, seconds))

    @property
    def pending(self) -> int:
        """How many calls have not begun, of this process."""
        executor = self._executors.get(os.getpid())
        return 0 if executor is None else executor.pending

    def give_up(self) -> None:
        """Log how many calls have not returned, and how many were dropped, if any."""
        if os.getpid() not in self._executors:
            return
        if self.dropped:
            self._guard.tell(f"{self._name}: {self.dropped} dropped")
            self.dropped = 0
        count = self.pending + (self._delivering != 0)
        if count:
            self._guard.tell(f"{self._name}: {count} not delivered in {EXIT_WAIT:g} s at the interpreter's exit")

    def _executor(self) -> SerialExecutor:
        pid = os.getpid()
        found = self._executors.get(pid)
        if found is None:
            _wait_in_child()
            new = SerialExecutor(self._name, self._most)
            found = self._executors.setdefault(pid, new)  # one step: two threads get the same
            for other in [*self._executors]:
                if other != pid:
                    self._executors.pop(other, None)
        return found

    def _call(self, nested: int, whose: object, action: Callable[..., object], args: tuple[object, ...]) -> None:
        self._delivering = threading.get_ident()
        try:
            with handler_guard.nested_in(nested):
                action(*args)
        except BaseException as error:  # noqa: BLE001 - a SystemExit of a handler ends nothing here
            self._guard.report(whose, handler_guard.RAISED, error)
        finally:
            self._delivering = 0


def flush(deliveries: Iterable[Delivery], seconds: float) -> bool:
    """Wait for all of these as `Delivery.flush` does, for at most ``seconds`` in all."""
    end = clock.now() + seconds
    done = [each.flush(end - clock.now()) for each in deliveries]
    return all(done)


def _wait_in_child() -> None:
    """Have the end of a process of `multiprocessing` wait, too: a fork of it ends without `atexit`."""
    parent_process = getattr(sys.modules.get("multiprocessing.process"), "parent_process", None)
    if parent_process is not None and parent_process() is not None:
        from multiprocessing.util import Finalize

        Finalize(None, _finish, exitpriority=0)


def _finish() -> None:
    """Give what waits a last chance, also a second time, but not after one was in vain."""
    global _gave_up  # noqa: PLW0603 - one for the process
    if _gave_up == os.getpid():
        return
    deliveries = [each for each in [ref() for ref in [*_begun]] if each is not None]
    if not flush(deliveries, EXIT_WAIT):
        _gave_up = os.getpid()
    for each in deliveries:
        each.give_up()


atexit.register(_finish)
