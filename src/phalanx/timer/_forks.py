"""Abandons timer servers in a fork of their process.

Owns the one fork hook for all servers. In the child their threads do not exist, their locks may be held for ever, and
their descriptors are shared with the parent: a byte that the child writes to a bell wakes the parent, a descriptor that
it removes from an epoll is removed for the parent, and what it holds open hides the parent's end from clients.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    class Server(Protocol):
        """A running server."""

        def _abandon(self) -> None:
            """In a fork: close all descriptors, and become a server that has not been started."""


_running: set[Server] = set()
_hooked = False


def track(server: Server) -> None:
    """Call the server's ``_abandon`` in forks from now on."""
    global _hooked  # noqa: PLW0603 - once per process, and cannot be taken back
    if not _hooked:
        _hooked = True
        os.register_at_fork(after_in_child=_after_fork)
    _running.add(server)


def forget(server: Server) -> None:
    """Undo `track`: the server has ended. Idempotent."""
    _running.discard(server)


def _after_fork() -> None:
    for server in list(_running):
        server._abandon()  # noqa: SLF001 - a hook that is for this module alone
    _running.clear()
