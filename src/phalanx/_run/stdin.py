"""Which worker reads the stdin of `phalanx run`, and job control while that is a terminal.

The worker inherits the descriptor: bytes that nobody reads stay in the pipe, the file or the terminal, for whoever
comes next (a shell, the pager behind `phalanx run ... | less`). A copy made by the launcher would take them from these.

A worker is in a session of its own, and job control is for processes of the terminal's session alone: a worker in a
background job would read what is typed for the shell (tty_ioctl(4), credentials(7)). So the launcher does what the
kernel does elsewhere: a job that starts in the background does not get the terminal, and Ctrl-Z stops all processes of
the run. Of a run that ``bg`` continues, a worker that reads is not stopped: that could only be polled for.
"""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import sys
import termios
import threading
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager, suppress

from phalanx._base import clock, interrupts, procfs
from phalanx._base.stderr import say

NONE = -1
"""The value of ``--stdin none``."""

_STOP_WAIT, _SHORT = 1.0, 0.001
_ALL = 1 << 20  # processes


class Stdin:
    """The stdin of this process, for one worker.

    Args:
        given: ``--stdin``: a global rank, or `NONE`; None: nobody has said.
        nprocs: How many workers this machine has.
        machines: Whether there are others. Which ranks these have is not known yet.
        terminals: The global ranks that have a terminal of their own.

    Raises ValueError: there is no such rank, or no stdin.
    """

    def __init__(self, given: int | None, nprocs: int, *, machines: bool, terminals: Container[int] = ()) -> None:
        if given is not None and given in terminals:
            msg = f"--stdin {given}: with --pty, this rank reads from its own terminal: phalanx attach --rank {given}"
            raise ValueError(msg)
        is_alone = nprocs == 1 and not machines
        self._is_open = sys.__stdin__ is not None  # None: 0 was closed, and may be a descriptor of ours by now
        self._is_chosen = given is not None or (is_alone and 0 in terminals)
        self._rank = given if given is not None else 0 if is_alone and 0 not in terminals else NONE
        if not machines and self._rank >= nprocs:
            raise ValueError(f"--stdin: there is no rank {self._rank}; ranks are 0 to {nprocs - 1}")
        if self._rank != NONE and not self._is_open:
            if self._is_chosen:
                raise ValueError(f"--stdin {self._rank}: the stdin of phalanx run is closed")
            self._rank = NONE
        self._reads_terminal = False
        self.is_terminal = self._rank != NONE and os.isatty(0)
        """Whether a worker may read from a terminal. Which one has it, is known when that is started."""

    def unread(self) -> list[str]:
        """What is to be said of input that no worker reads, once, unless somebody wants it so."""
        if self._is_chosen or self._rank != NONE or not self._is_open or not _bytes_wait() or _are_commands():
            return []
        self._is_chosen = True
        return ["stdin has input that no worker reads; --stdin 0 gives it to rank 0, --stdin none leaves out this line"]

    def of(self, envs: Mapping[int, Mapping[str, str]]) -> dict[int, int]:
        """Return the descriptors for the workers with these environments, by local rank: that of one, or none."""
        found = {local: 0 for local, env in envs.items() if env["RANK"] == str(self._rank)}
        if not found or not os.isatty(0):
            return found
        if not _is_in_foreground():
            if self._is_chosen:
                self._is_chosen = False  # once for all attempts
                say(f"--stdin {self._rank}: the run is in the background, and its worker has /dev/null")
            return {}
        self._reads_terminal = True
        return found

    @contextmanager
    def job_control(self) -> Iterator[None]:
        """Have Ctrl-Z stop, and ``fg`` continue, the whole run while a worker has the terminal.

        In the main thread only, where handlers can be set; signals that are ignored, or handled already, stay so.
        The terminal's modes are at the end as they were: a worker that is killed at a prompt for a password restores
        none, and of the shells that do, none knows that a process was killed that is not its own.
        """
        modes, handles = None, False
        if self.is_terminal and threading.current_thread() is threading.main_thread():
            with suppress(OSError, termios.error):  # not the terminal of our session: it has no job control for us
                os.tcgetpgrp(0)
                handles = signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL
                modes = termios.tcgetattr(0)
        if handles:
            signal.signal(signal.SIGTSTP, self._suspend)
        try:
            yield
        finally:
            if modes is not None and self._reads_terminal and _is_in_foreground():
                with suppress(OSError, termios.error):  # it was hung up
                    termios.tcsetattr(0, termios.TCSANOW, modes)
            self._reads_terminal = False
            if handles and signal.getsignal(signal.SIGTSTP) == self._suspend:
                signal.signal(signal.SIGTSTP, signal.SIG_DFL)

    def _suspend(self, number: int, _frame: object) -> None:
        """Stop every process below this one, and this one; when it is continued, continue them."""
        with interrupts.deferred():
            signal.signal(number, signal.SIG_IGN)  # a second one now (a key that repeats) asks for the same
            stopped = _stop_all() if self._reads_terminal else []
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)  # without effect in an orphaned process group: no shell could continue it
            signal.signal(number, self._suspend)
            for pid in reversed(stopped):  # parents last: until then, none of these pids can be another's
                with suppress(OSError):
                    os.kill(pid, signal.SIGCONT)


def _bytes_wait() -> bool:
    """Whether stdin is a pipe, a socket or a file with bytes that could be read now."""
    try:
        mode = os.fstat(0).st_mode
        if stat.S_ISCHR(mode):  # terminals, too: what is typed ahead is for the shell
            return False
        return int.from_bytes(fcntl.ioctl(0, termios.FIONREAD, bytes(4)), sys.byteorder, signed=True) > 0
    except OSError:  # ENOTTY: such a file cannot tell
        return False


def _are_commands() -> bool:
    """Whether stdin is what a shell above this process reads its commands from, as ``bash -s`` of ssh does."""
    parent = os.getppid()
    words = procfs.read(f"/proc/{parent}/cmdline").split(b"\0")[1:-1]
    if b"-s" not in words and not all(word.startswith(b"-") for word in words):  # it has a script, or the command
        return False
    try:
        return os.path.samestat(os.stat(f"/proc/{parent}/fd/0"), os.fstat(0))
    except OSError:
        return False


def _is_in_foreground() -> bool:
    """Whether this process may read from the terminal: it is of the foreground job, or the terminal is not its own."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return True


def _stop_all() -> list[int]:
    """Stop every process below this one, parents first, so that no stopped one is reaped. Returns their pids.

    That takes a while: one that waits for the terminal reads what is typed before it looks at its signals. A group's
    own pause is no replacement: it waits for no process, and is for a group that runs, while a rank at a debugger may
    have failed already. Timers rest as well: their keeper is stopped.
    """
    deadline, pause = clock.now() + _STOP_WAIT, threading.Event()
    stopped: dict[int, bool] = {}
    while fresh := [pid for pid in procfs.descendants([os.getpid()], _ALL) if pid not in stopped]:
        for pid in fresh:
            stopped[pid] = False
            with suppress(OSError):  # it is gone, or another user's
                if procfs.Stat(pid).state not in "TtZX":  # else somebody else continues it
                    os.kill(pid, signal.SIGSTOP)
                    stopped[pid] = True
                    while procfs.Stat(pid).state not in "TtZX" and clock.now() < deadline:
                        pause.wait(_SHORT)
    return [pid for pid, is_ours in stopped.items() if is_ours]
