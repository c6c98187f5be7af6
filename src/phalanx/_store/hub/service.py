"""Serves the keys to the agents that have entered: carries out what `keys` decides, on the loop's thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from phalanx._base import clock
from phalanx._base.loop import Deadline, Loop
from phalanx._store.hub import messages
from phalanx._store.hub.keys import JOB_LEASE, Change, Keys, Leases, Watches
from phalanx._store.hub.link import Link
from phalanx._store.hub.messages import (
    MOST_REQUEST,
    SESSION,
    Beat,
    Changes,
    DamagedError,
    Fetch,
    Leave,
    Left,
    Made,
    Read,
    Submit,
    Told,
    Unwatch,
    Watch,
    Welcome,
)
from phalanx._store.store import Entry

_FAREWELL = 5.0  # seconds within which an agent that has left is to read so
_ENTRY = 100  # bytes that a key takes that waits to be sent; its value is the store's own


class Service:
    """The keys, and the agents that use them.

    Args:
        loop: What watches the connections.
        ttl: Seconds after which an agent is lost that is not heard of.
    """

    def __init__(self, loop: Loop, ttl: float) -> None:
        self._loop = loop
        self._name = os.urandom(SESSION)
        self._keys = Keys(1)  # as of an etcd: 0 is the revision of what is not known
        self._ttl = ttl
        self._leases = Leases(ttl)
        self._watches: Watches[Link] = Watches()
        self._links: dict[bytes, Link] = {}  # of the agents that are connected, by their leases
        self._leaving: dict[Link, Deadline] = {}
        self._look: Deadline | None = None
        self._closing: Callable[[], None] | None = None

    def admit(self, link: Link, session: bytes) -> None:
        """Serve an agent that has entered. ``session``: the one that it has had, b"": none."""
        if session not in self._leases:
            if self._closing is not None:
                link.close()
                return
            session = os.urandom(SESSION)
        before = self._links.pop(session, None)
        if before is not None:  # what it was connected by before; what is left there is not made any more
            self._drop(before)
        self._links[session] = link
        link.take = lambda body, _is_sealed: self._take(link, session, body)
        link.lost = lambda _why: self._lose(link, session)
        link.take_up_to(MOST_REQUEST + messages.MOST_HELLO)
        self._leases.hear(session, clock.now())
        self._plan()
        link.send(messages.write(Welcome(session, self._ttl, self._name)))

    def close(self, done: Callable[[], None]) -> None:
        """Take no new agents, and call ``done`` once the last has left, and has read so."""
        self._closing = done
        self._check_end()

    def end(self) -> None:
        """Close all connections, having sent what can be sent at once."""
        for link in [*self._links.values(), *self._leaving]:
            link.flush()
            link.close()

    def abandon(self) -> None:
        """Close the sockets, in a fork."""
        for link in [*self._links.values(), *self._leaving]:
            link.abandon()

    # --- an agent

    def _take(self, link: Link, session: bytes, body: bytes) -> None:
        try:
            request = messages.read_request(body)
        except DamagedError as error:
            link.end(str(error))
            return
        self._leases.hear(session, clock.now())
        if isinstance(request, Submit):
            made, change = self._keys.make(session, request.transaction)
            self._tell(change)
            link.send(messages.write(Made(request.number, made, self._keys.revision)))
        elif isinstance(request, Fetch):
            entries = self._keys.below(request.prefix)
            link.stream(_read(request.number, entries), _size(entries))
        elif isinstance(request, Watch):
            entries = self._keys.below(request.prefix)
            self._watches.add(request.prefix, link)
            link.stream(_told(request.prefix, self._keys.revision, entries), _size(entries))
        elif isinstance(request, Unwatch):
            self._watches.remove(request.prefix, link)
        elif isinstance(request, Leave):
            self._leave(link, session, request)
        else:
            link.send(messages.write(Beat()))

    def _leave(self, link: Link, session: bytes, request: Leave) -> None:
        self._watches.forget(link)
        del self._links[session]
        self._end_lease(session)
        if request.ends_job:
            self._tell(self._keys.end_lease(JOB_LEASE))
        link.take = lambda _body, _is_sealed: None
        link.lost = lambda _why: self._forget_leaving(link)
        self._leaving[link] = self._loop.after(_FAREWELL, lambda: self._forget_leaving(link))
        link.send(messages.write(Left()))
        # The agent closes the connection once it has read this.

    def _forget_leaving(self, link: Link) -> None:
        self._leaving.pop(link).cancel()
        link.close()
        self._check_end()

    def _lose(self, link: Link, session: bytes) -> None:
        """Note that a connection has ended. The lease goes on."""
        self._watches.forget(link)
        if self._links.get(session) is link:
            del self._links[session]

    def _drop(self, link: Link) -> None:
        self._watches.forget(link)
        link.close()

    # --- leases

    def _plan(self) -> None:
        if self._look is None and len(self._leases):
            self._look = self._loop.at(self._leases.next_look(clock.now()), self._look_at_leases)

    def _look_at_leases(self) -> None:
        """End the leases of agents that are silent."""
        self._look = None
        for session in self._leases.look(clock.now()):
            if session in self._links:
                self._links[session].poll()  # it may have said something just now
        for session in self._leases.look(clock.now()):
            link = self._links.pop(session, None)
            if link is not None:
                self._drop(link)
            self._end_lease(session)
        self._plan()
        self._check_end()

    def _end_lease(self, session: bytes) -> None:
        self._leases.end(session)
        self._tell(self._keys.end_lease(session))

    def _tell(self, change: Change | None) -> None:
        """Tell a change to those who watch what it is about."""
        if change is None:
            return
        for prefix, part, links in self._watches.to_tell(change):
            message = Changes(prefix, part.revision, messages.items(part.written), part.deleted)
            body = messages.write(message)
            for link in links:
                link.send(body)

    def _check_end(self) -> None:
        if self._closing is not None and not self._leases and not self._leaving:
            self._closing()


def _size(entries: tuple[Entry, ...]) -> int:
    return len(entries) * _ENTRY


def _told(prefix: str, revision: int, entries: tuple[Entry, ...]) -> Iterator[bytes]:
    return (messages.write(Told(prefix, revision, items, more)) for items, more in messages.parts(entries))


def _read(number: int, entries: tuple[Entry, ...]) -> Iterator[bytes]:
    return (messages.write(Read(number, items, more)) for items, more in messages.parts(entries))
