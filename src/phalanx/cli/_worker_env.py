"""The environment variables of the workers of `phalanx run`."""

from __future__ import annotations

import os
import socket

RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
"""The variable that says which attempt a worker is in, from 0 on."""


def worker_env(
    rank: int,
    world_size: int,
    *,
    role: str,
    run_id: str,
    master_addr: str,
    master_port: int,
    max_restarts: int = 0,
) -> dict[str, str]:
    """The variables that a worker finds, with the names and meanings that torch programs read."""
    size, me = str(world_size), str(rank)
    return {
        "RANK": me,
        "LOCAL_RANK": me,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": me,
        "ROLE_NAME": role,
        "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_RUN_ID": run_id,
        RESTART_COUNT: "0",
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 serves the store at MASTER_PORT, not we
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),  # as torchrun has it
    }


def free_port(addr: str) -> int:
    """Find a port that is free now. Nothing can hold it until the workers bind it."""
    try:
        with socket.create_server((addr, 0)) as server:
            return int(server.getsockname()[1])
    except OSError:  # a name of another interface, or one that does not resolve here: any interface's will do
        with socket.create_server(("", 0)) as server:
            return int(server.getsockname()[1])
