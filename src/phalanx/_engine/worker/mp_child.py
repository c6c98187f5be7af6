"""A worker as a child of `multiprocessing`: its name, identity, parent, authentication key and resource tracker.

Owns the likeness. `multiprocessing` itself takes 10 of a worker's 25 ms to load, so what is to be set there is set when
somebody loads it: nobody can tell the difference. Knows nothing of what a worker does.
"""

from __future__ import annotations

import _socket
import itertools
import os
import sys

from phalanx._base import channels, linux
from phalanx._engine import worker_messages

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from typing import Any

_KINDS = {"spawn": "SpawnProcess", "forkserver": "ForkServerProcess", "fork": "ForkProcess"}
_INT = 4

_me: Child | None = None  # in a worker


# --- in the launcher


class Family:
    """What the workers of a group are called, and what they have from their parent.

    Args:
        method: The start method.
        count: How many there are.
        daemon: Whether they may have no children of their own, as `multiprocessing` has it.
    """

    def __init__(self, method: str, count: int, *, daemon: bool = False) -> None:
        from multiprocessing import process

        current: Any = process.current_process()
        counter = process._process_counter  # type: ignore[attr-defined]  # the stubs lack it
        key = bytes(current.authkey)
        self.method = method
        self._identities = [(*current._identity, next(counter)) for _ in range(count)]
        util = loaded("multiprocessing.util")
        level = None if util is None or util._logger is None else util._logger.getEffectiveLevel()
        self._shared = (method, current.name, os.getpid(), key, daemon, level, bool(util and util._log_to_stderr))

    def member(self, rank: int) -> State:
        """What one worker is told. `marshal` can write it."""
        return (self.name(rank), self._identities[rank], *self._shared)

    def name(self, rank: int) -> str:
        """Like ``"SpawnProcess-1"``, as `multiprocessing` counts its children."""
        return f"{_KINDS[self.method]}-{':'.join(map(str, self._identities[rank]))}"


State = tuple[str, tuple[int, ...], str, str, int, bytes, bool, "int | None", bool]


def resource_tracker() -> int | None:
    """The descriptor on which this process's resource tracker listens, if it has one."""
    module = loaded("multiprocessing.resource_tracker")
    return None if module is None else module._resource_tracker._fd  # as multiprocessing.spawn does


def give_tracker(fd: int) -> None:
    """Send the descriptor of this process's resource tracker, which is started if need be, over the socket ``fd``.

    Whatever goes wrong, the socket is closed in the end: who has asked, and is still there, helps itself then.
    """
    try:
        from multiprocessing import resource_tracker

        number: Any = resource_tracker.getfd()
        rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, number.to_bytes(_INT, sys.byteorder))]
        sock = _socket.socket(fileno=os.dup(fd))
        try:
            sock.sendmsg([b"1"], rights, _socket.MSG_DONTWAIT | _socket.MSG_NOSIGNAL)
        finally:
            sock.close()
    except Exception:  # noqa: BLE001, S110 - it has ended; there is no descriptor, no process; a warning is an error
        pass
    finally:
        os.close(fd)


def loaded(name: str) -> Any:
    """A module if it is loaded. One that another thread is loading is waited for: it holds only half of its names."""
    if name not in sys.modules:
        return None
    from importlib import import_module

    return import_module(name)


# --- in a worker


class Child:
    """This process as a child of `multiprocessing`.

    Args:
        state: What `Family.member` says of it.
        rank: Its rank.
        report: The descriptor on which it can ask its launcher.
        forked: Whether it has the memory of the process from which it was forked.
    """

    def __init__(self, state: State, rank: int, report: int, *, forked: bool) -> None:
        self.name, self.identity, self._method, self._parent, self._launcher, *rest = state
        self.key: bytes
        self._level: int | None
        self.key, self._daemon, self._level, self._to_stderr = rest  # type: ignore[assignment]  # `State` says more
        self.counter = itertools.count(1)
        """Of its own children."""
        self.rank = rank
        self._report = report
        self._report_is = _file(report)
        self._forked = forked
        self._inheriting = False
        self._process: Any = None
        self._server_of_others = _fork_server()
        self.tracker: int | None = None
        """The resource tracker's descriptor, if the launcher had one."""
        self.environment: dict[str, str] = {}
        """The variables that the caller has given this rank."""

    def begin(self) -> None:
        """Be one: at once where `multiprocessing` is loaded, else as soon as it is."""
        global _me  # noqa: PLW0603 - a process is one child
        _me = self
        todo: dict[str, Callable[[Any], None]] = {}
        for name, complete in (
            ("multiprocessing.context", self._enter),
            ("multiprocessing.resource_tracker", self._share),
            ("logging", _name_records),
        ):
            if name in sys.modules:
                complete(sys.modules[name])
            else:
                todo[name] = complete
        _Watch.install(todo)
        if self._level is not None or self._to_stderr:
            from multiprocessing import util

            if self._to_stderr and not util._log_to_stderr:  # type: ignore[attr-defined]  # the stubs lack it
                util.log_to_stderr()
            if self._level is not None:
                util.get_logger().setLevel(self._level)

    def inherit(self, *, begins: bool) -> None:
        """From now on, what is unpickled comes from the parent; or no longer. Nobody may start children meanwhile."""
        self._inheriting = begins
        if self._process is not None:
            self._mark()

    def settle(self) -> None:
        """All has been loaded: what that has made of the current process is undone, and forks are told that they are.

        `multiprocessing` becomes the child only now: objects that came with the arguments count themselves again.
        """
        if self._process is None:
            return
        sys.modules["multiprocessing.context"]._force_start_method(self._method)
        sys.modules["multiprocessing.process"]._current_process = self._process  # type: ignore[attr-defined]  # as above
        self._process._name = self.name
        if self._forked and "multiprocessing.util" in sys.modules:
            self._process._after_fork()

    def end(self) -> None:
        """What `multiprocessing` does when a child's function is over: finalizers run, its own children are joined.

        A fork server of ours is stopped when threads have ended, which may use it: it would end by itself, a moment
        after us, and be told as left behind.
        """
        import atexit

        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            util._exit_function()
        atexit.register(self._stop_fork_server)

    def _stop_fork_server(self) -> None:
        pid = _fork_server()
        if pid is not None and pid != self._server_of_others:
            server: Any = sys.modules["multiprocessing.forkserver"]
            try:
                os.kill(pid, linux.SIGKILL)  # others may hold the descriptor whose end it waits for
                server._forkserver._stop()
            except OSError:  # it has ended, and somebody has reaped it; its folder has been removed
                pass

    def _mark(self) -> None:
        # The flag under which multiprocessing's own children unpickle, and may not start others.
        if self._inheriting:
            self._process._inheriting = True
        elif hasattr(self._process, "_inheriting"):
            del self._process._inheriting

    def _enter(self, context: Any) -> None:
        """Be the current process. What is set is what `multiprocessing.process.BaseProcess._bootstrap` sets."""
        process: Any = sys.modules["multiprocessing.process"]
        child = context._concrete_contexts[self._method].Process(name=self.name)
        child._identity = self.identity
        child._parent_name, child._parent_pid = self._parent, self._launcher
        child._config.update(authkey=process.AuthenticationString(self.key), daemon=self._daemon)
        try:  # a pidfd serves as the parent's sentinel: readable once it has ended
            sentinel = os.pidfd_open(self._launcher)
        except OSError:  # it has
            sentinel = os.eventfd(1, os.EFD_CLOEXEC)
        process._process_counter = self.counter
        process._children = set()
        process._current_process = self._process = child
        process._parent_process = process._ParentProcess(self._parent, self._launcher, sentinel)
        context._force_start_method(self._method)
        self._mark()

    @property
    def entered(self) -> bool:
        """Whether `multiprocessing` is loaded, and knows of it."""
        return self._process is not None

    def _share(self, module: Any) -> None:
        """Have the launcher's resource tracker: one of our own would unlink what we have made as soon as we end."""
        tracker = module._resource_tracker
        if self._forked:
            import threading

            tracker._lock = threading.RLock()  # a thread of the launcher's, which is not here, may hold the other
            # The launcher may be a worker, and ask its own.
            tracker.__class__ = getattr(tracker, "_plain", type(tracker))
        if self._method == "forkserver":  # that of the process which has imported modules ends with it
            tracker._fd = tracker._pid = None
        if self.tracker is not None:
            tracker._fd = self.tracker
        elif tracker._fd is None:
            tracker.__class__ = _asking(type(tracker), self)

    @property
    def report(self) -> int | None:
        """The descriptor on which the launcher hears us; None once the user's code has closed it."""
        # Its number may be that of a file of the user's by now.
        return self._report if self._report_is is not None and _file(self._report) == self._report_is else None

    def ask(self) -> int | None:
        """The resource tracker of the launcher, which starts it if need be; None if it has gone, or cannot.

        A launcher that is stopped is waited for: a tracker of our own would unlink all that we make as soon as we end.
        """
        report = self.report
        if report is None:
            return None
        try:
            ours, theirs = channels.pair()
        except OSError:
            return None
        try:
            worker_messages.send(report, worker_messages.TRACKER, [theirs.fileno()])
            theirs.close()
            _wait_for_input(ours.fileno())
            _text, ancillary, _flags, _address = ours.recvmsg(1, _socket.CMSG_SPACE(_INT), _socket.MSG_CMSG_CLOEXEC)
            for _level, _kind, data in ancillary:
                return int.from_bytes(data[:_INT], sys.byteorder)
        except (OSError, ImportError, channels.Closed):
            pass
        finally:
            theirs.close()
            ours.close()
        return None


def _file(fd: int) -> tuple[int, int] | None:
    """What tells an open file from others; None if there is none."""
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _wait_for_input(fd: int) -> None:
    """Wait until a descriptor can be read, or has nobody at its other end. Raises OSError, ImportError."""
    import select  # a shared library: 0.25 ms, for what few workers do

    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.poll()


def _fork_server() -> int | None:
    """The pid of the fork server of `multiprocessing` that this process knows."""
    server: Any = sys.modules.get("multiprocessing.forkserver")
    return None if server is None else server._forkserver._forkserver_pid


def _asking(kind: type, child: Child) -> type:
    """A resource tracker that asks for the launcher's before it starts one."""
    asked = False

    class Asking(kind):  # type: ignore[misc]  # it is known at run time alone
        _plain = kind

        @property
        def _fd(self) -> int | None:
            nonlocal asked
            own = self.__dict__
            if own.get("_fd") is None and not asked and not sys.is_finalizing():
                own["_fd"] = child.ask()  # what a signal's handler raises ends this: then it is asked once more
                asked = True
            return own.get("_fd")

        @_fd.setter
        def _fd(self, value: int | None) -> None:
            self.__dict__["_fd"] = value

    Asking.__name__ = Asking.__qualname__ = kind.__name__
    return Asking


def _name_records(logging: Any) -> None:
    """Have log records name the process also where `multiprocessing`, which they ask for its name, is not loaded."""
    kind = logging.LogRecord
    original = kind.__init__
    if hasattr(original, "_by_phalanx"):  # in the launcher, of which this is a fork
        return

    def __init__(record: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it is one
        original(record, *args, **kwargs)
        if record.processName == "MainProcess" and _me is not None and not _me.entered:
            record.processName = _me.name

    __init__.__wrapped__ = original  # type: ignore[attr-defined]  # for its signature
    __init__._by_phalanx = True  # type: ignore[attr-defined]  # see above
    kind.__init__ = __init__


class _Watch:
    """A finder on `sys.meta_path` that has certain modules completed when they are loaded.

    It stays there when that is done: other threads may go through the list, and would skip the finder behind it.
    """

    def __init__(self, todo: dict[str, Callable[[Any], None]]) -> None:
        self._todo = todo

    @classmethod
    def install(cls, todo: dict[str, Callable[[Any], None]]) -> None:
        """Watch for modules. In a fork of a process that does so, it does so no more: what it is is another matter."""
        for finder in [finder for finder in sys.meta_path if isinstance(finder, cls)]:
            sys.meta_path.remove(finder)
        if todo:
            sys.meta_path.insert(0, cls(todo))

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find what the finders behind this one find. Those before it have been asked."""
        if name not in self._todo:
            return None
        finders: list[Any] = list(sys.meta_path)
        for finder in finders[finders.index(self) + 1 :] if self in finders else finders:
            find = getattr(finder, "find_spec", None)
            spec: Any = None if find is None else find(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Completing(spec.loader, self)
                return spec  # type: ignore[no-any-return]  # as find_spec has it
        return None

    def complete(self, module: Any) -> None:
        """The module has been loaded, or a copy of it that somebody keeps to himself."""
        name = module.__name__
        if name in self._todo and sys.modules.get(name) is module:
            self._todo[name](module)
            del self._todo[name]


class _Completing:
    """A loader that leaves no trace of itself in the module. It can do all that the real one can."""

    def __init__(self, loader: Any, watch: _Watch) -> None:
        self._loader = loader
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        if name in ("_loader", "_watch"):  # it is being copied
            raise AttributeError(name)
        return getattr(self._loader, name)

    def exec_module(self, module: Any) -> None:
        for holder, name in ((module, "__loader__"), (module.__spec__, "loader")):
            if getattr(holder, name, None) is self:
                setattr(holder, name, self._loader)
        self._loader.exec_module(module)
        self._watch.complete(module)
