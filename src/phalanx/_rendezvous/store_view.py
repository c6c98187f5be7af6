"""What an agent knows of the keys of its job, from what its store has told. Pure.

A watch tells each change once, and in order; what a broken one tells may come twice, or late. Of two statements on a
key, the one with the higher revision holds.
"""

from __future__ import annotations

from phalanx._rendezvous import records
from phalanx._rendezvous.records import DamagedError, Job, Node, Refusal, Stop, Waiting
from phalanx._rendezvous.rules import Seen
from phalanx._store.store import Changed, Entry, Snapshot


class StoreView:
    """The keys below ``job/``; and those below ``nodes/``, while they are watched."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._deleted: dict[str, int] = {}  # when keys were deleted
        self._told: dict[str, int] = {}  # up to which revision the keys below a prefix are known
        self._job: tuple[int, Job | None] = -1, None
        self._made = 0  # when the job was made
        self._nodes: dict[str, Seen] = {}
        self._entered: dict[str, dict[str, Seen]] = {}  # by node: its entry, and that of its success, by their keys
        self._looks: dict[str, Entry] = {}

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
                self._entries.pop(key, None)
                self._deleted[key] = revision
                self._drop_node(key)
                self._looks.pop(key.removeprefix(records.LOOK), None)
        for entry in told:
            if entry.modified > self._known(entry.key):
                self._entries[entry.key] = entry
                self._deleted.pop(entry.key, None)
                if entry.key.startswith(records.NODES):
                    self._see_node(entry)
                elif entry.key.startswith(records.LOOK):
                    self._looks[entry.key.removeprefix(records.LOOK)] = entry

    def _known(self, key: str) -> int:
        entry = self._entries.get(key)
        return self._deleted.get(key, -1) if entry is None else entry.modified

    def _see_node(self, entry: Entry) -> None:
        name = _name_in(entry.key)
        try:
            node = records.read(Node, entry)
        except DamagedError:
            version = records.version_of(entry)
            if version == records.VERSION:  # somebody else's: no node that takes part
                self._drop_node(entry.key)
                return
            node = Node(name, "", "", 1, version=version)  # it is to be told that it is not taken
        if node.id == name:
            self._entered.setdefault(name, {})[entry.key] = Seen(node, entry.created, entry.modified)
            self._find_node(name)

    def _drop_node(self, key: str) -> None:
        name = _name_in(key)
        if self._entered.get(name, {}).pop(key, None) is not None:
            self._find_node(name)

    def _find_node(self, name: str) -> None:
        """Note how far a node is: what its entry says; if that is gone, that its workers have succeeded."""
        its = self._entered[name]
        found = its.get(f"{records.NODES}{name}") or its.get(records.success_of(name))
        if found is None:
            del self._entered[name]
            self._nodes.pop(name, None)
        else:
            self._nodes[name] = found

    def forget(self, prefix: str) -> None:
        """Forget the keys below a prefix, which is not watched any more."""
        self._told.pop(prefix, None)
        for key in [key for key in self._entries if key.startswith(prefix)]:
            del self._entries[key]
            self._drop_node(key)

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
        return self._nodes

    @property
    def looks(self) -> dict[str, Entry]:
        """What is asked of all nodes, by its id."""
        return self._looks

    def job(self) -> tuple[Job | None, int]:
        """Return the job and the revision of its key; None and 0: there is none yet. Raises DamagedError."""
        entry = self._entries.get(records.STATE)
        if entry is None:
            return None, 0
        if self._job[0] != entry.modified:
            self._job = entry.modified, records.read_job(entry)
        return self._job[1], entry.modified

    def known_job(self) -> Job | None:
        """Return the job; None: there is none yet, or what is there cannot be one."""
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

    def forget_job(self) -> None:
        """Forget the job that was there: the one that is there now, if any, is the first."""
        self._made = 0

    def is_job_gone(self) -> bool:
        """Whether nothing is left of the job that was there when this was asked first; there may be another one."""
        entry = self._entries.get(records.STATE)
        self._made = self._made or (0 if entry is None else entry.created)
        return self.told(records.JOB) > 0 and self._made != (0 if entry is None else entry.created)

    def stop(self, generation: int) -> Stop | None:
        """Return why a generation ends; None: nobody has said. Raises DamagedError."""
        entry = self._entries.get(f"{records.STOP}{generation}")
        return None if entry is None else records.read(Stop, entry)

    def refusal(self, node: str) -> str:
        """Return why a node is not taken; "": it may be."""
        entry = self._entries.get(f"{records.REFUSED}{node}")
        return "" if entry is None else records.read(Refusal, entry).why

    def waiting(self, generation: int) -> tuple[Waiting | None, int]:
        """Return for whom a generation waits, and the revision of its key; None and 0: nobody has said.

        Raises DamagedError.
        """
        entry = self._entries.get(records.WAITING)
        found = None if entry is None else records.read(Waiting, entry)
        return (found, entry.modified) if entry and found and found.generation == generation else (None, 0)

    def is_alone(self, node: str) -> bool:
        """Whether no other node is there that has not left: who has come to an end waits for the next job."""
        job, modified = self.job()
        others = {name: seen for name, seen in self._nodes.items() if name != node}
        if job is not None and job.phase == "over":
            its = {*job.ids}
            others = {name: seen for name, seen in others.items() if seen.created < modified or name in its}
        return all(seen.node.state == "left" for seen in others.values())

    def awaits_lost(self) -> bool:
        """Whether the job has ended with the loss of a node: if that was stopped or cut off, it may come back."""
        job, _ = self.job()
        stop = None if job is None or job.verdict is None else job.verdict.stop
        return stop is not None and stop.kind == "lost" and stop.node not in self._nodes

    def leader(self) -> tuple[str, int]:
        """Return the id of the leader, and the revision at which it became that; "" and 0: there is none."""
        entry = self._entries.get(records.LEADER)
        return ("", 0) if entry is None else (entry.value.decode("utf-8", "replace"), entry.created)


def _name_in(key: str) -> str:
    """Return the node of a key below ``nodes/``."""
    return key.removeprefix(records.NODES).partition("/")[0]
