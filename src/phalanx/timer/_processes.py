"""Timer servers whose workers are processes of this host: which process may be signalled, and what precedes the signal.

`Victim` owns one open process: its identity (pid, start time, pidfd), whether this server may signal it, and what is
reported before. The words are in `hang_report`, as for a group. `ProcessTimerServer` owns the timers, and which
processes are held for them.

A pid is no identity: the kernel reuses it. A pidfd (pidfd_open(2)) stands for one process for ever, and a signal
through it reaches that process or none.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

from phalanx._base import clock, procfs
from phalanx._base.process import Process, descends_from, lineage
from phalanx._evidence.error_file import ERROR_FILE_ENV, may_write
from phalanx._evidence.stack_signals import error_file_of
from phalanx._stacks import collect, dump
from phalanx._stacks.request import Target
from phalanx._timers import hang_report
from phalanx._timers.hang import Hang, Timer
from phalanx.timer._readers import PipeRequestQueue
from phalanx.timer._requests import TimerRequest
from phalanx.timer._server import Complaints, TimerServer

_log = logging.getLogger("phalanx.timer")

_REMEMBERED = 1000  # workers whose refusal was logged


class RefusedError(Exception):
    """A timer server may not signal this process. ``str()`` says why; it fits after "refused: "."""


class ExitedError(RefusedError):
    """There is no such process any more. That is usual: a worker may exit before its request is read."""


class UnknownError(RefusedError):
    """No descriptor is left to examine the process. The caller may try again."""


def _raise_if_full(error: OSError) -> None:
    """Raise `UnknownError` for EMFILE and ENFILE, which are no news about the process."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        raise UnknownError(f"there is no descriptor left to look at it ({error.strerror})") from None


class Victim(Process):
    """A process that timers of this server may have signalled, held by a pidfd so that its pid cannot be confused.

    It must run as our own effective user or descend from us, and be neither this process nor an ancestor of it (an
    agent, a launcher, a shell). If we are root, and ``senders`` are not trusted, it must descend from us: a child that
    has become another user keeps its descriptors, and could otherwise name any process of root's, which it may not
    signal itself.

    Args:
        pid: The process.
        senders: Whether every process that can send requests here has our rights anyway.

    Attributes:
        start: When it started, in clock ticks after boot (proc_pid_stat(5)).

    Raises:
        RefusedError: This server may not signal it.
        ExitedError: There is no such process, or it is a zombie.
        UnknownError: No descriptor is left.

    >>> Victim(1)
    Traceback (most recent call last):
    phalanx.timer._processes.RefusedError: pid 1 is the system's first process
    """

    def __init__(self, pid: int, *, senders: bool = False) -> None:
        if pid < 1:
            raise RefusedError(f"{pid} is not the id of a process")
        if pid == 1:
            raise RefusedError("pid 1 is the system's first process")
        if pid == os.getpid():
            raise RefusedError(f"pid {pid} is the timer server's own process")
        self._senders = senders
        try:
            super().__init__(pid)
        except ProcessLookupError:
            raise ExitedError(f"there is no process {pid}") from None
        except (OSError, OverflowError) as exc:  # EINVAL or ENOENT: the number of a thread
            if isinstance(exc, OSError):
                _raise_if_full(exc)
            raise RefusedError(f"process {pid} cannot be opened ({getattr(exc, 'strerror', None) or exc})") from None
        try:
            self.start, self._same_user = self._qualify()
            self._path = self._find_error_file()  # now: once a deadline is over, there is no time for it
        except BaseException:
            self.close()
            raise

    def reap(self, number: int, hangs: Sequence[Hang]) -> bool:
        """Take its stacks, write its error file, send it a signal, and log that.

        Its Python stacks are waited for as long as `collect.BOUND`. The error file is written where the process would
        write its own, so that whatever supervises it can name the scope. Nothing that goes wrong with either keeps the
        signal from being sent.

        Args:
            number: The signal. With 0 or less the process is only logged: no signal, no error file.
            hangs: Its expired timers, at least one; the first one is what the failure names.

        Returns:
            False if it had exited before; no signal was sent then.
        """
        if self.has_exited():
            return False
        text, where = self._report(number, hangs)
        sent = number <= 0 or self.send(number)
        line = hang_report.line(f"pid {self.pid}", hangs, clock.now_ns(), where, max(0, number), sent=sent)
        _log.error("%s%s", line, f"\n{text}" if text else "")
        return sent

    def send(self, number: int) -> bool:
        """Send a signal (1..64). Returns whether it was sent; logs why not, unless the process has exited."""
        try:
            self.signal(number)
        except ProcessLookupError:
            return False
        except (OSError, ValueError) as exc:
            _log.error("pid %d: signal %d could not be sent: %s", self.pid, number, exc)
            return False
        return True

    def _qualify(self) -> tuple[int, bool]:
        """Check that it may be signalled. Returns its start time and whether it has our user. Raises RefusedError."""
        ancestry = {stat.pid for stat in _lineage(os.getppid())}
        if self.pid in ancestry:
            raise RefusedError(f"pid {self.pid} is a process that this server descends from")
        try:
            start = procfs.Stat(self.pid).start
            same_user = procfs.effective_uid(self.pid) == os.geteuid()
        except OSError as exc:
            _raise_if_full(exc)
            raise ExitedError(f"there is no process {self.pid} ({exc.strerror})") from None
        if not (same_user and (os.geteuid() or self._senders)) and not self._is_below():
            whose = "root's, as this server is" if same_user else "another user's process"
            raise RefusedError(f"pid {self.pid} is {whose}, and none that this server started")
        if self.has_exited():  # checked last: so all that was read above is of the process behind the pidfd
            raise ExitedError(f"process {self.pid} has exited")
        return start, same_user

    def _is_below(self) -> bool:
        """Whether it descends from us, as far as its ancestors live."""
        try:
            return descends_from(self.pid, os.getpid())
        except OSError as exc:
            _raise_if_full(exc)
            return False

    def _report(self, number: int, hangs: Sequence[Hang]) -> tuple[str, list[str]]:
        """Take its stacks and write its error file. Returns the stacks, and where it is, in lines."""
        path, text, where = self._path, "", []
        moment = clock.now_ns()
        try:
            text = self._stacks(path, doomed=number == signal.SIGKILL)
            location = dump.top(dump.parse(text), hangs[0].timer.thread)
            where = [] if location is None else [f"it is in {location}"]
            # The error file is for a process that is about to be signalled: one that goes on must be able to record
            # its own end. And root writes nothing to a path that another user has chosen.
            if number > 0 and path and self._same_user:
                if may_write(path):
                    writers = {stat.pid for stat in _lineage(self.pid)}
                    hang_report.write_error_file(path, hangs, moment, where, text, worker=self.pid, writers=writers)
                else:
                    _log.warning("pid %d: %s is no error file, and is left as it is", self.pid, path)
        except Exception as exc:  # noqa: BLE001 - whatever goes wrong with the evidence, the signal must follow
            _log.warning("pid %d: no evidence of its expired timer could be left at %s: %s", self.pid, path, exc)
        return text, where

    def _find_error_file(self) -> str:
        """Find the path of the process's error file: an absolute path, or ``""``.

        A worker has a file for its stacks open, which lies beside its error file. So that is found by its descriptors;
        the environment in /proc is that of its last execve(2), and in a fork may name another's. Any process may have a
        file of that name open, or read another's: its own has our header, is open for writing on the descriptor that
        the header names, and lies beside an ``error.json``, or beside what the environment names.
        """
        prefix = f"{ERROR_FILE_ENV}=".encode()
        named = next((entry[len(prefix) :] for entry in procfs.environ(self.pid) if entry.startswith(prefix)), b"")
        path = os.fsdecode(named)
        folder = f"/proc/{self.pid}/fd"
        try:
            fds = os.listdir(folder)
        except OSError:  # it has exited, or we may not read this
            fds = []
        for fd in fds:
            with contextlib.suppress(OSError):  # closed meanwhile
                found = error_file_of(os.readlink(f"{folder}/{fd}"), int(fd))
                if found and (found == path or os.path.basename(found) == "error.json") and self._writes(fd):
                    return found
        return path if os.path.isabs(path) else ""

    def _writes(self, fd: str) -> bool:
        """Whether it has a descriptor open for writing."""
        flags = procfs.read(f"/proc/{self.pid}/fdinfo/{fd}").partition(b"flags:")[2].split()
        return bool(flags) and int(flags[0], 8) & os.O_ACCMODE != os.O_RDONLY

    def _stacks(self, error_file: str, *, doomed: bool) -> str:
        """Take its stacks, for `collect.BOUND` seconds at most."""
        try:
            target = Target(0, self.pid, error_file, doomed=doomed, process=self)
            with collect.Collection([target]) as collection:
                collection.begin()
                collection.wait()
                return collection.finish().get(0, "")
        except Exception as exc:  # noqa: BLE001 - an error file without stacks is better than none
            _log.warning("pid %d: no stacks: %s: %s", self.pid, type(exc).__name__, exc)
            return ""


def hang_of(pid: int, scope: str, deadline: float) -> Hang:
    """Make a hang of a timer of which only the name and the ``deadline`` (seconds, monotonic) are known."""
    return Hang(0, pid, True, Timer(0, 1, int(deadline * clock.NS), 0, 0, scope, ""))


def _lineage(pid: int) -> Iterator[procfs.Stat]:
    """Yield what `lineage` does. Raises UnknownError if no descriptor is left."""
    try:
        yield from lineage(pid)
    except OSError as exc:
        _raise_if_full(exc)


class ProcessTimerServer(TimerServer):
    """A server whose workers are processes: holds the timers, and each process of which it has some.

    A process is opened when its first timer comes: once a deadline is over, there is no time for it. When it has
    exited, its timers are dropped.

    Args:
        requests: Where requests come from.
        max_interval: As for `TimerServer`.
        daemon: As for `TimerServer`.
    """

    _plans = True
    _trusts_senders = False
    """Whether every process that can send requests has the rights of this one anyway, see `Victim`."""

    def __init__(self, requests: PipeRequestQueue, max_interval: float, daemon: bool) -> None:  # noqa: FBT001 - as its base
        super().__init__(requests, max_interval, daemon)
        self._requests = requests
        self._timers: dict[tuple[Any, str], TimerRequest] = {}
        self._soonest = math.inf  # no timer expires earlier
        self._victims: dict[Any, Victim] = {}
        self._refused: set[Any] = set()
        self._complaints = Complaints()

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """See `TimerServer`. Requests for processes that must not be signalled are refused."""
        exited = set(self._requests.readable())
        for victim in [victim for victim in self._victims.values() if victim.pidfd in exited]:
            self._forget(victim)
        for request in timer_requests:
            key = request.worker_id, request.scope_id
            if request.expiration_time < 0:
                holder = self._victims.get(request.worker_id)
                # A release that came late is not for a process that has the pid now.
                if holder is None or born_of(request) in (None, holder.start):
                    self._timers.pop(key, None)
                    self._plan(request, -1.0)
            elif self._admit(request):
                moment = self._moment(request)
                if self._plan(request, moment):
                    self._timers[key] = request
                    self._soonest = min(self._soonest, moment)
        if self._watchdog is not None:
            self._watchdog.wake()

    def clear_timers(self, worker_ids: set[Any]) -> None:
        """See `TimerServer`."""
        self._timers = {key: request for key, request in self._timers.items() if key[0] not in worker_ids}
        if self._watchdog is not None:
            for worker in worker_ids:
                self._watchdog.forget(worker)

    def get_expired_timers(self, deadline: float) -> dict[Any, list[Any]]:
        """See `TimerServer`. ``deadline`` is on CLOCK_MONOTONIC. Within a worker the earliest stands first."""
        expired: dict[Any, list[TimerRequest]] = {}
        if deadline < self._soonest:
            return expired
        for request in sorted(self._timers.values(), key=self._moment):
            if self._moment(request) > deadline:
                break
            expired.setdefault(request.worker_id, []).append(request)
        self._soonest = min(map(self._moment, self._timers.values()), default=math.inf)
        return expired

    def stop(self) -> None:
        """See `TimerServer.stop`; at once."""
        super().stop()
        self._timers.clear()

    def _ended(self) -> None:
        for victim in list(self._victims.values()):
            self._let_go(victim)
        self._complaints.flush()

    def _abandon(self) -> None:
        super()._abandon()
        for victim in self._victims.values():
            victim.close()
        self._victims = {}
        self._timers = {}

    def _admit(self, request: TimerRequest) -> bool:
        """Whether timers of this process are accepted. It is held from now on, unless no descriptor is left."""
        pid, born = request.worker_id, born_of(request)
        victim = self._victims.get(pid)
        if victim is not None:
            if not victim.has_exited():
                return born in (None, victim.start)
            self._forget(victim)
        try:
            victim = Victim(pid, senders=self._trusts_senders)
        except RefusedError as reason:
            # One that could not be examined is examined later, if its start time identifies it.
            return (isinstance(reason, UnknownError) and born is not None) or self._refuse(request, reason)
        if born not in (None, victim.start):  # it has exited, and another process has its pid
            victim.close()
            return False
        for other in [other for other in self._victims.values() if other.has_exited()]:
            self._forget(other)
        self._victims[pid] = victim
        self._requests.watch(victim.pidfd)
        return True

    def _refuse(self, request: TimerRequest, reason: Exception) -> bool:
        """Decide about a request for a process that must not be signalled: it is logged, and refused."""
        pid = request.worker_id
        if pid not in self._refused:  # log it once: it may send many
            # The text alone: a log record may be kept, and an exception keeps its frames with all their variables.
            self._complaints.say("a timer of process %r is refused: %s", pid, str(reason))
            if len(self._refused) >= _REMEMBERED:
                self._refused.clear()
            self._refused.add(pid)
        return False

    def _forget(self, victim: Victim) -> None:
        """Forget a process that has exited, and its timers."""
        self._let_go(victim)
        self.clear_timers({victim.pid})

    def _plan(self, request: TimerRequest, moment: float) -> bool:
        return self._watchdog is None or self._watchdog.plan(request, moment)

    def _let_go(self, victim: Victim) -> None:
        del self._victims[victim.pid]
        self._requests.forget(victim.pidfd)
        victim.close()


def born_of(request: TimerRequest) -> int | None:
    """Return the start time of the process that sent a request; None if it is not in the request."""
    born: int | None = getattr(request, "_born", None)
    return born
