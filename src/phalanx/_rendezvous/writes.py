"""What a node has to write of itself, and what it has asked of its store and has no answer to. Pure.

Of each kind, one thing is asked at a time. It may have been done or not: no answer has to arrive.
"""

from __future__ import annotations

from phalanx._rendezvous import records
from phalanx._rendezvous.records import Node, Stop, replace
from phalanx._rendezvous.store_view import StoreView
from phalanx._store.store import JOB, KEPT, OWN, Absent, Delete, Done, Entry, Fetched, Put, Transaction, Unchanged

AGAIN = 1.0
"""Seconds after which a write is tried again that was not made, if nothing has told why by then."""

TOLD = ("lead", "stop")
"""Writes of which a watch tells: that they were made is not enough, for it may come first."""


class OwnEntry:
    """A node's entry, and what its workers have left: as the store is to have it, and as it has it.

    Attributes:
        node: The entry as it is to be.
        evidence: What the workers of its generation have left.
        entered: The entry that the store holds; None: it holds none.
        revision: That at which it was written last.
    """

    def __init__(self, me: Node) -> None:
        self.node = self._entering = me  # the latter: the one that is being written
        self.evidence = b""
        self.entered: Node | None = None
        self.revision = 0
        self._has_succeeded = False  # whether the store may hold that: see `records.success_of`

    def start(self, generation: int) -> None:
        """Have workers of a generation run."""
        self.node, self.evidence = replace(self.node, generation=generation, state="running"), b""

    def miss(self, generation: int) -> None:
        """Have none of a generation, and nothing of those before; -1: there was no generation."""
        me, outcome = self.node, "" if generation < 0 else "not started"
        me = replace(me, uptime=0.0, step=None, survivors=0, error="", rank=None, exitcode=None, is_cut_off=False)
        self.node, self.evidence = replace(me, generation=generation, outcome=outcome), b""

    def is_due(self, view: StoreView) -> bool:
        """Whether it is to be written. Raises DamagedError."""
        job, _ = view.job()
        # That the workers run is not said but after a lost lease: the job's state says it, until they have ended; or
        # until the job goes on without them. Who has not ended them by then cannot take part in what follows.
        is_said = self.node.state == "running" and (job is None or job.generation <= self.node.generation)
        return self.entered is None or (self.entered != self.node and not is_said)

    def write(self) -> Transaction:
        """Return the writes of how far the node is. That its workers have succeeded stays, if its machine goes."""
        me = self._entering = self.node
        writes: list[Put | Delete] = [Put(f"{records.NODES}{me.id}", records.write(me), OWN)]
        success = records.success_of(me.id)
        if me.state == "done":
            self._has_succeeded = True
            writes.append(Put(success, records.write(replace(me, state="left")), JOB))
        elif self._has_succeeded:
            writes.append(Delete(success))
        if self.evidence:
            its, old = records.evidence_of(me), records.evidence_of(me, before=1)
            writes += [Put(its, self.evidence, JOB), Delete(old)]
        return Transaction((), tuple(writes))

    def written(self, revision: int) -> None:
        """The store holds what was written last."""
        self.entered, self.revision = self._entering, revision

    @property
    def failure(self) -> tuple[Entry, ...]:
        """What the workers have left, if they have failed: what those of other nodes have is not here."""
        has_failed = self.evidence and self.node.outcome in ("failed", "not started")
        return (Entry(records.evidence_of(self.node), self.evidence, 0, 0),) if has_failed else ()


class Stops:
    """Why generations are to end, in a node's words.

    Attributes:
        own: What this node says of the end of the generation whose workers it has, or had; None: nothing.
    """

    def __init__(self) -> None:
        self.own: Stop | None = None

    def say(self, stop: Stop) -> None:
        """Have it said why a generation is to end: what is said first of it holds."""
        self.own = self.own or stop

    def forget(self) -> None:
        """Another generation begins here."""
        self.own = None

    def due(self, view: StoreView, asked: Stop | None) -> Transaction | None:
        """Return what is to be written: once, and nothing where another has said so first. Raises DamagedError.

        ``asked``: the end of the job that somebody here wants. It is said of the next generation where this one ends
        for another reason, and nobody begins that then.
        """
        job, modified = view.job()
        if job is None or job.phase == "over":
            return None
        stop, first = self.own, view.stop(job.generation)
        if stop is None or stop.generation != job.generation or first is not None:
            self.own = stop if stop is not None and stop.generation > job.generation else None
            is_next = first is not None and first.kind != "signal"
            stop = asked and replace(asked, generation=job.generation + is_next)
        if stop is None or view.stop(stop.generation) is not None:
            return None
        key = f"{records.STOP}{stop.generation}"
        put = Put(key, records.write(stop), JOB)
        return Transaction((Absent(key), Unchanged(records.STATE, modified)), (put,))


class Kept:
    """What is kept of a job that is over: each node keeps its evidence, the leader the job.

    These are writes of their own: the last decision and its copy may be more than one request can hold.
    """

    def __init__(self) -> None:
        self._kept: tuple[Put, ...] = ()
        self._keeping: tuple[Put, ...] = ()  # the same, and what is being written of it

    def due(self, view: StoreView, own: OwnEntry, *, leads: bool) -> tuple[Put, ...]:
        """Return what is to be kept, and is not yet. Raises DamagedError."""
        job, state = view.job()[0], view.entry(records.STATE)
        if job is None or state is None or not job.is_kept:
            return ()
        found = []
        if own.evidence and own.node.generation == job.with_evidence:
            found.append(Put(f"{records.KEPT}{records.evidence_of(own.node)}", own.evidence, KEPT))
        if leads:
            found.append(Put(f"{records.KEPT}{records.STATE}", state.value, KEPT))
        return tuple(put for put in found if put not in self._kept)

    def write(self, due: tuple[Put, ...], view: StoreView) -> Transaction:
        """Return the writes of what is `due`."""
        self._keeping = (*self._kept, *due)
        return Transaction((Unchanged(records.STATE, view.job()[1]),), due)

    def written(self) -> None:
        """The store holds what was written last; or the job has gone, and with it what was to be kept."""
        self._kept = self._keeping


class Writes:
    """The requests that are under way."""

    def __init__(self) -> None:
        self._ticket = 0
        self._open: dict[str, int] = {}
        self._closed: dict[str, float] = {}

    def begin(self, what: str) -> int:
        """Note that something is being asked. Returns the ticket."""
        self._ticket += 1
        self._open[what] = self._ticket
        return self._ticket

    def is_open(self, what: str) -> bool:
        """Whether something has been asked, and not been answered."""
        return what in self._open

    def drop(self, what: str) -> None:
        """Heed no answer to what has been asked."""
        self._open.pop(what, None)

    def end(self, event: Done | Fetched, now: float) -> str:
        """Note an answer. Returns to what it is one; "": to nothing that is asked any more."""
        what = next((what for what, ticket in self._open.items() if ticket == event.ticket), "")
        if what:
            del self._open[what]
            in_vain = not event.made if isinstance(event, Done) else event.entries is None
            if in_vain or what in TOLD:
                self._closed[what] = now + AGAIN
        return what

    def closed_until(self, what: str) -> float:
        """Return until when it is not to be asked again: it was not made, and why is not told yet."""
        return self._closed.get(what, 0.0)

    def reopen(self) -> None:
        """Let all be asked again: something has changed."""
        self._closed.clear()
