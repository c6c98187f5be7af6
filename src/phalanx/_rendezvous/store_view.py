"""What a node knows of its job, has asked of the store, and has to write of itself; and whether the job lives. Pure.

A watch delivers each change once, and in order; what a broken one delivers may come twice, or late. Of two statements
on a key, the one with the higher revision holds. Of each kind, one thing is asked at a time. It may have been done or
not: no answer has to arrive.

What was written by agents that were killed may outlive them a while; so may a job that has just ended: `Liveness` finds
whether somebody is left of the job that the store holds, or it is an earlier one of its id.
"""

from __future__ import annotations

import math

from phalanx._rendezvous import records
from phalanx._rendezvous.candidates import Seen
from phalanx._rendezvous.records import DamagedError, Job, Missing, Node, Refusal, Stop, replace
from phalanx._store.store import (
    JOB,
    KEPT,
    OWN,
    Absent,
    Changed,
    Delete,
    Done,
    Entry,
    Fetched,
    Put,
    Snapshot,
    Transaction,
    Unchanged,
)


class StoreView:
    """The keys below ``job/``; and those below ``nodes/``, while they are watched."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._deleted: dict[str, int] = {}  # when keys were deleted
        self._told: dict[str, int] = {}  # up to which revision the keys below a prefix are known
        self._job: tuple[int, Job | None] = -1, None
        self.made = 0
        """The revision at which the job was made that was there first; 0: none was."""
        self._seen: dict[str, Seen] = {}  # by key: the entries of nodes, and those of their successes
        self._nodes: dict[str, Seen] | None = None  # the same, by node; None: they have changed
        self.questions: dict[str, Entry] = {}
        """The questions to all nodes, by their ids."""

    def take(self, event: Snapshot | Changed) -> None:
        """Take what the store has told."""
        if isinstance(event, Changed):
            if event.prefix in self._told:  # before the first snapshot, most is not known
                self._told[event.prefix] = max(event.revision, self._told[event.prefix])
            told, gone = event.written, dict.fromkeys(event.deleted, event.revision)
        else:
            self._told[event.prefix] = max(event.revision, self._told.get(event.prefix, 0))
            told = event.entries
            there = {entry.key for entry in told}
            gone = {key: event.revision for key in self._entries if key.startswith(event.prefix) and key not in there}
            self._deleted = {key: at for key, at in self._deleted.items() if at > event.revision}
        for key, revision in gone.items():
            if revision > self._known(key):
                self._drop(key)
                self._deleted[key] = revision
        for entry in told:
            if entry.modified > self._known(entry.key):
                self._entries[entry.key] = entry
                self._deleted.pop(entry.key, None)
                if entry.key.startswith(records.NODES):
                    self._see_node(entry)
                elif entry.key.startswith(records.QUESTION):
                    self.questions[entry.key.removeprefix(records.QUESTION)] = entry

    def _known(self, key: str) -> int:
        entry = self._entries.get(key)
        return self._deleted.get(key, -1) if entry is None else entry.modified

    def _see_node(self, entry: Entry) -> None:
        name = entry.key.removeprefix(records.NODES).partition("/")[0]
        self._nodes = None
        self._seen.pop(entry.key, None)
        try:
            node = records.read(Node, entry)
        except DamagedError:
            version = records.version_of(entry)
            if version == records.VERSION:  # somebody else's: no node that takes part
                return
            node = Node(name, "", "", 1, version=version)  # the leader refuses it
        if node.id == name:
            self._seen[entry.key] = Seen(node, entry.created, entry.modified)

    def _drop(self, key: str) -> None:
        self._entries.pop(key, None)
        self.questions.pop(key.removeprefix(records.QUESTION), None)
        if self._seen.pop(key, None) is not None:
            self._nodes = None

    def forget(self, prefix: str) -> None:
        """Forget the keys below a prefix, which is not watched any more."""
        self._told.pop(prefix, None)
        for key in [key for key in self._entries if key.startswith(prefix)]:
            self._drop(key)

    def told(self, prefix: str) -> int:
        """Return up to which revision the keys below a prefix are known; 0: they are not."""
        return self._told.get(prefix, 0)

    def entry(self, key: str) -> Entry | None:
        """Return a key; None: it is not there."""
        return self._entries.get(key)

    def keys(self, prefix: str) -> list[str]:
        """Return the keys below a prefix."""
        return [key for key in self._entries if key.startswith(prefix)]

    @property
    def nodes(self) -> dict[str, Seen]:
        """The nodes, by their ids: those whose entries are there, and those that have gone after they succeeded."""
        if self._nodes is None:
            self._nodes = {}
            for key, seen in self._seen.items():
                if key == f"{records.NODES}{seen.node.id}" or seen.node.id not in self._nodes:  # else its success
                    self._nodes[seen.node.id] = seen
        return self._nodes

    def job(self) -> tuple[Job | None, int]:
        """Return the job and the revision of its key; None and 0: there is none yet. Raises DamagedError."""
        entry = self._entries.get(records.STATE)
        if entry is None:
            return None, 0
        if self._job[0] != entry.modified:
            self._job = entry.modified, records.read_job(entry)
        return self._job[1], entry.modified

    def known_job(self) -> Job | None:
        """Return the job; None: there is none yet, or it cannot be read."""
        try:
            return self.job()[0]
        except DamagedError:
            return None

    def known_stop(self, generation: int) -> Stop | None:
        """Return why a generation ends; None: nobody has said, or what is there cannot be that."""
        try:
            return self.stop(generation)
        except DamagedError:
            return None

    def is_ending(self) -> bool:
        """Whether the job is over, or somebody has asked for its end. Raises DamagedError."""
        job, _ = self.job()
        stop = None if job is None else self.stop(job.generation)
        return job is not None and (job.phase == "over" or (stop is not None and stop.kind == "signal"))

    def is_job_gone(self) -> bool:
        """Whether nothing is left of the job that was there when this was asked first; there may be another one."""
        entry = self._entries.get(records.STATE)
        self.made = self.made or (0 if entry is None else entry.created)
        return self.told(records.JOB) > 0 and self.made != (0 if entry is None else entry.created)

    def stop(self, generation: int) -> Stop | None:
        """Return why a generation ends; None: nobody has said. Raises DamagedError."""
        entry, job = self._entries.get(f"{records.STOP}{generation}"), self._entries.get(records.STATE)
        is_earlier = entry is not None and job is not None and entry.created < job.created  # of a job that is gone
        return None if entry is None or is_earlier else records.read(Stop, entry)

    def refusal(self, node: str) -> str:
        """Return why a node is not taken; "": it may be."""
        entry = self._entries.get(f"{records.REFUSED}{node}")
        return "" if entry is None else records.read(Refusal, entry).why

    def missing(self, generation: int) -> tuple[Missing | None, int]:
        """Return for whom a generation waits, and the revision of its key; or None and 0. Raises DamagedError."""
        entry = self._entries.get(records.WAITING)
        found = None if entry is None else records.read(Missing, entry)
        return (found, entry.modified) if entry and found and found.generation == generation else (None, 0)

    def is_alone(self, node: str) -> bool:
        """Whether no other node is there that has not left: who has come to an end waits for the next job."""
        job, modified = self.job()
        others = {name: seen for name, seen in self.nodes.items() if name != node}
        if job is not None and job.phase == "over":
            its = {*job.ids}
            others = {name: seen for name, seen in others.items() if seen.created < modified or name in its}
        return all(seen.node.state == "left" for seen in others.values())

    def awaits_lost(self) -> bool:
        """Whether the job has ended with the loss of a node: if that was stopped or cut off, it may come back."""
        job, _ = self.job()
        stop = None if job is None or job.verdict is None else job.verdict.stop
        return stop is not None and stop.kind == "lost" and stop.node not in self.nodes

    def leader(self) -> tuple[str, int]:
        """Return the id of the leader, and the revision at which it became that; "" and 0: there is none."""
        entry = self._entries.get(records.LEADER)
        return ("", 0) if entry is None else (entry.value.decode("utf-8", "replace"), entry.created)


AGAIN = 1.0
"""Seconds after which a write is tried again that was not made, if nothing has told why by then."""

TOLD = ("lead", "stop")
"""Writes of which a watch tells: that they were made is not enough, for it may come first."""


class OwnEntry:
    """What a node writes of itself: as the store is to have it, and as it has it.

    Attributes:
        node: The entry as it is to be.
        evidence: What the workers of its generation have left.
        stop: Why the generation is to end whose workers it has, or had: its first reason; None: it has none.
        entered: The entry that the store holds; None: it holds none.
        revision: That at which it was written last.
    """

    def __init__(self, me: Node) -> None:
        self.node = self._entering = me  # the latter: the one that is being written
        self.evidence = b""
        self.stop: Stop | None = None
        self.entered: Node | None = None
        self.revision = 0
        self._kept: tuple[Put, ...] = ()
        self._keeping: tuple[Put, ...] = ()  # the same, and what is being written of it
        self._has_succeeded = False  # whether the store may hold that: see `records.success_of`

    def start(self, generation: int) -> None:
        """Have workers of a generation run."""
        self.node, self.evidence = replace(self.node, generation=generation, state="running"), b""
        self.stop = None

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

    def write_stop(self, view: StoreView, asked: Stop | None) -> Transaction | None:
        """Return the write of why a generation ends: None, if there is no reason, or another one is there.

        ``asked``: the end of the job that somebody here wants. It is written for the next generation where this one
        ends for another reason, and no node begins that then. Raises DamagedError.
        """
        job, modified = view.job()
        if job is None or job.phase == "over":
            return None
        stop, first = self.stop, view.stop(job.generation)
        if stop is None or stop.generation != job.generation or first is not None:
            self.stop = stop if stop is not None and stop.generation > job.generation else None
            is_next = first is not None and first.kind != "signal"
            stop = asked and replace(asked, generation=job.generation + is_next)
        if stop is None or view.stop(stop.generation) is not None:
            return None
        key = f"{records.STOP}{stop.generation}"
        put = Put(key, records.write(stop), JOB)
        return Transaction((Absent(key), Unchanged(records.STATE, modified)), (put,))

    def to_keep(self, view: StoreView, *, leads: bool) -> tuple[Put, ...]:
        """Return what is to be kept of a job that is over, and is not yet: the evidence, and by the leader the job.

        These are writes of their own: the last decision and its copy may be more than one request can hold. Raises
        DamagedError.
        """
        job, state = view.job()[0], view.entry(records.STATE)
        if job is None or state is None or not job.is_kept:
            return ()
        found = []
        if self.evidence and self.node.generation == job.with_evidence:
            found.append(Put(f"{records.KEPT}{records.evidence_of(self.node)}", self.evidence, KEPT))
        if leads:
            found.append(Put(f"{records.KEPT}{records.STATE}", state.value, KEPT))
        return tuple(put for put in found if put not in self._kept)

    def keep(self, due: tuple[Put, ...], view: StoreView) -> Transaction:
        """Return the writes of what is `to_keep`."""
        self._keeping = (*self._kept, *due)
        return Transaction((Unchanged(records.STATE, view.job()[1]),), due)

    def kept(self) -> None:
        """The store holds what was to be kept; or the job has gone, and with it that."""
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


CONCEDED = 1.0
"""Seconds for which a node that has just come leaves it to the others to lead: they know whether the job lives."""


class Liveness:
    """What a node knows of whether the job is one that lives.

    Attributes:
        is_new: Whether this node has found no job that goes on.
        has_lived: Whether it has found that somebody is left of that.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience  # seconds after which a leader finds that nobody is left, see `Leader`
        self.is_new, self.has_lived = True, False
        self._is_late = False  # whether an earlier job was met
        self._led = 0, 0.0  # since which revision the leader leads, and since when this node knows

    def reach_store(self, now: float) -> None:
        """Reach the store, for the first time or again: who leads is not known yet."""
        self._led = 0, now

    def prove(self, view: StoreView, own: OwnEntry, now: float, *, is_away: bool) -> None:
        """Find out whether the job lives, from what is known now. ``is_away``: the store does not answer.

        It lives if this node takes part; if its leader has changed it since this node came; or if it has had the same
        leader for longer than such a one takes to find that nobody is left.
        """
        job = view.known_job()
        leader, since = view.leader()
        if self._led[0] != since:
            self._led = since, now
        if job is None or job.phase == "over" or view.is_job_gone():  # the last: it is another one
            return
        is_led = leader not in ("", own.node.id) and not is_away and now >= self._led[1] + 3 * self._patience
        is_changed = own.entered is not None and view.job()[1] > own.revision
        self.has_lived = self.has_lived or is_led or is_changed or job.rank_of(own.node.id) >= 0

    def find_earlier(self, view: StoreView) -> bool:
        """Find out whether the job `is_new`: one that ends when this node comes is an earlier one of its id.

        Returns whether such a one is met, for the first time. Raises DamagedError.
        """
        job, _ = view.job()
        is_over = job is not None and job.phase == "over"
        is_ending = is_over if self.has_lived else view.is_ending()
        self.is_new = self.is_new and (job is None or is_ending)
        if not self.has_lived and view.is_job_gone():  # nobody was left of it
            view.made = 0
            self.is_new = job is None or is_ending
        is_first = self.is_new and job is not None and not self._is_late
        self._is_late = self._is_late or is_first
        return is_first

    def conceded_until(self, view: StoreView, *, hosts: bool | None) -> float:
        """Return until when others are to lead, not this node. ``hosts``: see `Participant`. Raises DamagedError."""
        job, _ = view.job()
        if view.told(records.JOB) == 0 or view.leader()[0]:
            return math.inf
        if job is None and hosts is False:
            return math.inf  # what it is to be, the node says that hosts the store: it is there, and stays if refused
        is_known = self.has_lived or job is None or job.phase == "over"
        return -math.inf if is_known else self._led[1] + CONCEDED
