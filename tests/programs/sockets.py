# faces: spawn elastic
# methods: spawn forkserver fork
"""Sockets as arguments: a listening one that both ranks accept on, and a pair; and a socket in a queue."""

from __future__ import annotations

import socket
from typing import Any

import faces


def serve(rank: int, listener: socket.socket, pair: list[socket.socket], queue: Any) -> None:
    connection, _ = listener.accept()
    with connection, connection.makefile("rw", encoding="utf-8") as stream:
        line = stream.readline()
        stream.write(f"answer to {line}")
        stream.flush()
    mine = pair[rank]
    mine.sendall(f"rank {rank}".encode())
    queue.put((rank, listener.family.name, mine.type.name, mine.gettimeout()))


def main() -> None:
    queue = faces.context().SimpleQueue()
    pairs = [socket.socketpair() for _ in range(2)]
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def call() -> None:
            for number in range(2):
                with (
                    socket.create_connection(listener.getsockname()) as client,
                    client.makefile("rw", encoding="utf-8") as stream,
                ):
                    stream.write(f"question {number}\n")
                    stream.flush()
                    print(stream.readline().strip())

        faces.run(serve, (listener, [there for _, there in pairs], queue), 2, call)
    for here, there in pairs:
        print(here.recv(100))
        here.close()
        there.close()
    for line in faces.drained(queue, 2):
        print(*line)


if __name__ == "__main__":
    main()
