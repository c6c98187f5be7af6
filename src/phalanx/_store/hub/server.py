"""`HubServer`: the store of a job in the process of one of its agents. Owns the thread that serves, and its sockets.

The keys are in memory, and go with the process: if that agent ends, the job has no store any more. Every agent has one
connection to it, that one too. An agent shows that it knows the job's secret; all that is said afterwards is
authenticated, and encrypted where both can, see `wire`. An agent that is not heard of for the ttl loses its keys of
`OWN`; one that comes back sooner goes on as if nothing had been. Those of `JOB` stay until an agent ends the job.

Anybody may connect. Whoever is not known can send one short message, and has some seconds for all; if there are too
many, the oldest goes, and before they take the descriptors that the agent itself needs. What is no agent's message ends
its connection without an answer. The user is warned of both, once for each address and reason.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Self

from phalanx._base import clock, unpatched
from phalanx._base.host_names import address_text
from phalanx._base.loop import Deadline, Loop
from phalanx._store.hub import messages
from phalanx._store.hub.addresses import Encryption, Place, listen, protocol_of
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
    Unwatch,
    Watch,
    Welcome,
)
from phalanx._store.hub.wire import Cipher, ConnectionKeys, StoreSide, TurnedAwayError

_PATIENCE = 1.0


class HubServer:
    """Serves the keys of a job, from `start` to `close`. A context manager, which does both.

    Args:
        place: Where to listen; its port may be 0: any that is free, see `port`.
        run_id: Which job it is: agents of others are refused.
        secret: What agents must know; empty: nothing.
        ttl: Seconds (2 or more) after which an agent is lost that is not heard of.
        warn: Called with a line on somebody who is refused, once for each address, by the server's thread. Must not
            wait.
        encrypt: See `HubSettings`.
    """

    def __init__(
        self,
        place: Place,
        *,
        run_id: str,
        secret: bytes,
        ttl: int,
        warn: Callable[[str], None],
        encrypt: Encryption = "auto",
    ) -> None:
        self._place = place
        self._side = StoreSide(run_id, secret, encrypt)
        self._ttl = ttl
        self._warn = warn
        self._owner = os.getpid()
        self._loop: Loop | None = None
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        """The port at which it listens. After `start`."""
        return self._port

    def start(self) -> None:
        """Listen, and serve from now on. Called once. Raises OSError, which names the address and the port."""
        self._owner = os.getpid()
        with ExitStack() as opened:
            listeners = [opened.enter_context(listener) for listener in listen(self._place)]
            self._port = int(listeners[0].getsockname()[1])
            loop = self._loop = Loop()
            opened.callback(loop.close)
            self._service = Service(loop, self._ttl)
            self._acceptor = Acceptor(loop, listeners, self._side, self._service.admit, self._tell)
            thread = unpatched.thread(target=self._serve, args=(loop,), name="phalanx-hub")
            _running.add(self)
            opened.callback(_running.discard, self)
            try:
                thread.start()
            except RuntimeError as error:
                raise OSError(f"{address_text(self._place.own, self._port)}: {error}") from None
            self._thread = thread
            opened.pop_all()  # they are the thread's, which closes them

    def close(self, seconds: float) -> None:
        """Wait until the other agents have left, for at most so many seconds, and end. Idempotent.

        Until then, those that have entered are served, and no others.
        """
        thread, loop = self._thread, self._loop
        if thread is None or loop is None or self._owner != os.getpid():
            return
        loop.call(lambda: self._begin_end(seconds))
        thread.join(seconds + _PATIENCE)
        self._thread = None  # now: a signal may have raised before

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close(_PATIENCE)

    # --- the server's thread

    def _serve(self, loop: Loop) -> None:
        try:
            loop.run()
        except Exception as error:  # noqa: BLE001 - agents find it gone; why, only this one can tell
            self._tell(
                f"the store at {address_text(self._place.own, self._port)} has failed: {type(error).__name__}: {error}"
            )
        finally:
            _running.discard(self)
            self._acceptor.close()
            self._service.end()
            loop.close()

    def _tell(self, line: str) -> None:
        with suppress(Exception):  # the caller's: the agents are not to feel it
            self._warn(line)

    def _begin_end(self, seconds: float) -> None:
        assert self._loop is not None
        self._acceptor.is_quiet = True
        self._loop.after(max(0.0, seconds), self._loop.stop)
        self._service.close(self._loop.stop)

    def abandon(self) -> None:
        """Close, in a fork, what belongs to the parent."""
        self._thread = None
        self._acceptor.abandon()
        self._service.abandon()
        if self._loop is not None:
            self._loop.close_in_fork()


_running: set[HubServer] = set()


def _abandon_all() -> None:
    for server in _running:
        server.abandon()
    _running.clear()


os.register_at_fork(after_in_child=_abandon_all)


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
        elif isinstance(request, Fetch | Watch):
            if isinstance(request, Watch):
                self._watches.add(request.prefix, link)
            number, revision, entries = request.number, self._keys.revision, self._keys.below(request.prefix)
            parts = (messages.write(Read(number, revision, *part)) for part in messages.parts(entries))
            link.stream(parts, len(entries) * _ENTRY)
        elif isinstance(request, Unwatch):
            self._watches.remove(link, request.prefix)
        elif isinstance(request, Leave):
            self._leave(link, session, request)
        else:
            link.send(messages.write(Beat()))

    def _leave(self, link: Link, session: bytes, request: Leave) -> None:
        self._watches.remove(link)
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
        self._watches.remove(link)
        if self._links.get(session) is link:
            del self._links[session]

    def _drop(self, link: Link) -> None:
        self._watches.remove(link)
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
            message = Changes(prefix, part.revision, part.written, part.deleted)
            body = messages.write(message)
            for link in links:
                link.send(body)

    def _check_end(self) -> None:
        if self._closing is not None and not self._leases and not self._leaving:
            self._closing()


WITHIN = 5.0
"""Seconds within which an agent is to have entered."""
MOST_NEWCOMERS = 256
"""Connections at a time of those who have not."""
MOST_WARNINGS = 50

RESERVE = 96
"""Descriptors that are left to the rest of the process, which starts workers meanwhile. At most half of all."""

_TURN = 16  # connections that are accepted before others have their turn
_PAUSE = 0.5  # seconds for which nobody is accepted, where no descriptor is left
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
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
        self.loop = loop
        self.side = side
        self.admit = admit
        self._listeners = listeners
        self._warn = warn
        self._warned: set[tuple[str, str]] = set()
        self._newcomers: dict[_Newcomer, None] = {}  # the oldest first
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
                self.loop.forget(listener.fileno())
                listener.close()
        if self._resumes is not None:
            self._resumes.cancel()
        for newcomer in list(self._newcomers):
            newcomer.close()

    def abandon(self) -> None:
        """Close the sockets, in a fork."""
        for listener in self._listeners:
            listener.close()
        for newcomer in self._newcomers:
            newcomer.link.abandon()

    def _accept(self, listener: socket.socket, _events: int) -> None:
        for _ in range(_TURN):
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _SCARCE:  # it would be told again at once, and for ever
                    for each in self._listeners:
                        self.loop.forget(each.fileno())
                    self._resumes = self.loop.after(_PAUSE, self._resume)
                    return
                continue  # the connection has ended before it was accepted: accept(2)
            try:
                newcomer = _Newcomer(self, sock)
            except OSError:  # it has ended just now
                sock.close()
                continue
            self._newcomers[newcomer] = None
            if _are_scarce(sock.fileno()):
                # Of one, the next connection would have the number, and would not show that they are scarce.
                for oldest in list(self._newcomers)[: (len(self._newcomers) + 1) // 2]:
                    oldest.close()
            elif len(self._newcomers) > MOST_NEWCOMERS:
                next(iter(self._newcomers)).close()

    def _resume(self) -> None:
        for listener in self._listeners:
            self.loop.watch(listener.fileno(), partial(self._accept, listener))

    # --- for a newcomer

    def forget(self, newcomer: _Newcomer) -> None:
        """Forget somebody who has gone, or has entered."""
        self._newcomers.pop(newcomer, None)

    def refuse(self, newcomer: _Newcomer, error: TurnedAwayError) -> None:
        """Refuse somebody, and warn of it."""
        if not self.is_quiet:
            newcomer.link.send(self.side.refusal(error))
            newcomer.link.finish()
            peer = newcomer.link.peer
            self._warn_once((peer, error.why), f"the agent at {peer} is refused: {error.words}")
        if self.is_quiet or not newcomer.link.is_open:
            newcomer.close()

    def warn_of_foreign(self, newcomer: _Newcomer) -> None:
        """Warn that somebody has come who is no agent."""
        if not self.is_quiet:
            protocol = protocol_of(newcomer.link.began)
            spoken = f": it speaks {protocol}" if protocol else ""
            peer = newcomer.link.peer
            self._warn_once((peer, "foreign"), f"what has come from {peer} is no agent, and is turned away{spoken}")

    def _warn_once(self, about: tuple[str, str], line: str) -> None:
        """Warn of an address, once for each reason."""
        if about not in self._warned and len(self._warned) < MOST_WARNINGS:
            self._warned.add(about)
            self._warn(line)


def _are_scarce(descriptor: int) -> bool:
    """Whether few descriptors are left, as one shows that was made just now: it has the lowest number that was free."""
    most = os.sysconf("SC_OPEN_MAX")  # the soft limit, as it is now
    return 0 < most <= descriptor + min(RESERVE, most // 2)


class _Newcomer:
    """Somebody who is not known yet."""

    def __init__(self, acceptor: Acceptor, sock: socket.socket) -> None:
        self._acceptor = acceptor
        self._keys: ConnectionKeys | None = None  # once it has been greeted
        self._encrypts = False
        self._is_refused = False
        self.link = Link(acceptor.loop, sock, self._take, self._lost)
        self._deadline = acceptor.loop.after(WITHIN, self.close)

    def close(self) -> None:
        """End the connection. Idempotent."""
        self.link.close()
        self._lost("")

    def _lost(self, _why: str) -> None:
        self._deadline.cancel()
        self._acceptor.forget(self)
        if self.link.is_foreign:
            self._acceptor.warn_of_foreign(self)

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
            answer, self._keys, self._encrypts = self._acceptor.side.challenge(body)
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
        self._acceptor.forget(self)
        self._acceptor.admit(self.link, enter.session or b"")
        if self._encrypts:
            self.link.encrypt(Cipher(self._keys.cipher, is_store=True))

    def _refuse(self, error: TurnedAwayError) -> None:
        self._is_refused = True
        self._acceptor.refuse(self, error)
