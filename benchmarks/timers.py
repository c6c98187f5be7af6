"""Timer servers, and workers that take timers: what the cases about timers share.

One set of functions serves Phalanx and its peer, whose API has the same names. The server is in the launcher and the
client in a worker, as in a training. Imports little: each worker imports it.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from importlib import import_module
from itertools import repeat
from time import monotonic_ns, perf_counter_ns
from typing import TYPE_CHECKING, Any

from benchmarks.case import PHALANX, TORCH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import NoReturn

LIBRARY = {PHALANX: "phalanx.timer", TORCH: "torch.distributed.elastic.timer"}

GROUP, FILE, LOCAL = KINDS = ("group", "file", "local")
"""Who watches: the group itself, as under ``phalanx run``, or the server of a pair, which stands alone."""

LONG = 3600.0
"""Seconds of a timer that is not to expire."""

_MOMENT = struct.Struct("q")


@contextlib.contextmanager
def watching(contender: str, kind: str, max_interval: float) -> Iterator[Any]:
    """Have a server of this kind run in this process, and give what its clients need (of a group: None)."""
    if kind == GROUP:
        yield None
        return
    library = import_module(LIBRARY[contender])
    handle: Any
    if kind == FILE:
        import tempfile

        handle = os.path.join(tempfile.mkdtemp(), "timers")
        server = library.FileTimerServer(handle, "benchmark", max_interval)
    else:
        import multiprocessing

        handle = multiprocessing.get_context("spawn").Queue()
        server = library.LocalTimerServer(handle, max_interval)
    server.start()
    try:
        yield handle
    finally:
        server.stop()


def options(kind: str, on_event: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:
    """Return what `benchmarks.group.start` needs to be told beside, for a group that is watched in this way."""
    if kind != GROUP:
        return {}
    from phalanx.timer import TimerSpecs

    return {"timers": TimerSpecs(on_event=on_event)}


def _client(contender: str, kind: str, handle: Any) -> Any:
    if kind == GROUP:
        return None
    library = import_module(LIBRARY[contender])
    return getattr(library, f"{kind.capitalize()}TimerClient")(handle)


def _say(path: str, moment: int) -> None:
    said = os.open(path, os.O_RDWR)
    os.write(said, _MOMENT.pack(moment))
    os.close(said)


def _wait(path: str) -> None:
    held = os.open(path, os.O_RDWR)
    os.read(held, 1)
    os.close(held)


def hang(contender: str, kind: str, handle: Any, ready: str, after: float) -> NoReturn:
    """Take a timer, say in ``ready`` when it expires (the moment before it is taken, and ``after``), and sleep."""
    expires, client = import_module(LIBRARY[contender]).expires, _client(contender, kind, handle)
    with expires(after=LONG, scope="before", client=client):
        pass  # what the first one loads is not part of it
    began = monotonic_ns()
    with expires(after=after, scope="sleep", client=client):
        _say(ready, began + int(after * 1e9))
        time.sleep(600)
    raise AssertionError("nobody came")


def cost(contender: str, kind: str, handle: Any, batches: int, pairs: int) -> tuple[list[float], float, int]:
    """Take a timer and release it, again and again: ``acquire`` and ``release`` of a client; in a group, a block.

    Returns:
        The microseconds of a pair in each batch; the same over all batches and until the last request has been written
        to the queue's pipe (the peer has a thread for that, of the same process); and how many pairs raised.
    """
    one = blocks if kind == GROUP else _requests
    subject = import_module(LIBRARY[contender]).expires if kind == GROUP else _client(contender, kind, handle)
    errors = one(subject, pairs // 10)
    took, first = [], perf_counter_ns()
    for _ in range(batches):
        began = perf_counter_ns()
        errors += one(subject, pairs)
        took.append((perf_counter_ns() - began) / pairs / 1e3)
    if kind == LOCAL:
        handle.close()
        handle.join_thread()
    return took, (perf_counter_ns() - first) / pairs / batches / 1e3, errors


def blocks(expires: Any, pairs: int) -> int:
    """Enter and leave as many blocks."""
    for _ in repeat(None, pairs):
        with expires(LONG):
            pass
    return 0


def _requests(client: Any, pairs: int) -> int:
    expiration, errors = time.time() + LONG, 0
    for _ in repeat(None, pairs):
        try:
            client.acquire("step", expiration)
            client.release("step")
        except Exception:  # noqa: BLE001 - whatever the worker would have died of; it is counted
            errors += 1
    return errors


def flood(contender: str, handle: Any, paths: Sequence[str], pairs: int) -> int:
    """With all others, once let go, acquire and release as fast as may be; return how many pairs raised."""
    client = _client(contender, FILE, handle)
    _requests(client, 1)
    ready, gate = paths
    _say(ready, monotonic_ns())
    _wait(gate)
    errors = _requests(client, pairs)
    _say(ready, monotonic_ns())
    return errors


def nest(
    paths: Sequence[str],
    *,
    depth: int,
    shortest: float,
    pause: float,
    seconds: float,
    many: int,
) -> tuple[int, int]:
    """Take ``depth`` nested timers and release them, with pauses, for some seconds; then hold ``many`` at once.

    Returns:
        How many timers were taken, and how many slots of this process's seat were not free after each of the two.
    """
    from phalanx.timer import expires

    def descend(level: int) -> None:
        with expires(shortest + level):
            if level:
                descend(level - 1)

    descend(depth - 1)
    ready, gate = paths
    _say(ready, monotonic_ns())
    _wait(gate)
    end, taken = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        descend(depth - 1)
        taken += depth
        time.sleep(pause)
    _say(ready, monotonic_ns())
    left = _armed()
    with contextlib.ExitStack() as stack:
        for scope in range(many):
            stack.enter_context(expires(LONG, f"scope {scope}"))
        if _armed() != left + many:
            raise AssertionError(f"{many} timers run, and {_armed()} slots say so")
    return taken, left + _armed()


def _armed() -> int:
    """Count the slots of this process's seat that have a deadline."""
    from phalanx._timers.layout import FIRST, NEVER, SLOTS
    from phalanx.timer import _beats

    seat = _beats.take_seat()
    return SLOTS - seat.words[FIRST : FIRST + SLOTS].tolist().count(NEVER)
