r"""The socket at which a process that stands at a breakpoint is debugged from another terminal: both ends.

It is in the rank's folder, beside the error file: ``error.json.debug.PID``, for its user and root alone. Each message
is a line of JSON, an object:

- The server sends first what it is: ``{"pid", "rank", "at", "since", "attached"}``; ``at`` is empty while it runs.
- The client sends ``{"attach": true}``, then a ``{"line": text}`` for each prompt, ``{"complete": [text, line, begin,
  end]}`` before it has answered one, and ``{"interrupt": true}`` while its command runs.
- The server sends ``{"out": text}``, ``{"prompt": text}``, ``{"matches": [...]}``, ``{"runs": "on"}``,
  ``"step"`` or ``"end"`` when the program goes on, and ``{"end": why}``.

One client at a time is attached. A client that sends anything else, or does not read, loses its connection. The process
loads this module at its first breakpoint, in whatever Python it runs (3.8 or later).
"""

from __future__ import annotations

import atexit
import collections
import json
import math
import os
import select
import signal
import socket
import threading
import time

from phalanx._base.channels import by_folder, peer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

LONGEST_LINE = 1 << 16
"""Bytes of a message of a client."""

MOST_OUTPUT = 1 << 20
"""Characters that a command may print; of more, a line says how many are left out."""

_READS_WITHIN = 5.0  # seconds in which a client must read what it is sent, and one that connects must attach
_MOST_CONNECTIONS = 16
_MOST_WAITING = 64  # messages of a client that nobody has read: it sends no line without a prompt
_MOST_MATCHES = 1000
_PAUSE = 1.0  # seconds in which no client is accepted, after descriptors have run out
_LATE = 1.0  # seconds that a signal may take
_MODE = 0o600
_STILL_RUNS = "a command of the client before still runs; Ctrl-C interrupts it\n"


def encode(message: dict[str, Any]) -> bytes:
    """Return a message as it is sent."""
    return json.dumps(message).encode() + b"\n"


class Lines:
    """Splits what comes through a socket into messages, each of which is an object of JSON.

    Args:
        limit: Bytes of a message, at most.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Return the messages that are complete. Raises ValueError for what is none."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if max(map(len, (*lines, self._rest))) > self._limit:
            raise ValueError("too long")
        for line in lines:
            message = json.loads(line)
            if not isinstance(message, dict):
                raise ValueError("no object")  # noqa: TRY004 - what was sent is wrong, not how we are called
            yield message


class _Connection:
    """One that has connected, and is not attached yet, or is."""

    def __init__(self, link: socket.socket, pid: int) -> None:
        self.link = link
        self.pid = pid
        self.lines = Lines(LONGEST_LINE)
        self.until = time.monotonic() + _READS_WITHIN


class Standing:
    """At what a process stands.

    Attributes:
        at: Where, as ``FILE:LINE``.
        greet: Prints it, for a client that has just attached.
        complete: Returns what may complete a line, see `cmd.Cmd.complete`: the text, the line, and where the text is.
    """

    def __init__(self, at: str, greet: Callable[[], None], complete: Callable[[str, str, int, int], list[str]]) -> None:
        self.at = at
        self.greet = greet
        self.complete = complete


class Server:
    """Listens, and is the terminal of a debugger in this process. A thread of its own receives.

    The methods below `stands` are those of the thread that stands.

    Args:
        path: Of the socket.
        rank: Of this process, in words; "": it has none.
        attached: Called when a client attaches (True) and when it leaves (False), on the thread of the server.

    Raises:
        OSError: There can be no such socket.
        RuntimeError: There can be no thread.
    """

    def __init__(self, path: str, rank: str, attached: Callable[[bool], None]) -> None:
        self.path = path
        self.standing: Standing | None = None
        """At what the process stands; None: it runs."""
        self._rank = rank
        self._attached = attached
        self._since = 0.0
        self._thread = 0  # of the command that runs; 0: none
        self._interrupted = -math.inf  # when a command was
        self._is_interrupted = False  # the command that runs
        self._printed = 0  # characters, since the last line that was read
        self._partial = ""  # the line that is being printed: the next prompt
        self._waiting: collections.deque[tuple[str, Any]] = collections.deque()
        self._change = threading.Condition()
        self._client: _Connection | None = None
        self._connections: dict[int, _Connection] = {}
        self._poll = select.poll()
        self._pid = os.getpid()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._number = self._listener.fileno()
            self._file = os.fstat(self._number)
            os.fchmod(self._number, _MODE)  # before: that of the file is made of it
            self.close()  # of a process before that had this pid; or what this one had, see `is_open`
            by_folder(path, self._listener.bind)
            self._listener.listen(_MOST_CONNECTIONS)
            threading.Thread(target=self._serve, name="phalanx-debug", daemon=True).start()
        except BaseException:
            self.close()
            self._listener.close()
            raise
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._forget)

    @property
    def is_open(self) -> bool:
        """Whether it can be reached: not if the program has closed all its descriptors."""
        try:
            return os.path.samestat(os.fstat(self._number), self._file)
        except OSError:
            return False

    def close(self) -> None:
        """Remove the socket: the process is about to end."""
        if os.getpid() == self._pid:
            try:
                os.unlink(self.path)
            except OSError:
                pass

    def _forget(self) -> None:
        """In a fork: close what is the parent's."""
        for connection in list(self._connections.values()):
            connection.link.close()
        self._connections.clear()
        self._client = None
        self._listener.close()

    @property
    def has_interrupted(self) -> bool:
        """Whether a KeyboardInterrupt is the client's, which may come when the command is over."""
        return self._is_interrupted or time.monotonic() - self._interrupted < _LATE

    def stands(self, standing: Standing) -> Standing | None:
        """Begin to read lines of the client that is attached, or will be. Returns at what the process stood already."""
        with self._change:
            before, self.standing = self.standing, standing
            self._since = time.time()
            self._thread = self._printed = 0
            self._partial = ""
            self._waiting.clear()
        return before

    def goes(self, how: str, before: Standing | None) -> None:
        """Read no more lines: the program runs ``"on"``, for a ``"step"``, or to its ``"end"``; or stands as before."""
        with self._change:
            self._thread = 0 if before is None else threading.get_ident()
            self.standing = before
        if before is None:
            self._send({"runs": how}, self._client)

    def write(self, text: str) -> None:
        """Print for the client. What it does not read in time, and what is printed for nobody, is lost."""
        kept = text[: max(0, MOST_OUTPUT - self._printed)]
        self._printed += len(text)
        whole, newline, rest = kept.rpartition("\n")
        if newline:
            self._send({"out": self._partial + whole + newline}, self._reader())
            self._partial = ""
        self._partial += rest

    def read(self, prompt: str) -> str:
        """Return the next line, with its end. The prompt is what was printed last, or ``prompt``."""
        left_out = self._printed - MOST_OUTPUT
        if left_out > 0:
            self._send({"out": f"{self._partial}\n[{left_out} more characters are left out]\n"}, self._client)
            self._partial = ""
        prompt = self._partial or prompt
        with self._change:
            self._thread = self._printed = 0
            self._is_interrupted = False
        while True:
            self._partial = ""
            self._send({"prompt": prompt}, self._reader())
            kind, value = self._next()
            while kind == "complete":
                self._send({"matches": self._matches(value)}, self._client)
                kind, value = self._next()
            if kind == "line":
                return str(value) + "\n"
            if self.standing is not None:
                self.standing.greet()

    def _reader(self) -> _Connection | None:
        """The client, unless it is to be greeted first: it has one line where the program stands, and one prompt.

        One that attaches while a command runs has the rest of its output.
        """
        with self._change:
            is_new = not self._thread and bool(self._waiting) and self._waiting[0][0] == "attach"
            return None if is_new else self._client

    def _next(self) -> tuple[str, Any]:
        with self._change:
            while not self._waiting:
                self._change.wait()
            found = self._waiting.popleft()
            if found[0] == "line":
                self._thread = threading.get_ident()
            return found

    def _matches(self, line: list[Any]) -> list[str]:
        try:
            found = self.standing.complete(*line) if self.standing is not None else []
            return [str(each) for each in (found or ())][:_MOST_MATCHES]
        except Exception:  # noqa: BLE001 - of the user's objects, whose attributes are listed
            return []

    @staticmethod
    def _send(message: dict[str, Any], client: _Connection | None) -> None:
        if client is None:
            return
        try:
            client.link.sendall(encode(message), socket.MSG_NOSIGNAL)
        except OSError:  # it does not read, or has gone: the server's thread, which closes it, wakes
            try:
                client.link.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    # --- the thread of the server

    def _serve(self) -> None:
        self._poll.register(self._number, select.POLLIN)
        paused = 0.0  # until when no connection is accepted: descriptors had run out
        while True:
            now = time.monotonic()
            if paused and paused <= now:
                paused = 0.0
                self._poll.register(self._number, select.POLLIN)
            for number, connection in list(self._connections.items()):
                if connection is not self._client and connection.until <= now:
                    self._drop(number)
            waits = [each.until for each in self._connections.values() if each is not self._client]
            if paused:
                waits.append(paused)
            ready = self._poll.poll((min(waits) - now) * 1000 + 1 if waits else None)
            if not self.is_open:
                return
            for number, _ in ready:
                if number != self._number:
                    self._receive(number)
                elif not self._accept():
                    paused = time.monotonic() + _PAUSE
                    self._poll.unregister(number)

    def _accept(self) -> bool:
        try:
            link, _ = self._listener.accept()
        except OSError:
            return False
        pid, uid = peer(link)
        if uid not in (os.geteuid(), 0) or len(self._connections) >= _MOST_CONNECTIONS:
            link.close()
            return True
        link.settimeout(_READS_WITHIN)
        number = link.fileno()
        self._connections[number] = _Connection(link, pid)
        self._poll.register(number, select.POLLIN)
        standing, client = self.standing, self._client
        greeting = {
            "pid": self._pid,
            "rank": self._rank,
            "at": standing.at if standing is not None else "",
            "since": self._since,
            "attached": client.pid if client is not None else 0,
        }
        try:
            link.send(encode(greeting), socket.MSG_NOSIGNAL)
        except OSError:
            self._drop(number)
        return True

    def _drop(self, number: int) -> None:
        connection = self._connections.pop(number)
        self._poll.unregister(number)
        if connection is self._client:
            self._client = None
            self._attached(False)
        connection.link.close()

    def _receive(self, number: int) -> None:
        connection = self._connections[number]
        try:
            data = connection.link.recv(LONGEST_LINE, socket.MSG_DONTWAIT)
            if not data:
                raise ConnectionResetError
            for message in connection.lines.feed(data):
                if not self._handle(connection, message):
                    raise ConnectionAbortedError
        except BlockingIOError:
            pass
        except (OSError, ValueError, RecursionError):
            self._drop(number)

    def _handle(self, connection: _Connection, message: dict[str, Any]) -> bool:
        """Do what a client asks for. Returns whether it keeps its connection."""
        if connection is not self._client:
            return message == {"attach": True} and self._attach(connection)
        with self._change:
            if message == {"interrupt": True}:
                if self._thread:
                    self._interrupted, self._is_interrupted = time.monotonic(), True
                    _interrupt(self._thread)
                return True
            if self.standing is None:  # typed before it was known that the program runs
                return True
            line, parts = message.get("line"), message.get("complete")
            if isinstance(line, str) and "\n" not in line:
                self._waiting.append(("line", line))
            elif isinstance(parts, list) and [type(each) for each in parts] == [str, str, int, int]:
                self._waiting.append(("complete", parts))
            else:
                return False
            self._change.notify()
            return len(self._waiting) <= _MOST_WAITING

    def _attach(self, connection: _Connection) -> bool:
        if self._client is not None:
            try:
                connection.link.send(encode({"end": f"pid {self._client.pid} is attached"}), socket.MSG_NOSIGNAL)
            except OSError:
                pass
            return False
        self._attached(True)
        with self._change:
            if self._thread:  # before it is the client, to which the command prints
                try:
                    connection.link.send(encode({"out": _STILL_RUNS}), socket.MSG_NOSIGNAL)
                except OSError:
                    pass
            self._client = connection
            if self.standing is not None:
                self._waiting.append(("attach", None))
                self._change.notify()
        return True


def _interrupt(thread: int) -> None:
    """Raise KeyboardInterrupt in a thread that runs a command; in the main thread, as Ctrl-C does: it ends a sleep."""
    if thread == threading.main_thread().ident and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.pthread_kill(thread, signal.SIGINT)
        return
    import ctypes

    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(KeyboardInterrupt))
