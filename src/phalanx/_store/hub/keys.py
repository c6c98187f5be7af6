"""The keys, their revisions, who watches them and whose leases they have: what the store decides. Pure.

What a transaction, a lease and a watch do is what etcd does, see `phalanx._store.store`. Nothing here knows of
connections or of the clock: the server passes moments in (seconds, monotonic), and sends what is returned.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

from phalanx._store.store import JOB, OWN, Absent, Created, Entry, Put, Transaction, Unchanged

JOB_LEASE, KEPT_LEASE = b"", b"kept"
"""The leases of keys that go with the job, and of keys that are kept. Those of agents have 16 bytes."""

LOOKS = 5
"""How many times within a ttl the leases are looked at."""

W = TypeVar("W")


class Change(NamedTuple):
    """What one revision has written."""

    revision: int
    written: tuple[Entry, ...]
    deleted: tuple[str, ...]

    def below(self, prefix: str) -> Change | None:
        """Return what of it is below a prefix; None: nothing."""
        written = tuple(entry for entry in self.written if entry.key.startswith(prefix))
        deleted = tuple(key for key in self.deleted if key.startswith(prefix))
        return Change(self.revision, written, deleted) if written or deleted else None


class Keys:
    """The keys that are there.

    Args:
        revision: The one before the first.

    >>> from phalanx._store.store import Transaction
    >>> keys = Keys()
    >>> keys.make(b"an agent", Transaction((Absent("a"),), (Put("a", b"1", OWN),)))
    (True, Change(revision=1, written=(Entry(key='a', value=b'1', created=1, modified=1),), deleted=()))
    >>> keys.make(b"another", Transaction((Absent("a"),), (Put("a", b"2", OWN),)))
    (False, None)
    >>> keys.end_lease(b"an agent")
    Change(revision=2, written=(), deleted=('a',))
    """

    def __init__(self, revision: int = 0) -> None:
        self.revision = revision
        """The last one."""
        self._entries: dict[str, Entry] = {}
        self._lease_of: dict[str, bytes] = {}
        self._keys_of: dict[bytes, dict[str, None]] = {}

    def make(self, lease: bytes, transaction: Transaction) -> tuple[bool, Change | None]:
        """Make a transaction. Returns whether its conditions held, and what it has changed; None: nothing.

        ``lease``: whose keys those of `OWN` are.
        """
        if not all(self._holds(condition) for condition in transaction.conditions):
            return False, None
        revision = self.revision + 1
        before: dict[str, Entry | None] = {}
        for write in transaction.writes:
            old = self._entries.get(write.key)
            is_below = not isinstance(write, Put) and write.below
            for key in [key for key in self._entries if key.startswith(write.key)] if is_below else (write.key,):
                before.setdefault(key, self._entries.get(key))
                self._delete(key)
            if isinstance(write, Put):
                created = revision if old is None else old.created
                self._entries[write.key] = Entry(write.key, write.value, created, revision)
                mine = {OWN: lease, JOB: JOB_LEASE}.get(write.lease, KEPT_LEASE)
                self._lease_of[write.key] = mine
                self._keys_of.setdefault(mine, {})[write.key] = None
        return True, self._note(before)

    def end_lease(self, lease: bytes) -> Change | None:
        """Delete the keys of a lease. Returns what that has changed; None: nothing."""
        gone = {key: self._entries[key] for key in self._keys_of.get(lease, ())}
        for key in gone:
            self._delete(key)
        return self._note(dict(gone))

    def below(self, prefix: str) -> tuple[Entry, ...]:
        """Return the keys below a prefix, in their order."""
        return tuple(self._entries[key] for key in sorted(self._entries) if key.startswith(prefix))

    def _holds(self, condition: Absent | Unchanged | Created) -> bool:
        entry = self._entries.get(condition.key)
        if isinstance(condition, Absent):
            return entry is None
        if isinstance(condition, Created):
            return condition.created == (0 if entry is None else entry.created)
        return condition.modified == (0 if entry is None else entry.modified)

    def _delete(self, key: str) -> None:
        if self._entries.pop(key, None) is not None:
            lease = self._lease_of.pop(key)
            keys = self._keys_of[lease]
            del keys[key]
            if not keys:
                del self._keys_of[lease]

    def _note(self, before: dict[str, Entry | None]) -> Change | None:
        """Return what has changed of these keys, which makes a revision."""
        written = tuple(self._entries[key] for key in before if key in self._entries)
        deleted = tuple(key for key, old in before.items() if old is not None and key not in self._entries)
        if not (written or deleted):
            return None
        self.revision += 1
        return Change(self.revision, written, deleted)


class Watches(Generic[W]):
    """Who watches which prefixes."""

    def __init__(self) -> None:
        self._watchers: dict[str, dict[W, None]] = {}

    def add(self, prefix: str, watcher: W) -> None:
        """Note that somebody watches a prefix."""
        self._watchers.setdefault(prefix, {})[watcher] = None

    def remove(self, watcher: W, prefix: str | None = None) -> None:
        """Note that somebody watches a prefix no more; None: none."""
        for each in list(self._watchers) if prefix is None else (prefix,):
            watchers = self._watchers.get(each, {})
            watchers.pop(watcher, None)
            if not watchers:
                self._watchers.pop(each, None)

    def to_tell(self, change: Change) -> Iterator[tuple[str, Change, tuple[W, ...]]]:
        """Yield each watched prefix below which something has changed, what that is, and its watchers."""
        for prefix, watchers in list(self._watchers.items()):
            if part := change.below(prefix):
                yield prefix, part, tuple(watchers)


class Leases:
    """The leases of agents, and when each was heard of last.

    Args:
        ttl: Seconds after which a lease ends.

    >>> leases = Leases(5)
    >>> leases.hear(b"a", 100.0), leases.hear(b"b", 103.0), leases.next_look(103.0)
    (None, None, 104.0)
    >>> leases.look(104.0), leases.next_look(104.0), leases.look(105.1)
    ([], 105.0, [b'a'])

    Who looks too late was stopped, and has not heard what was said meanwhile. All leases begin anew.

    >>> leases.next_look(105.1), leases.look(140.0), leases.next_look(140.0)
    (106.1, [], 141.0)
    """

    def __init__(self, ttl: float) -> None:
        self._ttl = ttl
        self._heard: dict[bytes, float] = {}
        self._planned = float("inf")

    def __len__(self) -> int:
        return len(self._heard)

    def __contains__(self, lease: bytes) -> bool:
        return lease in self._heard

    def hear(self, lease: bytes, now: float) -> None:
        """Note that an agent was heard of; if it has no lease yet, it gets one."""
        self._heard[lease] = now

    def end(self, lease: bytes) -> None:
        """Forget a lease."""
        self._heard.pop(lease, None)

    def next_look(self, now: float) -> float:
        """Return when to `look` again, and note it."""
        self._planned = now + self._ttl / LOOKS
        ends = min(self._heard.values(), default=now) + self._ttl
        if now < ends < self._planned:
            self._planned = ends
        return self._planned

    def look(self, now: float) -> list[bytes]:
        """Return the leases that have ended; if the look comes too late, none, and all get their full time again."""
        if now - self._planned > self._ttl / LOOKS:
            self._heard = dict.fromkeys(self._heard, now)
        return [lease for lease, heard in self._heard.items() if now - heard >= self._ttl]
