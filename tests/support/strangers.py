"""Throws what is no agent's at ports: a script. Bounded in time, and in connections at a time and per second.

Its arguments: seconds; the secret of a job whose handshake with the first port is recorded, and repeated, "": none; and
``HOST:PORT`` of each port. It prints, as JSON, how many connections it has made to each.
"""

# ruff: noqa: S311 - it needs no secrets
from __future__ import annotations

import json
import os
import random
import select
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from phalanx._store.hub import messages, wire
from phalanx._store.hub.addresses import HubSettings
from phalanx._store.hub.wire import AgentSide

MOST = 320
"""Connections to each port at a time: more than an agent of this test may have descriptors."""
TURN = 16
"""Connections that are made to each port in one turn, of which there are a hundred in a second at most."""
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def side(secret: str) -> AgentSide:
    """An agent of a job of the id that jobs have by default."""
    return AgentSide(HubSettings("", 1, "none", secret.encode(), 2, encrypt="no"), b"")


def record(port: tuple[str, int], secret: str) -> bytes:
    """Enter a job as an agent does, leave it, and return what was sent."""
    agent, frames = side(secret), wire.Frames(messages.MOST_BODY)
    sent = wire.frame(agent.hello(), wire.checksum)
    with socket.create_connection(port, timeout=20) as one:
        one.sendall(sent)
        keys = None
        for _ in range(2):
            while (found := frames.next()) is None:
                frames.feed(one.recv(1 << 16))
            if keys is None:
                enter, keys = agent.enter(found[1])
                for body in (enter, messages.write(messages.Leave(ends_job=False))):
                    sent += (said := wire.frame(body, keys.agent))
                    one.sendall(said)
    return sent


def kinds(recorded: bytes) -> list[Callable[[], bytes]]:
    """What is said on a connection; after that, nothing is."""
    hello = wire.frame(side("wrong" * 8).hello(), wire.checksum)
    return [
        lambda: os.urandom(random.randrange(1, 4096)),
        lambda: b"",
        lambda: os.urandom(1),
        lambda: (1000).to_bytes(4, "big"),  # the length of a message, which does not come
        lambda: hello,
        lambda: hello[: random.randrange(1, len(hello))],
        lambda: hello + os.urandom(200),
        lambda: hello + hello,
        lambda: (0xFFFFFFF0).to_bytes(4, "big") + os.urandom(65536),
        lambda: wire.frame(b"\x91" * 1000, wire.checksum),  # an array in an array in ...
        lambda: wire.frame(b"\xdd\xff\xff\xff\xff", wire.checksum),  # an array of 2**32 members
        lambda: recorded,
        lambda: HTTP2 + os.urandom(random.randrange(64)),
        lambda: HTTP2 + b"\0\0\0\4\0\0\0\0\0",  # settings, and no request
        lambda: b"GET /" + b"a" * random.randrange(100_000) + b" HTTP/1.1\r\n",
        lambda: b"POST /v3/kv/range HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n{",
    ]


class Thrown(NamedTuple):
    """A connection: it is closed when the other end has closed it, or when it is among the oldest of too many."""

    sock: socket.socket
    port: tuple[str, int]


def main(seconds: float, secret: str, ports: list[tuple[str, int]]) -> dict[str, int]:
    """Keep connections to each port until the time is over. Returns how many were made to each."""
    say = kinds(record(ports[0], secret) if secret else b"\0")
    poll, thrown = select.poll(), dict[int, Thrown]()
    made, there = Counter[tuple[str, int]](), Counter[tuple[str, int]]()

    def end(number: int) -> None:
        one = thrown.pop(number)
        there[one.port] -= 1
        poll.unregister(number)
        one.sock.close()

    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for port in ports:
            for _ in range(min(TURN, MOST - there[port])):
                sock = socket.socket()
                sock.setblocking(False)
                sock.connect_ex(port)
                thrown[sock.fileno()] = Thrown(sock, port)
                there[port] += 1
                poll.register(sock, select.POLLOUT)
        for number, events in poll.poll(10):
            if events & (select.POLLERR | select.POLLHUP) or not events & select.POLLOUT:
                end(number)
                continue
            try:
                thrown[number].sock.send(random.choice(say)())
            except OSError:
                end(number)
                continue
            made[thrown[number].port] += 1
            poll.modify(number, select.POLLRDHUP)
        time.sleep(0.01)
    for number in list(thrown):
        end(number)
    return {f"{host}:{number}": made[host, number] for host, number in ports}


if __name__ == "__main__":
    targets = [(host, int(port)) for host, _, port in (text.rpartition(":") for text in sys.argv[3:])]
    sys.stdout.write(json.dumps(main(float(sys.argv[1]), sys.argv[2], targets)))
