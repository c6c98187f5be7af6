"""A group whose workers run a function, in any of the three start methods of `multiprocessing`."""

from __future__ import annotations

import gc
import os

from phalanx._base import interpreter, unpatched
from phalanx._engine import main_module
from phalanx._engine.mp_parent import ChildIdentities
from phalanx._group.arguments import IMPORT
from phalanx._group.context import PContext
from phalanx._group.plan import Places, Plan
from phalanx._group.warm import choose

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import ExitStack
    from typing import Any

    from phalanx._engine.mirror import WorkerRecord
    from phalanx._group.warm import Warm
    from phalanx._logs.specs import LogsSpecs
    from phalanx._placement.placement import WorkerBounds

_FORK_MODULES = [
    "multiprocessing.resource_tracker",
    "phalanx._engine.worker.forked",
    *(f"phalanx._engine.pickling.{name}" for name in ("payload", "picklers", "results")),
]
_BY_VALUE_MODULES = [*_FORK_MODULES, "phalanx._engine.pickling.by_value", "cloudpickle"]
"""The modules that the keeper imports for function workers that are its forks; the second: with a call by value."""


class MultiprocessContext(PContext):
    """A group whose workers run a function.

    Args:
        name: See `PContext`.
        entrypoint: The function.
        args: See `PContext`.
        envs: See `PContext`.
        start_method: "spawn", "forkserver" or "fork": see `start_processes`.
        logs_specs: See `PContext`.
        log_line_prefixes: See `PContext`.
        numbered: Whether the function takes its local rank before its arguments. What it returns is not kept then.
        daemon: Whether the workers are daemons of `multiprocessing`, which may have no children by it.
        preload: See `start_processes`.
        warm: See `start_processes`.
        writable: See `start_processes`.
        main: See `start_processes`.
        **options: The options of `PContext`.
    """

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any],
        args: Mapping[int, tuple[Any, ...]],
        envs: Mapping[int, Mapping[str, str]],
        start_method: str,
        logs_specs: LogsSpecs,
        log_line_prefixes: Mapping[int, str] | None = None,
        *,
        numbered: bool = False,
        daemon: bool = False,
        preload: Sequence[str] | None = None,
        warm: Warm | None = None,
        writable: bool = False,
        main: str = IMPORT,
        **options: Any,
    ) -> None:
        super().__init__(name, entrypoint, args, envs, logs_specs, log_line_prefixes, **options)
        self.start_method = start_method
        self.daemon = daemon
        self._main = main
        self._identities: ChildIdentities | None = None
        self._sent: list[object] = []
        self._preload = preload
        self._warm = warm
        self._writable = writable
        self._numbered = numbered

    def _plan(self, held: ExitStack) -> Plan:
        function, args = self.entrypoint, self.args
        assert callable(function)
        identities = self._identities = ChildIdentities(self.start_method, args, daemon=self.daemon)
        if self.start_method == "fork":
            unpatched.check_fork()
            from phalanx._engine.worker import forked

            collects = gc.isenabled()  # guard and keeper, its parents, switch it off

            def call(rank: int, fds: list[int]) -> None:
                if collects:
                    gc.enable()
                forked.call(function, args[rank], rank, fds, identities.state(rank), numbered=self._numbered)

            return Plan({rank: ("", [], [0]) for rank in args}, call=call, fork=True)
        from phalanx._engine.pickling.call_pickler import pack

        main = main_module.source() if self._main == IMPORT else None
        packed = pack(
            function, args, writable=self._writable, numbered=self._numbered, main=main, identities=identities,
            envs={rank: {**env, **self._places.variables.get(rank, {})} for rank, env in self.envs.items()},
        )  # fmt: skip
        held.callback(packed.close)
        self._sent = packed.sent
        passed = [packed.memfd, *packed.fds]
        # 0 is the report socket, 1 the payload; the descriptors of multiprocessing objects follow.
        fds = {rank: [0, 1, *(2 + index for index in packed.fd_indices[rank])] for rank in args}
        if self.start_method == "forkserver":
            forks: dict[int, tuple[str, list[bytes], list[int]]] = {rank: ("", [], fds[rank]) for rank in args}
            warm, own = choose(self._preload, self._warm, self.envs)
            self._own_warm = warm if own else None
            modules = _BY_VALUE_MODULES if packed.by_value else _FORK_MODULES
            return Plan(forks, flags=interpreter.flags(), fork=True, modules=modules, fds=passed, warm=warm)
        commands = {rank: (interpreter.executable(), self._argv(rank), fds[rank]) for rank in args}
        return Plan(commands, fds=passed)

    def preview(self) -> dict[int, tuple[list[str], dict[str, str], WorkerBounds | None]]:
        """Return what each worker would be given, as `SubprocessContext.preview`; no command: it calls a function."""
        places = Places(self._options.placement, self.envs)
        return {rank: ([], places.variables.get(rank, {}), places.bounds.get(rank)) for rank in self.args}

    def process_name(self, rank: int) -> str:
        """Return the name of a rank's process, like ``"SpawnProcess-1"``. The group must have been started."""
        assert self._identities is not None
        return self._identities.name(rank)

    def _argv(self, rank: int) -> list[bytes]:
        command = interpreter.command(
            interpreter.flags(), f"from phalanx._engine.worker.function import main;main({rank})"
        )
        return [os.fsencode(part) for part in command]

    def _value(self, worker: WorkerRecord) -> Any:
        if worker.result is None or self._numbered:  # it exited with 0 before it returned; or the value is not kept
            return None
        if isinstance(worker.result, Exception):
            raise worker.result
        from phalanx._engine.pickling import results

        return results.load(worker.result, worker.received_fds, self._sent)
