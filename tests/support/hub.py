"""Around the store in an agent: one in its own process, what stands between it and an agent, and strangers."""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

from phalanx._store.hub import messages, wire
from phalanx._store.hub.addresses import HubSettings
from phalanx._store.hub.wire import AgentSide, StoreSide
from tests.support.stores import SOON

SCRIPT = """
import sys
from phalanx._store.hub.addresses import Place
from phalanx._store.hub.server import HubServer
place = Place(int(sys.argv[1]), ("127.0.0.1",))
with HubServer(place, run_id="run", secret=b"secret", ttl=int(sys.argv[2]), warn=print) as it:
    print(it.port, flush=True)
    sys.stdin.read()
"""


class HubProcess:
    """The store in a process that can be stopped and killed. A context manager."""

    def __init__(self, ttl: int = 2) -> None:
        self.port = 0
        self._ttl = ttl

    def start(self) -> None:
        """Start it, at the port that it has had before. Returns when it serves."""
        command = [sys.executable, "-c", SCRIPT, str(self.port), str(self._ttl)]
        # What glibc has freed is given back at once: else by chance, which would hide what is held.
        env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def settings(self, **more: Any) -> HubSettings:
        """How it is reached."""
        return HubSettings("127.0.0.1", self.port, "run", b"secret", self._ttl)._replace(**more)

    @property
    def ticks(self) -> float:
        """Seconds of processor time that it has taken."""
        with open(f"/proc/{self.process.pid}/stat", encoding="ascii") as file:
            fields = file.read().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Between:
    """What passes bytes on between agents and the store, until it is told otherwise. A context manager.

    Attributes:
        is_cut: Whether connections are ended at once; `cut` ends those of now.
        change: Called with each piece that goes to the store; returns what goes there in its place.
        change_back: The same, of pieces that come from it.
    """

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.is_cut = False
        self.change: Callable[[bytes], bytes] = bytes
        self.change_back: Callable[[bytes], bytes] = bytes
        self._bell, self._rope = socket.socketpair()
        self._ends: dict[socket.socket, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        for each in (self._listener, self._bell):
            self._selector.register(each, selectors.EVENT_READ, "store")
        self._thread = threading.Thread(target=self._run)
        self._lock = threading.Lock()

    def cut(self) -> None:
        """End the connections, and all that come."""
        self.is_cut = True
        self.drop()

    def drop(self) -> None:
        """End the connections."""
        with self._lock:
            for end in list(self._ends):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._rope.close()
        self._thread.join()
        for end in (*self._ends, self._listener, self._bell):
            end.close()
        self._selector.close()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._bell:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._pass(key.fileobj, to_store=key.data)

    def _accept(self) -> None:
        agent, _ = self._listener.accept()
        if self.is_cut:
            agent.close()
            return
        try:
            store = socket.create_connection(("127.0.0.1", self._to), timeout=SOON)
        except OSError:
            agent.close()
            return
        with self._lock:
            self._ends.update({agent: store, store: agent})
        self._selector.register(agent, selectors.EVENT_READ, data=True)
        self._selector.register(store, selectors.EVENT_READ, data=False)

    def _pass(self, end: socket.socket, *, to_store: bool) -> None:
        if end not in self._ends:  # the other end has been closed in this round
            return
        try:
            data = end.recv(1 << 16)
            if data:
                self._ends[end].sendall((self.change if to_store else self.change_back)(data))
                return
        except OSError:
            pass
        with self._lock:
            both = end, self._ends.pop(end)
            del self._ends[both[1]]
        for each in both:
            self._selector.unregister(each)
            each.close()


class Stranger:
    """A connection to the store on which anything can be said. A context manager."""

    def __init__(self, settings: HubSettings) -> None:
        self._settings = settings._replace(encrypt="no")
        self.sock = socket.create_connection((settings.host, settings.port), timeout=SOON)
        self._frames = wire.Frames(messages.MOST_BODY)

    def greet(self, session: bytes = b"") -> None:
        """Enter, as an agent does."""
        side = AgentSide(self._settings, session)
        self.sock.sendall(wire.frame(side.hello(), wire.checksum))
        enter, keys = side.enter(self.read())
        self.seal = keys.agent
        self.say(enter)

    def say(self, body: bytes) -> None:
        """Say something that is sealed."""
        self.sock.sendall(wire.frame(body, self.seal))

    def read(self) -> bytes:
        """Return the next message; b"": the store has ended the connection."""
        while (found := self._frames.next()) is None:
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionError:
                return b""
            if not data:
                return b""
            self._frames.feed(data)
        return found[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()


class Impostor:
    """What an agent takes for the store, and says what it is told to. A context manager."""

    def __init__(self, secret: bytes) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.settings = HubSettings("127.0.0.1", self._listener.getsockname()[1], "run", secret, 2)
        self._side = StoreSide("run", secret, "no")

    def accept(self) -> None:
        """Take a connection."""
        self._listener.settimeout(SOON)
        self.sock, _ = self._listener.accept()
        self.sock.settimeout(SOON)
        self._frames = wire.Frames(messages.MOST_BODY)

    def let_in(self) -> None:
        """Take a connection, and let the agent in, whoever it is."""
        self.accept()
        answer, keys, _ = self._side.challenge(self.read())
        self._seal = keys.store
        self.sock.sendall(wire.frame(answer, wire.checksum))
        self.read()
        self.say(messages.write(messages.Welcome(bytes(messages.SESSION), self.settings.ttl, bytes(messages.SESSION))))

    def say(self, body: bytes) -> None:
        """Say something that is sealed."""
        self.sock.sendall(wire.frame(body, self._seal))

    def read(self) -> bytes:
        """Return the next message, whatever its code is."""
        while (found := self._frames.next()) is None:
            data = self.sock.recv(1 << 16)
            assert data
            self._frames.feed(data)
        return found[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self.sock.close()
