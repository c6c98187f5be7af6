"""An agent's connection to the store: connects, enters, sends beats, sees whether it is answered, and connects again.

Used by the thread of its loop. A name is resolved on a thread of its own, which is there meanwhile: a resolver may take
as long as it likes, and cannot be interrupted.
"""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from phalanx._base import clock
from phalanx._base.loop import WRITE, Deadline, Loop
from phalanx._base.threads import SerialExecutor
from phalanx._store.hub import messages
from phalanx._store.hub.addresses import CLOSED, SILENT, HubSettings, describe_error, describe_foreign
from phalanx._store.hub.link import Link
from phalanx._store.hub.messages import Beat, DamagedError, Welcome
from phalanx._store.hub.wire import AgentSide, Cipher, RefusedError


class Dialer:
    """Makes connections, one at a time.

    Args:
        loop: What watches them.
        host, port: Where to.
        seconds: How long a name may take to be resolved, and an address to answer.
        connected, failed: Called with the connected socket, which is the callee's then; or with why there is none.
    """

    def __init__(
        self,
        loop: Loop,
        host: str,
        port: int,
        seconds: float,
        connected: Callable[[socket.socket], None],
        failed: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._host = host
        self._port = port
        self._seconds = seconds
        self._connected = connected
        self._failed = failed
        self._resolver = SerialExecutor("phalanx-store-name")
        self._is_resolving = False  # a call may take longer than it was waited for
        self._is_waiting = False  # for a name
        self._addresses: list[tuple[Any, ...]] = []  # that are still to be tried, as getaddrinfo(3) has them
        self._sock: socket.socket | None = None
        self._deadline: Deadline | None = None

    def dial(self) -> None:
        """Try to connect. `connected` or `failed` is called once, perhaps before this returns."""
        try:
            numeric = socket.AI_NUMERICHOST
            self._addresses = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM, flags=numeric)
        except (OSError, UnicodeError):  # a name
            self._resolve()
        else:
            self._try_next("it has no address")

    def cancel(self) -> None:
        """Stop trying: neither is called any more. Idempotent."""
        self._is_waiting = False
        self._addresses.clear()
        self._drop()

    def abandon(self) -> None:
        """Close the socket, in a fork."""
        if self._sock is not None:
            self._sock.close()

    def _resolve(self) -> None:
        self._is_waiting = True
        self._deadline = self._loop.after(
            self._seconds, partial(self._see_name, [], f"its name was not resolved within {self._seconds:g} s")
        )
        if self._is_resolving:
            return  # the last call has not returned: its result will do
        self._is_resolving = True
        if not self._resolver.submit(self._look_up):
            self._see_resolved([], "no thread can be started to resolve it")

    def _look_up(self) -> None:
        """On the resolver's thread."""
        found, why = [], ""
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            why = f"its name is not known here: {getattr(error, 'strerror', None) or error}"
        self._loop.call(lambda: self._see_resolved(found, why))

    def _see_resolved(self, found: list[Any], why: str) -> None:
        self._is_resolving = False
        self._see_name(found, why)

    def _see_name(self, found: list[Any], why: str) -> None:
        if self._is_waiting:
            self._is_waiting, self._addresses = False, found
            self._try_next(why)

    def _try_next(self, why: str) -> None:
        """Try the next address. ``why``: what became of the last one."""
        self._drop()
        while self._addresses:
            family, kind, protocol, _, address = self._addresses.pop(0)
            try:
                self._sock = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
                error = self._sock.connect_ex(address)
                if error in (0, errno.EINPROGRESS):
                    self._loop.watch(self._sock.fileno(), self._ready, WRITE)
                    why = f"no answer within {self._seconds:g} s: is the machine up, and does a firewall let this port"
                    why += " through?"
                    self._deadline = self._loop.after(self._seconds, partial(self._try_next, why))
                    return
                why = describe_error(error)
            except OSError as raised:
                why = describe_error(raised.errno) if raised.errno else str(raised)
            self._drop()
        self._failed(why)

    def _ready(self, _events: int) -> None:
        sock = self._sock
        assert sock is not None
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self._try_next(describe_error(error))
            return
        try:
            peer = sock.getpeername()
        except OSError:  # the event was of a socket that had this number before
            return
        if peer == sock.getsockname():  # nobody listens, and the port was our own by chance: tcp(7) lets both ends meet
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # frees the port at once
            self._try_next(describe_error(errno.ECONNREFUSED))
            return
        self._sock = None
        self._loop.forget(sock.fileno())
        self._drop()
        self._addresses.clear()
        self._connected(sock)

    def _drop(self) -> None:
        """Close the socket, if there is one, and end the wait."""
        sock, self._sock = self._sock, None
        if sock is not None:
            self._loop.forget(sock.fileno())
            sock.close()
        deadline, self._deadline = self._deadline, None
        if deadline is not None:
            deadline.cancel()


_PAUSE = (0.05, 1.0)  # seconds between two tries to connect: the first, and the longest
_BEATS = 3  # within a ttl


class Connection:
    """A connection that is made again when it breaks.

    Args:
        loop: What watches it.
        settings: Who we are, and where to.
        entered: Called when the agent has entered, and whether the lease that it has had is lost.
        hear: Called with each message from then on. May raise DamagedError.
        broken: Called when there is no connection, and why. It is tried again.
        refused: Called when the store does not have this agent, and why. Nothing follows.
    """

    def __init__(
        self,
        loop: Loop,
        settings: HubSettings,
        *,
        entered: Callable[[bool], None],
        hear: Callable[[bytes], None],
        broken: Callable[[str], None],
        refused: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._settings = settings
        self._entered = entered
        self._hear = hear
        self._broken = broken
        self._refused = refused
        self._ttl: float = settings.ttl
        # A store that dies is known to be dead within the ttl: a third of that may pass until the next beat.
        self._within = min(settings.timeout, self._ttl * 0.6)
        self._dialer = Dialer(loop, settings.host, settings.port, self._within, self._greet, self._see_broken)
        self._link: Link | None = None
        self._side: AgentSide | None = None  # until the agent has entered
        self._session = b""
        self._key = b""  # of what is encrypted once the agent has entered; b"": nothing is
        self._pause = _PAUSE[0]
        self._retry: Deadline | None = None
        self._beat: Deadline | None = None
        self._judgement: Deadline | None = None  # when the store is to have said something
        self._missing = 0  # answers
        self._heard = 0.0
        self.peer = ""
        """The address by which the store was reached last; "": not yet."""
        self.encrypts = False
        """Whether what was said last was encrypted."""

    @property
    def is_up(self) -> bool:
        """Whether the agent has entered."""
        return self._link is not None and self._side is None

    def begin(self) -> None:
        """Begin to connect."""
        self._dialer.dial()

    def send(self, body: bytes) -> None:
        """Send a message that has no answer. While `is_up`."""
        assert self._link is not None
        self._link.send(body)

    def ask(self, body: bytes) -> None:
        """Send a message that is answered; `settle` is called then."""
        self.send(body)
        self._expect()

    def settle(self) -> None:
        """Note that an answer has come."""
        self._missing -= 1
        if self._missing <= 0 and self._judgement is not None:
            self._judgement.cancel()
            self._judgement = None

    def close(self) -> None:
        """End the connection, and try no more. Idempotent."""
        self._dialer.cancel()
        self._disconnect()

    def abandon(self) -> None:
        """Close the sockets, in a fork."""
        self._dialer.abandon()
        if self._link is not None:
            self._link.abandon()

    # --- from the first message to the last

    def _greet(self, sock: socket.socket) -> None:
        """Say who we are."""
        self._side = AgentSide(self._settings, self._session)
        try:
            link = self._link = Link(self._loop, sock, self._take, self._see_lost)
        except OSError as error:
            sock.close()
            self._see_broken(error.strerror or str(error))
            return
        link.send(self._side.hello())
        self._expect()

    def _take(self, body: bytes, is_sealed: bool) -> None:  # noqa: FBT001 - called by the link
        link = self._link
        assert link is not None
        self._heard = clock.now()
        try:
            if self._side is None:
                self._hear(body)
            elif link.opens is None:
                body, keys = self._side.enter(body)
                link.seals, link.opens = keys.agent, keys.store
                link.forged = lambda: self._see_refused(f"{self._settings.where} does not know the job's secret")
                self._key = keys.cipher if self._side.encrypts else b""
                link.send(body)
            else:
                self._enter(link, self._side.welcome(body, is_sealed=is_sealed))
        except RefusedError as error:
            self._see_refused(str(error))
        except DamagedError:  # what its words quote may be anybody's
            self._see_broken(describe_foreign(link.began))

    def _enter(self, link: Link, welcome: Welcome) -> None:
        is_lost = self._session not in (b"", welcome.session)
        self._session, self._side = welcome.session, None
        self.store = welcome.store
        if self._key:
            link.encrypt(Cipher(self._key, is_store=False))
        self.encrypts = link.encrypts
        self._ttl = welcome.ttl  # the store's is the one that holds
        self._within = min(self._settings.timeout, self._ttl * 0.6)
        link.may_be_plain, link.forged = False, None
        link.take_up_to(messages.MOST_BODY)
        self.settle()
        self._plan_beat()
        self.peer = link.peer
        self._entered(is_lost)

    def _see_lost(self, why: str) -> None:
        """Note that the connection has ended. Before the store has said who it is, that may be something else."""
        link = self._link
        if link is not None and link.is_foreign:
            why = describe_foreign(link.began)
        elif self._side is not None:
            why = CLOSED
        self._see_broken(why)

    def _see_broken(self, why: str) -> None:
        """Note that there is no connection, and plan the next try."""
        self._disconnect()
        pause = self._pause * (1 + random.random()) / 2  # noqa: S311 - it spreads retries
        self._pause = min(2 * self._pause, _PAUSE[1])
        self._retry = self._loop.after(pause, self._dialer.dial)
        self._broken(why)

    def _see_refused(self, why: str) -> None:
        self._disconnect()
        self._refused(why)

    def _disconnect(self) -> None:
        link, self._link, self._side = self._link, None, None
        if link is not None:
            link.close()
        for deadline in (self._retry, self._beat, self._judgement):
            if deadline is not None:
                deadline.cancel()
        self._retry = self._beat = self._judgement = None
        self._missing = 0

    # --- whether the store answers

    def _plan_beat(self) -> None:
        def send() -> None:
            self._plan_beat()
            self.ask(messages.write(Beat()))

        self._beat = self._loop.after(self._ttl / _BEATS, send)

    def beat_heard(self) -> None:
        """Note the answer to a beat: the connection has lasted for a while."""
        self._pause = _PAUSE[0]
        self.settle()

    def _expect(self) -> None:
        """Note that the store is to answer."""
        self._missing += 1
        if self._judgement is None:
            self._heard = clock.now()
            self._judgement = self._loop.after(self._within, self._judge)

    def _judge(self) -> None:
        """Give the connection up, if nothing was heard for too long."""
        self._judgement = None
        link = self._link
        if link is not None:
            link.poll()  # this process may have been stopped: the answer may be there
        if link is None or link is not self._link or self._missing <= 0:
            return
        until = self._heard + self._within
        if clock.now() < until:
            self._judgement = self._loop.at(until, self._judge)
        else:
            self._see_broken(SILENT if self._side is not None else f"no answer within {self._within:g} s")
