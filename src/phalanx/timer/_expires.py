"""What code that can hang uses: `expires`, `beat`, `progress`, `rest`; and `configure`, which says who is to watch.

Owns the worker's side of timers in general. How a client tells its server is the client's business; timers in shared
memory alone are set from here, because what they cost is this module's cost.
"""

from __future__ import annotations

import math
import os
import sys
from _thread import RLock, get_ident
from contextlib import suppress

from phalanx._base import clock
from phalanx._timers import timetable
from phalanx._timers.timetable import (
    HEAD_WAKE,
    LATE,
    LONGEST,
    NEVER,
    SEAT_BEAT,
    SEAT_REST,
    SEAT_STEP,
    SLOTS,
    Seat,
    encode,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Self, TypeVar

    from phalanx.timer._server import TimerClient

    F = TypeVar("F", bound=Callable[..., Any])

_now_ns = clock.now_ns
_frame = sys._getframe  # noqa: SLF001 - the one way to a caller that does not cost a stack
_NUMBERS = frozenset((int, float))
_SPANS, _THREADS = SLOTS, 2 * SLOTS
_MOST = LONGEST / 1e9  # seconds
_PLACES = 4096  # lines of code, and scopes, whose names are kept ready

_client: TimerClient | None = None
_own: Seat | None = None  # at the table of the group
_seat: Seat | None = None  # where timers go, unless they go to a client that knows scopes by their names
_beating: Seat | None = None  # where heartbeats go
_alone = False  # this process is in no group that has a table
_hooked = False
_lock = RLock()  # reentrant, for a signal handler that takes a timer while its own thread does
_places: dict[tuple[int, int], tuple[object, str]] = {}  # a line of code, by its code object and place therein
_texts: dict[tuple[str | None, str], bytes] = {}
_ways: dict[type, str] = {}  # how clients of a class are told: one of these
_BY_NAME, _BY_DEADLINE, _BY_SEAT = "acquire", "_acquire", "seat"
_rests: list[rest] = []  # the blocks of that kind that are entered
_running: dict[tuple[int, str], set[int]] = {}  # which numbers of a scope are taken, for clients that know names alone


def configure(timer_client: TimerClient | None) -> None:
    """Set the client that `expires` uses in this process from now on. Timers that run already stay where they are.

    Under ``phalanx run``, and in a group that was started with `TimerSpecs`, it is not needed: the group watches.

    Args:
        timer_client: A `LocalTimerClient`, a `FileTimerClient`, a `SharedTimerClient`, or one of your own. None: no
            client; if the process is in a group that has timers, the group watches again.

    Raises:
        TypeError: It has no ``acquire`` and ``release``.
    """
    global _client, _seat, _alone
    if timer_client is not None and not (hasattr(timer_client, "acquire") and hasattr(timer_client, "release")):
        msg = f"timer_client: expected a TimerClient, got {timer_client!r}"
        raise TypeError(msg)
    _client, _seat, _alone = timer_client, None, False
    _move_beats()


def _move_beats() -> None:
    """Have heartbeats that have begun go on where the configured client sends them. Its old seat expects none."""
    global _beating  # noqa: PLW0603 - one for the process
    with _lock:
        before = _beating
        if before is None:
            return
        try:
            seat = _find() or _group_seat()
        except (RuntimeError, ValueError):  # nobody is there who would take them
            return
        if seat is before:
            return
        step = before.words[SEAT_STEP]
        if before.words[SEAT_BEAT] and not before.words[SEAT_REST]:
            seat.beat(step)
        else:
            seat.rest()
        _beating = seat
        before.give_up()


class NobodyWatchesError(RuntimeError):
    """A timer was taken, and there is nobody to take it from."""

    __module__ = "phalanx.timer"  # as people know it, in tracebacks and pickles


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
        RuntimeError: On entry: nobody has been configured, and the process is in no group that has timers; the server
            has stopped; 1024 timers run in this process; or this very object is entered already.

    >>> import phalanx.timer as timer
    >>> with timer.SharedTimerServer() as server:  # a group has its own
    ...     with timer.expires(after=60, client=timer.SharedTimerClient(server.address)):
    ...         pass
    >>> with timer.expires(after=0):
    ...     pass
    Traceback (most recent call last):
    ValueError: after: expected more than 0 seconds, got 0
    """

    __slots__ = ("_after", "_client", "_held", "_named", "_scope", "_seat", "_span", "_text")

    def __init__(self, after: float, scope: str | None = None, client: TimerClient | None = None) -> None:
        self._held = 0  # the slot that is to be given back
        self._named: tuple[TimerClient, str, int] | None = None  # or the name that is to be released
        if after.__class__ not in _NUMBERS or not (scope is None or isinstance(scope, str)):
            after = _checked(after, scope)
        if not 0 < after < math.inf:
            msg = f"after: expected more than 0 seconds, got {after!r}"
            raise ValueError(msg)
        self._span = int((after if after < _MOST else _MOST) * 1e9) or 1  # noqa: FURB136 - a call would cost more
        self._after = after
        self._scope = scope
        self._client = client
        self._text = b""  # known already: that of a decorated function

    def __enter__(self) -> Self:
        if self._held or self._named:
            raise RuntimeError("this very block is entered already; write `with expires(...)` for each")
        seat = _seat if self._client is None else _seat_of(self._client)
        if seat is None:
            seat = _find() if self._client is None else None
            if seat is None:
                self._acquire()
                return self
        text = self._text
        if not text:
            frame = _frame(1)
            try:
                text = _texts[self._scope, _places[id(frame.f_code), frame.f_lasti][1]]
            except KeyError:
                text = _text(self._scope, _place(frame))
        try:
            slot = seat.free.pop()
        except IndexError:
            msg = f"{SLOTS} timers run in this process: that is the most"
            raise RuntimeError(msg) from None
        if seat.texts[slot] is not text:
            seat.write(slot, text)
        words, head, span = seat.words, seat.head, self._span
        words[slot + _SPANS] = span
        words[slot + _THREADS] = get_ident()
        self._seat = seat
        deadline = _now_ns() + span
        # From here on no call is made, so that no signal handler can raise before `with` has taken the block over.
        self._held = slot
        words[slot] = deadline
        if not deadline - span - LATE <= head[HEAD_WAKE] <= deadline:
            self._ring(seat)
        return self

    def __exit__(self, *_: object) -> None:
        held = self._held
        if held:  # as `Seat.give` does it
            self._held = 0
            seat = self._seat
            words = seat.words
            words[held] = NEVER
            seat.free.append(held)
            if seat.expected:
                seat.left()
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
        place = f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(function)

        def block() -> expires:
            new = expires(self._after, self._scope, self._client)
            new._text = _text(self._scope, place)
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

    def _ring(self, seat: Seat) -> None:
        try:
            seat.ring()
        except BaseException:  # the block is not entered
            self.__exit__()
            raise

    def _acquire(self) -> None:
        """Tell a client that knows scopes by their names: the same name twice would be one timer."""
        client = self._client or _client
        assert client is not None
        _hook()
        place = timetable.decode(self._text)[1] if self._text else _place(_frame(2))
        scope = self._scope or place
        with _lock:
            numbers = _running.setdefault((id(client), scope), set())
            number = next(count for count in range(1, len(numbers) + 2) if count not in numbers)
            numbers.add(number)
        deadline = (_now_ns() + self._span) / 1e9
        self._named = client, scope, number
        try:
            if _by_deadline(client):
                client._acquire(_numbered(scope, number), deadline)  # type: ignore[attr-defined]  # noqa: SLF001 - as was just found
            else:
                client.acquire(_numbered(scope, number), clock.wall() + self._after)
        except BrokenPipeError:  # nobody is there
            self._forget(client, scope, number)
            raise
        except BaseException:  # perhaps a signal handler's, and the timer had been taken
            with suppress(Exception):
                self._release(client, scope, number)
            raise

    def _release(self, client: TimerClient, scope: str, number: int) -> None:
        # What a signal handler raises leaves `_named` as it is: `__del__` releases again, which harms nobody.
        try:
            client.release(_numbered(scope, number))
        except BrokenPipeError:
            self._forget(client, scope, number)
            raise
        self._forget(client, scope, number)

    def _forget(self, client: object, scope: str, number: int) -> None:
        self._named = None
        with _lock:
            numbers = _running.get((id(client), scope), set())
            numbers.discard(number)
            if not numbers:
                _running.pop((id(client), scope), None)


def _numbered(scope: str, number: int) -> str:
    return scope if number == 1 else f"{scope} ({number})"


def _checked(after: Any, scope: Any) -> float:
    """Look twice at what is no plain number (one of numpy's, say), or no plain scope. Raises TypeError."""
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


def beat() -> None:
    """Say that this rank is alive: call it once per step of the training loop. It costs a quarter of a microsecond.

    With ``--hang-timeout SECONDS`` (`TimerSpecs.hang_timeout`), a rank whose last beat is older is hung. The first
    beat arms it, so a start may take its time. An `expires` block in any process of the rank extends it, and the end of
    the block counts as a beat. After the last step, call `rest`. In a process that is in no such group, it does
    nothing. If the group's table cannot be opened, it says so once on stderr, and does nothing.
    """
    progress()


def progress(step: int = 0) -> None:
    """`beat`, and say which step this is: reports name the last one.

    Args:
        step: A number of 64 bits, as you count.
    """
    global _beating, _alone  # noqa: PLW0603 - one for the process
    seat = _beating
    if seat is None:
        if _alone:
            return
        try:
            seat = _beating = _find() or _group_seat()
        except NobodyWatchesError:
            _alone = True
            return
        except (RuntimeError, ValueError) as error:  # who beats asks for nothing, and is not to fail of it
            _alone = True
            from phalanx._base import std_streams

            std_streams.write_stderr(f"phalanx: heartbeats of process {os.getpid()} are not watched: {error}\n")
            return
    seat.beat(step)
    if seat is not _beating:  # another thread has configured another client meanwhile
        seat.give_up()


class rest:  # noqa: N801 - used as a verb, as `expires` is
    """Suspend this process's heartbeat until its next `beat`: what comes now may take any time.

    It is for an evaluation, an upload, or what runs after the last step. It covers the processes below this one as well
    (loaders that are idle meanwhile), but neither its parents nor its siblings. `expires` blocks are still watched.

    It is also a context manager, which can be used again. When the block is left, and heartbeats ran before, it beats
    once, with the last step; of several blocks at once, the last one does.

    At the end of a worker's program (its function has returned, its script is at its end, or either has called
    ``sys.exit(0)``) the heartbeat is suspended by itself, so exit handlers and threads may take their time. After a
    failure it is not.

    In a process that is in no group, it does nothing. It never raises.

    >>> with rest():
    ...     pass
    """

    __slots__ = ("ran",)

    ran: bool
    """Whether it is this block's end that beats."""

    def __init__(self) -> None:
        self.ran = False
        with _lock:
            seat = _seat_for_beats()
            if seat is not None:
                self.ran = seat.rest()

    def __enter__(self) -> Self:
        with _lock:
            seat = _seat_for_beats()
            if seat is not None:
                self.ran |= seat.rest()  # it may have been left before, or a heartbeat has come
            _rests.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        with _lock:
            if not any(one is self for one in _rests):  # a fork of the process that entered it
                return
            _rests.remove(self)
            ran, self.ran = self.ran, False
            if ran and _rests:
                _rests[-1].ran = True  # it goes on resting
            elif ran and _beating is not None:
                _beating.beat(_beating.words[SEAT_STEP])


def _seat_for_beats() -> Seat | None:
    """Where heartbeats go, or would go; None if nobody expects any."""
    global _beating  # noqa: PLW0603 - one for the process
    if _beating is None and not _alone:
        try:
            _beating = _find() or _group_seat()
        except Exception:  # noqa: BLE001 - a beat would say why; a client of the user's may raise anything
            return None
    return _beating


def _find() -> Seat | None:
    """Where timers go: the configured client's seat, or that at the table of this process's group.

    None stands for a configured client that has none. Raises RuntimeError when nobody watches.
    """
    global _seat  # noqa: PLW0603 - one for the process
    _hook()
    if _client is None:
        _seat = _group_seat()
        return _seat
    _seat = _seat_of(_client)
    return _seat


def _seat_of(client: TimerClient) -> Seat | None:
    way = _ways.get(client.__class__) or _way(client.__class__)
    if way is _BY_SEAT:
        own = client.__dict__
        if "acquire" not in own and "release" not in own and "_acquire" not in own:
            seat = client.seat  # type: ignore[attr-defined]  # as was found
            return seat if isinstance(seat, Seat) else None
    return None


def _by_deadline(client: TimerClient) -> bool:
    """Whether ``_acquire``, by the monotonic clock, may stand in for a client's ``acquire``."""
    way = _ways.get(client.__class__) or _way(client.__class__)
    if way is _BY_NAME:
        return False
    own = client.__dict__
    return "acquire" not in own or "_acquire" in own


def _way(kind: type) -> str:
    """How clients of a class are told.

    A class that overrides a method below the one that gave the short way wants to be asked, and so does an object. The
    short ways are those of our own clients: what others call by these names is another matter.
    """
    server = sys.modules.get("phalanx.timer._server")
    order = kind.__mro__

    def giver(name: str) -> int:
        """The class that gives a name: the higher the number, the farther from ``kind``. None does: beyond them all."""
        return next((number for number, each in enumerate(order) if name in each.__dict__), len(order))

    acquire, seat = giver("_acquire"), giver("seat")
    if server is None or server.TimerClient not in order or not acquire <= giver("acquire") < len(order):
        way = _BY_NAME
    elif seat <= min(acquire, giver("acquire"), giver("release")):
        way = _BY_SEAT
    else:
        way = _BY_DEADLINE
    if len(_ways) >= _PLACES:
        _ways.clear()
    _ways[kind] = way
    return way


def _group_seat() -> Seat:
    """The seat at the table of this process's group, taken once. Raises NobodyWatchesError, RuntimeError."""
    global _own  # noqa: PLW0603 - one for the process
    address = os.environ.get(timetable.ENV)
    if not address:
        raise NobodyWatchesError(
            "nobody watches timers: call phalanx.timer.configure(client) first, or run under `phalanx run`, or in a "
            "group that was started with timers=TimerSpecs()"
        )
    with _lock:
        if _own is None:
            try:
                _own = timetable.Seat(address)
            except OSError as error:
                raise RuntimeError(error.strerror) from error
            _show_stacks()
        return _own


def _show_stacks() -> None:
    """Have this process show its stacks, unless it does: it may be one below the worker (`sh run.sh`, a loader)."""
    from phalanx._base import linux
    from phalanx._evidence.error_file import ERROR_FILE_ENV
    from phalanx._evidence.stack_signals import offer_stacks, offers_stacks

    path = os.environ.get(ERROR_FILE_ENV)
    if path and not offers_stacks(path):
        offer_stacks(path)
        linux.allow_ptrace()


def _hook() -> None:
    global _hooked  # noqa: PLW0603 - one for the process
    if not _hooked:
        _hooked = True
        os.register_at_fork(after_in_child=_start_anew)


def _place(frame: Any) -> str:
    """The file and line that a frame stands at; not those of an `ExitStack`, but of its user."""
    contexts = getattr(sys.modules.get("contextlib"), "__file__", None)
    while frame.f_code.co_filename == contexts and frame.f_back is not None:
        frame = frame.f_back
    code = frame.f_code
    key = (id(code), frame.f_lasti)
    known = _places.get(key)
    if known is None:
        if len(_places) >= _PLACES:
            _places.clear()
        known = _places[key] = (code, f"{code.co_filename}:{frame.f_lineno}")  # the code is kept, and so is its id
    return known[1]


def _text(scope: str | None, place: str) -> bytes:
    text = _texts.get((scope, place))
    if text is None:
        if len(_texts) >= _PLACES:
            _texts.clear()
        text = _texts[scope, place] = encode(scope or "", place)
    return text


def _start_anew() -> None:
    """After a fork, in the child: no timer of its parent's is its own, and it takes a seat of its own."""
    global _own, _seat, _beating, _lock, _alone  # noqa: PLW0603 - as above
    _lock = RLock()
    _own = _seat = _beating = None
    _alone = False
    _running.clear()
    _rests.clear()
