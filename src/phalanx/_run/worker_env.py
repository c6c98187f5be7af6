"""What workers are given, by `phalanx run` and by `phalanx.agent`: variables, and arguments with their local rank."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

MASTER_PORT = "MASTER_PORT"
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
"""The variable that says which attempt a worker is in, from 0 on."""

STEP = "PHALANX_STEP"
"""The variable in which workers find the step that their launcher is in. ``sbatch`` and ``srun`` hand it on to jobs and
steps to which it does not belong, so it is compared with `step_of`."""

OF_PART = (
    "RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", MASTER_PORT,
    RESTART_COUNT,
)  # fmt: skip
"""Variables that follow from the part of a machine in an attempt of a job of many, and are not known before."""


def worker_env(
    rank: int,
    world_size: int,
    *,
    role: str,
    run_id: str,
    master_addr: str,
    master_port: int,
    local_rank: int | None = None,
    local_world_size: int | None = None,
    group_rank: int = 0,
    group_world_size: int = 1,
    role_rank: int | None = None,
    role_world_size: int | None = None,
    attempt: int = 0,
    max_restarts: int = 0,
    use_agent_store: bool = False,
) -> dict[str, str]:
    """Return the variables that a worker finds, with the names and meanings that torch programs read.

    What is None is as on one machine with one role: the local rank is ``rank``, sizes are ``world_size``.
    """
    local_rank = rank if local_rank is None else local_rank
    role_rank = rank if role_rank is None else role_rank
    step = step_of(os.environ)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size if local_world_size is None else local_world_size),
        "GROUP_RANK": str(group_rank),
        "GROUP_WORLD_SIZE": str(group_world_size),
        "ROLE_RANK": str(role_rank),
        "ROLE_NAME": role,
        "ROLE_WORLD_SIZE": str(world_size if role_world_size is None else role_world_size),
        "MASTER_ADDR": master_addr,
        MASTER_PORT: str(master_port),
        "TORCHELASTIC_RUN_ID": run_id,
        RESTART_COUNT: str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        # False: rank 0 serves the store at MASTER_PORT, not we.
        "TORCHELASTIC_USE_AGENT_STORE": str(use_agent_store),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),  # as torchrun has it
    } | ({STEP: step} if step else {})


def step_of(environ: Mapping[str, str]) -> str:
    """Return the name of a step, from what a scheduler has put into an environment; "": there is none.

    >>> step_of({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}), step_of({})
    ('slurm-7.0', '')
    """
    mpirun = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    if mpirun and "OMPI_COMM_WORLD_RANK" in environ:
        return f"openmpi-{mpirun}"
    if {"PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"} <= environ.keys():
        return f"hydra-{environ['PMI_RANK']}-{environ['PMI_SIZE']}"
    if {"SLURM_JOB_ID", "SLURM_STEP_ID"} <= environ.keys():
        return f"slurm-{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"
    return ""


def with_local_rank(args: Iterable[Any], rank: int) -> tuple[Any, ...]:
    """Return the arguments of one worker: in strings, its local rank replaces ``${local_rank}`` and ``$local_rank``.

    ``$$`` becomes ``$``. Other names, and a ``$`` that nothing follows, stay: see `string.Template.safe_substitute`.

    >>> with_local_rank(("--device", "cuda:${local_rank}", "$$5", "${HOME}", 4), 1)
    ('--device', 'cuda:1', '$5', '${HOME}', 4)
    """
    args = tuple(args)
    if not any(isinstance(value, str) and "$" in value for value in args):
        return args
    from string import Template

    return tuple(
        Template(value).safe_substitute(local_rank=rank) if isinstance(value, str) and "$" in value else value
        for value in args
    )
