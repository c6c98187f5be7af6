"""Where the ranks of a job are, for ``phalanx stack``: the socket of its agent, and who asks there.

The socket is in the folder of the run. `_rendezvous.stack_report` has what the agents of a job ask each other.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Callable
from contextlib import suppress

from phalanx._base import clock, files
from phalanx._base.loop import READ, WRITE, Loop
from phalanx._rendezvous import stack_report
from phalanx._rendezvous.life import Found
from phalanx._rendezvous.questions import PATIENCE
from phalanx._rendezvous.records import DamagedError
from phalanx._rendezvous.stack_report import MOST_BYTES, JobStacks
from phalanx._run.local_server import LocalServer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx._runs.record import Run

NAME = "stack.sock"
"""Of the socket, in the run's folder."""

SEEN = b"\n"
"""What somebody who asks is sent first: white space, for JSON."""

MOST_CALLERS = 16
"""Who may ask at a time; others find the connection closed."""

LONGEST = 30.0
"""Seconds after which the connection of somebody who does not read is closed."""

_MODE = 0o600
_JOIN = 1.0  # seconds that the end waits for the thread: for its disk, nobody waits
_CREDENTIALS = struct.Struct("iII")  # of unix(7): pid, uid, gid


def peer(connection: socket.socket) -> tuple[int, int]:
    """Return the pid and the uid of who was at the other end of a Unix socket when it was connected, or listened at."""
    said = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(said)
    return pid, uid


class StackDoor(LocalServer):
    """Answers those who ask where the ranks are, from `open` to `close`.

    Args:
        ask: Finds it out: the function that it is given is called with it once, on any thread, or never.
        warn: Called with a line, by the door's thread, if there can be no such socket.
    """

    def __init__(self, ask: Callable[[Callable[[Found], None]], None], warn: Callable[[str], None]) -> None:
        super().__init__("phalanx-stack", MOST_CALLERS, LONGEST)
        self._ask = ask
        self._warn = warn
        self._folder = ""

    def open(self, folder: str) -> None:
        """Begin to listen in a run's folder, soon. A further call does nothing."""
        if self._folder or not folder:
            return
        self._folder = folder
        try:
            self.begin()
        except (OSError, RuntimeError) as error:
            self.failed(error)

    def close(self) -> None:
        """Stop listening, and close all connections. Waits for the thread at most a second. Idempotent."""
        self.end(_JOIN)

    # --- the door's thread

    def listen(self) -> socket.socket:
        """See `LocalServer`. Raises OSError."""
        inside = os.open(self._folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self.held.callback(os.close, inside)
        with suppress(FileNotFoundError):  # of a run before, whose folder this one has, too
            if stat.S_ISSOCK(os.lstat(NAME, dir_fd=inside).st_mode):
                os.unlink(NAME, dir_fd=inside)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            os.fchmod(listener.fileno(), _MODE)  # before: that of the file is made of it
            listener.bind(f"/proc/self/fd/{inside}/{NAME}")  # a path of the folder may be too long, see unix(7)
            listener.listen(MOST_CALLERS)
        except BaseException:
            listener.close()
            raise
        self.held.enter_context(suppress(OSError))
        self.held.callback(os.unlink, NAME, dir_fd=inside)
        return listener

    def failed(self, error: Exception) -> None:
        """See `LocalServer`. The job does not feel it."""
        self._warn(f"phalanx stack cannot show the ranks of other machines here: {error}")

    def accepted(self, connection: socket.socket) -> None:
        """See `LocalServer`."""
        if peer(connection)[1] not in (os.geteuid(), files.ROOT):
            self.drop(connection)
            return
        with suppress(OSError):  # who asked has gone: `ready` handles that
            connection.send(SEEN)
        loop = self.loop
        assert loop is not None
        self._ask(lambda found: loop.call(lambda: self._answer(loop, connection, found)))

    def _answer(self, loop: Loop, connection: socket.socket, found: Found) -> None:
        if connection in self.connections:
            self.connections[connection] = stack_report.tell(found)
            loop.change(connection.fileno(), READ | WRITE)

    def ready(self, connection: socket.socket, events: int) -> None:
        """See `LocalServer`. Nothing is to be read: who sends anything, or has gone, is answered no more."""
        left = self.connections[connection]
        if not events & ~WRITE:
            left = self.connections[connection] = left[connection.send(left) :]
        if events & ~WRITE or not left:
            self.drop(connection)


WAIT = 2 * PATIENCE + 3.0
"""Seconds that a person waits at the most: for the end of what somebody else has asked, and for our own."""

SOON = 3.0
"""Seconds of these after which an agent is taken for stopped that has not noticed that it is asked."""

_CHUNK = 1 << 20


class NotToldError(Exception):
    """The agent has not told where the ranks of other machines are. ``str()`` is why."""


def ask(folder: str, run: Run, owner: int) -> JobStacks:
    """Return where the ranks are, of a run that goes on here. ``owner``: the uid that it belongs to.

    Only the launcher that the record names is believed. Raises NotToldError, after `WAIT` at the latest.
    """
    until = clock.now() + WAIT
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(SOON)
            _connect(connection, folder)
            pid, uid = peer(connection)
            if pid != run.pid or uid not in (owner, os.geteuid(), files.ROOT):
                raise NotToldError(f"another process than its launcher answers at {NAME}")
            data = connection.recv(_CHUNK)
            data += _receive(connection, until) if data else b""
    except FileNotFoundError:
        raise NotToldError(f"its agent shows no others (there is no {NAME} in the run's folder)") from None
    except TimeoutError:
        msg = f"its agent has not answered within {WAIT if clock.now() >= until else SOON:g} s"
        raise NotToldError(msg) from None
    except BlockingIOError:
        raise NotToldError("too many ask its agent at once") from None
    except OSError as error:
        raise NotToldError(f"its agent cannot be asked: {error.strerror or error}") from None
    if not data.strip():
        raise NotToldError("its agent has not answered: it ends, or too many ask at once")
    try:
        told = JobStacks(data)
    except DamagedError as error:
        raise NotToldError(f"what its agent has answered cannot be read: {error}") from None
    if told.why:
        raise NotToldError(told.why)
    return told


def _connect(connection: socket.socket, folder: str) -> None:
    inside = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        connection.connect(f"/proc/self/fd/{inside}/{NAME}")  # a path of the folder may be too long, see unix(7)
    finally:
        os.close(inside)


def _receive(connection: socket.socket, until: float) -> bytes:
    """Return all that is sent. Raises OSError, TimeoutError."""
    parts: list[bytes] = []
    size = 0
    while size <= MOST_BYTES:
        left = until - clock.now()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        part = connection.recv(_CHUNK)
        if not part:
            return b"".join(parts)
        parts.append(part)
        size += len(part)
    raise NotToldError(f"its answer is longer than {MOST_BYTES} bytes")
