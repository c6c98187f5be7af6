"""What the tests of all stores share: an agent's side of one."""

from __future__ import annotations

import queue
import threading
from typing import Any, TypeVar

from phalanx._store.store import (
    Delete,
    Done,
    Fetched,
    Put,
    Snapshot,
    Store,
    Transaction,
)

T = TypeVar("T")

SOON = 15.0
"""Seconds that anything may take; spent only by a test that fails."""


class Client:
    """A store, and what it has told."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.ticket = 0
        self.threads: set[int] = set()
        self.all: list[Any] = []
        self.store.open(self._take)

    def _take(self, event: Any) -> None:
        self.threads.add(threading.get_ident())
        self.all.append(event)
        self.told.put(event)

    def next(self, kind: type[T], *, never: type | tuple[type, ...] = ()) -> T:
        """What it tells next of a kind; what comes before is passed over, but for what must not come."""
        while True:
            event = self.told.get(timeout=SOON)
            assert not isinstance(event, never), event
            if isinstance(event, kind):
                return event

    def make(self, *writes: Put | Delete, given: tuple[Any, ...] = ()) -> Done:
        """Make a transaction."""
        self.ticket += 1
        self.store.submit(self.ticket, Transaction(given, writes))
        done = self.next(Done)
        assert done.ticket == self.ticket
        return done

    def watch(self, prefix: str) -> Snapshot:
        self.store.watch(prefix)
        return self.next(Snapshot)

    def below(self, prefix: str) -> list[str]:
        self.ticket += 1
        self.store.fetch(self.ticket, prefix)
        found = self.next(Fetched)
        assert found.entries is not None
        return [entry.key for entry in found.entries]
