"""Workers that say when they are ready, and who listens to them. Imports little: its import is part of each start."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import NoReturn, Self


class Listener:
    """Hears what workers say, from its making until its end as a context."""

    def __init__(self) -> None:
        self.address = os.path.join(tempfile.mkdtemp(), "ready")
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind(self.address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._sock.close()

    def wait(self, count: int) -> None:
        """Return when ``count`` words have been said."""
        for _ in range(count):
            self._sock.recv(16)


def say(address: str) -> None:
    """Say that we have come so far."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(b".", address)


def with_module(module: str, address: str) -> None:
    """Import a module, say so, and stay: a worker that ends takes time from those that have not begun."""
    import_module(module)
    say(address)
    _stay()


def with_array(array: Any, address: str) -> None:
    """Say that we have an array; read one number from each of its pages, say so, and stay."""
    say(address)
    array[:: max(1, 4096 // array.itemsize)].sum()
    say(address)
    _stay()


def _stay() -> NoReturn:
    while True:
        signal.pause()
