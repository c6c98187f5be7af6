"""What launcher and fork server send each other: verbs, fields, directions, and the wait for an answer.

Messages are made and received as those of `protocol`. Apart from that, because the keeper has no use for it.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx._engine.main_module import Source
    from phalanx._engine.protocol import Message

FORK_WAIT = 60.0
"""Seconds that the fork server has to fork a guard: the launcher postpones signals meanwhile."""

# --- launcher to fork server


def preload(path: list[str], modules: list[str], main: Source | None, arguments: list[str]) -> Message:
    """Import ``modules`` with ``path`` in front of `sys.path`; "__main__" is ``main``, with ``arguments``."""
    return "preload", path, modules, main, arguments


def fork(serial: int, page: str, umask: int) -> Message:
    """Fork a guard. Beside it: the guard's end of its socket, its working directory, its stdout and stderr.

    ``page`` is the name of a page that is mapped in it and its forks, see `marked_processes`.
    """
    return "fork", serial, page, umask


TO_FORK_SERVER = (preload, fork)

# --- fork server to launcher


def importing(module: str) -> Message:
    """The import of a module begins."""
    return "importing", module


def failed(module: str, why: str, traceback: str) -> Message:
    """A module could not be imported, or must not be preloaded. The fork server is of no use."""
    return "failed", module, why, traceback


def ready() -> Message:
    """All modules are imported."""
    return ("ready",)


def forked(serial: int, pid: int) -> Message:
    """The answer to `fork`: the guard's pid. Beside it: its pidfd, unless it has gone already."""
    return "forked", serial, pid


def not_forked(serial: int, number: int) -> Message:
    """The answer to `fork`: the errno of fork(2)."""
    return "not_forked", serial, number


FROM_FORK_SERVER = (importing, failed, ready, forked, not_forked)
