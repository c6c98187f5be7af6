"""Makes a worker a child of `multiprocessing`: its name, identity, parent, authentication key and resource tracker.

Knows nothing of what a worker does. `mp_parent` has the launcher's side.
"""

from __future__ import annotations

import _socket
import _thread
import itertools
import os
import sys

from phalanx._base import channels, linux
from phalanx._engine import worker_messages
from phalanx._evidence.sent import Report

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from phalanx._engine.mp_parent import State

_INT = 4

_this_child: Child | None = None  # in a worker


class Child:
    """This process as a child of `multiprocessing`, by the ``state`` from `mp_parent.ChildIdentities`.

    ``report`` is the descriptor of the report socket; ``forked``: whether it is a fork, with the memory of its parent.
    """

    def __init__(self, state: State, rank: int, report: int, *, forked: bool) -> None:
        self.name, self.identity, self._method, self._parent, self._launcher, *rest = state
        self.key: bytes
        self._level: int | None
        self.key, self._daemon, self._level, self._to_stderr = rest  # type: ignore[assignment]  # `State` says more
        self.rank = rank
        self.socket = Report(report)
        """The report socket."""
        self._forked = forked
        self._process: Any = None
        self._server_of_others = _fork_server()
        self.tracker: int | None = None
        """The resource tracker's descriptor, if the launcher had one."""
        self.environment: dict[str, str] = {}
        """The variables that the caller has given this rank."""
        # Takes some 10 ms, and so is not imported with this module, which processes have that run no function.
        from multiprocessing import context, process, resource_tracker, util

        self._context: Any = context
        self._module: Any = process
        self._trackers: Any = resource_tracker
        self._util: Any = util

    def begin(self) -> None:
        """Become the current process: set what `multiprocessing.process.BaseProcess._bootstrap` sets."""
        global _this_child  # noqa: PLW0603 - a process is one child
        _this_child = self
        process = self._module
        child = self._context._concrete_contexts[self._method].Process(name=self.name)
        child._identity = self.identity
        child._parent_name, child._parent_pid = self._parent, self._launcher
        child._config.update(authkey=process.AuthenticationString(self.key), daemon=self._daemon)
        try:  # a pidfd serves as the parent's sentinel: readable once it has ended
            sentinel = os.pidfd_open(self._launcher)
        except OSError:  # it has ended
            sentinel = os.eventfd(1, os.EFD_CLOEXEC)
        process._process_counter = itertools.count(1)
        process._children = set()
        process._current_process = self._process = child
        process._parent_process = process._ParentProcess(self._parent, self._launcher, sentinel)
        self._context._force_start_method(self._method)
        self._share_tracker()
        if self._to_stderr and not self._util._log_to_stderr:
            self._util.log_to_stderr()
        if self._level is not None:
            self._util.get_logger().setLevel(self._level)

    def run(self, call: Callable[[], int]) -> int:
        """Call ``call`` and return what it returns, by way of a `BaseProcess._bootstrap` that somebody has replaced.

        coverage.py measures there. Our own start has done what the original does, but for the end.
        """
        base = self._module.BaseProcess
        if base._bootstrap.__module__ == base.__module__:
            return call()
        codes = []
        stdin, sys.stdin = sys.stdin, None  # the original would close it

        def run() -> None:
            sys.stdin = stdin
            codes.append(call())

        process = self._process
        process.run, process._after_fork = run, lambda: None
        failed: int = process._bootstrap(parent_sentinel=self._module._parent_process._sentinel)
        return codes[0] if codes else failed

    def inherit(self) -> None:
        """Set the flag of `multiprocessing` that objects are unpickled from the parent: it starts no children then."""
        self._process._inheriting = True

    def settle(self) -> None:
        """Restore the current process after the call was unpickled, which may have changed it; run the fork hooks.

        The hooks run only now, so that `multiprocessing` objects among the arguments are included.
        """
        vars(self._process).pop("_inheriting", None)
        self._context._force_start_method(self._method)
        self._module._current_process = self._process
        self._process._name = self.name
        if self._forked:
            self._process._after_fork()

    def end(self) -> None:
        """Do what `multiprocessing` does when a child's function has returned: run finalizers, join its children.

        A fork server that this worker has started is stopped at exit, once threads that may use it have ended. It
        would end by itself a moment after the worker, and be reported as left behind.
        """
        import atexit

        self._util._exit_function()
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

    def _share_tracker(self) -> None:
        """Use the launcher's resource tracker: a worker's own would unlink what it has made as soon as it ends."""
        tracker = self._trackers._resource_tracker
        if self._forked:
            import threading

            tracker._lock = threading.RLock()  # a thread of the launcher, which the fork lacks, may hold the old one
            # The launcher may itself be a worker, with a tracker that asks.
            tracker.__class__ = getattr(tracker, "_plain", type(tracker))
        if self._method == "forkserver":  # the tracker of the process that preloads ends with that process
            tracker._fd = tracker._pid = None
        if self.tracker is not None:
            tracker._fd = self.tracker
        if tracker._fd is None or hasattr(tracker, "_after_fork_in_child"):
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
    """Make a class of resource trackers that request the launcher's before they start one.

    Since Python 3.14, a fork closes the descriptor that it has inherited, and starts a tracker of its own. Here it
    keeps the launcher's, as before: its own would be left behind, and killed before it has unlinked anything.
    """
    asked = False
    forking: set[int] = set()  # threads: what looks at the descriptor in a fork sees none

    if hasattr(kind, "_after_fork_in_child"):
        os.register_at_fork(
            before=lambda: forking.add(_thread.get_ident()),
            after_in_parent=lambda: forking.discard(_thread.get_ident()),
            after_in_child=forking.clear,  # runs after the tracker's own, which is registered already
        )

    class Asking(kind):  # type: ignore[misc]  # it is known at run time alone
        _plain = kind

        @property
        def _fd(self) -> int | None:
            nonlocal asked
            own = self.__dict__
            if _thread.get_ident() in forking:
                return None
            if own.get("_fd") is None and not asked and not sys.is_finalizing():
                own["_fd"] = child.ask()  # if a signal handler raises here, the next use asks again
                asked = True
            return own.get("_fd")

        @_fd.setter
        def _fd(self, value: int | None) -> None:
            self.__dict__["_fd"] = value

    Asking.__name__ = Asking.__qualname__ = kind.__name__
    return Asking
