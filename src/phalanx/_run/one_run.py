"""Holds a run's name on this machine, where its launchers have it from their scheduler, and not from a user.

Several launchers that start at once in one step of several machines have the same name. Which of them is the first is
chance, and may be another one on each machine: those would meet, and be one job of two halves. So the first one does
not go on, either, if another one comes soon after it.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import threading
from contextlib import suppress
from hashlib import sha256

from phalanx._base import clock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

TOGETHER = 10.0
"""Seconds between two launchers that were started together, at most."""

TOLD = "two `phalanx run` of one step (give each a --run-id of its own)"
"""Why the job ends, then; the host is said after it."""

_JOIN = 1.0  # seconds that the end waits for the thread: one whose start Ctrl-C has cut short may never end
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid: see SCM_CREDENTIALS in unix(7)


class NameTakenError(Exception):
    """Raised where another process has the name. ``str()`` is for the user."""


class OneRun:
    """A name that one launcher of this machine has: an abstract address of unix(7). A context manager.

    The name is free when the process ends, at the latest. Entering raises NameTakenError where another process has it;
    that one is told.

    Args:
        name: What is held.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._address = b"\0phalanx-run-" + sha256(name.encode("utf-8", "surrogateescape")).hexdigest().encode()
        self._thread: threading.Thread | None = None
        self._is_over = False

    def __enter__(self) -> Self:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._sock.bind(self._address)
        except OSError as error:
            with self._sock:
                if error.errno != errno.EADDRINUSE:
                    raise
                with suppress(OSError):  # its queue is full: others have told it
                    self._sock.sendto(b"\n", socket.MSG_DONTWAIT, self._address)
            msg = f"{self._name}: another `phalanx run` of this step is under way here: give each a --run-id of its own"
            raise NameTakenError(msg) from None
        self._until = clock.now() + TOGETHER
        return self

    def when_met(self, call: Callable[[], None]) -> None:
        """Have ``call`` called once if another launcher comes by `TOGETHER`, or has come already. Called once.

        By a thread, if one can be started. It must not raise.
        """
        self._thread = threading.Thread(target=self._watch, args=(call,), name="phalanx-one-run", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._thread = None

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        with self._sock:
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # wakes the thread
            if self._thread is not None:
                with suppress(RuntimeError):  # it was not started: Ctrl-C came before
                    self._thread.join(_JOIN)

    def _watch(self, call: Callable[[], None]) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        while poll.poll(max(0.0, self._until - clock.now()) * 1000) and not self._is_over:
            if self._is_from_our_user():
                call()
                return

    def _is_from_our_user(self) -> bool:
        """Take a message. Returns whether it is of this user: others reach the address, too."""
        try:
            _, more, _, _ = self._sock.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size), socket.MSG_DONTWAIT)
        except OSError:
            return False
        return any(
            kind == socket.SCM_CREDENTIALS and _CREDENTIALS.unpack(data)[1] == os.geteuid() for _, kind, data in more
        )
