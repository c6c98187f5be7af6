"""The socket by which `phalanx stack` asks an agent where the ranks of the whole job are.

It is ``stack.sock`` in the run's folder, and is there only where a run has a part in a job of many machines. Who
connects has asked, and gets `SEEN` at once; then the answer, one message of JSON (`stack_report.tell`); then the
connection is closed. It is the user's and root's: others cannot open it, and the kernel says who is at the other end.
Owns the thread that serves it: the folder may be on a disk that does not answer.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

from phalanx._base import files, interrupts
from phalanx._base.loop import READ, WRITE, Loop
from phalanx._rendezvous import stack_report
from phalanx._rendezvous.life import Found

NAME = "stack.sock"
"""Of the socket, in the run's folder."""

SEEN = b"\n"
"""What somebody who asks is sent first: white space, for JSON."""

MOST_CALLERS = 16
"""Who may ask at a time; others find the connection closed."""

LONGEST = 30.0
"""Seconds after which the connection of somebody who does not read is closed."""

_MODE = 0o600
_AGAIN = 1.0  # seconds after which somebody is let in again, if no descriptor was left
_JOIN = 1.0  # seconds that the end waits for the thread: for its disk, nobody waits
_CREDENTIALS = struct.Struct("iII")  # of unix(7): pid, uid, gid


def peer(connection: socket.socket) -> tuple[int, int]:
    """Return the pid and the uid of who was at the other end of a Unix socket when it was connected, or listened at."""
    said = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(said)
    return pid, uid


class _Caller:
    """Somebody who asks: the connection, and what is still to be sent."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.data = memoryview(b"")


class StackDoor:
    """Answers those who ask where the ranks are, from `open` to `close`.

    Args:
        ask: Finds it out: the function that it is given is called with it once, on any thread, or never.
        warn: Called with a line, by the door's thread, if there can be no such socket.
    """

    def __init__(self, ask: Callable[[Callable[[Found], None]], None], warn: Callable[[str], None]) -> None:
        self._ask = ask
        self._warn = warn
        self._owner = os.getpid()
        self._loop: Loop | None = None
        self._thread: threading.Thread | None = None
        self._listener: socket.socket | None = None
        self._callers: dict[int, _Caller] = {}
        self._told: tuple[Found | None, bytes] = None, b""  # what was told last: several may have asked

    def open(self, folder: str) -> None:
        """Begin to listen in a run's folder, soon. A further call does nothing."""
        if self._loop is not None or not folder:
            return
        try:
            with interrupts.deferred():
                self._begin(folder)
        except (OSError, RuntimeError) as error:  # no descriptor is left, or no thread
            self._warn(_why(error))

    def _begin(self, folder: str) -> None:
        loop = Loop()
        thread = threading.Thread(target=self._serve, args=(loop, folder), name="phalanx-stack", daemon=True)
        self._loop = loop
        _open.add(self)
        try:
            thread.start()
        except RuntimeError:
            _open.discard(self)
            loop.close()
            raise
        self._thread = thread

    def close(self) -> None:
        """Stop listening, and close all connections. Waits for the thread at most a second. Idempotent."""
        thread, loop = self._thread, self._loop
        if thread is None or loop is None or self._owner != os.getpid():
            return
        loop.call(loop.stop)
        thread.join(_JOIN)
        self._thread = None  # now: a signal may have raised before

    def abandon(self) -> None:
        """Close, in a fork, what belongs to the parent."""
        self._thread = None
        for caller in self._callers.values():
            caller.connection.close()
        if self._listener is not None:
            self._listener.close()
        if self._loop is not None:
            self._loop.close_in_fork()

    # --- the door's thread

    def _serve(self, loop: Loop, folder: str) -> None:
        inside = -1
        try:
            inside = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            self._listener = _listen(inside)
            self._await(loop)
            loop.run()
        except Exception as error:  # noqa: BLE001 - the job is not to feel it
            with suppress(Exception):  # the caller's
                self._warn(_why(error))
        finally:
            _open.discard(self)
            for caller in [*self._callers.values()]:
                self._drop(caller)
            if self._listener is not None:
                self._listener.close()
                with suppress(OSError):
                    os.unlink(NAME, dir_fd=inside)
            if inside >= 0:
                os.close(inside)
            loop.close()

    def _await(self, loop: Loop) -> None:
        assert self._listener is not None
        loop.watch(self._listener.fileno(), lambda _: self._accept(loop))

    def _accept(self, loop: Loop) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # who asked has gone
            return
        except OSError:  # no descriptor is left: who asks waits, and this thread, too
            loop.forget(self._listener.fileno())
            loop.after(_AGAIN, lambda: self._await(loop))
            return
        if len(self._callers) >= MOST_CALLERS or peer(connection)[1] not in (os.geteuid(), files.ROOT):
            connection.close()
            return
        connection.setblocking(False)
        with suppress(OSError):  # who asked has gone, which is seen soon
            connection.send(SEEN)
        caller = self._callers[connection.fileno()] = _Caller(connection)
        loop.watch(connection.fileno(), lambda events: self._see(caller, events))
        loop.after(LONGEST, lambda: self._drop(caller))
        self._ask(lambda found: loop.call(lambda: self._answer(loop, caller, found)))

    def _answer(self, loop: Loop, caller: _Caller, found: Found) -> None:
        if caller.connection.fileno() < 0:
            return
        if self._told[0] is not found:
            self._told = found, stack_report.tell(found)
        caller.data = memoryview(self._told[1])
        loop.change(caller.connection.fileno(), READ | WRITE)

    def _see(self, caller: _Caller, events: int) -> None:
        """Send what can be sent. Nothing is to be read: who sends anything, or has gone, is told no more."""
        try:
            if events & ~WRITE:
                self._drop(caller)
                return
            caller.data = caller.data[caller.connection.send(caller.data) :]
            if not caller.data:
                self._drop(caller)
        except BlockingIOError:
            return
        except OSError:
            self._drop(caller)

    def _drop(self, caller: _Caller) -> None:
        fd = caller.connection.fileno()
        if fd >= 0:
            assert self._loop is not None
            self._loop.forget(fd)
            self._callers.pop(fd, None)
            caller.connection.close()
            if not self._callers:
                self._told = None, b""


def _listen(folder: int) -> socket.socket:
    """Return a socket in a folder that is open. Raises OSError."""
    with suppress(FileNotFoundError):  # of a run before, whose folder this one has, too
        if stat.S_ISSOCK(os.lstat(NAME, dir_fd=folder).st_mode):
            os.unlink(NAME, dir_fd=folder)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        os.fchmod(listener.fileno(), _MODE)  # before: that of the file is made of it
        listener.bind(f"/proc/self/fd/{folder}/{NAME}")  # a path of the folder may be too long, see unix(7)
        listener.listen(MOST_CALLERS)
    except BaseException:
        listener.close()
        raise
    return listener


def _why(error: object) -> str:
    return f"phalanx stack cannot show the ranks of other machines here: {error}"


_open: set[StackDoor] = set()


def _abandon_all() -> None:
    for door in _open:
        door.abandon()
    _open.clear()


os.register_at_fork(after_in_child=_abandon_all)
