"""The floor: a hub that counts who has come, and sends each its rank; over TCP, and with nothing else."""

from __future__ import annotations

import selectors
import socket
from threading import Thread
from typing import TYPE_CHECKING

from benchmarks.agents.say import CALLED, FAILED, IN, RANK, TOLD, say

if TYPE_CHECKING:
    from typing import Self


class BareAgents:
    """The agents of this process: a thread and a socket each."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.rpartition(":")
        self._address = host, int(port)
        self._sockets: dict[int, socket.socket] = {}

    def join(self, agent: int, run: str, nodes: int) -> None:
        """See `Agents`."""
        Thread(target=self._run, args=(agent, run, nodes), daemon=True).start()

    def _run(self, agent: int, run: str, nodes: int) -> None:
        say(CALLED, agent)
        with socket.create_connection(self._address) as link, link.makefile("r") as lines:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets[agent] = link
            join = f"join {run} {nodes}\n".encode()
            link.sendall(join)
            for line in lines:
                word, _, rank = line.strip().partition(" ")
                if word == "rank":
                    say(RANK, agent, int(rank))
                elif word == "in":
                    say(IN, agent)
                else:
                    if word == "told":
                        say(TOLD, agent)
                    link.sendall(join)

    def fail(self, agent: int) -> None:
        """See `Agents`."""
        say(FAILED, agent)
        self._sockets[agent].sendall(b"fail\n")

    def end(self) -> None:
        """Nothing: the process ends."""


class Hub:
    """Where they meet. A context manager."""

    def __enter__(self) -> Self:
        """Listen."""
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = Thread(target=self._serve, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        """Listen no more; the agents have gone."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(10.0)
        self._listener.close()

    def _serve(self) -> None:
        self._jobs: dict[str, list[socket.socket]] = {}  # who has come
        self._job_of: dict[socket.socket, str] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    link = key.fileobj
                    assert isinstance(link, socket.socket)
                    if link is not self._listener:
                        if not self._answer(link):
                            selector.unregister(link)
                            link.close()
                        continue
                    try:
                        new = link.accept()[0]
                    except OSError:  # it was shut down
                        for each in self._job_of:
                            each.close()
                        return
                    new.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    selector.register(new, selectors.EVENT_READ)

    def _answer(self, link: socket.socket) -> bool:
        """Read what an agent says, and do it. Returns False: it has gone."""
        try:
            words = link.recv(4096).split()
        except ConnectionError:
            words = []
        if not words:
            self._job_of.pop(link, None)
        elif words[0] == b"join":
            run = self._job_of[link] = words[1].decode()
            _join(self._jobs.setdefault(run, []), link, int(words[2]))
        else:  # its worker has failed
            for other in [each for each, run in self._job_of.items() if run == self._job_of[link]]:
                other.sendall(b"told\n" if other is not link else b"again\n")
        return bool(words)


def _join(job: list[socket.socket], link: socket.socket, nodes: int) -> None:
    job.append(link)
    link.sendall(b"in\n")
    if len(job) == nodes:
        for rank, each in enumerate(job):
            each.sendall(b"rank %d\n" % rank)
        job.clear()
