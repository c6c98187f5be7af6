"""The helper processes of one group, as the launcher has them: starts guard and keeper, signals and reaps them.

Owns their processes and the socket to them. Does not know when a group should stop, or why.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager, suppress
from functools import partial
from signal import SIGCONT, SIGKILL

from phalanx._base import channels, interpreter, linux, procfs
from phalanx._base.process import Process, reap_later, wait_all
from phalanx._engine import protocol
from phalanx._engine.marked_processes import MarkedProcesses
from phalanx._engine.protocol import GUARD_WAIT

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from _socket import socket
    from collections.abc import Callable, Iterator, Sequence

    from phalanx._engine.forkserver import ForkServer


class KeeperClient:
    """Guard and keeper of one group, from their start to the reaping of the guard."""

    def __init__(self) -> None:
        self.marked = MarkedProcesses()
        self.channel: channels.Channel  # from `exec` or `fork` on
        self.executable = ""
        self.guard: Process | None = None
        """The guard; None until it has been started."""
        self.keeper: Process | None = None
        """The keeper; None until it has sent its pidfd, see `protocol.up`."""
        self._guard = 0
        self._popen: subprocess.Popen[bytes] | None = None
        self._is_child = True

    def exec(self, flags: Sequence[str]) -> None:
        """Start a keeper in an interpreter of its own, with ``flags``. Raises OSError."""
        with self._connecting() as theirs:
            fd = theirs.fileno()
            command = interpreter.command(flags, f"from phalanx._engine.keeper.guard import main;main({fd})")
            self.executable = command[0]
            self._popen = interpreter.start_helper(command, fd, self.marked.environment())
            self._hold(self._popen.pid)

    def fork(self, call: Callable[[int, list[int]], None], forget: Callable[[], None]) -> None:
        """Start a keeper that is a fork of this process, whose workers each run ``call(rank, fds)``. Raises OSError.

        ``forget`` closes, in the fork, what belongs to the launcher alone.
        """
        from phalanx._engine.keeper import guard

        _load_for_fork()  # before the fork: another thread may hold the lock of an import in the child
        for stream in (sys.stdout, sys.stderr):  # each fork would write once more what is in their buffers
            with suppress(Exception):  # None, closed, a full disk, or any object of the host
                stream.flush()
        with self._connecting() as theirs:
            with interpreter.unfollowed():
                pid = interpreter.fork()
            if pid == 0:
                try:
                    if interpreter.debugger() is not None:
                        sys.settrace(None)  # it traces the thread that forks
                    self.channel.close()
                    forget()
                    os.setsid()
                    linux.map_name(self.marked.page)
                    guard.keep(theirs, call)
                finally:
                    os._exit(70)
        self._hold(pid)

    def fork_warm(self, fork_server: ForkServer) -> None:
        """Start a keeper that is a fork of ``fork_server``. Raises PreloadError, OSError."""
        with self._connecting() as theirs:
            self._guard, pidfd = fork_server.fork(theirs, self.marked.page)
            self.guard = Process(self._guard, pidfd) if pidfd >= 0 else None
            self._is_child = False

    def close(self, wait: float, spared: int = 0) -> int:
        """Close the socket, reap the guard within ``wait`` seconds (kill it after), and return its exit code.

        A keeper whose socket closes kills the group and exits, so this is right at any time. Idempotent.
        ``spared``: see `MarkedProcesses.kill`.
        """
        if not self._guard:
            return 0
        self.wake()
        # By EOF alone the keeper would take us for dead, and give the workers the orphan grace.
        if self.channel.fileno() >= 0:
            with suppress(channels.Closed):
                self.channel.send(protocol.kill())
        # A fork of this process, even another group's keeper, may hold a copy of the socket: close(2) gives no EOF.
        self.channel.shutdown()
        self.channel.close()
        gone = True
        try:
            if self.guard is not None:
                gone = self._end(self.guard, wait, spared)
                if not self._is_child:  # it may be: its fork server has died, and we are a subreaper, or PID 1
                    with suppress(ChildProcessError):
                        os.waitid(os.P_PIDFD, self.guard.pidfd, os.WEXITED | os.WNOHANG)
        finally:
            for process in (self.guard, self.keeper):
                if process is not None:
                    process.close()
            self.guard = self.keeper = None
        return self._reap(gone=gone)

    def _end(self, guard: Process, wait: float, spared: int) -> bool:
        """Wait for the guard's end, and kill all after ``wait`` seconds. Returns whether it has ended."""
        if guard.wait(wait):
            return True
        self.kill_helpers()
        self.marked.kill(wait, spared)
        return guard.wait(GUARD_WAIT)

    def wake(self) -> None:
        """Send SIGCONT to guard and keeper: they may have been stopped (SIGSTOP)."""
        _send(SIGCONT, self.guard)
        self._send_to_keeper(SIGCONT)

    def kill_keeper(self) -> bool:
        """Kill a keeper that does not answer, so that its guard takes over. Returns whether it was alive."""
        there = self.keeper is None or not self.keeper.has_exited()
        self._send_to_keeper(SIGKILL)
        return there

    def _send_to_keeper(self, number: int) -> None:
        if self.keeper is not None:
            _send(number, self.keeper)
            return
        if self.guard is None or self.guard.has_exited():  # its pid may be another's
            return
        with suppress(OSError):  # the guard has not forked it yet, or it has exited
            for pid in procfs.children(self._guard):
                with Process(pid, parent=self._guard) as keeper:
                    keeper.signal(number)

    def kill_helpers(self) -> None:
        """Kill guard and keeper. What is left of the group then is killed by `marked`."""
        _send(SIGKILL, self.guard)
        _send(SIGKILL, self.keeper)

    def exit_code(self) -> int | None:
        """The guard's exit code, if it has ended and was executed from here."""
        return None if self._popen is None else self._popen.poll()

    def helpers_gone(self) -> bool:
        """Whether guard and keeper have exited, as far as they are known."""
        known = [process for process in (self.guard, self.keeper) if process is not None]
        return bool(known) and wait_all(known, 0)

    @contextmanager
    def _connecting(self) -> Iterator[socket]:
        """Make the socket. Its other end is closed here at the end of the block, and ours if that raises."""
        ours, theirs = channels.pair()
        self.channel = channels.Channel(ours)
        try:
            yield theirs
        except BaseException:
            self.channel.close()
            raise
        finally:
            theirs.close()

    def _hold(self, guard: int) -> None:
        """Open a pidfd of the guard.

        Where the host ignores SIGCHLD, or waits for every child, the kernel or the host reaps it at its end, and its
        pid may be reused.
        """
        self._guard = guard
        with suppress(ProcessLookupError):  # it has ended already, and was reaped: the socket will tell
            self.guard = Process(guard)

    def _reap(self, *, gone: bool) -> int:
        guard, self._guard = self._guard, 0
        if not self._is_child:
            return 0
        if not gone:
            reap_later(partial(os.waitpid, guard, 0) if self._popen is None else self._popen.wait)
            return 0
        if self._popen is not None:
            return self._popen.wait()
        try:
            _pid, status = os.waitpid(guard, 0)
        except ChildProcessError:
            return 0
        return os.waitstatus_to_exitcode(status)


def _send(number: int, process: Process | None) -> None:
    if process is not None:
        with suppress(OSError):  # it has exited, and was reaped
            process.signal(number)


# What guard, keeper and workers of start method "fork" may import. In a fork of a process with threads an import may
# wait without end, for a lock that a thread of the parent held.
_LIGHT = (
    *("atexit", "errno", "faulthandler", "fcntl", "gc", "json", "resource", "select", "signal", "stat", "threading"),
    "traceback",
    *(f"multiprocessing.{name}" for name in ("context", "popen_fork", "reduction", "resource_tracker", "util")),
    *("phalanx._base.process", "phalanx._base.std_streams"),
    "phalanx._evidence.recording",
    *("phalanx._timers.escalation", "phalanx._timers.table"),
    *(f"phalanx._engine.keeper.{name}" for name in ("guard", "log_writer", "start_group", "sweep")),
    *(f"phalanx._engine.pickling.{name}" for name in ("by_value", "picklers", "results", "unpicklable")),
    "phalanx._engine.worker.forked",
)
_HEAVY = ("cloudpickle", "linecache", "phalanx._engine.pickling.call_pickler", "tokenize")


def _load_for_fork() -> None:
    """Import in the host what a fork of it may import; what takes long only where there are other threads."""
    from importlib import import_module

    names = [*_LIGHT]
    if _threads() != 1:
        names += _HEAVY
    if "torch" in sys.modules:
        names.append("phalanx._engine.pickling.tensors")
    for name in names:  # an import that another thread has begun is waited for
        import_module(name)


def _threads() -> int:
    """The number of threads; 0 when /proc does not show it."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 0
