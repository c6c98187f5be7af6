"""Asks all nodes of a job something: this node's questions, and its answers to those of others. Pure.

A node writes a question as one key below ``job/``, which all agents watch, and watches the prefix of the answers. Each
node that takes part answers it once, while it is there; its own answer needs no store. When all have answered, or
`PATIENCE` is over, or the generation is, the node deletes the question and the answers.

`STACKS` asks where the ranks of the attempt are that runs, see `stack_report`. A node takes the stacks of its workers
`INTERVAL` apart, and answers all such questions that are there by then with them. Any other text is the callers', and
so is its answer: it may ask for something to be done. Each is answered by itself, in the order of their coming, at most
`UNDER_WAY` at a time; it may be asked between two attempts, too, of the nodes of the last one. Before a node does what
another one asks, it writes an answer without text: so the question was still there. An agent that was stopped does not
do later what nobody waits for any more.

A node asks at most `UNDER_WAY` questions at a time; others wait. Of those in `SHARED`, which change nothing, it asks
one at a time: callers that ask meanwhile share the next one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from phalanx._base.clock import format_duration
from phalanx._rendezvous import records
from phalanx._rendezvous.life import Answer, Answered, Effect, Found, Submit, Unwatch, Watch
from phalanx._rendezvous.records import MOST_QUESTION, MOST_SHARE, DamagedError, Job, Question, Refusal, Told, share
from phalanx._rendezvous.store_view import StoreView
from phalanx._store.store import OWN, Changed, Created, Delete, Done, Entry, Put, Snapshot, StoreEvent, Transaction

STACKS, STATUS = "stacks", "status"
"""Where the ranks are; how the ranks are."""

SHARED = (STACKS, STATUS)
"""Questions that change nothing: those who ask the same at the same time have the same answer."""

PATIENCE = 5.0
"""Seconds for which answers are waited for."""

INTERVAL = 1.0
"""Seconds from one taking of the stacks of a node to the next."""

MOST_TOGETHER = 64
"""Questions that are answered with the same stacks; others wait for the next ones."""

UNDER_WAY = 8
"""Questions that a node asks at a time; and those that it answers at a time, but for stacks."""

NOT_KNOWN = "its agent does not know that question"

_NOT_ASKED = "the store could not be asked"
_RETRY = 1.0  # seconds after which a deletion is tried again
_REMEMBERED = 256  # questions that are not there any more, and are not answered again if they seem to be


def refuse(why: str) -> bytes:
    """Return what a node answers that does not do what it is asked.

    >>> refuse("it is not allowed")
    b'{"why":"it is not allowed"}'
    """
    return records.write(Refusal(records.one_line(why)))


def tell(found: Found) -> bytes:
    """Return a JSON object of what was found: ``generation``, ``members``, ``answers`` by node, and ``why``.

    An answer is the object that the node has written, see `refuse`, also where that cannot be read. See `records.Told`.
    Not for `STACKS`.
    """
    job = found.job
    if job is None:
        return records.write(Told(why=found.why))
    answers = {}
    for node, data in found.answers.items():
        try:
            records.read_object(Entry(node, data, 0, 0))
            why = ""
        except DamagedError as error:
            why = f"what its agent has answered cannot be read: {error}"
        answers[node] = records.Raw(refuse(why) if why else data)
    return records.write(Told(job.generation, job.members, answers, found.why))


class _Asked:
    """A question of this node: who asks what in which job, and what has been answered so far."""

    def __init__(
        self, what: str, name: str, job: Job, tells: list[Callable[[Found], None]], ticket: int, until: float
    ) -> None:
        self.what = what
        self.name = name
        self.job = job
        self.tells = tells
        self.ticket = ticket  # of its writing; then of its deletion, 0: that is not under way
        self.until = until  # when it ends; then when its deletion may be tried
        self.why = ""  # why no node could be asked
        self.nodes = set(job.ids)
        self.answers: dict[str, bytes] = {}
        self.prefix = f"{records.ANSWERS}{name}/"  # of the answers


class Questions:
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
        self._count = 0
        self._waiting: list[tuple[str, list[Callable[[Found], None]]]] = []  # what is to be asked, and for whom
        self._asked: dict[str, _Asked] = {}  # by name
        self._ended: dict[str, _Asked] = {}  # those whose keys are to be deleted
        self._seen: dict[str, None] = {}  # questions of others that have come, or are not for this node
        self._come: dict[str, Question] = {}  # those that are to be answered here, in the order of their coming
        self._under_way: dict[str, tuple[Question, int]] = {}  # those that are being answered, and of how many nodes
        self._begun: dict[int, str] = {}  # those of which it is being written that they are begun, by ticket
        self._taking: tuple[str, ...] = ()  # those for which stacks are being taken
        self._next = -math.inf  # when the stacks may be taken again
        self._due: list[Effect] = []

    # --- what happens

    def ask(self, what: str, tell: Callable[[Found], None]) -> None:
        """Ask all nodes. `Answered` has ``tell`` called."""
        for waiting, tells in self._waiting:
            if waiting == what and what in SHARED:
                tells.append(tell)
                return
        self._waiting.append((what, [tell]))

    def hear(self, event: StoreEvent, now: float) -> bool:
        """Handle an event of the store. Returns whether it is about a question of this node, and nothing else."""
        if isinstance(event, Snapshot | Changed) and event.prefix.startswith(records.ANSWERS):
            asked = self._asked.get(event.prefix.removeprefix(records.ANSWERS).rstrip("/"))
            if asked is not None:
                for entry in event.entries if isinstance(event, Snapshot) else event.written:
                    node = entry.key.removeprefix(asked.prefix)
                    if node in asked.nodes and entry.value:  # others have no part in the job
                        asked.answers[node] = entry.value if len(entry.value) <= MOST_SHARE else b""
        elif isinstance(event, Done) and event.ticket < 0:
            self._done(event, now)
        else:
            return False
        return True

    def _done(self, event: Done, now: float) -> None:
        """Handle what has become of a write."""
        name = self._begun.pop(event.ticket, "")
        question, nodes = self._under_way.get(name, (None, 0))
        if question is not None and event.made:
            self._due.append(Answer(question.what, question.generation, nodes, (name,)))
        elif name:
            self._under_way.pop(name, None)
        for asked in self._asked.values():
            if asked.ticket == event.ticket and not event.made:
                asked.why = _NOT_ASKED
        for ended in list(self._ended.values()):
            if ended.ticket == event.ticket:
                ended.ticket, ended.until = 0, now + _RETRY
                if event.made is not None:
                    del self._ended[ended.name]

    def answer(self, names: tuple[str, ...], data: bytes, view: StoreView) -> None:
        """Answer questions that are still there."""
        self._taking = () if names == self._taking else self._taking
        for name in names:
            question, nodes = self._under_way.pop(name, (None, 0))
            if question is None:  # it was answered, or is not there any more
                continue
            value = data if len(data) <= share(nodes) else refuse("what its agent has to answer is too long")
            entry = view.questions.get(name)
            if name in self._asked:
                self._asked[name].answers[self._me] = value
            elif entry is not None and not self._is_mine(name):
                put = Put(f"{records.ANSWERS}{name}/{self._me}", value, OWN)
                self._submit(Transaction((Created(entry.key, entry.created),), (put,)))

    # --- what follows

    def settle(self, view: StoreView, job: Job | None, now: float, *, is_away: bool) -> list[Effect]:
        """Return what is to be done now.

        ``job``: as it is, None: there is none that this node knows. ``is_away``: whether the store does not answer.
        """
        self.wake = math.inf
        self._follow(job, now, is_away=is_away)
        if not is_away:
            self._remove(now)
        self._ask(job, now, is_away=is_away)
        if job is not None and not is_away:
            self._collect(view, job)
            self._have_answered(view, job, now)
        due, self._due = self._due, []
        return due

    def _ask(self, job: Job | None, now: float, *, is_away: bool) -> None:
        """Ask what can be asked now."""
        waiting, self._waiting = self._waiting, []
        for what, tells in waiting:
            open_ones = [*self._asked.values(), *self._ended.values()]
            why = ""
            if is_away:
                why = "the store does not answer"
            elif len(what) > MOST_QUESTION:
                why = f"a question has {MOST_QUESTION} characters at most"
            elif not _can_be_asked(what, job):
                why = "no attempt of the job runs now"
            elif any(now < ended.until for ended in self._ended.values()):
                why = _NOT_ASKED
            if why or job is None:
                self._due += [Answered(tell, Found(None, {}, why)) for tell in tells]
            elif len(open_ones) >= UNDER_WAY or (what in SHARED and any(one.what == what for one in open_ones)):
                self._waiting.append((what, tells))
            else:
                self._begin(what, tells, job, now)

    def _begin(self, what: str, tells: list[Callable[[Found], None]], job: Job, now: float) -> None:
        self._count += 1
        self._tickets -= 1
        name = f"{self._me}.{self._count}"
        asked = self._asked[name] = _Asked(what, name, job, tells, self._tickets, now + PATIENCE)
        question = Question(self._me, job.generation, what)
        put = Put(f"{records.QUESTION}{name}", records.write(question), OWN)
        self._due += [Watch(asked.prefix), Submit(asked.ticket, Transaction((), (put,)))]
        self.wake = min(self.wake, asked.until)
        if self._me in asked.nodes:
            self._come[name] = question

    def _follow(self, job: Job | None, now: float, *, is_away: bool) -> None:
        """Find which questions are answered, or cannot be any more."""
        for asked in list(self._asked.values()):
            if len(asked.nodes) == len(asked.answers):
                why = ""
            elif is_away:
                why = "the store does not answer any more"
            elif job is None or job.generation != asked.job.generation or not _can_be_asked(asked.what, job):
                why = "the attempt has ended meanwhile"
            elif asked.why:
                why = asked.why
            elif now >= asked.until:
                why = f"its agent has not answered within {format_duration(PATIENCE)}"
            else:
                self.wake = min(self.wake, asked.until)
                continue
            found = Found(asked.job, asked.answers, why)
            self._due += [Answered(tell, found) for tell in asked.tells]
            self._due.append(Unwatch(asked.prefix))
            self._ended[asked.name] = self._asked.pop(asked.name)
            asked.ticket, asked.until = 0, -math.inf

    def _remove(self, now: float) -> None:
        """Delete questions and their answers: no node answers one that is gone."""
        for ended in self._ended.values():
            if now < ended.until:
                self.wake = min(self.wake, ended.until)
            elif not ended.ticket:
                keys = Delete(f"{records.QUESTION}{ended.name}"), Delete(ended.prefix, below=True)
                ended.ticket = self._submit(Transaction((), keys))

    def _collect(self, view: StoreView, job: Job) -> None:
        """Take the questions of others that have come; forget those that are not there any more."""
        new = [(entry.created, name, entry) for name, entry in view.questions.items() if name not in self._seen]
        for _, name, entry in sorted(new, key=lambda one: one[:2]):
            question = self._read(name, entry)
            if question is not None and question.generation > job.generation:
                continue  # the job is not known here as it is there
            self._seen[name] = None
            if question is not None and question.generation == job.generation and self._me in job.ids:
                self._come[name] = question
        gone = [name for name in self._seen if name not in view.questions]
        for name in gone[:-_REMEMBERED]:
            del self._seen[name]
        there = view.questions.keys() | self._asked.keys()
        self._come = {
            name: question
            for name, question in self._come.items()
            if name in there and question.generation == job.generation
        }
        self._under_way = {name: one for name, one in self._under_way.items() if name in there}

    def _have_answered(self, view: StoreView, job: Job, now: float) -> None:
        """Have the questions answered whose turn it is."""
        count = sum(question.what != STACKS for question, _ in self._under_way.values())
        stacks: list[str] = []
        for name, question in list(self._come.items()):
            if not _can_be_asked(question.what, job):
                continue
            if question.what == STACKS:
                stacks.append(name)
            elif count < UNDER_WAY:
                count += 1
                if question.what in SHARED or name in self._asked:
                    self._have_those_answered(question, (name,), job)
                else:
                    self._begin_to_answer(view.questions[name], name, job)
        if not stacks or self._taking:
            return
        if now < self._next:
            self.wake = min(self.wake, self._next)
            return
        self._next, self._taking = now + INTERVAL, tuple(stacks[:MOST_TOGETHER])
        self._have_those_answered(self._come[stacks[0]], self._taking, job)

    def _begin_to_answer(self, entry: Entry, name: str, job: Job) -> None:
        """Write that a question is begun, if it is still there: it is answered when that is done."""
        self._under_way[name] = self._come.pop(name), len(job.members)
        put = Put(f"{records.ANSWERS}{name}/{self._me}", b"", OWN)
        self._begun[self._submit(Transaction((Created(entry.key, entry.created),), (put,)))] = name

    def _have_those_answered(self, question: Question, names: Iterable[str], job: Job) -> None:
        nodes = len(job.members)
        for name in names:
            self._under_way[name] = self._come.pop(name), nodes
        self._due.append(Answer(question.what, job.generation, nodes, tuple(names)))

    def _read(self, name: str, entry: Entry) -> Question | None:
        """Return what another node asks; None: it is no question, or is our own."""
        try:
            return None if self._is_mine(name) else records.read(Question, entry)
        except DamagedError:  # no agent has written it, or one of another release
            return None

    def _is_mine(self, name: str) -> bool:
        return name.startswith(f"{self._me}.")

    def _submit(self, transaction: Transaction) -> int:
        self._tickets -= 1
        self._due.append(Submit(self._tickets, transaction))
        return self._tickets


def _can_be_asked(what: str, job: Job | None) -> bool:
    """Whether a job has nodes that can be asked that now: where the ranks are, only while an attempt runs."""
    return job is not None and bool(job.ids) and job.phase in ("running", *(("forming",) if what != STACKS else ()))
