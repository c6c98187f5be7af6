"""Collects the stacks of all ranks of a job: this node's questions, and its answers to those of others. Pure.

A node writes its question as one key below ``job/``, which all agents watch, and watches the prefix of the answers.
Each node of the generation that runs takes the stacks of its workers, and writes them while the question is there. When
all have answered, or `PATIENCE` is over, or the generation is, the node deletes the question and the answers. The
stacks of its own workers need no store: it has them though no other node answers. A node has one question at a time:
callers that ask meanwhile wait for the next. It takes the stacks of its workers `INTERVAL` apart, and answers all
questions that are there by then with them.

Equal stacks are written once. An agent writes `MOST_ANSWER` bytes at most, and of many nodes a share of `ALL_BYTES`,
for one of them reads it all. Longer ones are cut, and the answer says so: threads other than the main one are left out
first, then all frames but the innermost, then all but the one that says where a rank is. If that is still too much,
ranks are left out: last those of the place where most are, and those that are alone at theirs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from phalanx._base.clock import format_duration
from phalanx._evidence.describe import cut_middle
from phalanx._rendezvous import records
from phalanx._rendezvous.life import Effect, Found, Look, Looked, Submit, Unwatch, Watch
from phalanx._rendezvous.records import DamagedError, Job, JobRanks, Member, neighbours
from phalanx._rendezvous.settings import MOST_LINE, MOST_NODES
from phalanx._rendezvous.store_view import StoreView
from phalanx._stacks import dump
from phalanx._store.store import OWN, Changed, Created, Delete, Done, Entry, Put, Snapshot, StoreEvent, Transaction

PATIENCE = 5.0
"""Seconds for which answers are waited for."""

INTERVAL = 1.0
"""Seconds from one taking of the stacks of a node to the next."""

MOST_ANSWER = 128 << 10
"""Bytes of a node's answer that is taken; the share of each is less where there are many, see `stack_report`."""

MOST_TOGETHER = 64
"""Questions that are answered with the same stacks; others wait for the next ones."""

_NOT_ASKED = "the store could not be asked"
_RETRY = 1.0  # seconds after which a deletion is tried again


class _Question:
    """A question of this node: who asks in which job, and what has been answered so far."""

    def __init__(self, name: str, job: Job, tells: list[Callable[[Found], None]], ticket: int, until: float) -> None:
        self.name = name
        self.job = job
        self.tells = tells
        self.ticket = ticket  # of its writing; then of its deletion, 0: that is not under way
        self.until = until  # when it ends; then when its deletion may be tried
        self.why = ""  # why no node could be asked
        self.nodes = set(job.ids)
        self.answers: dict[str, bytes] = {}
        self.is_seen = False  # whether the stacks of the workers here were asked for
        self.prefix = f"{records.LOOKS}{name}/"  # of the answers


class StackRequests:
    """The questions of a node, and its answers.

    Args:
        me: The node's id.

    Attributes:
        wake: When to call `settle`, though nothing has happened (monotonic seconds).
    """

    def __init__(self, me: str) -> None:
        self._me = me
        self.wake = math.inf
        self._tickets = 0  # downwards: those of `Writes` go upwards
        self._tells: list[Callable[[Found], None]] = []  # of the next question
        self._count = 0
        self._asked: _Question | None = None
        self._removed: _Question | None = None  # the one whose keys are to be deleted
        self._seen: set[str] = set()  # questions that need no answer of this node any more
        self._looking: tuple[str, ...] = ()  # those that are being answered
        self._next = -math.inf  # when the stacks may be taken again
        self._due: list[Effect] = []

    # --- what happens

    def ask(self, tell: Callable[[Found], None]) -> None:
        """Ask where all ranks are. `Looked` has ``tell`` called."""
        self._tells.append(tell)

    def hear(self, event: StoreEvent, now: float) -> bool:
        """Handle an event of the store. Returns whether it is about a question of this node, and nothing else."""
        asked, removed = self._asked, self._removed
        if isinstance(event, Snapshot | Changed) and event.prefix.startswith(records.LOOKS):
            if asked is not None and event.prefix == asked.prefix:
                for entry in event.entries if isinstance(event, Snapshot) else event.written:
                    node = entry.key.removeprefix(asked.prefix)
                    if node in asked.nodes:  # others have no part in the job
                        asked.answers[node] = entry.value if len(entry.value) <= MOST_ANSWER else b""
        elif isinstance(event, Done) and event.ticket < 0:
            if asked is not None and event.ticket == asked.ticket and not event.made:
                asked.why = _NOT_ASKED
            elif removed is not None and event.ticket == removed.ticket:
                removed.ticket, removed.until = 0, now + _RETRY
                self._removed = removed if event.made is None else None
        else:
            return False
        return True

    def answer(self, looks: Iterable[str], data: bytes, view: StoreView) -> None:
        """Answer questions that are still there."""
        self._looking = ()
        for name in looks:
            entry = view.looks.get(name)
            if self._asked is not None and name == self._asked.name:
                self._asked.answers[self._me] = data
            if entry is not None and not self._is_mine(name):
                put = Put(f"{records.LOOKS}{name}/{self._me}", data, OWN)
                self._submit(Transaction((Created(entry.key, entry.created),), (put,)))

    # --- what follows

    def settle(self, view: StoreView, job: Job | None, now: float, *, is_away: bool) -> list[Effect]:
        """Return what is to be done now.

        ``job``: as it is, None: there is none that this node knows. ``is_away``: whether the store does not answer.
        """
        self.wake = math.inf
        is_running = job is not None and job.phase == "running"
        self._follow(job if is_running else None, now, is_away=is_away)
        if not is_away:
            self._remove(now)
        if is_away:
            self._tell_all(Found(None, {}, "the store does not answer"))
        elif job is None or not is_running:
            self._tell_all(Found(None, {}, "no attempt of the job runs now"))
        else:
            if self._removed is not None and now < self._removed.until:
                self._tell_all(Found(None, {}, _NOT_ASKED))
            elif self._tells and self._asked is None and self._removed is None:
                self._begin(job, now)
            self._look(view, job, now)
        due, self._due = self._due, []
        return due

    def _begin(self, job: Job, now: float) -> None:
        self._count += 1
        name = f"{self._me}.{self._count}"
        tells, self._tells = self._tells, []
        self._tickets -= 1
        asked = self._asked = _Question(name, job, tells, self._tickets, now + PATIENCE)
        put = Put(f"{records.LOOK}{name}", records.write(records.Look(self._me, job.generation)), OWN)
        self._due += [Watch(asked.prefix), Submit(asked.ticket, Transaction((), (put,)))]
        self.wake = min(self.wake, asked.until)

    def _follow(self, running: Job | None, now: float, *, is_away: bool) -> None:
        """See whether what was asked is answered, or cannot be any more."""
        asked = self._asked
        if asked is None:
            return
        missing = len(asked.nodes) - len(asked.answers)
        if not missing:
            why = ""
        elif is_away:
            why = "the store does not answer any more"
        elif running is None or running.generation != asked.job.generation:
            why = "the attempt has ended meanwhile"
        elif asked.why:
            why = asked.why
        elif now >= asked.until:
            why = f"its agent has not answered within {format_duration(PATIENCE)}"
        else:
            self.wake = min(self.wake, asked.until)
            return
        found = Found(asked.job, asked.answers, why)
        self._due += [Looked(tell, found) for tell in asked.tells]
        self._due.append(Unwatch(asked.prefix))
        self._asked, self._removed = None, asked
        asked.ticket, asked.until = 0, -math.inf

    def _tell_all(self, found: Found) -> None:
        tells, self._tells = self._tells, []
        self._due += [Looked(tell, found) for tell in tells]

    def _remove(self, now: float) -> None:
        """Delete a question and its answers: no node answers one that is gone."""
        removed = self._removed
        if removed is None or removed.ticket:
            return
        if now < removed.until:
            self.wake = min(self.wake, removed.until)
            return
        keys = Delete(f"{records.LOOK}{removed.name}"), Delete(removed.prefix, below=True)
        removed.ticket = self._submit(Transaction((), keys))

    def _look(self, view: StoreView, job: Job, now: float) -> None:
        """Have the workers looked at, if somebody asks who has no answer yet."""
        if self._seen and not self._seen.issubset(view.looks):
            self._seen.intersection_update(view.looks)
        asked = self._asked
        mine = asked is not None and not asked.is_seen and asked.job.generation == job.generation
        if self._looking or not (mine or len(self._seen) < len(view.looks)):
            return
        those = {name: self._generation(name, entry) for name, entry in view.looks.items() if name not in self._seen}
        asking = [name for name, generation in those.items() if generation == job.generation]
        if self._me not in job.ids:
            asking, mine = [], False
        if not (asking or mine):
            self._seen.update(name for name, generation in those.items() if generation <= job.generation)
        elif now < self._next:
            self.wake = min(self.wake, self._next)
        else:
            asking = asking[:MOST_TOGETHER]
            self._seen.update(asking)
            if asked is not None and mine:
                asked.is_seen = True
                asking.insert(0, asked.name)
            self._looking = tuple(asking)
            self._next = now + INTERVAL
            self._due.append(Look(job.generation, len(job.members), self._looking))

    def _generation(self, name: str, entry: Entry) -> int:
        """Return the generation that another node asks about; -1: it is no question, or is our own."""
        try:
            return -1 if self._is_mine(name) else records.read(records.Look, entry).generation
        except DamagedError:  # no agent has written it, or one of another release
            return -1

    def _is_mine(self, name: str) -> bool:
        return name.startswith(f"{self._me}.")

    def _submit(self, transaction: Transaction) -> int:
        self._tickets -= 1
        self._due.append(Submit(self._tickets, transaction))
        return self._tickets


ALL_BYTES = 8 << 20
"""Of the answers of all nodes, unless there are so many that `_LEAST_BYTES` of each are more."""

MOST_BYTES = 64 << 20
"""Of what an agent tells a person."""

NONE_SHOWN = "its agent is a program that shows no stacks"

_LEAST_BYTES = 4 << 10
_MOST_RUNS = 4096  # of neighbouring ranks with the same stacks
_INNERMOST = 12  # frames
_MOST_PATH = 200  # characters, where one frame is told

CUTS = (
    "",
    "threads other than the main one are left out",
    f"threads other than the main one are left out, and all but the {_INNERMOST} innermost frames",
    "one frame of each rank is shown",
)
"""What is missing, in words."""

_Rank = Annotated[int, Meta(ge=0, lt=2**31)]
_Ranks = Annotated[tuple[tuple[_Rank, _Rank], ...], Meta(max_length=_MOST_RUNS)]
_Line = Annotated[str, Meta(max_length=MOST_LINE)]


class Stacks(Struct, frozen=True):
    """The stacks of some ranks of the job.

    Attributes:
        ranks: The first and the last of each run of neighbours.
        text: As `_stacks.collect` returns it.
    """

    ranks: _Ranks
    text: Annotated[str, Meta(max_length=MOST_ANSWER)]


class Answer(Struct, frozen=True):
    """Where the ranks of a node are.

    Attributes:
        stacks: Those of ranks that are in none have been left out.
        why: Why there are none; "": there are.
        cut: What is missing of each: an index of `CUTS`.
    """

    stacks: Annotated[tuple[Stacks, ...], Meta(max_length=_MOST_RUNS)] = ()
    why: _Line = ""
    cut: Literal[0, 1, 2, 3] = 0


class Told(Struct, frozen=True):
    """Where the ranks of a job are.

    Attributes:
        generation: The one that was asked for.
        members: Its nodes, by group rank; none: nobody could be asked.
        answers: What they have answered, by their ids.
        why: Why nobody could be asked, or why those that are missing have not answered.
    """

    generation: int = -1
    members: Annotated[tuple[Member, ...], Meta(max_length=MOST_NODES)] = ()
    answers: Annotated[dict[str, Answer], Meta(max_length=MOST_NODES)] = {}
    why: _Line = ""


_answer, _told = msgspec.json.Decoder(Answer), msgspec.json.Decoder(Told)


def write(texts: Mapping[int, str], first_rank: int, nodes: int = 1, why: str = "") -> bytes:
    """Return what one of ``nodes`` answers: the texts of its workers by local rank, which have ranks from the first on.

    ``why``: why there are none.
    """
    most = max(_LEAST_BYTES, min(MOST_ANSWER, ALL_BYTES // nodes))
    together: list[tuple[list[int], str]] = []
    data = b""
    for cut in range(len(CUTS)):
        known = {text: _cut(text, cut) for text in set(texts.values())}
        together = dump.group_equal({first_rank + rank: known[text] for rank, text in texts.items()}, dump.alike)
        data = _write(together, why, cut)
        if len(data) <= most:
            return data
    together.sort(key=lambda group: len(group[0]))
    together = together[-1:] + together[:-1]
    while len(data) > most and together:
        together = together[: len(together) // 2]
        data = _write(together, why, len(CUTS) - 1)
    return data


def read(data: bytes) -> Answer:
    """Return what a node has answered; if that cannot be read, an answer that says so: anybody may have written it.

    >>> read(write({0: "# no Python stack: it has exited"}, 4)).stacks[0].ranks, read(b"[]").why
    (((4, 4),), 'what its agent has answered cannot be read: Expected `object`, got `array`')
    """
    try:
        return _answer.decode(data)
    except msgspec.MsgspecError as error:
        return Answer(why=records.one_line(f"what its agent has answered cannot be read: {error}"))


def tell(found: Found) -> bytes:
    """Return what a person is told of what was found."""
    job = found.job
    if job is None:
        return records.write(Told(why=found.why))
    answers = {node: read(data) for node, data in found.answers.items()}
    return records.write(Told(job.generation, job.members, answers, found.why))


class JobStacks:
    """Where the ranks of a job are.

    Args:
        data: What `tell` has returned.

    Attributes:
        why: Why nothing is known, as no agent has answered; "": see the others.
        ranks: The ranks of the job.
        texts: By rank, its stacks; or why it has shown none, as `_stacks.collect` says that.
        notes: What is missing, a line each.

    Raises DamagedError.
    """

    def __init__(self, data: bytes) -> None:
        try:
            told = _told.decode(data)
        except msgspec.MsgspecError as error:
            raise DamagedError(str(error)) from None
        self.ranks = JobRanks(told.members)
        known = bool(told.members and told.answers)
        self.why = told.why if not known else "" if self.ranks.size else "the job has too many ranks"
        self.texts: dict[int, str] = {}
        self.notes: list[str] = []
        for member in told.members if self.ranks.size else ():
            answer = told.answers.get(member.id)
            own = self.ranks.of_node(member.id)
            missing = told.why if answer is None else answer.why or "it is left out: those of its host are too long"
            self.texts.update(dict.fromkeys(own, f"{dump.NO_STACK}{missing}\n"))
            for one in () if answer is None else answer.stacks:
                for first, last in one.ranks:
                    self.texts.update(dict.fromkeys(range(max(first, own.start), min(last + 1, own.stop)), one.text))
            if answer is not None and answer.cut:
                self.notes.append(f"host {member.host}: {CUTS[answer.cut]}, for all of it is too long")


def _write(together: Iterable[tuple[list[int], str]], why: str, cut: int) -> bytes:
    stacks = tuple(Stacks(neighbours(ranks)[:_MOST_RUNS], text) for ranks, text in together)
    return records.write(Answer(stacks[:_MOST_RUNS], why, cut))  # type: ignore[arg-type] # it is one of the four


def _cut(text: str, cut: int) -> str:
    """Return a text without what is left out at that cut."""
    threads = dump.parse(text)
    if not threads:
        return cut_middle(text, MOST_ANSWER // (2, 8, 64, 256)[cut])
    if not cut:
        return cut_middle(text, MOST_ANSWER // 2)
    first, main = text.partition("\n")[0], threads[-1]
    frames = list(dump.program_frames(main.frames))
    top = dump.top([main])
    if cut > 1:
        frames = frames[:_INNERMOST] + [frame for frame in frames[_INNERMOST:] if frame is top]
    lines = [cut_middle(first, MOST_LINE)] if first.startswith("# ") else []
    lines.append(f"Thread {main.ident:#x} (most recent call first):")
    if cut == len(CUTS) - 1 and top is not None:
        path = top.path if len(top.path) <= _MOST_PATH else os.path.basename(top.path)[-_MOST_PATH:]
        frames = [dump.Frame(path, top.line, cut_middle(top.function, _MOST_PATH))]
    lines += [f'  File "{frame.path}", line {frame.line or "???"} in {frame.function}' for frame in frames]
    return "\n".join([*lines, ""])
