"""Has a rank that stands at no breakpoint stop where it is: by `sys.remote_exec`, which Python 3.14 has.

The rank's own interpreter calls that, because it takes the same Python. What the rank runs then is `remote_stop`, which
answers at a socket of ours.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess

import click

from phalanx._base import clock, files, procfs
from phalanx._base.channels import peer
from phalanx._base.process import Process
from phalanx._base.tty import printable
from phalanx._engine import worker
from phalanx._run.control_socket import user_name
from phalanx._runs.catalog import RunDir
from phalanx._runs.record import Rank
from phalanx._stacks.request import NotAskedError, StackRequest, Target, working_process

_CODE = """
import sys
if sys.version_info < (3, 14):
    sys.exit(f"it runs Python {sys.version.split()[0]}, and only 3.14 and later can be stopped there: "
             "call breakpoint() in the script, or see where it is with phalanx stack")
try:
    sys.remote_exec(int(sys.argv[1]), sys.argv[2])
except PermissionError as error:
    sys.exit(f"ptrace is not allowed here (a container, kernel.yama.ptrace_scope): {error}")
except Exception as error:
    why = str(error)
    if "not enabled in the remote" in why:
        why = "its Python forbids it (PYTHON_DISABLE_REMOTE_DEBUG, -X disable-remote-debug)"
    sys.exit(why)
"""
_SCRIPT = os.path.join(os.path.dirname(os.path.abspath(worker.__file__)), "remote_stop.py")
_CALLS_WITHIN = 20.0  # seconds that an interpreter may take
_ANSWERS_WITHIN = 5.0  # seconds in which a rank that has connected answers
_INTERRUPTS_AFTER = 1.0  # seconds after which a signal interrupts a sleep
_ASKS_EVERY = 0.05  # seconds between two requests to a rank that runs code of Phalanx
_MOST_CONNECTIONS = 128  # of others, too, which are closed at once: the name can be guessed
_LONGEST = 1 << 13  # bytes of an answer
_STOPPED = "Tt"  # states of proc_pid_status(5)


def stop_rank(found: RunDir, number: int, seconds: float) -> str:
    """Have a rank of the latest attempt stop. Returns the path of the socket at which it stands, or is about to.

    Raises ClickException: it cannot be, or it has not come to a line of Python within so many ``seconds``.
    """
    assert found.run is not None
    attempts = found.run.attempts
    known = {rank.rank: rank for rank in attempts[-1].ranks} if attempts else {}
    if number not in known:
        raise click.UsageError(f"--rank: this machine has no rank {number}")
    folder = os.path.join(found.path, f"attempt_{attempts[-1].number}", str(known[number].local_rank))
    try:
        with contextlib.ExitStack() as held:
            return _RemoteStop(known[number], os.path.join(folder, "error.json"), held).wait(seconds)
    except (ProcessLookupError, FileNotFoundError):  # the latter from its folder in /proc
        why = "has ended"
    except (_RefusedError, OSError) as error:
        why = f"stands at no breakpoint, and cannot be stopped: {error}"
    raise click.ClickException(printable(f"rank {number} {why}"))


class _RefusedError(Exception):
    """Why a rank cannot be stopped."""


class _RemoteStop:
    """A rank that is to stop. Raises ProcessLookupError, _RefusedError, OSError."""

    def __init__(self, rank: Rank, error_file: str, held: contextlib.ExitStack) -> None:
        self._rank, self._error_file = rank, error_file
        held.enter_context(Process(rank.pid, start=rank.pid_started))
        self._pid = working_process(rank.pid)
        self._process = held.enter_context(Process(self._pid))
        # Opened first: it is this file that we are going to run, whatever the process becomes.
        self._file = os.open(f"/proc/{self._pid}/exe", os.O_PATH | os.O_CLOEXEC)
        held.callback(os.close, self._file)
        status, uid = procfs.status(self._pid), os.geteuid()
        if set(status.get("Uid", "").split()) != {str(uid)}:
            raise _RefusedError("it is another user's process")
        self._program = os.readlink(f"/proc/self/fd/{self._file}")
        owner = os.fstat(self._file).st_uid
        if uid == files.ROOT != owner:
            raise _RefusedError(
                f"its program {self._program} belongs to user {user_name(owner)}, and root does not run it"
            )
        if not os.path.basename(self._program).startswith("python"):
            raise _RefusedError(f"its program is {self._program}, and no Python")
        if status.get("State", "Z")[0] in _STOPPED:
            raise _RefusedError("it is paused or stopped (phalanx resume)")
        self._listener = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        name = f"\0phalanx-debug-{self._pid}"
        try:
            self._listener.bind(name)
        except OSError:
            raise _RefusedError(f"another phalanx debug{_whose(name)} is about to stop it") from None
        self._listener.listen(_MOST_CONNECTIONS)

    def wait(self, seconds: float) -> str:
        """See `stop_rank`."""
        until = clock.now() + seconds
        self._call()
        signal_at = clock.now() + _INTERRUPTS_AFTER
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._process, select.POLLIN)
        while (now := clock.now()) < until:
            ready = dict(poll.poll((min(until, max(now, signal_at)) - now) * 1000 + 1))
            if self._process.fileno() in ready:
                raise ProcessLookupError
            if ready:
                verb, _, text = self._receive().partition(" ")
                if verb == "at":
                    return text
                if verb == "no":
                    raise _RefusedError(text)
                if verb == "busy":
                    self._process.wait(_ASKS_EVERY)
                    self._call()
            elif clock.now() >= signal_at:
                signal_at = until
                self._interrupt()
        raise _RefusedError(
            f"it has not come to a line of Python within {seconds:g} s, and goes on; phalanx stack --rank "
            f"{self._rank.rank} shows where it is, --wait TIME waits longer"
        )

    def _call(self) -> None:
        """Have the rank run our file as soon as it can."""
        try:
            done = subprocess.run(
                [self._program, "-I", "-S", "-c", _CODE, str(self._pid), _SCRIPT],
                executable=f"/proc/self/fd/{self._file}", pass_fds=[self._file], stdin=subprocess.DEVNULL,
                capture_output=True, check=False, timeout=_CALLS_WITHIN,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise _RefusedError(f"{self._program} has not called sys.remote_exec in {_CALLS_WITHIN:g} s") from None
        if done.returncode:
            if self._process.has_exited():
                raise ProcessLookupError
            text = done.stderr.decode("utf-8", "replace").strip()
            raise _RefusedError(text.splitlines()[-1] if text else f"{self._program} exits with {done.returncode}")

    def _interrupt(self) -> None:
        """End a sleep, by the rank's stack signal: its main thread runs the file in there."""
        request = StackRequest(Target(self._rank.rank, self._pid, self._error_file, process=self._process))
        with contextlib.suppress(NotAskedError, OSError):
            request.open()
            request.send(all_threads=False)

    def _receive(self) -> str:
        """Return what a process answers; "": that was another one, or it has not answered."""
        link, _ = self._listener.accept()
        with link:
            if peer(link) != (self._pid, os.geteuid()):
                return ""
            link.settimeout(_ANSWERS_WITHIN)
            data = b""
            while len(data) < _LONGEST and (more := link.recv(_LONGEST)):
                data += more
            answer = os.fsdecode(data)
            if answer.startswith("at "):  # it stops if we still wait for that
                link.sendall(b"\n", socket.MSG_NOSIGNAL)
            return answer


def _whose(name: str) -> str:
    """Who listens at an abstract name, in words: that may be any user."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.setblocking(False)
        link.connect(name)
        pid, uid = peer(link)
        return f" (pid {pid}, of user {user_name(uid)})"
    return ""
