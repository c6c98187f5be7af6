"""One process that is not our unreaped child: who it is, whether it has ended, and signals that reach it alone.

A pid names nobody for long: once a process is reaped, the kernel gives its pid to another. A pidfd (pidfd_open(2))
names one process for ever, and a signal through it reaches that process or nobody. Owns the pidfd, and the check that
it was opened on the process that was meant: by start time or by parent, read after the pidfd was opened. A keeper's
own children need none of this: a child that is not reaped keeps its pid. Owns also what a wait status says: `Exit`.
"""

from __future__ import annotations

import errno
import os
import select

from phalanx._base import clock, linux, procfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    import signal as _signal
    from collections.abc import Callable, Iterable, Iterator
    from typing import Self
else:
    import _signal  # the C half: `signal` builds enums for 3 ms
    import posix as os  # the C half: `os` itself takes 1 of the 13 ms in which a keeper gets up

_GENERATIONS = 512  # a loop, which races with exits could show, ends there


class Process:
    """A process, held by a pidfd. A context: at its end the pidfd is closed.

    Args:
        pid: Its process id. With a ``pidfd`` it may be 0: not known.
        pidfd: A pidfd of it, which is this object's from now on. -1: one is opened.
        start: When it must have started, in clock ticks after boot (`procfs.Stat.start`). None: whenever.
        parent: The pid that its parent must have. None: whoever.

    Raises:
        ProcessLookupError: There is no such process, or it is not the one that is meant.
        OSError: See `linux.pidfd_open`.

    >>> import os
    >>> with Process(os.getpid()) as process:
    ...     process.has_exited(), process.wait(0)
    (False, False)
    """

    __slots__ = ("pid", "pidfd")

    def __init__(self, pid: int, pidfd: int = -1, *, start: int | None = None, parent: int | None = None) -> None:
        self.pid = pid
        self.pidfd = pidfd if pidfd >= 0 else linux.pidfd_open(pid)
        if start is not None or parent is not None:
            try:
                stat = procfs.Stat(pid)
                if start not in (None, stat.start) or parent not in (None, stat.parent):
                    raise ProcessLookupError(errno.ESRCH, "the pid belongs to another process", str(pid))  # noqa: TRY301 - after which it is closed
            except BaseException:
                self.close()
                raise

    def fileno(self) -> int:
        """The pidfd, which is readable once the process has exited; -1 after `close`."""
        return self.pidfd

    def has_exited(self) -> bool:
        """Whether it has exited, reaped or not."""
        return self.wait(0)

    def wait(self, seconds: float) -> bool:
        """Wait until it has exited, for at most ``seconds``. Returns whether it has."""
        return wait_all([self], seconds)

    def signal(self, number: int) -> None:
        """Send it a signal. Raises ProcessLookupError when it has been reaped, PermissionError, ValueError."""
        _signal.pidfd_send_signal(self.pidfd, number)

    def close(self) -> None:
        """Close the pidfd. Idempotent."""
        pidfd, self.pidfd = self.pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_details: object) -> None:
        self.close()


def wait_all(processes: Iterable[Process], seconds: float) -> bool:
    """Wait until all have exited, for at most ``seconds``. Returns whether they have."""
    deadline = clock.now() + seconds
    poll = select.poll()
    waiting = {process.pidfd for process in processes}
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


def lineage(pid: int) -> Iterator[procfs.Stat]:
    """Read a process, its parent, and so on up, as far as /proc shows them. Raises OSError: no descriptor is left."""
    for _ in range(_GENERATIONS):
        if pid < 1:
            return
        try:
            stat = procfs.Stat(pid)
        except (ProcessLookupError, PermissionError):
            return
        yield stat
        pid = stat.parent


def descends_from(pid: int, ancestor: int) -> bool:
    """Whether ``pid`` is ``ancestor`` or a process below it, as far as its parents live. Raises as `lineage`."""
    younger = None
    for stat in lineage(pid):
        if younger is not None and stat.start > younger:  # the parent has ended, and its pid is another's
            return False
        if stat.pid == ancestor:
            return True
        younger = stat.start
    return False


def reap_later(reap: Callable[[], object]) -> None:
    """Call ``reap``, which waits for a child that outlives SIGKILL, on a thread of its own, for which nobody waits."""
    try:
        from phalanx._base import interrupts, unpatched

        thread = unpatched.thread(target=reap, name="phalanx-reaper")
    except (ImportError, OSError):  # no descriptor is left to load them: it stays a zombie until this process ends
        return
    try:
        with interrupts.deferred():
            thread.start()
    except RuntimeError:  # no thread is to be had: as above
        return


class Exit:
    """The end of a process: an exit code, or the signal that killed it.

    ``returncode`` follows `subprocess`: 0 to 255 for an exit code, ``-n`` for signal ``n``.

    >>> Exit(0).ok, Exit(-9).ok
    (True, False)
    >>> Exit(-9).signal, Exit(3).signal
    (9, None)
    """

    __slots__ = ("returncode",)

    def __init__(self, returncode: int) -> None:
        self.returncode = returncode

    @classmethod
    def of_status(cls, status: int) -> Exit:
        """Read a status word as wait(2) fills it.

        >>> Exit.of_status(256).returncode, Exit.of_status(9).returncode
        (1, -9)
        """
        return cls(os.waitstatus_to_exitcode(status))

    @property
    def ok(self) -> bool:
        """Whether the process ended by itself with exit code 0."""
        return self.returncode == 0

    @property
    def signal(self) -> int | None:
        """The number of the signal that killed the process, or None."""
        return -self.returncode if self.returncode < 0 else None

    @property
    def description(self) -> str:
        """The end in words.

        >>> Exit(0).description, Exit(-9).description
        ('exit code 0', 'signal 9')
        """
        return f"signal {-self.returncode}" if self.returncode < 0 else f"exit code {self.returncode}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Exit) and other.returncode == self.returncode

    def __hash__(self) -> int:
        return hash((Exit, self.returncode))

    def __repr__(self) -> str:
        return f"Exit({self.returncode})"
