"""Makes a worker a child of `multiprocessing`: its name, identity, parent, authentication key and resource tracker.

To import `multiprocessing` takes 10 of a worker's 25 ms. So its attributes are set when the program imports it, and
programs see no difference. Knows nothing of what a worker does. `mp_parent` has the launcher's side.
"""

from __future__ import annotations

import _socket
import itertools
import os
import sys

from phalanx._base import channels, linux
from phalanx._engine import worker_messages
from phalanx._evidence.sent import Report

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from typing import Any

    from phalanx._engine.mp_parent import State

_INT = 4

_this_child: Child | None = None  # in a worker


class Child:
    """This process as a child of `multiprocessing`.

    Args:
        state: Its state, from `mp_parent.ChildIdentities`.
        rank: Its rank.
        report: The descriptor of the report socket, on which it sends requests to its launcher.
        forked: Whether it is a fork, with the memory of its parent.
    """

    def __init__(self, state: State, rank: int, report: int, *, forked: bool) -> None:
        self.name, self.identity, self._method, self._parent, self._launcher, *rest = state
        self.key: bytes
        self._level: int | None
        self.key, self._daemon, self._level, self._to_stderr = rest  # type: ignore[assignment]  # `State` says more
        self.counter = itertools.count(1)
        """Numbers its own children."""
        self.rank = rank
        self.socket = Report(report)
        """The report socket."""
        self._forked = forked
        self._inheriting = False
        self._process: Any = None
        self._server_of_others = _fork_server()
        self.tracker: int | None = None
        """The resource tracker's descriptor, if the launcher had one."""
        self.environment: dict[str, str] = {}
        """The variables that the caller has given this rank."""

    def begin(self) -> None:
        """Set the attributes of `multiprocessing`, at once where it is loaded, else as soon as it is."""
        global _this_child  # noqa: PLW0603 - a process is one child
        _this_child = self
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
        """Set or clear the flag of `multiprocessing` that objects are unpickled from the parent.

        While it is set, `multiprocessing` refuses to start children.
        """
        self._inheriting = begins
        if self._process is not None:
            self._mark()

    def settle(self) -> None:
        """Restore the current process after the call was unpickled, which may have changed it; run the fork hooks.

        The hooks run only now, so that `multiprocessing` objects among the arguments are included.
        """
        if self._process is None:
            return
        sys.modules["multiprocessing.context"]._force_start_method(self._method)
        sys.modules["multiprocessing.process"]._current_process = self._process  # type: ignore[attr-defined]  # as above
        self._process._name = self.name
        if self._forked and "multiprocessing.util" in sys.modules:
            self._process._after_fork()

    def end(self) -> None:
        """Do what `multiprocessing` does when a child's function has returned: run finalizers, join its children.

        A fork server that this worker has started is stopped at exit, once threads that may use it have ended. It
        would end by itself a moment after the worker, and be reported as left behind.
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
                os.kill(pid, linux.SIGKILL)  # it waits for EOF on a descriptor that others may hold open
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
        """Become the current process: set what `multiprocessing.process.BaseProcess._bootstrap` sets."""
        process: Any = sys.modules["multiprocessing.process"]
        child = context._concrete_contexts[self._method].Process(name=self.name)
        child._identity = self.identity
        child._parent_name, child._parent_pid = self._parent, self._launcher
        child._config.update(authkey=process.AuthenticationString(self.key), daemon=self._daemon)
        try:  # a pidfd serves as the parent's sentinel: readable once it has ended
            sentinel = os.pidfd_open(self._launcher)
        except OSError:  # it has ended
            sentinel = os.eventfd(1, os.EFD_CLOEXEC)
        process._process_counter = self.counter
        process._children = set()
        process._current_process = self._process = child
        process._parent_process = process._ParentProcess(self._parent, self._launcher, sentinel)
        context._force_start_method(self._method)
        self._mark()

    @property
    def entered(self) -> bool:
        """Whether this is the current process of `multiprocessing`, which has been loaded."""
        return self._process is not None

    def _share(self, module: Any) -> None:
        """Use the launcher's resource tracker: a worker's own would unlink what it has made as soon as it ends."""
        tracker = module._resource_tracker
        if self._forked:
            import threading

            tracker._lock = threading.RLock()  # a thread of the launcher, which the fork lacks, may hold the old one
            # The launcher may itself be a worker, with a tracker that asks.
            tracker.__class__ = getattr(tracker, "_plain", type(tracker))
        if self._method == "forkserver":  # the tracker of the process that preloads ends with that process
            tracker._fd = tracker._pid = None
        if self.tracker is not None:
            tracker._fd = self.tracker
        elif tracker._fd is None:
            tracker.__class__ = _asking(type(tracker), self)

    @property
    def report(self) -> int | None:
        """The descriptor of the report socket; None once the user's code has closed it."""
        return self.socket.number()

    def ask(self) -> int | None:
        """Request the descriptor of the launcher's resource tracker. None if it has ended or has none to send.

        Waits for a launcher that is stopped (SIGSTOP): a worker's own tracker would unlink all that the worker makes as
        soon as it ends.
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
            ours.setblocking(True)  # the program may have set a default timeout
            _text, ancillary, _flags, _address = ours.recvmsg(1, _socket.CMSG_SPACE(_INT), _socket.MSG_CMSG_CLOEXEC)
            for _level, _kind, data in ancillary:
                return int.from_bytes(data[:_INT], sys.byteorder)
        except (OSError, channels.Closed):
            pass
        finally:
            theirs.close()
            ours.close()
        return None


def _fork_server() -> int | None:
    """The pid of the fork server of `multiprocessing` in this process; None if it has none."""
    server: Any = sys.modules.get("multiprocessing.forkserver")
    return None if server is None else server._forkserver._forkserver_pid


def _asking(kind: type, child: Child) -> type:
    """Make a class of resource trackers that request the launcher's before they start one."""
    asked = False

    class Asking(kind):  # type: ignore[misc]  # it is known at run time alone
        _plain = kind

        @property
        def _fd(self) -> int | None:
            nonlocal asked
            own = self.__dict__
            if own.get("_fd") is None and not asked and not sys.is_finalizing():
                own["_fd"] = child.ask()  # if a signal handler raises here, the next use asks again
                asked = True
            return own.get("_fd")

        @_fd.setter
        def _fd(self, value: int | None) -> None:
            self.__dict__["_fd"] = value

    Asking.__name__ = Asking.__qualname__ = kind.__name__
    return Asking


def _name_records(logging: Any) -> None:
    """Give log records the worker's name where `multiprocessing`, from which they take it, is not loaded."""
    kind = logging.LogRecord
    original = kind.__init__
    if hasattr(original, "_by_phalanx"):  # in the launcher, of which this is a fork
        return

    def __init__(record: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it replaces one
        original(record, *args, **kwargs)
        if record.processName == "MainProcess" and _this_child is not None and not _this_child.entered:
            record.processName = _this_child.name

    __init__.__wrapped__ = original  # type: ignore[attr-defined]  # for its signature
    __init__._by_phalanx = True  # type: ignore[attr-defined]  # see above
    kind.__init__ = __init__


class _Watch:
    """A finder on `sys.meta_path` that calls a function for certain modules when they have been loaded.

    It stays on the list afterwards: another thread may be iterating over the list, and would skip the next finder.
    """

    def __init__(self, todo: dict[str, Callable[[Any], None]]) -> None:
        self._todo = todo

    @classmethod
    def install(cls, todo: dict[str, Callable[[Any], None]]) -> None:
        """Install the finder for the modules in ``todo``, in place of one that a fork has inherited."""
        for finder in [finder for finder in sys.meta_path if isinstance(finder, cls)]:
            sys.meta_path.remove(finder)
        if todo:
            sys.meta_path.insert(0, cls(todo))

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find what the finders after this one find. Those before it have been tried."""
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
        """Call the function for a loaded module, unless it is a copy that is not in `sys.modules`."""
        name = module.__name__
        if name in self._todo and sys.modules.get(name) is module:
            self._todo[name](module)
            del self._todo[name]


class _Completing:
    """Wraps a loader. Sets the real one in the module, and passes every other attribute on to it."""

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
