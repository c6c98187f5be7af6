"""What becomes of a timer server in a fork of its process: it is none of the child's.

Owns the one hook for all servers. In the child their threads are not there, their locks may be held for ever, and their
descriptors are the parent's: a byte written to its bell, or a descriptor taken out of its epoll, would be felt there,
and what the child holds open keeps clients from noticing the parent's end.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    class Server(Protocol):
        """What runs, and has descriptors."""

        def _abandon(self) -> None:
            """In a fork: close what is open, and be a server that has not been started."""


_running: set[Server] = set()
_hooked = False


def track(server: Server) -> None:
    """Have a server abandoned in forks from now on."""
    global _hooked  # noqa: PLW0603 - once per process, and cannot be taken back
    if not _hooked:
        _hooked = True
        os.register_at_fork(after_in_child=_after_fork)
    _running.add(server)


def forget(server: Server) -> None:
    """It has ended. Idempotent."""
    _running.discard(server)


def _after_fork() -> None:
    for server in list(_running):
        server._abandon()  # noqa: SLF001 - a hook that is for this module alone
    _running.clear()
