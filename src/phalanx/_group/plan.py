"""A group's start plan: the keeper that starts the workers, and what each worker executes and inherits."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from phalanx._group.warm import Warm


class Plan:
    """How a group's workers are started.

    Args:
        commands: Local rank → the file to execute, its argv, and the indices of the descriptors that it inherits, of
            ``fds`` from 1 on; 0 is the report socket, see `worker_messages`.
        flags: The options of the keeper's interpreter.
        call: Runs a worker in a fork of this process. The keeper is such a fork as well then.
        fork: Whether workers are forks of the keeper.
        modules: The modules that the keeper imports before it forks.
        fds: Descriptors for the workers.
        warm: The process that forks the keeper, and has imported already what the workers need.
    """

    def __init__(
        self,
        commands: dict[int, tuple[str, list[bytes], list[int]]],
        *,
        flags: Sequence[str] = ("-I", "-S"),
        call: Callable[[int, list[int]], None] | None = None,
        fork: bool = False,
        modules: Sequence[str] = (),
        fds: Sequence[int] = (),
        warm: Warm | None = None,
    ) -> None:
        self.commands = commands
        self.flags = flags
        self.call = call
        self.fork = fork
        self.modules = modules
        self.fds = fds
        self.warm = warm


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
        msg = f"entrypoint: no such binary: {name!r}{where}"
        raise FileNotFoundError(msg)
    if os.path.isdir(found[0]):
        msg = f"entrypoint: {found[0]!r} is a folder, not a binary"
        raise IsADirectoryError(msg)
    msg = f"entrypoint: {found[0]!r} is not executable (chmod +x?)"
    raise PermissionError(msg)
