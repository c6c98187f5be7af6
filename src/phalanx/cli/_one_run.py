"""Holds a run's name on this machine, where its launchers have it from their scheduler, and not from a user."""

from __future__ import annotations

import errno
import socket
from contextlib import contextmanager
from hashlib import sha256

import click

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def one_run(name: str) -> Iterator[None]:
    """Hold a name while the body runs: an abstract address of unix(7), which ends with the process at the latest.

    Raises UsageError: another process holds it.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as held:
        try:
            held.bind(b"\0phalanx-run-" + sha256(name.encode("utf-8", "surrogateescape")).digest())
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            msg = f"{name}: another `phalanx run` of this step is under way here: give each a --run-id of its own"
            raise click.UsageError(msg) from None
        yield
