"""Makes the group of each attempt of `phalanx run`: the same program, in the environment of the attempt."""

from __future__ import annotations

import click

from phalanx._agent import master_port
from phalanx._agent.worker_env import MASTER_PORT, RESTART_COUNT
from phalanx._group.warm import Warm, path_of, shared
from phalanx.multiprocessing import PContext, ScriptContext, SubprocessContext

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from phalanx._agent.master_port import ReservedPort
    from phalanx.cli._run_logs import RunLogs


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
        port: The reserved MASTER_PORT; None: the user has given one.
        options: The options of `PContext`.
    """

    def __init__(
        self,
        script: str,
        args: tuple[str, ...],
        envs: Mapping[int, Mapping[str, str]],
        specs: RunLogs,
        *,
        module: bool,
        no_python: bool,
        python: str,
        preload: Sequence[str] | None,
        port: ReservedPort | None,
        options: Mapping[str, Any],
    ) -> None:
        self.script = script
        self.envs = envs
        self.command = [*(["-m"] if module else []), script, *args]
        """What the record of the run says was started."""
        self._argv = dict.fromkeys(envs, args)
        self._specs = specs
        self._no_python = no_python
        self._port = port
        self._options = dict(options)
        self._warm: Warm | None = None
        if preload:
            self._warm = Warm(preload, path=path_of(script, module=module), flags=("-u",), env=shared(envs))
        if not no_python:
            self._options |= {"module": module, "python": python, "warm": self._warm}

    def make(self, attempt: int, before: PContext | None) -> SubprocessContext:
        """Make the group of an attempt, which is shown after that of the attempt ``before``."""
        own = {RESTART_COUNT: str(attempt)}
        if attempt and self._port is not None:
            own[MASTER_PORT] = str(self._port.renew())
        envs = {rank: {**env, **own} for rank, env in self.envs.items()}
        kind = SubprocessContext if self._no_python else ScriptContext
        return kind(self.script, self.script, self._argv, envs, self._specs, follows=before, **self._options)

    def close(self) -> None:
        """End the process that preloads."""
        if self._warm is not None:
            self._warm.close()


def reserve_port() -> ReservedPort:
    """Reserve a port for rank 0, see `master_port.reserve`. Raises ClickException."""
    try:
        return master_port.reserve()
    except OSError as error:
        msg = f"no port for MASTER_PORT: {error.strerror}; --master-port takes the number of one"
        raise click.ClickException(msg) from None
