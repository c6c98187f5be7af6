"""Workers of which one fails, and what the others do meanwhile: for the tests of the settle window."""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import TYPE_CHECKING

from tests.support.helpers import pass_gate, tell

if TYPE_CHECKING:
    from typing import NoReturn


def leaves_nothing(rank: int, gate: str, ready: str) -> NoReturn:
    """Rank 0 exits without a word of why; the others sleep."""
    tell(ready, "up")
    if rank == 0:
        pass_gate(gate)
        os._exit(3)
    while True:
        signal.pause()


def raises(rank: int, gate: str, ready: str) -> NoReturn:
    """Rank 0 raises; the others sleep."""
    tell(ready, "up")
    if rank == 0:
        pass_gate(gate)
        raise ValueError("the cause")
    while True:
        signal.pause()


class SlowError(Exception):
    """Tells when somebody asks for its text, and takes its time."""

    def __init__(self, fifo: str, asleep: float) -> None:
        super().__init__()
        self._fifo, self._asleep = fifo, asleep

    def __str__(self) -> str:
        if self._fifo:
            with open(self._fifo, "wb", 0) as stream:
                stream.write(b".")
            self._fifo = ""
            time.sleep(self._asleep)
        return "the cause"


def is_slow_to_record(rank: int, gate: str, asleep: float) -> NoReturn:
    """Rank 0 raises what takes long to be recorded, and sleeps in that; meanwhile rank 1 fails, and is gone first."""
    if rank == 0:
        raise SlowError(gate, asleep)
    pass_gate(gate)
    raise ValueError("what followed")


def closes_and_sleeps(rank: int, path: str, ready: str, gate: str, asleep: float) -> NoReturn:
    """Rank 0 raises, and is held up in a handler once its connection is closed; so rank 1 is the first to be gone."""
    with socket.socket(socket.AF_UNIX) as sock:
        if rank == 1:
            sock.bind(path)
            sock.listen()
            tell(ready, "up")
            peer, _ = sock.accept()
            peer.recv(1)
            peer.close()
            raise ConnectionResetError("the other end is gone")
        pass_gate(gate)  # until the other listens
        sock.connect(path)
        try:
            raise ValueError("the cause")
        finally:
            sock.close()
            time.sleep(asleep)
