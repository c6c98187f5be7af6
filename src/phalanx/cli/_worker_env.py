"""The environment variables of the workers of `phalanx run`."""

from __future__ import annotations

import os

import click

from phalanx._agent import master_port as master_ports

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx._agent.master_port import ReservedPort

MASTER_PORT = "MASTER_PORT"
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
        MASTER_PORT: str(master_port),
        "TORCHELASTIC_RUN_ID": run_id,
        RESTART_COUNT: "0",
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 serves the store at MASTER_PORT, not we
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),  # as torchrun has it
    }


def reserve_port() -> ReservedPort:
    """Reserve a port for rank 0, see `master_ports.reserve`. Raises ClickException."""
    try:
        return master_ports.reserve()
    except OSError as error:
        msg = f"no port for MASTER_PORT: {error.strerror}; --master-port takes the number of one"
        raise click.ClickException(msg) from None
