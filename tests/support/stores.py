"""What the tests of all stores share: an agent's side of one, and what each store promises."""

from __future__ import annotations

import os
import queue
import threading
from typing import Any, TypeVar

from phalanx._store.store import (
    JOB,
    KEPT,
    OWN,
    Absent,
    Back,
    Changed,
    Created,
    Delete,
    Done,
    Entry,
    Fetched,
    Put,
    Snapshot,
    Store,
    Transaction,
    Unchanged,
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


def check_transactions(one: Client) -> None:
    """Transactions and their conditions."""
    one.next(Back)
    first = one.make(Put("a", b"1", JOB), Put("b", b"1", JOB), given=(Absent("a"),))
    assert first.made
    assert one.make(Put("a", b"2", JOB), given=(Absent("a"),)).made is False
    assert one.make(Put("a", b"2", JOB), given=(Unchanged("a", first.revision),)).made
    assert one.make(Put("a", b"3", JOB), given=(Unchanged("a", first.revision),)).made is False
    assert one.make(Put("a", b"3", JOB), given=(Created("a", first.revision), Absent("c"))).made
    assert one.make(Delete("a"), Delete("nothing")).made
    assert one.make(Put("a", b"4", JOB), given=(Created("a", first.revision),)).made is False
    assert one.below("") == ["b"]
    assert one.make(*(Put(key, b"", KEPT) for key in ("c", "c/1", "c/2/x", "d/1"))).made
    assert one.make(Delete("c/", below=True), Delete("d", below=False), Put("c", b"5", JOB)).made
    assert one.below("") == ["b", "c", "d/1"]


def check_watch(one: Client, other: Client) -> None:
    """A watch tells all once, and in order."""
    one.next(Back)
    made = one.make(Put("job/a", b"0", JOB), Put("else/x", b"0", JOB))
    assert other.watch("job/").entries == (Entry("job/a", b"0", made.revision, made.revision),)
    revisions = [one.make(Put("job/a", b"%d" % number, JOB)).revision for number in range(20)]
    one.make(Put("else/x", b"1", JOB))
    last = one.make(Delete("job/a"), Put("job/b", b"x", JOB))
    told = [other.next(Changed) for _ in range(21)]
    assert [event.revision for event in told] == [*revisions, last.revision]
    assert [event.written[0].value for event in told[:20]] == [b"%d" % number for number in range(20)]
    assert (told[20].deleted, [entry.key for entry in told[20].written]) == (("job/a",), ["job/b"])
    other.store.watch("job/")  # once more
    other.next(Snapshot)
    one.make(Delete("job/b"))
    one.make(Put("job/b", b"x", JOB))
    assert [other.next(Changed).revision for _ in range(2)] == [last.revision + 1, last.revision + 2]
    other.store.unwatch("job/")
    assert other.below("job/") == ["job/b"]
    one.make(Put("job/b", b"y", JOB))
    assert other.told.empty()


def check_fork(one: Client) -> None:
    """A fork of the process has no part in it."""
    one.next(Back)
    one.make(Put("mine", b"", OWN))
    pid = os.fork()
    if pid == 0:
        one.store.submit(99, Transaction((), (Put("child", b"", JOB),)))
        one.store.close(1.0, ends_job=True)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert one.make(Put("a", b"", JOB)).made
    assert one.below("") == ["a", "mine"]
