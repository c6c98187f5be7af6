"""What a store of shared keys does, and what it tells: the part of etcd's API (version 3) that agents need.

A key has a value (bytes), and the store's revision at which it was made (``created``) and last written (``modified``).
Every transaction that writes makes a new revision, greater than all before it: revisions order what happens in a job,
for the clocks of its machines are never compared. See https://etcd.io/docs/v3.5/learning/api/.

`Store` is the interface; `phalanx._store.etcd` and `phalanx._store.hub` are the stores. The parts of a transaction have
types and bounds, by which the hub reads them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Annotated, Final, Literal, NamedTuple

from msgspec import Meta, Struct

OWN: Final = "own"
JOB: Final = "job"
KEPT: Final = "kept"
"""Leases: a key of ``OWN`` goes with the agent that wrote it, one of ``JOB`` with the last agent of the job.

One of ``KEPT`` has none: it is there until it is deleted. In a store that ends with the job, it ends with the job.
"""


MOST_VALUE = 32 << 20
"""Bytes of a value, and of a request: what it writes is sent to others with a little more beside it."""

Lease = Literal["own", "job", "kept"]
Key = Annotated[str, Meta(max_length=1000)]
Revision = Annotated[int, Meta(ge=0, le=1 << 62)]
_MANY = Meta(max_length=1 << 16)


class Entry(NamedTuple):
    """A key that is there."""

    key: str
    value: bytes
    created: int
    modified: int


class _Part(Struct, frozen=True, array_like=True, tag=str.lower):
    """A part of a transaction; in a message, an array whose first element says which."""


class Absent(_Part, frozen=True):
    """The condition that a key is not there."""

    key: Key


class Unchanged(_Part, frozen=True):
    """The condition that a key was last written at the revision ``modified``."""

    key: Key
    modified: Revision


class Created(_Part, frozen=True):
    """The condition that a key was made at the revision ``created``: it has not been deleted and made again."""

    key: Key
    created: Revision


class Put(_Part, frozen=True):
    """Write a key. ``lease``: with whom it goes, `OWN` or `JOB`; or `KEPT`."""

    key: Key
    value: Annotated[bytes, Meta(max_length=MOST_VALUE)]
    lease: Lease


class Delete(_Part, frozen=True):
    """Delete a key, if it is there; ``below``: all keys that begin with it, none of which is put with that."""

    key: Key
    below: bool = False


class Transaction(NamedTuple):
    """Writes that are made together, if all conditions hold; else none is."""

    conditions: Annotated[tuple[Absent | Unchanged | Created, ...], _MANY]
    writes: Annotated[tuple[Put | Delete, ...], _MANY]


class Snapshot(NamedTuple):
    """All keys below a prefix at a revision: the first answer to a watch, and another one after a gap in it."""

    prefix: str
    revision: int
    entries: tuple[Entry, ...]


class Changed(NamedTuple):
    """What one revision has written below a watched prefix. Nothing is told twice, or out of order."""

    prefix: str
    revision: int
    written: tuple[Entry, ...]
    deleted: tuple[str, ...]


class Done(NamedTuple):
    """The end of a transaction. ``made``: whether its conditions held; None: not known, the store was lost."""

    ticket: int
    made: bool | None
    revision: int


class Fetched(NamedTuple):
    """The answer to a fetch. ``entries``: None: the store could not be asked."""

    ticket: int
    entries: tuple[Entry, ...] | None


class Away(NamedTuple):
    """The store does not answer, or cannot be what it was. It is tried again, until `Back`. ``why``: one line.

    Told again, where the reason has become another one.
    """

    why: str


class Back(NamedTuple):
    """The store answers again; or for the first time. The watches go on by themselves.

    ``store``: which one it is: another one has none of the keys that were there, and its revisions begin anew. b"": it
    is always the same.
    """

    store: bytes = b""


class LeaseLost(NamedTuple):
    """The lease of this agent has expired: its keys of `OWN` are gone. There is a new one: they can be put again.

    Told before `Back`, and before what has changed since, where the store was away meanwhile.
    """


class Refused(NamedTuple):
    """The store will not have this agent: a certificate, a password or the job's secret is wrong. Nothing follows."""

    why: str


StoreEvent = Snapshot | Changed | Done | Fetched | Away | Back | LeaseLost | Refused


class Store(ABC):
    """A connection to a store. Its methods do not wait, and may be called by any thread, `close` alone excepted."""

    @abstractmethod
    def open(self, deliver: Callable[[StoreEvent], None]) -> None:
        """Begin to connect. Called once, before all else.

        ``deliver`` is called with what happens, by a thread of the store's, one call at a time. It must not wait.

        Raises ValueError or OSError for what is wrong before anything is connected to: a file that cannot be read.
        """

    @property
    def peer(self) -> str:
        """The address by which the store was reached last, if a machine of the job has it; "": none has, or not yet."""
        return ""

    @abstractmethod
    def watch(self, prefix: str) -> None:
        """Have the keys below a prefix told: a `Snapshot`, and each `Changed` from then on, whatever interrupts."""

    @abstractmethod
    def unwatch(self, prefix: str) -> None:
        """End a watch. What is on its way may still be told."""

    @abstractmethod
    def submit(self, ticket: int, transaction: Transaction) -> None:
        """Have a transaction made; `Done` tells the end, once for each ``ticket``, within seconds.

        While the store is away, that is soon, with ``made`` None. A transaction is never made twice.
        """

    @abstractmethod
    def fetch(self, ticket: int, prefix: str) -> None:
        """Have the keys below a prefix read once; `Fetched` tells them, or that they could not be read."""

    @abstractmethod
    def close(self, seconds: float, *, ends_job: bool = False) -> None:
        """Give the lease back, so that the keys of `OWN` go at once, and end. Waits at most ``seconds``. Idempotent.

        ``ends_job``: the lease `JOB` and the keys that go with it, too.
        """
