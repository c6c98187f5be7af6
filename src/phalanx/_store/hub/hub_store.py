"""`HubStore`: the keys of a job in one of its agents, over one TCP connection. Owns the thread that keeps it.

What breaks ends the connection: `Away` says so, and the store is tried again, within a second. After that, each watch
is told all of its keys anew. A request that was lost on its way may have been made: it is not repeated.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress

from phalanx._base import unpatched
from phalanx._base.loop import Loop
from phalanx._store.hub import messages
from phalanx._store.hub.addresses import HubSettings
from phalanx._store.hub.connection import Connection
from phalanx._store.hub.messages import Beat, Changes, Fetch, Leave, Made, Read, Submit, Unwatch, Watch
from phalanx._store.hub.wire import NEEDS, can_encrypt
from phalanx._store.store import (
    Away,
    Back,
    Changed,
    Done,
    Entry,
    Fetched,
    LeaseLost,
    Refused,
    Snapshot,
    Store,
    StoreEvent,
    Transaction,
)

_PATIENCE = 1.0


class HubStore(Store):
    """The keys of a job in one of its agents.

    Args:
        settings: How it is reached.
        warn: Called with a line for the user, if what is said is not encrypted, by the store's thread. It must not
            wait. None: nobody is told.
    """

    def __init__(self, settings: HubSettings, warn: Callable[[str], None] | None = None) -> None:
        self._settings = settings
        self._warn = warn
        self._owner = os.getpid()
        self._thread: threading.Thread | None = None
        self._loop: Loop | None = None
        self._is_closed = False  # nothing is told any more
        self._is_leaving = False
        self._away = ""  # why the store does not answer, as was told last; "": it does
        self._watched: dict[str, None] = {}
        self._awaited: dict[str, int] = {}  # the prefixes whose snapshots are to come: as the answer to which request
        self._number = 0
        self._requests: dict[int, tuple[type[Submit | Fetch], int]] = {}  # their tickets, by our numbers
        self._read: dict[int, list[Entry]] = {}  # what has come of what was asked for

    # --- any thread

    def open(self, deliver: Callable[[StoreEvent], None]) -> None:
        """See `Store`."""
        self._deliver = deliver
        self._owner = os.getpid()
        loop = self._loop = Loop()
        self._connection = Connection(
            loop, self._settings, entered=self._enter, hear=self._hear, broken=self._see_broken,
            refused=self._see_refused,
        )  # fmt: skip
        loop.call(self._connection.begin)
        self._thread = unpatched.thread(target=self._run, args=(loop,), name="phalanx-store")
        _running.add(self)
        try:
            self._thread.start()
        except BaseException as error:
            self._thread = None
            self._end()
            if isinstance(error, RuntimeError):
                raise OSError(str(error)) from None
            raise

    @property
    def peer(self) -> str:
        """See `Store`."""
        return self._connection.peer

    def watch(self, prefix: str) -> None:
        """See `Store`."""
        self._call(lambda: self._watch(prefix))

    def unwatch(self, prefix: str) -> None:
        """See `Store`."""
        self._call(lambda: self._unwatch(prefix))

    def submit(self, ticket: int, transaction: Transaction) -> None:
        """See `Store`."""
        self._call(lambda: self._ask(Submit, ticket, lambda number: Submit(number, transaction)))

    def fetch(self, ticket: int, prefix: str) -> None:
        """See `Store`."""
        self._call(lambda: self._ask(Fetch, ticket, lambda number: Fetch(number, prefix)))

    def close(self, seconds: float, *, ends_job: bool = False) -> None:
        """See `Store`."""
        thread = self._thread
        if thread is None or self._owner != os.getpid():
            return
        self._call(lambda: self._leave(seconds, ends_job=ends_job))
        thread.join(seconds + _PATIENCE)
        self._is_closed = True
        self._thread = None  # now: a signal may have raised before

    def _call(self, action: Callable[[], None]) -> None:
        """Have an action carried out by the store's thread; if the store is closed, not at all."""
        if self._loop is not None and self._owner == os.getpid():
            self._loop.call(action)

    # --- the store's thread

    def _run(self, loop: Loop) -> None:
        try:
            loop.run()
        except Exception as error:  # noqa: BLE001 - the agent must not wait for ever for what does not come
            self._tell(Refused(f"{self._settings.where}: {type(error).__name__}: {error}"))
        finally:
            self._end()

    def _end(self) -> None:
        _running.discard(self)
        self._connection.close()
        if self._loop is not None:
            self._loop.close()

    def _tell(self, event: StoreEvent) -> None:
        if not self._is_closed:
            self._deliver(event)

    # --- the connection

    def _enter(self, is_lost: bool) -> None:  # noqa: FBT001 - called by the connection
        self._away = ""
        warn, self._warn = self._warn, None
        if warn is not None and not self._connection.encrypts:
            needs = f"{NEEDS} is needed at both ends" + (", and not encrypt=no" if can_encrypt() else "")
            warn(f"what the agents say to each other is authenticated, but not encrypted: {needs}")
        if is_lost:
            self._tell(LeaseLost())
        self._tell(Back(self._connection.store))
        for prefix in self._watched:
            self._begin_watch(prefix)

    def _see_broken(self, why: str) -> None:
        if why != self._away and not self._is_leaving:
            self._away = why
            self._tell(Away(why))
        self._fail_all()

    def _see_refused(self, why: str) -> None:
        self._fail_all()
        if not self._is_leaving:
            self._tell(Refused(why))

    def _fail_all(self) -> None:
        """Forget what was to come, and tell so; end, if this agent leaves."""
        if self._is_leaving:
            self._stop()
            return
        self._awaited.clear()
        self._read.clear()
        requests, self._requests = self._requests, {}
        for kind, ticket in requests.values():
            self._tell_failed(kind, ticket)

    def _tell_failed(self, kind: type[Submit | Fetch], ticket: int) -> None:
        self._tell(Done(ticket, None, 0) if kind is Submit else Fetched(ticket, None))

    def _leave(self, seconds: float, *, ends_job: bool) -> None:
        """Give the lease back, and end."""
        assert self._loop is not None
        if self._is_leaving:  # once more: sooner
            self._loop.after(max(0.0, seconds), self._stop)
            return
        self._is_leaving = True
        if self._connection.is_up:
            self._connection.send(messages.write(Leave(ends_job)))
            self._loop.after(max(0.0, seconds), self._stop)
        else:
            self._stop()

    def _stop(self) -> None:
        assert self._loop is not None
        self._loop.stop()

    # --- requests and watches

    def _watch(self, prefix: str) -> None:
        self._watched[prefix] = None
        if self._connection.is_up:
            self._begin_watch(prefix)

    def _begin_watch(self, prefix: str) -> None:
        self._number += 1
        self._awaited[prefix] = self._number  # if it was unwatched and watched again, the last snapshot counts
        self._connection.ask(messages.write(Watch(self._number, prefix)))

    def _unwatch(self, prefix: str) -> None:
        if prefix in self._watched:
            del self._watched[prefix]
            if self._connection.is_up:
                self._connection.send(messages.write(Unwatch(prefix)))

    def _ask(self, kind: type[Submit | Fetch], ticket: int, message: Callable[[int], Submit | Fetch]) -> None:
        self._number += 1
        body = b""
        if self._connection.is_up and not self._is_leaving:
            with suppress(ValueError):  # a key that is no Unicode
                body = messages.write(message(self._number))
        if not 0 < len(body) <= messages.MOST_REQUEST:
            self._tell_failed(kind, ticket)
            return
        self._requests[self._number] = kind, ticket
        self._connection.ask(body)

    # --- what the store says

    def _hear(self, body: bytes) -> None:
        """Take a message. Raises DamagedError."""
        news = messages.read_news(body)
        if isinstance(news, Changes):
            if news.prefix in self._watched and news.prefix not in self._awaited:
                self._tell(Changed(news.prefix, news.revision, news.written, news.deleted))
        elif isinstance(news, Made):
            self._connection.settle()
            if found := self._requests.pop(news.number, None):
                self._tell(Done(found[1], news.made, news.revision))
        elif isinstance(news, Read):
            self._hear_read(news)
        elif isinstance(news, Beat):
            self._connection.beat_heard()
        elif self._is_leaving:  # it has noted that
            self._stop()

    def _hear_read(self, news: Read) -> None:
        entries = self._read.setdefault(news.number, [])
        entries += news.items
        if news.more:
            return
        self._connection.settle()
        del self._read[news.number]
        if found := self._requests.pop(news.number, None):
            self._tell(Fetched(found[1], tuple(entries)))
        for prefix in [prefix for prefix, number in self._awaited.items() if number == news.number]:
            del self._awaited[prefix]
            if prefix in self._watched:
                self._tell(Snapshot(prefix, news.revision, tuple(entries)))

    def abandon(self) -> None:
        """Close, in a fork, what belongs to the parent."""
        self._thread = None
        self._connection.abandon()
        if self._loop is not None:
            self._loop.close_in_fork()


_running: set[HubStore] = set()


def _abandon_all() -> None:
    for store in _running:
        store.abandon()
    _running.clear()


os.register_at_fork(after_in_child=_abandon_all)
