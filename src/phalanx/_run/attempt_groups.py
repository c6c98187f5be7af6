"""Makes the group of each attempt of `phalanx run`: the same program, in the environment of the attempt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from phalanx._group.arguments import VALUE
from phalanx._group.function_group import MultiprocessContext
from phalanx._group.warm import Warm, path_of
from phalanx._run.master_port import ReservedPort
from phalanx._run.worker_env import MASTER_PORT, RESTART_COUNT, with_local_rank
from phalanx.multiprocessing import DefaultLogsSpecs, PContext, ScriptContext, SubprocessContext


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
