"""Receives what function workers return, for one group: values, evidence, and requests for the resource tracker.

Owns the launcher's end of the report socket. What arrives is kept in the `mirror`. What may take long (a large value,
descriptors to be closed, the tracker's start) is done on threads of its own, so that the group's thread never waits.
"""

from __future__ import annotations

import os
from contextlib import suppress

from phalanx._base import channels
from phalanx._base.threads import SerialExecutor
from phalanx._engine import mp_parent, worker_messages
from phalanx._engine.protocol import ANSWER_WAIT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _socket import socket
    from collections.abc import Callable

    from phalanx._base.loop import Loop
    from phalanx._engine.mirror import Mirror

_ASKING = 32  # workers that wait for the resource tracker, each with a descriptor of ours
_LAST = 1 << 20  # packets that are taken at the end, when workers are gone: a socket holds far fewer


class ResultReceiver:
    """One group's. ``loop`` is that of the group's thread; ``mirror`` keeps what is received."""

    def __init__(self, loop: Loop, mirror: Mirror) -> None:
        self._loop = loop
        self._mirror = mirror
        self._inbox: worker_messages.Inbox | None = None
        self._reading = SerialExecutor("phalanx-results")
        self._tracking = SerialExecutor("phalanx-tracker")
        self._closing = SerialExecutor("phalanx-dropped")
        self._closes_in_time = True

    def open(self) -> socket:
        """Begin to receive. Returns the workers' end of the socket, the caller's from now on."""
        ours, theirs = worker_messages.pair()
        self._inbox = worker_messages.Inbox(ours, self._drop)
        self._loop.watch(ours.fileno(), self._on_report)
        return theirs

    def finish(self) -> None:
        """Take what is left, when no worker is; and settle whose it is."""
        self._reading.drain(-1)
        with suppress(channels.Closed):
            inbox, left = self._inbox, _LAST
            while inbox is not None and left and (read := self._mirror.take(inbox, self._send_tracker, _LAST)):
                left -= 1
                read()
        self._mirror.settle_results()

    def finish_threads(self) -> None:
        """Wait for the threads, `ANSWER_WAIT` for each at most."""
        self._tracking.drain(ANSWER_WAIT)
        self._closing.drain(ANSWER_WAIT)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        if self._inbox is not None:
            self._inbox.close()

    def _on_report(self, _events: int) -> None:
        """Take packets. While a large value is read on another thread, no packet is taken."""
        inbox = self._inbox
        assert inbox is not None
        try:
            read = self._mirror.take(inbox, self._send_tracker)
        except channels.Closed:
            self._loop.forget(inbox.fileno())
            return
        if read is None:
            return
        self._loop.forget(inbox.fileno())

        def go_on() -> None:
            try:
                read()
            finally:
                self._loop.call(lambda: self._loop.watch(inbox.fileno(), self._on_report))

        if not self._reading.submit(go_on):  # no thread can be started
            go_on()

    def _send_tracker(self, asks: int) -> Callable[[], None] | None:
        """Send a worker this process's resource tracker, over the socket ``asks``. The tracker may have to be started.

        Returns what waits for that once `_ASKING` workers have asked: each has sent a descriptor.
        """
        if not self._tracking.submit(lambda: mp_parent.send_tracker(asks)):  # no thread: the interpreter ends
            mp_parent.send_tracker(asks)
        if self._tracking.pending < _ASKING:
            return None
        return lambda: bool(self._tracking.drain(ANSWER_WAIT))  # type: ignore[return-value]  # nobody looks at it

    def _drop(self, fds: list[int]) -> Callable[[], None] | None:
        """Close descriptors that belong to no result, of whatever kind, on a thread that the group does not wait for.

        Returns what has the results wait for that: a worker can send descriptors faster than they are closed, until
        none is left here. None once a file took so long to close that its sender must have intended it.
        """

        def close() -> None:
            for fd in fds:
                with suppress(OSError):
                    os.close(fd)

        if not self._closing.submit(close):
            close()

        def wait() -> None:
            self._closes_in_time = self._closing.drain(ANSWER_WAIT)

        return wait if self._closes_in_time and self._closing.pending else None
