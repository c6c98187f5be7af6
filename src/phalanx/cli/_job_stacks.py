"""Asks the agent of a run, which is one machine's part of a job of many, where the ranks of the whole job are."""

from __future__ import annotations

import os
import socket

from phalanx._base import clock, files
from phalanx._rendezvous.records import DamagedError
from phalanx._rendezvous.stack_report import MOST_BYTES, JobStacks
from phalanx._rendezvous.stack_requests import PATIENCE
from phalanx._run.stack_door import NAME, peer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx._runs.record import Run

WAIT = 2 * PATIENCE + 3.0
"""Seconds that a person waits at the most: for the end of what somebody else has asked, and for our own."""

SOON = 3.0
"""Seconds of these after which an agent is taken for stopped that has not noticed that it is asked."""

_CHUNK = 1 << 20


class NotToldError(Exception):
    """The agent has not told where the ranks of other machines are. ``str()`` is why."""


def ask(folder: str, run: Run, owner: int) -> JobStacks:
    """Return where the ranks are, of a run that goes on here. ``owner``: the uid that it belongs to.

    Only the launcher that the record names is believed. Raises NotToldError, after `WAIT` at the latest.
    """
    until = clock.now() + WAIT
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(SOON)
            _connect(connection, folder)
            pid, uid = peer(connection)
            if pid != run.pid or uid not in (owner, os.geteuid(), files.ROOT):
                raise NotToldError(f"another process than its launcher answers at {NAME}")
            data = connection.recv(_CHUNK)
            data += _receive(connection, until) if data else b""
    except FileNotFoundError:
        raise NotToldError(f"its agent shows no others (there is no {NAME} in the run's folder)") from None
    except TimeoutError:
        msg = f"its agent has not answered within {WAIT if clock.now() >= until else SOON:g} s"
        raise NotToldError(msg) from None
    except BlockingIOError:
        raise NotToldError("too many ask its agent at once") from None
    except OSError as error:
        raise NotToldError(f"its agent cannot be asked: {error.strerror or error}") from None
    if not data.strip():
        raise NotToldError("its agent has not answered: it ends, or too many ask at once")
    try:
        told = JobStacks(data)
    except DamagedError as error:
        raise NotToldError(f"what its agent has answered cannot be read: {error}") from None
    if told.why:
        raise NotToldError(told.why)
    return told


def _connect(connection: socket.socket, folder: str) -> None:
    inside = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        connection.connect(f"/proc/self/fd/{inside}/{NAME}")  # a path of the folder may be too long, see unix(7)
    finally:
        os.close(inside)


def _receive(connection: socket.socket, until: float) -> bytes:
    """Return all that is sent. Raises OSError, TimeoutError."""
    parts: list[bytes] = []
    size = 0
    while size <= MOST_BYTES:
        left = until - clock.now()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        part = connection.recv(_CHUNK)
        if not part:
            return b"".join(parts)
        parts.append(part)
        size += len(part)
    raise NotToldError(f"its answer is longer than {MOST_BYTES} bytes")
