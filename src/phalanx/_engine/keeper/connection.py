"""The keeper's connections: the channel to the launcher, the pidfds of launcher and guard, the notes to the guard.

Owns what is received and sent, in order and in packets that fit, without blocking; and the detection of a dead launcher
or guard. What the messages are is in `protocol`, what follows from them is decided in `keeper`.
"""

from __future__ import annotations

import select

from phalanx._base import channels, clock
from phalanx._base.loop import READ, WRITE
from phalanx._engine import protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    import os
    from collections.abc import Callable, Sequence
    from typing import Any

    from phalanx._base.loop import Loop
else:
    import posix as os  # the C half: `os` itself takes 1 of the 13 ms in which a keeper gets up

BATCH = 250
"""Entries of one message: it has to fit a packet, for the launcher may have no descriptor left for a larger one."""

FEW = 16
"""Entries that are long."""


class Connection:
    """One keeper's connections.

    ``receive`` is called with each message and its descriptors; ``truncated`` when the kernel dropped descriptors of
    one, because no more may be open here; ``orphaned`` when the launcher has died, or nobody holds its end of the
    socket any more, perhaps twice; ``guard_lost`` when the guard has died; ``sent`` when all that was kept has been
    sent.
    """

    def __init__(
        self,
        sock: _socket.socket,
        loop: Loop,
        *,
        receive: Callable[[channels.Message, list[int]], None],
        truncated: Callable[[], None],
        orphaned: Callable[[], None],
        guard_lost: Callable[[], None],
        sent: Callable[[], None],
    ) -> None:
        self._channel = channels.Channel(sock)
        self._loop = loop
        self._receive = receive
        self._truncated = truncated
        self._orphaned = orphaned
        self._guard_lost = guard_lost
        self._sent = sent
        self._launcher = self._guard = self.notes = -1
        self._left = self._silent = False
        self._pids_sent = 0

    def open(self, launcher: int, guard: int = -1, notes: int = -1) -> None:
        """Begin to watch. ``launcher`` and ``guard`` are pidfds, ``notes`` is a pipe; the guard has no other guard.

        EOF on the socket alone would not show that the launcher has died: any process that it forks inherits its end,
        and may outlive it.
        """
        self._launcher, self._guard, self.notes = launcher, guard, notes
        self._loop.watch(self._channel.fileno(), self._on_channel)
        if guard >= 0:
            self._loop.watch(guard, self.on_guard)
        self._loop.watch(launcher, self._on_launcher)

    def leave(self) -> None:
        """Call nothing any more. What the current round of the loop has found ready, and what lies unread, is left."""
        self._left = True
        for fd in (self._channel.fileno(), self._launcher, self._guard):
            self._loop.forget(fd)

    def silence(self) -> None:
        """Send nothing any more: nobody reads it, though a fork of the launcher may hold the other end."""
        self._silent = True

    def descriptors(self) -> list[int]:
        """Return the open descriptors."""
        return [self._guard, self._launcher, self.notes, *self._channel.descriptors()]

    def poll(self, wanted: Callable[[], bool], *, receive: bool) -> None:
        """Handle what is there in the midst of a start, while ``wanted``: deaths, and with ``receive`` messages."""
        callbacks: dict[int, Callable[[int], None]]
        callbacks = {self._launcher: self._on_launcher, self._guard: self.on_guard}
        if receive:
            callbacks[self._channel.fileno()] = self._on_channel
        poll = select.poll()
        for fd in callbacks:
            poll.register(fd, select.POLLIN)
        for fd, _events in poll.poll(0):
            if wanted():
                callbacks[fd](READ)

    def on_guard(self, _events: int = READ) -> None:
        """The guard has died."""
        self._loop.forget(self._guard)
        self._guard_lost()

    def _on_launcher(self, _events: int) -> None:
        self._loop.forget(self._launcher)
        self._orphaned()

    def _on_channel(self, events: int) -> None:
        try:
            if events & WRITE and self._channel.flush():
                self._loop.change(self._channel.fileno(), READ)
                self._sent()
            while not self._left and (received := self._channel.receive()) is not None:
                self._receive(*received)
        except channels.Closed:
            self._loop.forget(self._channel.fileno())
            self._orphaned()
        except channels.Truncated:
            self._truncated()

    def send_up(self) -> None:
        """Report that the keeper is up, with its pidfd."""
        try:
            own = [os.pidfd_open(os.getpid())]
        except OSError:  # no descriptor is left, which the start will report
            own = []
        self.send(protocol.up(os.getpid()), own)
        for fd in own:
            os.close(fd)

    def note(self, note: bytes) -> None:
        """Write a note for the guard, which reads it if it takes over."""
        try:
            if self.notes >= 0:
                os.write(self.notes, note)
        except BrokenPipeError:  # the guard has died
            return

    def send(self, message: channels.Message, fds: Sequence[int] = ()) -> bool:
        """Send a message, or keep it until there is room. Returns whether nothing waits to be sent."""
        if self._silent:
            return True
        try:
            sent = self._channel.send(message, fds)
        except channels.Closed:  # the socket is readable then, and `_on_channel` sees its end
            return True
        if not sent:
            self._loop.change(self._channel.fileno(), READ | WRITE)
        return sent

    def started(self, pids: list[tuple[int, int]]) -> None:
        """Send rank and pid of the workers that were started since the last call; ``pids`` are those of all."""
        fresh = pids[self._pids_sent :]
        self._pids_sent += len(fresh)
        self.send_all(lambda some: protocol.started(some, clock.now_ns()), fresh)

    def send_all(self, make: Callable[[Any], channels.Message], entries: Sequence[Any], size: int = BATCH) -> None:
        """Send all entries, in messages of so many that ``make`` makes."""
        for first in range(0, len(entries), size):
            self.send(make(entries[first : first + size]))
