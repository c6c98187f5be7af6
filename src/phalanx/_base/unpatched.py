"""The modules of this program: those that are loaded; and what they offer where gevent or eventlet has patched them.

Owns what of ours must not become a greenlet. ``patch_all`` makes greenlets of threads, which take turns: one that waits
in the kernel, as a group's supervisor does, would stop all others. It also takes ``epoll`` out of `select`, and has
children reaped by a loop of its own.
"""

from __future__ import annotations

import select as _select
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import threading
    from collections.abc import Callable
    from typing import Any

_made: dict[str, Any] = {}


def module(name: str) -> Any:
    """Return a module of the standard library, unpatched. What it has imported itself may be patched.

    >>> import select
    >>> module("select") is select
    True
    """
    if not _is_patched():
        return __import__(name)
    if name not in _made:
        import importlib.util

        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        if name == "subprocess":  # its `os.close` must close now: what it then waits for is the end of a pipe
            vars(made)["os"] = module("os")
        _made[name] = made
    return _made[name]


def loaded(name: str) -> Any:
    """Return a module if it is in `sys.modules`, else None. If another thread is importing it, wait for the end."""
    if name not in sys.modules:
        return None
    from importlib import import_module

    return import_module(name)


def check() -> None:
    """Raise RuntimeError where no group can be started."""
    if not hasattr(_select, "poll"):
        msg = "eventlet has patched this program: no group can be started in it; start one from another program"
        raise RuntimeError(msg)


def check_fork() -> None:
    """Raise RuntimeError where no group can be started whose helpers and workers are forks of this process."""
    if _is_patched():
        msg = (
            "start_method 'fork': gevent has patched this program, and the group's helpers would be forks of it; "
            "'spawn' and 'forkserver' work"
        )
        raise RuntimeError(msg)


def thread(
    target: Callable[..., object], name: str, args: tuple[object, ...] = (), *, daemon: bool = True
) -> threading.Thread:
    """Return a thread of the operating system's that is yet to be started.

    >>> hello = thread(print, "phalanx-example", ("hello",))
    >>> hello.start(); hello.join()
    hello
    """
    if _is_patched():
        return _Thread(target, args)  # type: ignore[return-value]  # it has what we use of one

    import threading

    return threading.Thread(target=target, name=name, args=args, daemon=daemon)


def is_current(thread: object) -> bool:
    """Whether this is the thread that runs, of those that `thread` has made."""
    if isinstance(thread, _Thread):
        return thread.is_alive() and thread.ident == module("_thread").get_ident()

    import threading

    return thread is threading.current_thread()


def _is_patched() -> bool:
    # Not by the type of `start_new_thread`: debuggers replace that, too.
    monkey = sys.modules.get("gevent.monkey")
    return not hasattr(_select, "epoll") or (monkey is not None and monkey.is_module_patched("threading"))


class _Thread:
    """A thread that `threading` does not know."""

    def __init__(self, target: Callable[..., object], args: tuple[object, ...]) -> None:
        self._target, self._args = target, args
        self._native = module("_thread")
        self._running = self._native.allocate_lock()
        self.ident: int | None = None

    def start(self) -> None:
        self._running.acquire()
        try:
            self.ident = self._native.start_new_thread(self._run, ())
        except BaseException:
            self._running.release()
            raise

    def _run(self) -> None:
        try:
            self._target(*self._args)
        finally:
            self._running.release()

    def is_alive(self) -> bool:
        return bool(self._running.locked())

    def join(self, timeout: float | None = None) -> None:
        if self.ident != self._native.get_ident() and self._running.acquire(timeout=-1 if timeout is None else timeout):
            self._running.release()
