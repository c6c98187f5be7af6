"""Whom an expired timer may strike, and how: the identity of a process, its evidence, then the signal.

Owns one open process: who it is (pid, start time, pidfd), whether this server may signal it, what is written down
before that, and the signal itself. It refuses to know where timers live, who sets them and when they are due.

A pid alone names nobody: the kernel hands it out again. A pidfd (pidfd_open(2)) names one process for ever, and
a signal through it reaches that process or nobody.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal

from phalanx._base import clock, procfs
from phalanx._base.process import Process, descends_from, lineage
from phalanx._evidence.error_file import ERROR_FILE_ENV, may_write, read_error_file
from phalanx._evidence.stack_signals import error_file_of
from phalanx._stacks import collect, dump, request
from phalanx._timers import hang_report
from phalanx._timers.hang import Hang
from phalanx._timers.timetable import Timer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_log = logging.getLogger("phalanx.timer")


class Refused(Exception):  # noqa: N818 - it is an answer, and the caller logs it
    """This process is not for a timer server to signal. ``str()`` says why; it fits after "refused: "."""


class Exited(Refused):
    """There is no such process any more. No cause for alarm: a worker may leave before its request is read."""


class Unknown(Refused):
    """There is no descriptor left to find out who it is. It may be asked again."""


def _unless_full(error: OSError) -> None:
    """Raise `Unknown` if an error says nothing about what was looked for."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        raise Unknown(f"there is no descriptor left to look at it ({error.strerror})") from None


class Victim:
    """A process that timers of this server may strike, held open so that its pid cannot come to mean another.

    Qualified is who runs as our own effective user or descends from us, and is neither this process nor one of those
    that it descends from (an agent, a launcher, a shell). For root, unless the ``senders`` are trusted, it is only who
    descends from us: a child that has become another user keeps what it had open, and could name any process of root's,
    which it may not signal itself.

    Args:
        pid: The process.
        senders: Whether all who can name a process here could do to it what we can.

    Attributes:
        pid: Its process id.
        start: When it started, in clock ticks after boot (proc_pid_stat(5)).

    Raises:
        Refused: It does not qualify.
        Exited: There is no such process, or it is a zombie.
        Unknown: No descriptor is left.

    >>> Victim(1)
    Traceback (most recent call last):
    phalanx.timer._victim.Refused: pid 1 is the system's first process
    """

    def __init__(self, pid: int, *, senders: bool = False) -> None:
        _refuse_by_number(pid)
        self._senders = senders
        # What the evidence took is given back when the process has gone: the kernel needs milliseconds for that, and
        # other processes may be late as well.
        self._afterwards = contextlib.ExitStack()
        try:
            self._process = Process(pid)
        except ProcessLookupError:
            raise Exited(f"there is no process {pid}") from None
        except (OSError, OverflowError) as exc:  # EINVAL or ENOENT: the number of a thread
            if isinstance(exc, OSError):
                _unless_full(exc)
            raise Refused(f"process {pid} cannot be opened ({getattr(exc, 'strerror', None) or exc})") from None
        try:
            self.pid = pid
            self.start, self._same_user = self._qualify()
            self._path = self._error_file()  # now: once a deadline is over, there is no time for it
        except BaseException:
            self._process.close()
            raise

    @property
    def fd(self) -> int:
        """Its pidfd, owned by this object: readable once the process has exited; -1 after `close`."""
        return self._process.pidfd

    def gone(self) -> bool:
        """Whether it has exited (a zombie has)."""
        return self._process.has_exited()

    def reap(self, number: int, hangs: Sequence[Hang]) -> bool:
        """Write down where it hangs, then signal it; log both.

        The evidence is its Python stacks, as far as it gives them within `stacks.BOUND`, and an error file where the
        process was told to leave one, so that whoever supervises it can name the scope. Nothing that goes wrong with
        the evidence keeps the signal from being sent.

        Args:
            number: The signal. With 0 or less the process is reported on, and neither signalled nor accused in a file.
            hangs: Its timers that expired, at least one, the first one first; that one is what the failure names.

        Returns:
            False if it had exited before; no signal was sent then.
        """
        if self.gone():
            return False
        before, self._afterwards = self._afterwards, contextlib.ExitStack()
        text, where = self._write_down(number, hangs)
        sent = number <= 0 or self.send(number)
        now = clock.now_ns()
        late = [f"{hang.what}; {clock.format_seconds(hang.late(now))} over" for hang in hangs]
        told = "; ".join([*late, *where, _outcome(number, sent=sent)])
        _log.error("pid %d: %s%s", self.pid, told, f"\n{text}" if text else "")
        before.close()
        if number <= 0:
            self._afterwards.close()
        return sent

    def send(self, number: int) -> bool:
        """Send a signal (1..64). Returns False, and logs why unless it has exited, if it could not be sent."""
        try:
            self._process.signal(number)
        except ProcessLookupError:
            return False
        except (OSError, ValueError) as exc:
            _log.error("pid %d: signal %d could not be sent: %s", self.pid, number, exc)
            return False
        return True

    def close(self) -> None:
        """Give back the pidfd, and what the evidence took. Idempotent."""
        self._process.close()
        self._afterwards.close()

    def _qualify(self) -> tuple[int, bool]:
        """Its start time, and whether it runs as our user. Raises Refused."""
        ancestry = {stat.pid for stat in _lineage(os.getppid())}
        if self.pid in ancestry:
            raise Refused(f"pid {self.pid} is a process that this server descends from")
        try:
            start = procfs.Stat(self.pid).start
            same_user = procfs.effective_uid(self.pid) == os.geteuid()
        except OSError as exc:
            _unless_full(exc)
            raise Exited(f"there is no process {self.pid} ({exc.strerror})") from None
        if not (same_user and (os.geteuid() or self._senders)) and not self._is_below():
            whose = "root's, as this server is" if same_user else "another user's process"
            raise Refused(f"pid {self.pid} is {whose}, and none that this server started")
        if self.gone():  # asked last: all that was read above belongs to the process that the pidfd names
            raise Exited(f"process {self.pid} has exited")
        return start, same_user

    def _is_below(self) -> bool:
        """Whether it descends from us, as far as its parents live."""
        try:
            return descends_from(self.pid, os.getpid())
        except OSError as exc:
            _unless_full(exc)
            return False

    def _write_down(self, number: int, hangs: Sequence[Hang]) -> tuple[str, list[str]]:
        """Its stacks, and where that is, in words."""
        path, text, where = self._path, "", []
        moment = clock.now_ns()
        try:
            text = self._stacks(path, doomed=number == signal.SIGKILL)
            place = dump.top(dump.parse(text), hangs[0].timer.thread)
            where = [] if place is None else [f"it is in {place}"]
            # Accused in a file is only who is about to be killed: one that lives on must be able to record its own end.
            # And never by root in a place that a user names.
            if number > 0 and path and self._same_user:
                known = read_error_file(path)[0]
                if not hang_report.stands(known, {stat.pid for stat in _lineage(self.pid)}):
                    self._accuse(path, hangs, moment, [*where, *hang_report.handled(known)], text)
        except Exception as exc:  # noqa: BLE001 - whatever went wrong with the evidence, the kill must follow
            _log.warning("pid %d: no evidence of its expired timer could be left at %s: %s", self.pid, path, exc)
        return text, where

    def _accuse(self, path: str, hangs: Sequence[Hang], moment: int, where: list[str], text: str) -> None:
        if not may_write(path):
            _log.warning("pid %d: %s is no error file, and is left as it is", self.pid, path)
            return
        first, *others = hangs
        also = [f"also: {hang.what}; {clock.format_seconds(hang.late(moment))} over its deadline" for hang in others]
        hang_report.write_down(path, first, moment, [*where, *also], text, worker=self.pid)

    def _error_file(self) -> str:
        """Where the process was told to leave its evidence: an absolute path, or ``""``.

        The file for its stacks lies beside, and it has that open; the environment in /proc is that of its last exec, so
        in a fork it may be another's. Anybody may have a file open that is called so, and may read another's: its own
        has our header, is open for writing as that says, and lies beside an ``error.json``, or beside what the
        environment names.
        """
        prefix = f"{ERROR_FILE_ENV}=".encode()
        told = next((entry[len(prefix) :] for entry in procfs.environ(self.pid) if entry.startswith(prefix)), b"")
        path = os.fsdecode(told)
        folder = f"/proc/{self.pid}/fd"
        try:
            fds = os.listdir(folder)
        except OSError:  # it has exited, or may not be looked at
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
        """Take its stacks, for `stacks.BOUND` seconds at most."""
        try:
            target = request.Target(0, self.pid, error_file, doomed=doomed, process=self._process)
            collection = collect.Collection([target])
            self._afterwards.callback(collection.close)
            collection.begin()
            collection.wait()
            return collection.finish().get(0, "")
        except Exception as exc:  # noqa: BLE001 - an error file without stacks is better than none
            _log.warning("pid %d: no stacks: %s: %s", self.pid, type(exc).__name__, exc)
            return ""


def hang_of(pid: int, scope: str, deadline: float) -> Hang:
    """A timer of a process that has expired at ``deadline`` (seconds, monotonic), known by its name alone."""
    return Hang(0, pid, True, Timer(0, 1, int(deadline * clock.NS), 0, 0, scope, ""))


def _outcome(number: int, *, sent: bool) -> str:
    if number <= 0:
        return "it is reported only"
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return f"it was sent {name}" if sent else f"{name} was not sent"


def _refuse_by_number(pid: int) -> None:
    if pid < 1:
        raise Refused(f"{pid} is not the id of a process")
    if pid == 1:
        raise Refused("pid 1 is the system's first process")
    if pid == os.getpid():
        raise Refused(f"pid {pid} is the timer server's own process")


def _lineage(pid: int) -> Iterator[procfs.Stat]:
    """As `lineage`; but raises `Unknown` when no descriptor is left."""
    try:
        yield from lineage(pid)
    except OSError as exc:
        _unless_full(exc)
