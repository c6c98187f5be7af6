"""The thread on which all stores of a process run: grpc disturbs itself where it serves the loops of several threads.

It is there while a store is open.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from contextvars import Context
from typing import TypeVarTuple

_Ts = TypeVarTuple("_Ts")


class _Loop(asyncio.SelectorEventLoop):
    """A loop that may be told something when it is closed: grpc does, and asyncio would print that it raises."""

    def call_soon_threadsafe(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        if self.is_closed():
            return asyncio.Handle(callback, args, self, context)  # it is never run
        return super().call_soon_threadsafe(callback, *args, context=context)


_PATIENCE = 0.5
_lock = threading.Lock()
_users = 0
_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None
_has_run = _is_fork = False  # whether grpc has been used here; and in the process that this one is a fork of


def acquire() -> asyncio.AbstractEventLoop:
    """Return the loop of the thread, which is started if it is not there. `release` follows.

    Raises OSError in a fork of a process that has used grpc, which would crash or hang.
    """
    global _users, _loop, _thread, _has_run  # noqa: PLW0603 - there is one for the process
    if _is_fork:
        msg = "this process is a fork of one that has used an etcd, by grpc, which crashes or hangs in forks: spawn it"
        raise OSError(msg)
    _has_run = True
    with _lock:
        if _loop is None:
            loop = _Loop()
            thread = threading.Thread(target=_run, args=(loop,), name="phalanx-store", daemon=True)
            thread.start()
            _loop, _thread = loop, thread
        _users += 1
        return _loop


def release(seconds: float) -> None:
    """Give the loop back. With the last one the thread ends, which is waited for, at most so many seconds."""
    global _users, _loop, _thread  # noqa: PLW0603 - as above
    with _lock:
        _users -= 1
        if _users or _loop is None or _thread is None:
            return
        loop, thread, _loop, _thread = _loop, _thread, None, None
    loop.call_soon_threadsafe(loop.stop)
    thread.join(seconds)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        if left := asyncio.all_tasks(loop):  # nobody has waited for their end, or not long enough
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.wait(left, timeout=_PATIENCE))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def _forget() -> None:
    """Forget, in a fork, the thread that is not there."""
    global _lock, _users, _loop, _thread, _is_fork  # noqa: PLW0603 - as above
    _lock, _users, _loop, _thread = threading.Lock(), 0, None, None
    _is_fork = _is_fork or _has_run


os.register_at_fork(after_in_child=_forget)
