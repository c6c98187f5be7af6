"""The launcher's end of a fork server: a process that has imported what workers need, and forks their keepers.

Owns its start, its end, and the questions to it. What runs in that process is in `keeper.fork_server`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading

from phalanx._base import channels, clock, interpreter, linux, procfs, unpatched
from phalanx._base.clock import format_duration
from phalanx._base.process import reap_later
from phalanx._engine import protocol, start_errors
from phalanx._engine.protocol import FORK_WAIT

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    import subprocess
    from collections.abc import Mapping, Sequence
    from typing import NoReturn

    from phalanx._engine.main_module import Source

_CLOSING = 10.0  # seconds in which a fork server that nobody needs has to be gone before it is killed
_KILLED = 2.0  # seconds after SIGKILL in which it is waited for


class PreloadError(RuntimeError):
    """A module that was to be preloaded could not be, or must not be.

    Attributes:
        module: The module's name.
        traceback: The text of what its import raised; "" if it was imported, but has started what a fork would break.
    """

    __module__ = "phalanx.multiprocessing"

    def __init__(self, message: str, module: str = "", traceback: str = "") -> None:
        super().__init__(message, module, traceback)
        self.module = module
        self.traceback = traceback

    def __str__(self) -> str:
        return f"{self.args[0]}\n\n{self.traceback}".rstrip() if self.traceback else str(self.args[0])


class ForkServer:
    """A fork server, as the launcher has it.

    ``preload`` are modules to import, in order, "__main__" being ``main``, with ``path`` in front of `sys.path`.
    ``env`` are variables on top of the launcher's: some are read by a library once, as it is loaded.
    """

    def __init__(
        self,
        preload: Sequence[str],
        path: Sequence[str],
        flags: Sequence[str],
        env: Mapping[str, str],
        main: Source | None = None,
    ) -> None:
        self.preload = tuple(preload)
        self._main = main
        self._env = dict(env)
        self._path = list(path)
        self._flags = list(flags)
        self._popen: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._serial = 0  # of the last question
        self._channel: channels.Channel | None = None
        self._ready = False
        self._importing = ""
        self._failure: PreloadError | None = None
        self._one = threading.Lock()
        self._owner = 0

    @property
    def usable(self) -> bool:
        """Whether it runs, and nothing has failed."""
        return self._failure is None and self._alive()

    @property
    def is_ready(self) -> bool:
        """Whether all has been imported, as far as `wait` has seen."""
        return self._ready

    def start(self) -> None:
        """Start to import. Raises OSError."""
        self._owner = os.getpid()
        occupied = linux.occupy_standard_descriptors()
        ours, theirs = channels.pair()
        try:
            fd = theirs.fileno()
            code = f"from phalanx._engine.keeper.fork_server import main;main({fd},path)"
            command = interpreter.command(self._flags, code, "path=sys.path[:];")
            self._popen = interpreter.start_helper(command, fd, {**os.environ, **self._env})
            self._channel = channels.Channel(ours)
            # A process that an import has started may hold the socket, and keep EOF from coming.
            with contextlib.suppress(ProcessLookupError):  # it has exited: EOF on the socket shows it
                self._pidfd = linux.pidfd_open(self._popen.pid)
            arguments = [str(argument) for argument in getattr(sys, "argv", [])]
            self._channel.send(protocol.preload(self._path, list(self.preload), self._main, arguments))
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            for fd in occupied:
                os.close(fd)

    def wait(self, seconds: float | None = None) -> None:
        """Return when all is imported. Raises PreloadError; also after ``seconds``, and the process is killed then.

        ``seconds``: None: it is waited for without limit.
        """
        deadline = None if seconds is None else clock.now() + seconds
        with self._one:
            if self._ready:
                return
            if self._failure is not None:
                raise self._failure
            while not self._ready:
                try:
                    (verb, *fields), _fds = self._receive(deadline)
                except TimeoutError:
                    assert seconds is not None
                    self._kill()
                    what = self._importing or ", ".join(self.preload)
                    msg = f"preload: {what!r} is not imported after {format_duration(seconds)}"
                    self._failure = PreloadError(msg, self._importing)
                    raise self._failure from None
                if verb == "importing":
                    self._importing = str(fields[0])
                elif verb == "failed":
                    module, why, text = map(str, fields)
                    msg = f"preload: {module!r} {why}"
                    self._failure = PreloadError(msg, module, text)
                    raise self._failure
                else:
                    self._ready = True

    def fork(self, sock: _socket.socket, page: str) -> tuple[int, int]:
        """Fork a guard with the socket ``sock``. Returns its pid and a pidfd. Raises PreloadError, OSError.

        ``page`` names a page that is mapped in it and its forks, see `marked_processes`.
        """
        self.wait()
        cwd = os.open(".", os.O_PATH | os.O_CLOEXEC)
        try:
            with self._one:
                assert self._channel is not None
                self._serial += 1
                self._channel.drop_received()
                try:
                    self._channel.send(protocol.fork(self._serial, page, procfs.umask()), [sock.fileno(), cwd, 1, 2])
                except channels.Closed:
                    self._gone()
                (verb, number), fds = self._answer()
        finally:
            os.close(cwd)
        if verb == "not_forked":
            raise OSError(number, os.strerror(number))
        return number, fds[0] if fds else -1

    def _answer(self) -> tuple[tuple[str, int], list[int]]:
        """Receive the answer to the last question. Answers to calls that an exception has ended are dropped."""
        while True:
            try:
                (verb, serial, number), fds = self._receive(clock.now() + FORK_WAIT)
            except TimeoutError:  # stopped: a late answer would be taken for the next one
                assert self._popen is not None
                self._popen.kill()
                self._gone()
            if serial == self._serial:
                return (str(verb), int(str(number))), fds
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        """End the process. The groups that it has forked live on. Idempotent."""
        if self._owner != os.getpid():  # a fork of the launcher: a shutdown would be for both
            self._close_descriptors()
            return
        if self._channel is not None:
            self._channel.shutdown()
        # While it imports it receives nothing: it is killed, and what an import has started as well.
        if self._alive() and not self._ready:
            self._kill()
        if self._popen is not None:
            self._end(_CLOSING if self._ready else _KILLED)
        with self._one:  # another thread may be receiving, and sees EOF now
            self._close_descriptors()

    def _kill(self) -> None:
        """Kill it while it imports, and what an import has started. Not after that: its forks are groups."""
        assert self._popen is not None
        try:
            os.killpg(self._popen.pid, signal.SIGKILL)
        except ProcessLookupError:  # its session is not made yet, or it has just exited
            self._popen.kill()

    def _close_descriptors(self) -> None:
        if self._channel is not None:
            self._channel.close()
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)

    def _end(self, seconds: float) -> int | None:
        """Reap it; kill it if it does not go within ``seconds``. Returns its exit code; None if it cannot be reaped."""
        assert self._popen is not None
        late = unpatched.module("subprocess").TimeoutExpired
        try:
            return self._popen.wait(seconds)
        except late:
            self._popen.kill()
        try:
            return self._popen.wait(_KILLED)
        except late:  # on a disk that does not answer
            reap_later(self._popen.wait)
            return None

    def _alive(self) -> bool:
        return self._popen is not None and self._owner == os.getpid() and self._popen.poll() is None

    def _receive(self, deadline: float | None) -> tuple[channels.Message, list[int]]:
        """Wait for the next message, or its end. Raises TimeoutError at the ``deadline`` (monotonic); PreloadError."""
        assert self._channel is not None
        received = None
        with contextlib.suppress(channels.Closed):
            received = self._channel.receive_by(deadline, [self._pidfd])
        if received is None:
            self._gone()
        return received

    def _gone(self) -> NoReturn:
        code = self._end(_KILLED)
        how = "was killed, and does not end" if code is None else start_errors.how_ended(code)
        if self._ready:
            msg = f"preload: the process that has imported {', '.join(self.preload) or 'nothing'} {how}"
            raise PreloadError(msg) from None
        what = repr(self._importing or ", ".join(self.preload))  # the latter: it ended before its first message
        msg = f"preload: {what} could not be imported: the process that does so {how}"
        raise PreloadError(msg, self._importing) from None
