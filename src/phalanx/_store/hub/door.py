"""Where agents come in: accepts connections, and hands those over that know the secret. Owns the listening sockets.

Anybody may connect. Whoever is not known can send one short message, and has some seconds for all; if there are too
many, the oldest goes, and before they take the descriptors that the agent itself needs. What is no agent's message ends
its connection without an answer. The user is told of both, once for each address and reason.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Sequence
from functools import partial

from phalanx._base.loop import Deadline, Loop
from phalanx._store.hub import messages
from phalanx._store.hub.cipher import Cipher
from phalanx._store.hub.handshake import StoreSide, TurnedAwayError
from phalanx._store.hub.link import Link
from phalanx._store.hub.wire import Keys
from phalanx._store.hub.words import protocol_of

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
        listeners: The listening sockets.
        side: What decides who is let in.
        admit: Called with the connection of an agent that has entered, and the session that it has had (b"": none).
        warn: Called with a line on somebody who is refused.
    """

    def __init__(
        self,
        loop: Loop,
        listeners: Sequence[socket.socket],
        side: StoreSide,
        admit: Callable[[Link, bytes], None],
        warn: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._listeners = listeners
        self._side = side
        self._admit = admit
        self._warn = warn
        self._warned: set[tuple[str, str]] = set()
        self._strangers: dict[_Stranger, None] = {}  # the oldest first
        self._resumes: Deadline | None = None
        self.is_quiet = False
        """Whether those who are refused are not told why: the store ends, and another one may follow it here."""
        for listener in listeners:
            listener.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Let nobody in any more, and close the connections of those who are not known. Idempotent."""
        for listener in self._listeners:
            if listener.fileno() >= 0:
                self._loop.forget(listener.fileno())
                listener.close()
        if self._resumes is not None:
            self._resumes.cancel()
        for stranger in list(self._strangers):
            stranger.close()

    def abandon(self) -> None:
        """Close the sockets, in a fork."""
        for listener in self._listeners:
            listener.close()
        for stranger in self._strangers:
            stranger.link.abandon()

    def _accept(self, listener: socket.socket, _events: int) -> None:
        for _ in range(_TURN):
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _SCARCE:  # it would be told again at once, and for ever
                    for each in self._listeners:
                        self._loop.forget(each.fileno())
                    self._resumes = self._loop.after(_PAUSE, self._resume)
                    return
                continue  # the connection has ended before it was accepted: accept(2)
            try:
                stranger = _Stranger(self, sock)
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
        for listener in self._listeners:
            self._loop.watch(listener.fileno(), partial(self._accept, listener))

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
            peer = stranger.link.peer
            self._mention((peer, error.why), f"the agent at {peer} is refused: {error.words}")
        if self.is_quiet or not stranger.link.is_open:
            stranger.close()

    def tell_foreign(self, stranger: _Stranger) -> None:
        """Say that somebody has come who is no agent."""
        if not self.is_quiet:
            protocol = protocol_of(stranger.link.began)
            spoken = f": it speaks {protocol}" if protocol else ""
            peer = stranger.link.peer
            self._mention((peer, "foreign"), f"what has come from {peer} is no agent, and is turned away{spoken}")

    def _mention(self, about: tuple[str, str], line: str) -> None:
        """Say something about an address, once for each reason."""
        if about not in self._warned and len(self._warned) < MOST_WARNINGS:
            self._warned.add(about)
            self._warn(line)


def _are_scarce(descriptor: int) -> bool:
    """Whether few descriptors are left, as one shows that was made just now: it has the lowest number that was free."""
    most = os.sysconf("SC_OPEN_MAX")  # the soft limit, as it is now
    return 0 < most <= descriptor + min(RESERVE, most // 2)


class _Stranger:
    """Somebody who is not known yet."""

    def __init__(self, door: Door, sock: socket.socket) -> None:
        self._door = door
        self._keys: Keys | None = None  # once it has been greeted
        self._encrypts = False
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
        if self.link.is_foreign:
            self._door.tell_foreign(self)

    def _take(self, body: bytes, is_sealed: bool) -> None:  # noqa: FBT001 - called by the link
        try:
            if self._is_refused:
                self.close()  # it has nothing to say any more
            elif is_sealed:
                self._enter(messages.read_enter(body))
            else:
                self._greet(body)
        except messages.DamagedError:
            self.link.is_foreign = True
            self.close()

    def _greet(self, body: bytes) -> None:
        try:
            answer, self._keys, self._encrypts = self._door.side.challenge(body)
        except TurnedAwayError as error:
            self._refuse(error)
            return
        self.link.opens, self.link.may_be_plain = self._keys.agent, False
        self.link.forged = lambda: self._refuse(TurnedAwayError("secret", "it does not know the job's secret"))
        self.link.send(answer)

    def _enter(self, enter: messages.Enter) -> None:
        self._deadline.cancel()
        assert self._keys is not None  # it has been greeted
        self.link.forged, self.link.seals = None, self._keys.store
        self._door.admit(self, enter.session or b"")
        if self._encrypts:
            self.link.encrypt(Cipher(self._keys.cipher, is_store=True))

    def _refuse(self, error: TurnedAwayError) -> None:
        self._is_refused = True
        self._door.turn_away(self, error)
