"""Follows the keys below a prefix in an etcd: delivers all that there are, and what becomes of them.

Owns what an etcd has said of its revisions, by which it is known again when it answers after a while.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from phalanx._store.etcd import api
from phalanx._store.etcd.session import BROKEN, WATCH_ENDED, BrokenError, Session
from phalanx._store.store import Changed, Entry, Snapshot


class Keys:
    """The keys of a job, as an etcd has them.

    Args:
        prefix: What they begin with there.
    """

    def __init__(self, prefix: bytes) -> None:
        self.prefix = prefix
        self._newest = 0  # the newest revision that the etcd has told
        self._written: tuple[bytes, int] | None = None  # the latest of which a key is known that it has written

    def see(self, revision: int, key: bytes = b"") -> None:
        """Note a revision. ``key``: what it has written; empty: that is not known."""
        self._newest = max(self._newest, revision)
        if key and (self._written is None or revision > self._written[1]):
            self._written = key, revision

    async def check(self, session: Session, revision: int = 0) -> None:
        """Check that an etcd, at a revision, holds what it has told. Raises BrokenError: it has lost its data.

        The revision alone does not show that: in an etcd that began anew, others may have written as often meanwhile.
        An etcd cannot say what it has compacted since then: watches then tell all there is.
        """
        if 0 < revision < self._newest:  # a watch would tell nothing until it has as many again
            raise BrokenError(f"it has lost what it held: it was at revision {self._newest}, and is before that")
        if self._written is not None and not await session.has_written(*self._written):
            key, at = self._written
            raise BrokenError(
                f"it has lost what it held: it has not written {key.decode(errors='replace')} at revision {at}"
            )

    async def read(self, session: Session, prefix: str) -> tuple[tuple[Entry, ...], int]:
        """Return the keys below a prefix, and the revision at which they are so."""
        kvs, revision = await session.range(self.prefix + prefix.encode())
        self.see(revision)
        for kv in kvs:
            self.see(kv.mod_revision, kv.key)
        return tuple(self.entry(kv) for kv in kvs), revision

    def entry(self, kv: Any) -> Entry:
        """Return a key of etcd's as the store tells it."""
        return Entry(self.name(kv.key), kv.value, kv.create_revision, kv.mod_revision)

    def name(self, key: bytes) -> str:
        """Return the name of a key of etcd's."""
        return key[len(self.prefix) :].decode("utf-8", "replace")


class Watched:
    """A prefix that is watched, and up to which revision it has been told; -1: all is to be read."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.revision = -1
        self.follower: asyncio.Task[None] | None = None

    async def tell(self, session: Session, keys: Keys, deliver: Callable[[Snapshot | Changed], None]) -> None:
        """Tell all keys below the prefix, and what becomes of them. What breaks ends the session."""
        try:
            while True:
                try:
                    await self._tell_changes(session, keys, deliver)
                except api.aio.AioRpcError as error:
                    if error.code() != api.grpc.StatusCode.RESOURCE_EXHAUSTED or self.revision < 0:
                        raise  # the latter: all keys are asked for again in a while, by another session
                    self.revision = -1  # more has changed meanwhile than one message may hold
        except BROKEN as error:
            session.end(error)

    async def _tell_changes(self, session: Session, keys: Keys, deliver: Callable[[Snapshot | Changed], None]) -> None:
        """Tell what changes, until the stream ends: etcd has compacted what was to be told.

        All keys are read once the watch is there, and not before it: a watch from a revision on that is not the last
        is served by etcd's next look at those that lag behind, which is 0.1 s later. The revision 0 is the present.
        """
        read = 0
        async for response in session.watch(keys.prefix + self.prefix.encode(), self.revision + 1):
            if response.canceled:
                if not response.compact_revision:
                    raise BrokenError(response.cancel_reason or WATCH_ENDED)
                self.revision = -1
                return
            if self.revision < 0:
                entries, read = await keys.read(session, self.prefix)
                self.revision = read
                deliver(Snapshot(self.prefix, read, entries))
            for revision, events in itertools.groupby(response.events, key=lambda event: event.kv.mod_revision):
                if revision <= read:
                    continue
                written, deleted = [], []
                for event in events:
                    if event.type == api.DELETE:
                        deleted.append(keys.name(event.kv.key))
                    else:
                        written.append(keys.entry(event.kv))
                        keys.see(revision, event.kv.key)
                self.revision = revision
                keys.see(revision)
                deliver(Changed(self.prefix, revision, tuple(written), tuple(deleted)))
        raise BrokenError(WATCH_ENDED)
