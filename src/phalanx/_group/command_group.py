"""Groups whose workers run a binary, a Python script or a module."""

from __future__ import annotations

import os
from contextlib import ExitStack

from phalanx._base import interpreter
from phalanx._engine import worker as worker_package
from phalanx._group.context import PContext
from phalanx._group.plan import Places, Plan, find_binary
from phalanx._group.warm import Warm, path_of, shared

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from phalanx._logs.specs import LogsSpecs
    from phalanx._placement.placement import WorkerBounds


class SubprocessContext(PContext):
    """A group whose workers run a program.

    Args:
        name: See `PContext`.
        entrypoint: The program, by its name (found on PATH) or its path.
        args: See `PContext`.
        envs: See `PContext`.
        logs_specs: See `PContext`.
        log_line_prefixes: See `PContext`.
    """

    _begins_slowly = False

    def preview(self) -> dict[int, tuple[list[str], dict[str, str], WorkerBounds | None]]:
        """Return what each worker would be given; nothing is started.

        Returns:
            By local rank: the command; the variables that the placement adds; and its CPUs, nice value and limits, None
            for those of the launcher.

        Raises:
            OSError, ValueError: What `start` would raise for the arguments.
        """
        places = Places(self._options.placement, self.envs)
        with ExitStack() as held:
            commands = self._plan(held).commands
        return {
            rank: ([os.fsdecode(word) for word in argv], places.variables.get(rank, {}), places.bounds.get(rank))
            for rank, (_, argv, _) in commands.items()
        }

    def _plan(self, held: ExitStack) -> Plan:  # noqa: ARG002 - a binary needs no resources
        name = str(self.entrypoint)
        commands: dict[int, tuple[str, list[bytes], list[int]]] = {}
        found: dict[str | None, str] = {}  # by PATH
        for rank, values in self.args.items():
            argv = [os.fsencode(value if isinstance(value, (str, bytes)) else str(value)) for value in (name, *values)]
            if any(b"\0" in value for value in argv):
                raise ValueError(f"args: rank {rank}: an argument of a binary cannot hold a null character")
            path = self.envs[rank].get("PATH")
            if path not in found:
                found[path] = find_binary(name, rank, self.envs[rank])
            commands[rank] = (found[path], argv, [])
        return Plan(commands)


class ScriptContext(SubprocessContext):
    """A group whose workers run a Python script, or a module, as an interpreter of their own would.

    Args:
        name: See `PContext`.
        script: The script's path, or the module's name; or those of each local rank.
        args: The command line of each local rank.
        envs: See `PContext`.
        logs_specs: See `PContext`.
        log_line_prefixes: See `PContext`.
        module: Whether ``script`` is a module's name.
        python: The interpreter; default: this one.
        preload: Modules to import once: the workers are forks that have them already, and ``python`` is this
            interpreter.
        warm: An entered `warm` to fork the workers from.
        **options: The options of `PContext`.
    """

    _begins_slowly = True

    def __init__(
        self,
        name: str,
        script: str | Mapping[int, str],
        args: Mapping[int, tuple[Any, ...]],
        envs: Mapping[int, Mapping[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: Mapping[int, str] | None = None,
        *,
        module: bool = False,
        python: str | None = None,
        preload: Sequence[str] = (),
        warm: Warm | None = None,
        **options: Any,
    ) -> None:
        scripts = dict.fromkeys(args, script) if isinstance(script, str) else script
        head: tuple[str, ...] = ("-m",) if module else ()
        if not preload and warm is None:
            head = ("-u", *_runner(worker_package.__path__[0]), *head)
        argv = {rank: (*head, scripts[rank], *values) for rank, values in args.items()}
        super().__init__(name, python or interpreter.executable(), argv, envs, logs_specs, log_line_prefixes, **options)
        self._warm = warm
        if preload and warm is None:
            path = path_of(next(iter(scripts.values())), module=module)
            self._warm = self._own_warm = Warm(preload, path=path, flags=("-u",), env=shared(envs))

    def _plan(self, held: ExitStack) -> Plan:
        if self._warm is None:
            commands = super()._plan(held).commands
            return Plan({rank: (path, argv, [0]) for rank, (path, argv, _fds) in commands.items()})
        forks: dict[int, tuple[str, list[bytes], list[int]]] = {
            rank: ("", [os.fsencode(str(value)) for value in values], [0]) for rank, values in self.args.items()
        }
        return Plan(forks, fork=True, warm=self._warm)


def _runner(folder: str) -> tuple[str, ...]:
    """What an interpreter runs that runs a program of Python: a file, or the code that runs it out of a zip file."""
    path = os.path.join(folder, "script.py")
    if os.path.exists(path):
        return (path,)
    names = {"__name__": "__main__", "__package__": None, "__file__": path}
    return ("-c", f"from zipimport import zipimporter as z;exec(z({folder!r}).get_code('script'),{names!r})")
