"""Unix sockets in folders of ours: reached by paths of any length, and who is at the other end."""

from __future__ import annotations

import os
import socket
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_CREDENTIALS = struct.Struct("iII")  # of unix(7): pid, uid, gid


def peer(connection: socket.socket) -> tuple[int, int]:
    """Return the pid and the uid of the process at the other end: as it was when it connected, or listened."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(found)
    return pid, uid


def by_folder(path: str, call: Callable[[str], object]) -> None:
    """Call ``call`` with a short path to ``path``: the whole one may be too long for a socket, see unix(7)."""
    folder = os.open(os.path.dirname(path) or os.curdir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        call(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
    finally:
        os.close(folder)
