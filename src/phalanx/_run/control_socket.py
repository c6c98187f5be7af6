"""The control socket of a run: its launcher answers there, and other processes of the same user ask.

Owns the socket in the run's folder, who may ask, and the bounds on both ends. A connection carries one question, a line
of JSON, and its answer, another one. What a question does is `control`'s business.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from phalanx._base import clock, files
from phalanx._run.local_server import LocalServer

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

    from phalanx._runs.record import Run

NAME = "control.sock"
"""Of the socket, in the run's folder."""

VERSION = 1
"""Of questions and answers. New fields, and new questions, leave it as it is."""

ACCEPTED = b"\n"
"""What a caller is sent first: white space, for JSON."""

MOST_CALLERS = 32
"""Callers at a time; others find the connection closed."""

MOST_QUESTION = 16 << 10
"""Bytes of a question."""

MOST_ANSWER = 64 << 20
"""Bytes of an answer."""

LONGEST = 30.0
"""Seconds after which a connection is closed, whatever its other end does."""

WAIT = 13.0
"""Seconds for which a caller waits for an answer: the agents of others have 5 s, and another question goes first."""

SOON = 3.0
"""Seconds of these after which a launcher counts as stopped that has not accepted the connection."""

_MODE = 0o600
_BEGINS_WITHIN = 2.0  # seconds after its start in which a run has its socket
_BRIEF = 10  # milliseconds until the next attempt to connect
_JOIN = 1.0  # seconds that the end waits for the thread: for its disk, nobody waits
_CHUNK = 1 << 20


class Asker(NamedTuple):
    """Who asks: ``host`` is "" on the machine of the launcher."""

    pid: int
    uid: int
    host: str = ""

    def __str__(self) -> str:
        return f"user {user_name(self.uid)}, pid {self.pid}" + f", host {self.host}" * bool(self.host)


class Question(NamedTuple):
    """A question: its name, its arguments, as JSON has them, and who asks."""

    name: str
    arguments: dict[str, Any]
    asker: Asker


class RefusedError(Exception):
    """A question has no answer. ``str()`` is why."""


Reply = Callable[[bytes], None]
"""Called with an answer, once, on any thread; or never."""


def user_name(uid: int) -> str:
    """Return the name of a user, or the number of one that has none here."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def refusal(why: str) -> bytes:
    """Return an answer that says why there is none."""
    import json  # likewise

    return json.dumps({"version": VERSION, "error": why}).encode()


class ControlSocket(LocalServer):
    """Answers questions, from `open` to `close`.

    Args:
        answer: Called with each question, and with what is to be called with its answer, by the socket's thread: it
            must not wait. Raises RefusedError.
        warn: Called with a line, by the socket's thread, if there can be no such socket.
    """

    def __init__(self, answer: Callable[[Question, Reply], None], warn: Callable[[str], None]) -> None:
        super().__init__("phalanx-control", MOST_CALLERS, LONGEST, MOST_QUESTION + 1)
        self._answer = answer
        self._warn = warn
        self._folder = ""
        self._inside = -1  # its descriptor

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

    def abandon(self) -> None:
        """See `LocalServer`: in a fork."""
        super().abandon()
        inside, self._inside = self._inside, -1
        if inside >= 0:
            os.close(inside)

    def call(self, function: Callable[[], None]) -> None:
        """Call a function on the socket's thread, soon; here, if there was none yet; not, after `close`."""
        if self.loop is None:
            function()
        else:
            self.loop.call(function)

    # --- the socket's thread

    def call_later(self, seconds: float, function: Callable[[], None]) -> None:
        """Call a function in so many seconds; not, after `close`."""
        assert self.loop is not None
        self.loop.after(seconds, function)

    def listen(self) -> socket.socket:
        """See `LocalServer`. Raises OSError."""
        import socket

        inside = os.open(self._folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._inside = inside
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
        """See `LocalServer`. The workers do not feel it."""
        self._warn(f"phalanx status, stop and the like cannot reach this run: {NAME}: {error}")

    def accepted(self, connection: socket.socket) -> None:
        """See `LocalServer`."""
        from phalanx._base import channels  # which loads `socket`: no start is to wait for that

        if channels.peer(connection)[1] not in (os.geteuid(), files.ROOT):
            self.drop(connection)
            return
        with suppress(OSError):  # the other end has gone, which its request will show
            connection.send(ACCEPTED)

    def is_whole(self, request: bytes) -> bool:
        """See `LocalServer`."""
        return b"\n" in request

    def asked(self, connection: socket.socket, request: bytes) -> None:
        """See `LocalServer`."""
        from phalanx._base import channels

        line, end, _ = request.partition(b"\n")
        loop = self.loop
        assert loop is not None

        def reply(answer: bytes) -> None:
            loop.call(lambda: self.reply(connection, answer + b"\n"))

        if not end:
            self.drop(connection)
            return
        try:
            self._answer(_question(line, channels.peer(connection)), reply)
        except RefusedError as error:
            reply(refusal(str(error)))
        except Exception as error:  # noqa: BLE001 - whatever it is, the next question is answered
            reply(refusal(f"its launcher could not answer: {error}"))


def _question(line: bytes, caller: tuple[int, int]) -> Question:
    """Read a question. Raises RefusedError."""
    import json

    try:
        found = json.loads(line.decode())
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("ask"), str):
        raise RefusedError("this is no question: expected a line of JSON, an object with `version` and `ask`")
    if found.get("version") != VERSION:
        raise RefusedError(f"a question of version {found.get('version')!r}; this launcher answers version {VERSION}")
    return Question(found["ask"], found, Asker(*caller))


# --- the other end


class NotAnsweredError(Exception):
    """The launcher of a run has not answered. ``str()`` is why."""


def ask(folder: str, run: Run, owner: int, name: str, **arguments: Any) -> bytes:
    """Ask the launcher of a run that goes on here. Returns its answer, a line of JSON.

    Only the launcher that the record names is believed.

    Args:
        folder: The run's folder.
        run: Its record.
        owner: The uid that it belongs to.
        name: Of the question.
        **arguments: Its arguments: what JSON can hold.

    Raises NotAnsweredError, after `WAIT` seconds at the latest; RefusedError: the launcher says why it does not do it.
    """
    import json
    import socket

    from phalanx._base import channels

    until = clock.now() + WAIT
    question = json.dumps({"version": VERSION, "ask": name, **arguments}).encode() + b"\n"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(SOON)
            _connect(connection, os.path.join(folder, NAME), run.started)
            pid, uid = channels.peer(connection)
            if pid != run.pid or uid not in (owner, os.geteuid(), files.ROOT):
                raise NotAnsweredError(f"another process than its launcher answers at {NAME}")
            data = connection.recv(1)
            if data:
                connection.sendall(question)
                data = _receive(connection, until)
    except FileNotFoundError:
        raise NotAnsweredError(f"it has no workers yet, or it ends (there is no {NAME} in its folder)") from None
    except TimeoutError:
        msg = f"its launcher has not answered within {WAIT if clock.now() >= until else SOON:g} s"
        raise NotAnsweredError(msg) from None
    except PermissionError:
        whose = f"user {user_name(owner)}"
        raise NotAnsweredError(f"it belongs to {whose}: only that user, and root, can ask its launcher") from None
    except BlockingIOError:
        raise NotAnsweredError("too many ask its launcher at once") from None
    except (ConnectionResetError, BrokenPipeError):
        data = b""
    except OSError as error:
        raise NotAnsweredError(f"its launcher cannot be asked: {error.strerror or error}") from None
    if not data.strip():
        raise NotAnsweredError("its launcher has not answered: it ends, or too many ask at once")
    return data


def _connect(connection: socket.socket, path: str, started: float) -> None:
    """Connect to a run's socket, which a run that has just ``started`` (seconds since the epoch) has soon."""
    import select
    import time

    from phalanx._base import channels

    while 0 <= time.time() - started < _BEGINS_WITHIN:
        with suppress(FileNotFoundError, ConnectionRefusedError):  # it does not listen yet
            return channels.by_folder(path, connection.connect)
        select.poll().poll(_BRIEF)
    return channels.by_folder(path, connection.connect)


def ask_for(folder: str, run: Run, owner: int, name: str, **arguments: Any) -> dict[str, Any]:
    """Ask as `ask` does, and return the answer. Raises NotAnsweredError, RefusedError."""
    import json

    try:
        found = json.loads(ask(folder, run, owner, name, **arguments).decode())
    except (ValueError, RecursionError) as error:
        raise NotAnsweredError(f"what its launcher has answered cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise NotAnsweredError("what its launcher has answered is no answer")
    if "error" in found:
        raise RefusedError(str(found["error"]))
    return found


def _receive(connection: socket.socket, until: float) -> bytes:
    """Return all that is sent. Raises OSError, TimeoutError."""
    parts: list[bytes] = []
    size = 0
    while size <= MOST_ANSWER:
        left = until - clock.now()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        part = connection.recv(_CHUNK)
        if not part:
            return b"".join(parts)
        parts.append(part)
        size += len(part)
    raise NotAnsweredError(f"its answer is longer than {MOST_ANSWER} bytes")
