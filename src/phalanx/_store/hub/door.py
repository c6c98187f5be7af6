"""Where agents come in: accepts connections, and hands those over that know the secret. Owns the listening socket.

Anybody may connect. Whoever is not known can send one short message, and has some seconds for all; if there are too
many, the oldest goes, and before they take the descriptors that the agent itself needs. What is no agent's message ends
its connection without an answer.
"""

from __future__ import annotations

import errno
import os

from phalanx._store.hub import messages
from phalanx._store.hub.handshake import TurnedAwayError
from phalanx._store.hub.link import Link

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from phalanx._base.deadlines import Deadline
    from phalanx._base.loop import Loop
    from phalanx._store.hub.handshake import StoreSide
    from phalanx._store.hub.wire import Seal

WITHIN = 5.0
"""Seconds within which an agent is to have entered."""
MOST_STRANGERS = 256
"""Connections at a time of those who have not."""
MOST_WARNINGS = 50

RESERVE = 96
"""Descriptors that are left to the rest of the process, which starts workers meanwhile. At most half of all."""

_TURN = 16  # connections that are accepted before others have their turn
_PAUSE = 0.5  # seconds for which nobody is accepted, where no descriptor is left
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Door:
    """Lets agents in.

    Args:
        loop: What watches the connections.
        listener: The listening socket.
        side: What decides who is let in.
        admit: Called with the connection of an agent that has entered, and the session that it has had (b"": none).
        warn: Called with a line on somebody who is refused.
    """

    def __init__(
        self,
        loop: Loop,
        listener: socket.socket,
        side: StoreSide,
        admit: Callable[[Link, bytes], None],
        warn: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._listener = listener
        self._side = side
        self._admit = admit
        self._warn = warn
        self._warned: set[str] = set()
        self._strangers: dict[_Stranger, None] = {}  # the oldest first
        self._resumes: Deadline | None = None
        self.is_quiet = False
        """Whether those who are refused are not told why: the store ends, and another one may follow it here."""
        listener.setblocking(False)
        loop.watch(listener.fileno(), self._accept)

    def close(self) -> None:
        """Let nobody in any more, and close the connections of those who are not known. Idempotent."""
        if self._listener.fileno() >= 0:
            self._loop.forget(self._listener.fileno())
            self._listener.close()
        if self._resumes is not None:
            self._resumes.cancel()
        for stranger in list(self._strangers):
            stranger.close()

    def abandon(self) -> None:
        """Close the sockets, in a fork."""
        self._listener.close()
        for stranger in self._strangers:
            stranger.link.abandon()

    def _accept(self, _events: int) -> None:
        for _ in range(_TURN):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _SCARCE:  # it would be told again at once, and for ever
                    self._loop.forget(self._listener.fileno())
                    self._resumes = self._loop.after(_PAUSE, self._resume)
                    return
                continue  # the connection has ended before it was accepted: accept(2)
            try:
                stranger = _Stranger(self, sock, str(address[0]))
            except OSError:  # it has ended just now
                sock.close()
                continue
            self._strangers[stranger] = None
            if _are_scarce(sock.fileno()):
                # Of one, the next connection would have the number, and would not show that they are scarce.
                for oldest in list(self._strangers)[: (len(self._strangers) + 1) // 2]:
                    oldest.close()
            elif len(self._strangers) > MOST_STRANGERS:
                next(iter(self._strangers)).close()

    def _resume(self) -> None:
        self._loop.watch(self._listener.fileno(), self._accept)

    # --- for a stranger

    @property
    def loop(self) -> Loop:
        """What watches the connections."""
        return self._loop

    @property
    def side(self) -> StoreSide:
        """What decides who is let in."""
        return self._side

    def forget(self, stranger: _Stranger) -> None:
        """Forget somebody who has gone, or has entered."""
        self._strangers.pop(stranger, None)

    def admit(self, stranger: _Stranger, session: bytes) -> None:
        """Let somebody in."""
        self.forget(stranger)
        self._admit(stranger.link, session)

    def turn_away(self, stranger: _Stranger, error: TurnedAwayError) -> None:
        """Refuse somebody, and say so."""
        if not self.is_quiet:
            stranger.link.send(self._side.refusal(error))
            stranger.link.finish()
            if stranger.peer not in self._warned and len(self._warned) < MOST_WARNINGS:
                self._warned.add(stranger.peer)
                self._warn(f"the agent at {stranger.peer} is refused: {error.words}")
        if self.is_quiet or not stranger.link.is_open:
            stranger.close()


def _are_scarce(descriptor: int) -> bool:
    """Whether few descriptors are left, as one shows that was made just now: it has the lowest number that was free."""
    most = os.sysconf("SC_OPEN_MAX")  # the soft limit, as it is now
    return 0 < most <= descriptor + min(RESERVE, most // 2)


class _Stranger:
    """Somebody who is not known yet."""

    def __init__(self, door: Door, sock: socket.socket, peer: str) -> None:
        self.peer = peer
        self._door = door
        self._seals: Seal | None = None  # ours, once it has been greeted
        self._is_refused = False
        self.link = Link(door.loop, sock, self._take, self._lost, messages.MOST_HELLO)
        self._deadline = door.loop.after(WITHIN, self.close)

    def close(self) -> None:
        """End the connection. Idempotent."""
        self.link.close()
        self._lost("")

    def _lost(self, _why: str) -> None:
        self._deadline.cancel()
        self._door.forget(self)

    def _take(self, body: bytes, is_sealed: bool) -> None:  # noqa: FBT001 - called by the link
        try:
            if self._is_refused:
                self.close()  # it has nothing to say any more
            elif is_sealed:
                self._enter(messages.read_enter(body))
            else:
                self._greet(body)
        except messages.DamagedError:
            self.close()

    def _greet(self, body: bytes) -> None:
        try:
            answer, theirs, self._seals = self._door.side.challenge(body)
        except TurnedAwayError as error:
            self._refuse(error)
            return
        self.link.opens, self.link.may_be_plain = theirs, False
        self.link.forged = lambda: self._refuse(TurnedAwayError("secret", "it does not know the job's secret"))
        self.link.send(answer)

    def _enter(self, enter: messages.Enter) -> None:
        self._deadline.cancel()
        self.link.forged, self.link.seals = None, self._seals
        self._door.admit(self, enter.session or b"")

    def _refuse(self, error: TurnedAwayError) -> None:
        self._is_refused = True
        self._door.turn_away(self, error)
