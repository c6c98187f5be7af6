"""`HubServer`: the store of a job in the process of one of its agents. Owns the thread that serves, and its port.

The keys are in memory, and go with the process: if that agent ends, the job has no store any more. Every agent has one
connection to it, that one too. An agent shows that it knows the job's secret; all that is said afterwards is
authenticated, and encrypted where both can, see `wire`. An agent that is not heard of for the ttl loses its keys of
`OWN`; one that comes back sooner goes on as if nothing had been. Those of `JOB` stay until an agent ends the job.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Self

from phalanx._base import unpatched
from phalanx._base.host_names import address_text
from phalanx._base.loop import Loop
from phalanx._store.hub.door import Door
from phalanx._store.hub.handshake import StoreSide
from phalanx._store.hub.link import Link
from phalanx._store.hub.listening import Place, listen
from phalanx._store.hub.service import Service
from phalanx._store.hub.settings import Encryption

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
            self._door = Door(loop, listeners, self._side, self._admit, self._tell)
            self._service = Service(loop, self._ttl)
            thread = unpatched.thread(target=self._serve, args=(loop,), name="phalanx-hub")
            _running.add(self)
            opened.callback(_running.discard, self)
            try:
                thread.start()
            except RuntimeError as error:
                msg = f"{address_text(self._place.own, self._port)}: {error}"
                raise OSError(msg) from None
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
            self._door.close()
            self._service.end()
            loop.close()

    def _admit(self, link: Link, session: bytes) -> None:
        self._service.admit(link, session)

    def _tell(self, line: str) -> None:
        with suppress(Exception):  # the caller's: the agents are not to feel it
            self._warn(line)

    def _begin_end(self, seconds: float) -> None:
        assert self._loop is not None
        self._door.is_quiet = True
        self._loop.after(max(0.0, seconds), self._loop.stop)
        self._service.close(self._loop.stop)

    def abandon(self) -> None:
        """Close, in a fork, what belongs to the parent."""
        self._thread = None
        self._door.abandon()
        self._service.abandon()
        if self._loop is not None:
            self._loop.close_in_fork()


_running: set[HubServer] = set()


def _abandon_all() -> None:
    for server in _running:
        server.abandon()
    _running.clear()


os.register_at_fork(after_in_child=_abandon_all)
