"""The launcher's end of the keeper: starts it, talks to it, and cleans up without it when it is gone.

Owns the keeper's process and socket. Knows nothing of when a group should stop, or why.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from contextlib import suppress
from signal import SIGCONT, SIGKILL, pidfd_send_signal

from phalanx._core import clock, linux, wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _socket import socket
    from collections.abc import Callable, Sequence

    from phalanx._core.zygote import Zygote

MARK = b"PHALANX_GROUP"
"""The environment variable that every worker of a group carries, and with it, unless it is removed on purpose,
every process that a worker starts. Nested groups add to it: ``outer/inner``.

What /proc shows is the environment of the last exec. The keeper carries the mark too, so that its forks show it; forks
of the launcher itself, which was exec'ed before there was a group, carry it as the name of a mapped page instead."""


class Launch:
    """A keeper, from its start to its reaping."""

    def __init__(self) -> None:
        self.token = os.urandom(8).hex()
        self.channel: wire.Channel  # from `exec` or `fork` on
        self._guard = 0
        self._pidfd = -1
        self._popen: subprocess.Popen[bytes] | None = None
        self._is_child = True

    def environment(self) -> dict[bytes, bytes]:
        """What a worker's environment is built on: ours, and the group's mark."""
        base = dict(os.environb)
        base[MARK] = b"/".join(filter(None, (base.get(MARK), self.token.encode())))
        return base

    def exec(self, flags: Sequence[str]) -> None:
        """Start a keeper in an interpreter of its own, with ``flags``. Raises OSError."""
        theirs = self._connect()
        try:
            root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
            fd = theirs.fileno()
            code = f"import sys;sys.path.append({root!r});from phalanx._core.keeper import main;main({fd})"
            command = [sys.executable, *flags, "-c", code]
            # A session of its own: a Ctrl-C at the terminal is for the launcher.
            self._popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[fd], start_new_session=True, env=self.environment()
            )
            self._hold(self._popen.pid)
        except BaseException:
            self.channel.close()
            raise
        finally:
            theirs.close()

    def fork(self, call: Callable[[int, list[int]], None], forget: Callable[[], None]) -> None:
        """Start a keeper that is a fork of this process, whose workers each run ``call(rank, fds)``. Raises OSError.

        ``forget`` closes, in the fork, what is the launcher's alone.
        """
        from phalanx._core import keeper  # before the fork: another thread may hold the lock of an import in the child

        for stream in (sys.stdout, sys.stderr):  # what is in their buffers would be written once more by each fork
            if hasattr(stream, "flush"):  # None where there is no console; a stand-in may have `write` alone
                stream.flush()
        theirs = self._connect()
        try:
            pid = os.fork()
        except BaseException:
            self.channel.close()
            theirs.close()
            raise
        if pid == 0:
            try:
                self.channel.close()
                forget()
                os.setsid()
                linux.map_name(self._page())
                keeper.keep(theirs, call)
            finally:
                os._exit(70)
        theirs.close()
        self._hold(pid)

    def fork_warm(self, zygote: Zygote) -> None:
        """Start a keeper that is a fork of ``zygote``. Raises PreloadError, OSError."""
        theirs = self._connect()
        try:
            self._guard, self._pidfd = zygote.fork(theirs, self._page())
            self._is_child = False
        except BaseException:
            self.channel.close()
            raise
        finally:
            theirs.close()

    def close(self, wait: float) -> int:
        """Close the socket, reap the guard within ``wait`` seconds (kill it after), and return its exit code.

        A keeper whose socket closes kills what it has and leaves: this is also the way out at any time. Idempotent.
        """
        if not self._guard:
            return 0
        # A fork of ours, another group's keeper even, may hold a copy of the socket: closing alone would not end it.
        self.channel.shutdown()
        self.channel.close()
        if self._pidfd >= 0:
            try:
                if not _wait([self._pidfd], wait):
                    pidfd_send_signal(self._pidfd, SIGKILL)
                if not self._is_child:
                    self._reap_orphan()
            finally:
                os.close(self._pidfd)
                self._pidfd = -1
        return self._reap()

    def break_silence(self) -> None:
        """Kill a keeper that answers no more, so that its guard finishes its work and reports."""
        try:
            pidfd_send_signal(self._pidfd, SIGCONT)
            for pid in linux.children(self._guard):
                pidfd = os.pidfd_open(pid)
                try:
                    if linux.Stat(pid).parent == self._guard:  # so the pidfd was opened on no other
                        pidfd_send_signal(pidfd, SIGKILL)
                finally:
                    os.close(pidfd)
        except OSError:  # gone meanwhile
            pass

    def kill_marked(self, wait: float) -> list[int]:
        """Kill all that carries the group's mark, for when guard and keeper are both gone. Returns who is left.

        The mark is the last resort: it sees through setsid and double forks, but not through a cleared environment.
        """
        deadline = clock.now() + wait
        while True:
            pidfds = {}
            for stat in linux.processes():
                if self._is_marked(stat.pid):
                    try:
                        pidfds[stat.pid] = os.pidfd_open(stat.pid)
                        if linux.Stat(stat.pid).start == stat.start:
                            pidfd_send_signal(pidfds[stat.pid], SIGKILL)
                    except OSError:
                        continue
            left = _wait(list(pidfds.values()), max(0.0, deadline - clock.now()))
            for pidfd in pidfds.values():
                os.close(pidfd)
            if not pidfds or not left:
                return [] if left else list(pidfds)

    def _is_marked(self, pid: int) -> bool:
        if pid == os.getpid():
            return False
        token = self.token.encode()
        if any(entry.startswith(MARK + b"=") and token in entry for entry in linux.environ(pid)):
            return True
        return self._page().encode() in linux.maps(pid)

    def _page(self) -> str:
        return f"phalanx-group-{self.token}"

    def _connect(self) -> socket:
        ours, theirs = wire.pair()
        self.channel = wire.Channel(ours)
        return theirs

    def _hold(self, guard: int) -> None:
        """Take hold of the guard: a host that ignores SIGCHLD, or waits for everybody, frees its pid without a word."""
        self._guard = guard
        try:
            self._pidfd = os.pidfd_open(guard)
        except ProcessLookupError:  # so soon: the socket will tell
            self._pidfd = -1

    def _reap_orphan(self) -> None:
        """Reap a guard that has become ours, because its zygote has gone and we are a subreaper, or PID 1."""
        with suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)

    def _reap(self) -> int:
        guard, self._guard = self._guard, 0
        if not self._is_child:
            return 0
        if self._popen is not None:
            return self._popen.wait()
        try:
            _pid, status = os.waitpid(guard, 0)
        except ChildProcessError:
            return 0
        return os.waitstatus_to_exitcode(status)


def _wait(pidfds: list[int], seconds: float) -> bool:
    """Wait until all have exited, for at most ``seconds``. Returns whether they have."""
    deadline = clock.now() + seconds
    poll = select.poll()
    waiting = set(pidfds)
    for pidfd in waiting:
        poll.register(pidfd, select.POLLIN)
    while waiting:
        ready = poll.poll(max(0.0, deadline - clock.now()) * 1000)
        if not ready:
            return False
        for pidfd, _events in ready:
            poll.unregister(pidfd)
            waiting.discard(pidfd)
    return True
