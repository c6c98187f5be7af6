"""What is checked and resolved before a group starts: its options, its places, what each worker executes and inherits.

Nothing is started here.
"""

from __future__ import annotations

import os

from phalanx._base import interpreter
from phalanx._base.frozen import Value
from phalanx._engine import protocol
from phalanx._evidence.error_file import ERROR_FILE_ENV

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from phalanx._events.stream import EventStream
    from phalanx._group.warm import Warm
    from phalanx._logs.layout import LogsDest
    from phalanx._logs.specs import LogsSpecs
    from phalanx._placement.placement import Placement, WorkerBounds
    from phalanx._timers.specs import TimerSpecs


class GroupOptions(Value):
    """What `PContext` was given beside the workers and the looks of their lines; see there."""

    announces: bool
    events: EventStream | None
    filters: dict[str, list[str] | None]
    grace: float
    linger: float
    logs_specs: LogsSpecs
    on_event: Callable[[dict[str, Any]], object] | None
    on_reader_gone: Callable[[str], None] | None
    orphan_grace: float
    placement: Placement | None
    record: bool
    settle: float
    signals: bool
    speak: Callable[[str], None] | None
    stdin: dict[int, int]
    timers: TimerSpecs | None


class Places(Value):
    """Where the workers of a group run, by local rank.

    Attributes:
        bounds: Their CPUs, nice values and limits; a rank that is missing has the launcher's.
        variables: The environment variables that follow.
        warning: What is to be known of it; "": nothing.
    """

    bounds: dict[int, WorkerBounds | None]
    variables: dict[int, dict[str, str]]
    warning: str

    def __init__(self, placement: Placement | None = None, envs: Mapping[int, Mapping[str, str]] | None = None) -> None:
        """Resolve a placement for workers with these environments. Raises ValueError: not on this machine."""
        if placement is None or envs is None:
            self._store(bounds={}, variables={}, warning="")
            return
        found, warning = placement.resolve(len(envs))
        bounds = dict(zip(sorted(envs), found.values(), strict=True))
        self._store(bounds=bounds, variables=placement.environment(envs), warning=warning)


class Plan(Value):
    """How a group's workers are started.

    Attributes:
        commands: Local rank → the file to execute, its argv, and the indices of the descriptors that it inherits, of
            ``fds`` from 1 on; 0 is the report socket, see `worker_messages`.
        flags: The options of the keeper's interpreter.
        call: Runs a worker in a fork of this process. The keeper is such a fork as well then.
        fork: Whether workers are forks of the keeper.
        modules: The modules that the keeper imports before it forks.
        fds: Descriptors for the workers.
        warm: The process that forks the keeper, and has imported already what the workers need.
    """

    commands: dict[int, tuple[str, list[bytes], list[int]]]
    flags: Sequence[str] = ("-I", "-S")
    call: Callable[[int, list[int]], None] | None = None
    fork: bool = False
    modules: Sequence[str] = ()
    fds: Sequence[int] = ()
    warm: Warm | None = None


def find_binary(name: str, rank: int, env: Mapping[str, str]) -> str:
    """Find the file that a shell would run for ``name`` in the worker's environment. Raises OSError, ValueError."""
    if not name:
        raise ValueError("entrypoint: an empty string is not the name of a binary")
    search = env.get("PATH", os.environ.get("PATH", os.defpath))
    candidates = [name] if "/" in name else [os.path.join(part or ".", name) for part in search.split(os.pathsep)]
    found = [path for path in candidates if os.path.exists(path)]
    for path in found:
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    if not found:
        where = ""
        if "/" not in name:
            here = f"./{name} is here; " if os.path.isfile(name) else ""
            where = f"; {here}PATH of rank {rank}: {search}"
        raise FileNotFoundError(f"entrypoint: no such binary: {name!r}{where}")
    if os.path.isdir(found[0]):
        raise IsADirectoryError(f"entrypoint: {found[0]!r} is a folder, not a binary")
    raise PermissionError(f"entrypoint: {found[0]!r} is not executable (chmod +x?)")


def worker_specs(
    plan: Plan,
    logs: LogsDest,
    places: Places,
    envs: Mapping[int, dict[str, str]],
    more: Mapping[int, dict[str, str]],
    stdin: Mapping[int, int],
    *,
    is_function: bool,
    prints_failures: bool,
) -> tuple[list[protocol.Spec], list[int]]:
    """Return what to start for each rank, and the descriptors of what is read.

    ``more`` are variables beside ``envs`` and those of ``places``; ``stdin`` are the descriptors that become the stdin
    of a rank; ``prints_failures``: whether a function's worker prints the traceback of its failure to a stderr that is
    the launcher's.
    """
    files = {rank: fd for rank, fd in stdin.items() if rank in plan.commands}
    indices = {rank: number for number, rank in enumerate(files, 1 + len(plan.fds))}
    follow = os.fsencode(interpreter.follow_fork()) if plan.fork else b""
    bounds = (logs.max_size, logs.keep, logs.compress)
    specs = []
    for rank, (path, argv, fds) in plan.commands.items():
        whole = envs[rank] | places.variables.get(rank, {}) | more[rank]
        env = {os.fsencode(name): os.fsencode(value) for name, value in whole.items()}
        if rank in logs.terminals and whole.get("TERM", os.environ.get("TERM")) in (None, "", "dumb"):
            env[b"TERM"] = b"xterm-256color"
        env[ERROR_FILE_ENV.encode()] = os.fsencode(logs.error_files[rank])
        if is_function:
            whose = f"rank {envs[rank].get('RANK') or rank}" if prints_failures else "none"
            env[b"PHALANX_TRACEBACKS"] = os.fsencode("all" if logs.stderrs[rank] else whose)
        if follow:
            env[os.fsencode(interpreter.FOLLOW_ENV)] = follow
        stdout, stderr = logs.stdouts[rank] or None, logs.stderrs[rank] or None
        words = argv if plan.fork else interpreter.followed(argv)
        specs.append(protocol.Spec(
            rank, os.fsencode(path), words, env, indices.get(rank), stdout, stderr, fds, bounds,
            places.bounds.get(rank), rank in logs.terminals,
        ))  # fmt: skip
    return specs, [*files.values()]
