"""What workers are given, by `phalanx run` and by `phalanx.agent`: variables, and arguments with their local rank.

`AttemptGroups` makes of these the group of each attempt of `phalanx run`: the same program, in its environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from phalanx._group.arguments import VALUE
from phalanx._group.command_group import ScriptContext, SubprocessContext
from phalanx._group.context import PContext
from phalanx._group.function_group import MultiprocessContext
from phalanx._group.warm import Warm, path_of
from phalanx._logs.specs import DefaultLogsSpecs
from phalanx._run.master_port import ReservedPort

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


class AttemptGroups:
    """Makes groups. What preloads outlives them; `close` ends it.

    Args:
        script: The script, the module or the binary.
        args: Its arguments.
        envs: The environment variables of each local rank, as in the first attempt.
        specs: Where output goes.
        module: Whether ``script`` is a module's name.
        no_python: Whether it is a binary.
        python: The interpreter of the others.
        preload: Modules to import once, for all attempts.
        preload_env: Variables that they find then.
        run_path: How workers are started that run the script by `runpy.run_path`, see `MultiprocessContext`; "": each
            runs it as an interpreter of its own does.
        port: The reserved MASTER_PORT; None: the user has given one.
        stdin: Returns the descriptors that workers with these environments read, see `PContext`.
        options: The options of `PContext`.
    """

    def __init__(
        self,
        script: str,
        args: tuple[str, ...],
        envs: Mapping[int, Mapping[str, str]],
        specs: DefaultLogsSpecs,
        *,
        module: bool,
        no_python: bool,
        python: str,
        preload: Sequence[str] | None,
        preload_env: Mapping[str, str],
        run_path: str,
        port: ReservedPort | None,
        stdin: Callable[[Mapping[int, Mapping[str, str]]], dict[int, int]],
        options: Mapping[str, Any],
    ) -> None:
        self.script = script
        self.envs = {rank: dict(env) for rank, env in envs.items()}
        self.command = [*(["-m"] if module else []), script, *args]
        """What the record of the run says was started."""
        self._args = {rank: with_local_rank(args, rank) for rank in envs}
        self._scripts = [script] * len(envs) if no_python else scripts_of(script, len(envs))
        self._specs = specs
        self._no_python = no_python
        self._run_path = run_path
        self._port = port
        self._stdin = stdin
        self.options = dict(options)
        self.warm: Warm | None = None
        """The process that preloads; None: there is nothing to be preloaded."""
        self._held = ExitStack()
        if preload:
            self.warm = Warm(preload, path=path_of(self._scripts[0], module=module), flags=("-u",), env=preload_env)
        if run_path:
            self.options |= {"warm": self.warm, "main": VALUE}
        elif not no_python:
            self.options |= {"module": module, "python": python, "warm": self.warm}

    @property
    def log_dir(self) -> str:
        """The folder of the run's logs; "": there is none, or it is not made yet."""
        return self._specs.run_log_dir or ""

    def make(self, attempt: int, before: PContext | None) -> SubprocessContext | MultiprocessContext:
        """Make the group of an attempt, which is shown after that of the attempt ``before``."""
        own = {RESTART_COUNT: str(attempt)}
        if self._port is not None:
            own[MASTER_PORT] = str(self._port.renew() if attempt else self._port.number)
        envs = {rank: {**env, **own} for rank, env in self.envs.items()}
        options = {**self.options, "follows": before, "stdin": self._stdin(envs)}
        if self._run_path:
            from phalanx._engine.main_module import run_path

            calls = {rank: tuple(self.called(rank)) for rank in envs}
            return MultiprocessContext(self.script, run_path, calls, envs, self._run_path, self._specs, **options)
        if self._no_python:
            return SubprocessContext(self.script, self.script, self._args, envs, self._specs, **options)
        scripts = dict(enumerate(self._scripts))
        return ScriptContext(self.script, scripts, self._args, envs, self._specs, **options)

    def warm_up(self) -> None:
        """Have the process that preloads up for functions; scripts wait for it by themselves. Raises PreloadError."""
        if self._run_path and self.warm is not None and not self.warm.is_open:
            self._held.enter_context(self.warm)

    def called(self, rank: int) -> list[str]:
        """Return what a rank's script finds as its command line, which `make` gives to `runpy.run_path`."""
        return [self._scripts[rank], *self._args[rank]]

    def close(self) -> None:
        """End the process that preloads."""
        self._held.close()
        if self.warm is not None:
            self.warm.close()


def scripts_of(script: str, nprocs: int) -> list[str]:
    """Return the script of each local rank: as with torchrun, ``${local_rank}`` stands for that in its name, too.

    >>> scripts_of("worker_${local_rank}.py", 2)
    ['worker_0.py', 'worker_1.py']
    """
    return [with_local_rank((script,), rank)[0] for rank in range(nprocs)]
