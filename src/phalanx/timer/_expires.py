"""`expires`, a block that must be left in time, and `configure`, which chooses the client that gets the timers.

A timer that goes to the table of the group is set from here, word by word: its cost is the cost of this module. With a
client, its ``acquire`` and ``release`` are called.
"""

from __future__ import annotations

import math
import os
import sys
from _thread import get_ident
from contextlib import suppress

from phalanx._base import clock
from phalanx._timers.layout import HEAD_WAKE, LATE, LONGEST, NEVER, SLOTS, encode
from phalanx.timer import _beats

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Self, TypeVar

    from phalanx._timers.client import Seat
    from phalanx.timer._requests import TimerClient

    F = TypeVar("F", bound=Callable[..., Any])

_now_ns = clock.now_ns
_frame = sys._getframe  # noqa: SLF001 - the one way to a caller that does not cost a stack
_NUMBERS = frozenset((int, float))
_MOST = LONGEST / 1e9  # seconds
_MOST_KEPT = 4096  # texts of timers that are kept for their next use

_configured: TimerClient | None = None  # the client that gets the timers; None: the group's table

_texts: dict[tuple[int, int, str | None, str], tuple[object, bytes]] = {}  # by the id of a code, and the rest of a site
_running: dict[tuple[int, str], set[int]] = {}  # the numbers in use of a scope, for clients that know names alone


def configure(timer_client: TimerClient | None) -> None:
    """Set the client that `expires` uses in this process from now on. Timers that run already stay where they are.

    Under ``phalanx run``, and in a group that was started with `TimerSpecs`, it is not needed: the group watches.

    Args:
        timer_client: A `LocalTimerClient`, a `FileTimerClient`, or one of your own. None: no client; if the process is
            in a group that has timers, the group watches again.

    Raises:
        TypeError: It has no ``acquire`` and ``release``.
    """
    global _configured  # noqa: PLW0603 - one for the process
    if timer_client is not None and not (hasattr(timer_client, "acquire") and hasattr(timer_client, "release")):
        msg = f"timer_client: expected a TimerClient, got {timer_client!r}"
        raise TypeError(msg)
    _configured = timer_client


class expires:  # noqa: N801 - used as a verb, as it is in torch
    """A block that must be left within ``after`` seconds. Otherwise the stacks are written, and the worker is killed.

    It is a context manager, and a decorator (also of coroutine functions). Blocks can be nested, and several threads
    may enter the same block: each entry has a timer of its own. A block that ends with an exception releases its timer.
    Time is CLOCK_MONOTONIC: a step of the wall clock changes nothing. If a process forks within a block, the parent
    keeps the timer, and the child has none.

    In contrast to torch's, the default scope names the caller's file and line, and nested blocks do not cancel each
    other.

    Args:
        after: Seconds, more than 0.
        scope: What the block is called in reports. Default: the caller's file and line; as a decorator, those of the
            function.
        client: The client to use, instead of the one that was configured.

    Raises:
        ValueError: ``after`` is 0, negative, infinite or not a number.
        TypeError: An argument is of the wrong type; or a generator function is decorated, whose body runs later.
        RuntimeError: On entry: no client is configured, and the process is in no group that has timers; the server
            has stopped; 1024 timers run in this process; or this very object is entered already.

    >>> import phalanx.timer as timer
    >>> import multiprocessing
    >>> queue = multiprocessing.get_context("spawn").SimpleQueue()
    >>> with timer.LocalTimerServer(queue):  # a group watches by itself
    ...     with timer.expires(after=60, client=timer.LocalTimerClient(queue)):
    ...         pass
    >>> with timer.expires(after=0):
    ...     pass
    Traceback (most recent call last):
    ValueError: after: expected more than 0 seconds, got 0
    """

    __slots__ = ("_after", "_client", "_held", "_named", "_place", "_scope", "_seat")

    def __init__(self, after: float, scope: str | None = None, client: TimerClient | None = None) -> None:
        self._held = 0  # the slot that is to be disarmed
        self._named: tuple[TimerClient, str, int] | None = None  # or the name that is to be released
        if type(after) not in _NUMBERS or not (scope is None or isinstance(scope, str)):
            after = _checked(after, scope)
        if not 0 < after < math.inf:
            msg = f"after: expected more than 0 seconds, got {after!r}"
            raise ValueError(msg)
        self._after = after
        self._scope = scope
        self._client = client
        self._place = ""  # that of a decorated function is known already

    def __enter__(self) -> Self:
        if self._held or self._named:
            raise RuntimeError("this very block is entered already; write `with expires(...)` for each")
        client = _configured if self._client is None else self._client
        if client is not None:
            self._acquire(client)
            return self
        seat = _beats.seat or _beats.take_seat()
        try:
            slot = seat.free.pop()
        except IndexError:
            msg = f"{SLOTS} timers run in this process: that is the most"
            raise RuntimeError(msg) from None
        self._seat = seat
        self._held = slot  # from here on, the end of this object gives it back, if a signal handler raises
        frame = _frame(1)
        # A block in a loop finds its slot as it left it.
        code, at, after, scope, place, thread, span = seat.known[slot]
        if (
            code is not frame.f_code
            or at != frame.f_lasti
            or after != self._after
            or scope != self._scope
            or place != self._place
            or thread != get_ident()
        ):
            span = self._describe(seat, slot, frame)
        words, head = seat.words, seat.head
        now = _now_ns()
        deadline = now + span
        # From here on nothing is called, so no signal handler can raise before `with` has entered the block.
        words[slot] = deadline
        if not now - LATE <= head[HEAD_WAKE] <= deadline:
            self._wake_watcher(seat)
        return self

    def __exit__(self, _kind: object = None, _error: object = None, _traceback: object = None) -> None:
        held = self._held
        if held:  # as `Seat.disarm` does it
            self._held = 0
            seat = self._seat
            words = seat.words
            words[held] = NEVER
            seat.free.append(held)
            if seat.expected:
                seat.record_block_end()
        elif self._named:
            self._release(*self._named)

    def __del__(self) -> None:
        # A signal handler may have raised as the block was about to be left: its timer must not outlive it.
        if self._held:
            self.__exit__()
        elif self._named:
            with suppress(Exception):
                self.__exit__()

    def __call__(self, function: F) -> F:
        """Decorate a function: each call of it is a block."""
        from functools import wraps
        from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction

        if isgeneratorfunction(function) or isasyncgenfunction(function):
            msg = f"{function!r} is a generator: calling it runs nothing yet; write `with expires(...)` inside"
            raise TypeError(msg)
        code = getattr(function, "__code__", None)
        location = f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(function)

        def block() -> expires:
            new = expires(self._after, self._scope, self._client)
            new._place = location
            return new

        if iscoroutinefunction(function):

            @wraps(function)
            async def decorated(*args: Any, **kwargs: Any) -> Any:
                with block():
                    return await function(*args, **kwargs)

        else:

            @wraps(function)
            def decorated(*args: Any, **kwargs: Any) -> Any:
                with block():
                    return function(*args, **kwargs)

        return decorated  # type: ignore[return-value]  # it has the signature of what it wraps

    def _describe(self, seat: Seat, slot: int, frame: Any) -> int:
        """Store what the timer of a slot is about. Returns its span in nanoseconds."""
        code, at, scope, place = frame.f_code, frame.f_lasti, self._scope, self._place
        try:
            text = _texts[id(code), at, scope, place][1]
        except KeyError:
            frame = _outside(frame)
            code, at = frame.f_code, frame.f_lasti
            text = encode(scope or "", place or _location(frame))
            if len(_texts) >= _MOST_KEPT:
                _texts.clear()
            _texts[id(code), at, scope, place] = code, text  # the code is kept, so its id is not reused
        after, thread = self._after, get_ident()
        span = int((after if after < _MOST else _MOST) * 1e9) or 1  # noqa: FURB136 - a call would cost more
        seat.describe(slot, text, span, thread)
        seat.known[slot] = code, at, after, scope, place, thread, span
        return span

    def _wake_watcher(self, seat: Seat) -> None:
        try:
            seat.wake_watcher()
        except BaseException:  # the block is not entered
            self.__exit__()
            raise

    def _acquire(self, client: TimerClient) -> None:
        """Take a timer from a client, which knows scopes by name: under one that no other timer of the process has."""
        scope = self._scope or self._place or _location(_outside(_frame(2)))
        with _beats.lock:
            numbers = _running.setdefault((id(client), scope), set())
            number = next(count for count in range(1, len(numbers) + 2) if count not in numbers)
            numbers.add(number)
        self._named = client, scope, number
        try:
            client.acquire(_numbered(scope, number), clock.wall() + self._after)
        except BrokenPipeError:  # there is no server
            self._forget(client, scope, number)
            raise
        except BaseException:  # perhaps a signal handler's, after the timer was taken
            with suppress(Exception):
                self._release(client, scope, number)
            raise

    def _release(self, client: TimerClient, scope: str, number: int) -> None:
        # If a signal handler raises here, `_named` stays as it is, and `__del__` releases again, which is harmless.
        try:
            client.release(_numbered(scope, number))
        except BrokenPipeError:
            self._forget(client, scope, number)
            raise
        self._forget(client, scope, number)

    def _forget(self, client: object, scope: str, number: int) -> None:
        self._named = None
        with _beats.lock:
            numbers = _running.get((id(client), scope), set())
            numbers.discard(number)
            if not numbers:
                _running.pop((id(client), scope), None)


def _numbered(scope: str, number: int) -> str:
    return scope if number == 1 else f"{scope} ({number})"


def _checked(after: Any, scope: Any) -> float:
    """Convert a number that is no int or float (one of numpy's, say), and check the scope. Raises TypeError."""
    if scope is not None and not isinstance(scope, str):
        msg = f"scope: expected a string, got {scope!r}"
        raise TypeError(msg)
    try:
        if not isinstance(after, (bool, str, bytes)):
            return float(after)
    except (TypeError, ValueError):
        pass
    msg = f"after: expected seconds, got {after!r}"
    raise TypeError(msg)


def _outside(frame: Any) -> Any:
    """Return the frame that enters a block; instead of an `ExitStack`'s, that of its caller."""
    contexts = getattr(sys.modules.get("contextlib"), "__file__", None)
    while frame.f_code.co_filename == contexts and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _location(frame: Any) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _start_anew() -> None:
    """After a fork, in the child: forget the parent's timers."""
    _running.clear()


os.register_at_fork(after_in_child=_start_anew)
