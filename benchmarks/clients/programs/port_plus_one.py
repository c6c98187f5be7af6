"""Serves something of its own at MASTER_PORT + 1, beside torch's store at MASTER_PORT: here, the step to go on from."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import fault
import torch
import torch.distributed as dist

SERVED = Path("step")


def serve(server: socket.socket) -> None:
    """Send everybody who connects the step."""
    while True:
        connection, _ = server.accept()
        with connection:
            connection.sendall(SERVED.read_bytes() if SERVED.exists() else b"0")


def main() -> None:
    rank = int(os.environ["RANK"])
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1)
    if rank == 0:
        server = socket.create_server(address)
        threading.Thread(target=serve, args=(server,), daemon=True).start()
    dist.init_process_group("gloo")  # nobody comes out of it before rank 0 has come in: the server listens
    with socket.create_connection(address, timeout=30) as connection:
        first = int(connection.makefile().read())
    dist.barrier()
    fault.resumed(first)
    for step in range(first, fault.STEPS):
        fault.strike(rank, step)
        dist.all_reduce(torch.ones(8))
        if rank == 0 and step % 2:
            SERVED.write_text(str(step + 1), encoding="utf-8")
        dist.barrier()
    dist.destroy_process_group()
    fault.finished(rank)


if __name__ == "__main__":
    main()
