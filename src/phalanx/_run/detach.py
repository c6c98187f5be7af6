"""`phalanx run --detach`: the launcher goes on in a session of its own, and the command waits until its ranks are up.

The launcher is a fork of the command, made before anything else: so it does not matter how the command was called (by
its path, as a module, by `phalanx rerun`, from a zip archive). Until its ranks are up, it belongs to the command, which
passes signals on to it, and whose death stops it. Its streams lead to a file in the run's folder before anything is
started that inherits them; the command copies that file to stderr as long as it waits.
"""

from __future__ import annotations

import os
import select
import shlex
import signal
import sys
from contextlib import ExitStack, suppress

from phalanx._base import interrupts, linux
from phalanx._base.stderr import say
from phalanx._base.text import how_many
from phalanx._outcomes.failure import signal_name
from phalanx._run.stdin import NONE
from phalanx._runs.paths import NoHomeError, search_folders
from phalanx._runs.recorder import FILES, PATIENCE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO

    from phalanx._run.config import RunConfig
    from phalanx._run.logs import RunLogs
    from phalanx._run.run_team import RunTeam

CONSOLE = "console.log"
"""Of the launcher's stdout and stderr, in the run's folder."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_VARIABLES = ("PHALANX_DETACH", "PET_DETACH")
_MARK = b"\0"  # ends what the launcher sends: the path of its console, and, once its ranks are up, nothing
_MARKS = 2
_CHUNK = 1 << 16


class Detached:
    """The launcher's end.

    Args:
        command: A pipe to the command, which is closed once the ranks are up.
    """

    def __init__(self, command: int) -> None:
        self._command = command
        self._specs: RunLogs

    def leave_terminal(self, specs: RunLogs, run_id: str, ranks: int) -> None:
        """Have stdout and stderr lead to `CONSOLE` from now on. Raises RunError, OSError."""
        self._specs = specs
        for name in _VARIABLES:  # else a run in a rank would detach itself, and be left behind by that rank
            os.environ.pop(name, None)
        path = os.path.join(specs.make_folder(run_id, ranks), CONSOLE)
        console = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        for fd in (1, 2):
            os.dup2(console, fd)
        os.close(console)
        if sys.stderr is None:  # it was closed
            text = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115 - until the end
            sys.stderr = text
        os.write(self._command, os.fsencode(path) + _MARK)

    def report_up(self, team: RunTeam) -> None:
        """Have the command end, once the run's folder has what other commands need to find the run. Once."""
        if self._command < 0 or team.group is None:
            return
        team.events.drain(PATIENCE, (FILES,))
        team.control.wait_open()
        folder = self._specs.run_log_dir or ""
        what = f"{how_many(len(team.group.pids()), 'worker')} up"
        say(f"{what}; the run goes on in the background (launcher pid {os.getpid()}, console in {CONSOLE})")
        for aim, command in ("follow it", "logs -f"), ("see its ranks", "top"), ("stop it", "stop"):
            say(f"to {aim}: phalanx {command} {_name(folder)}")
        with interrupts.deferred():
            pipe, self._command = self._command, -1
            linux.prctl(linux.PR_SET_PDEATHSIG, 0)
            with suppress(OSError):  # it was killed just now
                os.write(pipe, _MARK)
            os.close(pipe)


def _name(folder: str) -> str:
    """Return what other commands call the run in a folder."""
    with suppress(NoHomeError):
        if os.path.dirname(folder) in search_folders():
            return os.path.basename(folder)
    return shlex.quote(folder)


def detach(config: RunConfig) -> Detached:
    """Fork, and return in the launcher. The command ends here, when the ranks are up or the launcher has ended.

    No other thread may run. Raises ValueError, OSError; in the command SystemExit, with 0 or the launcher's exit code.
    """
    if config.stdin not in (None, NONE):
        raise ValueError("--detach and --stdin exclude each other: the stdin of a detached run is /dev/null")
    if config.log_dir == os.devnull:
        raise ValueError(f"--detach: with --log-dir {os.devnull}, the run has no folder, and no command would find it")
    if config.logs_specs is not None:
        raise ValueError("--detach and --logs-specs exclude each other: the run's folder must be known at the start")
    linux.occupy_standard_descriptors()
    ready, told = os.pipe()
    command = os.getpid()
    launcher = os.fork()
    if launcher:
        os.close(told)
        sys.exit(_Waiting(launcher, ready).wait())
    os.close(ready)
    os.setsid()
    # Who ignores SIGTERM has us ignore it as well.
    ends_by = signal.SIGKILL if signal.getsignal(signal.SIGTERM) == signal.SIG_IGN else signal.SIGTERM
    linux.die_with_parent(command, ends_by)
    _close_inherited()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return Detached(told)


def _close_inherited() -> None:
    """Close what a shell has opened besides, such as a lock or a pipe whose reader waits for its end."""
    with suppress(OSError):  # there is no /proc
        for fd in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):  # that of the listing
                if fd > 2 and os.get_inheritable(fd):  # noqa: PLR2004 - the number of stderr
                    os.close(fd)


# --- the command


class _Waiting:
    """The command, from the fork of the launcher until its ranks are up, or it has ended."""

    def __init__(self, launcher: int, ready: int) -> None:
        self._launcher, self._ready = launcher, ready
        self._told = b""
        self._has_passed_on = False

    @property
    def _path(self) -> str:
        """The path of its console; "": it has none yet."""
        path, mark, _ = self._told.partition(_MARK)
        return os.fsdecode(path) if mark else ""

    def wait(self) -> int:
        """Copy the launcher's console to stderr meanwhile. Returns the exit code."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, the kernel reaps the launcher
        for number in _SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._pass_on)
        with ExitStack() as held:
            console = self._copy_until_up(held)
            if self._told.count(_MARK) == _MARKS:
                for number in _SIGNALS:
                    signal.signal(number, signal.SIG_IGN)  # until the interpreter has ended
                if not self._has_passed_on:
                    return 0
            end = os.waitid(os.P_PID, self._launcher, os.WEXITED | os.WNOWAIT)  # a signal may still be passed on to it
            assert end is not None
            _copy(console)
        with suppress(OSError):
            folder = os.path.dirname(self._path)
            if self._path and os.listdir(folder) == [CONSOLE]:  # no worker was started: it is no run's
                os.unlink(self._path)
                os.rmdir(folder)
        if end.si_code == os.CLD_EXITED:
            return end.si_status
        say(f"the launcher has ended by {signal_name(end.si_status)} before all ranks were up")
        return 128 + end.si_status

    def _pass_on(self, number: int, _frame: object) -> None:
        if not (self._path and select.select([self._ready], [], [], 0)[0]):  # it is neither up nor has it ended
            self._has_passed_on = True
            os.kill(self._launcher, number)  # it is not reaped

    def _copy_until_up(self, held: ExitStack) -> BinaryIO | None:
        """Copy its console until it says that its ranks are up, or ends. Returns that, to be copied to the end."""
        poll, console = select.poll(), None
        poll.register(self._ready, select.POLLIN)
        while self._told.count(_MARK) < _MARKS:
            for fd, _ in poll.poll():
                data = os.read(fd, _CHUNK)
                if not data:
                    return console
                self._told += data if fd == self._ready else b""
            if console is None and self._path:
                console = open(self._path, "rb", buffering=0)  # noqa: SIM115 - until the end
                held.callback(console.close)
                with suppress(OSError):  # no watch is left: its lines come at the end
                    notify = linux.inotify()
                    held.callback(os.close, notify)
                    linux.inotify_add(notify, self._path)
                    poll.register(notify, select.POLLIN)
            _copy(console)
        return console


def _copy(console: BinaryIO | None) -> None:
    """Write to stderr what the console has now, and had not before."""
    if console is not None:
        left = os.fstat(console.fileno()).st_size - console.tell()
        with suppress(OSError, AttributeError):  # nobody reads it, or it is closed
            while left > 0 and (data := console.read(min(left, _CHUNK))):
                left -= len(data)
                sys.stderr.buffer.write(data)
                sys.stderr.flush()
