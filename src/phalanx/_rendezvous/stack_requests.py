"""Where all ranks of a job are, when somebody asks: what a node asks of the others, and what it answers. Pure.

Who asks writes one key below ``job/``, which all agents watch, and watches the prefix below which they answer. Each
node of the generation that runs takes the stacks of its workers, and writes them, while the question is there. When all
have answered, or `PATIENCE` is over, or the generation is, who asks deletes the question and the answers. Its own
workers need no store: where they are is known, though nobody else answers.

A node asks one thing at a time: who wants to know meanwhile waits for the next. It looks at its workers `INTERVAL`
apart, whoever asks, and answers by one look all who have asked by then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from phalanx._base.clock import format_duration
from phalanx._rendezvous import records
from phalanx._rendezvous.life import Effect, Fetch, Found, Look, Looked, Submit, Unwatch, Watch
from phalanx._rendezvous.records import DamagedError, Job
from phalanx._rendezvous.store_view import StoreView
from phalanx._store.store import (
    OWN,
    Changed,
    Created,
    Delete,
    Done,
    Entry,
    Fetched,
    Put,
    Snapshot,
    StoreEvent,
    Transaction,
)

PATIENCE = 5.0
"""Seconds for which answers are waited for."""

INTERVAL = 1.0
"""Seconds between the beginnings of two looks at the workers of a node."""

MOST_ANSWER = 128 << 10
"""Bytes of a node's answer that is taken; the share of each is less where there are many, see `stack_report`."""

MOST_TOGETHER = 64
"""Questions that are answered by one look; others wait for the next one."""

_MOST_DELETED = 64  # keys in one transaction: etcd takes 128 operations at most
_NOT_ASKED = "the store could not be asked"
_AGAIN = 1.0  # seconds after which a deletion is tried again


class _Question:
    """What this node has asked: its id, the generation, who wants to know, and what has been answered so far."""

    def __init__(self, name: str, job: Job, tells: list[Callable[[Found], None]], ticket: int, until: float) -> None:
        self.name = name
        self.job = job
        self.tells = tells
        self.ticket = ticket
        self.until = until
        self.why = ""  # why nobody could be asked
        self.nodes = set(job.ids)
        self.answers: dict[str, bytes] = {}
        self.is_seen = False  # whether the workers here are being looked at for it, or were

    @property
    def prefix(self) -> str:
        """Below which it is answered."""
        return f"{records.LOOKS}{self.name}/"


class _Removal:
    """The deletion of a question of ``me``, and its answers; ``is_sure``: there can be no others than these."""

    def __init__(self, question: _Question, me: str) -> None:
        self.prefix = question.prefix
        answers = [f"{question.prefix}{node}" for node in question.answers if node != me]
        self.keys = [*answers, f"{records.LOOK}{question.name}"]
        self.is_sure = len(question.answers) == len(question.nodes)
        self.is_asked = False  # whether the question is gone, and what is left of the answers is to be read
        self.ticket = 0  # of what has been asked of the store; 0: nothing
        self.at = -math.inf  # when it may be asked


class StackRequests:
    """What a node asks, and answers.

    Args:
        me: The node's id.

    Attributes:
        wake: When `settle` is to be called, though nothing has happened (monotonic seconds).
    """

    def __init__(self, me: str) -> None:
        self._me = me
        self.wake = math.inf
        self._tickets = 0  # downwards: those of `Writes` go upwards
        self._tells: list[Callable[[Found], None]] = []  # who wants to know, and for whom nothing is asked yet
        self._count = 0
        self._asked: _Question | None = None
        self._removal: _Removal | None = None
        self._seen: set[str] = set()  # the questions that need no answer of ours any more
        self._looking: tuple[str, ...] = ()  # those that are being answered
        self._next = -math.inf  # when the workers may be looked at again
        self._mine: list[str] = []  # the questions whose answers of ours may be in the store
        self._due: list[Effect] = []

    # --- what happens

    def ask(self, tell: Callable[[Found], None]) -> None:
        """Note that somebody wants to know where all ranks are. `Looked` tells."""
        self._tells.append(tell)

    def hear(self, event: StoreEvent, now: float) -> bool:
        """See what the store tells. Returns whether it is about what was asked here, and nothing else."""
        if isinstance(event, Snapshot | Changed) and event.prefix.startswith(records.LOOKS):
            self._take(event)
        elif isinstance(event, Done | Fetched) and event.ticket < 0:
            self._note(event, now)
        else:
            return False
        return True

    def _take(self, event: Snapshot | Changed) -> None:
        """Take what nodes have answered."""
        asked = self._asked
        if asked is None or event.prefix != asked.prefix:
            return
        for entry in event.entries if isinstance(event, Snapshot) else event.written:
            node = entry.key.removeprefix(asked.prefix)
            if node in asked.nodes:  # others have no part in the job
                asked.answers[node] = entry.value if len(entry.value) <= MOST_ANSWER else b""

    def _note(self, event: Done | Fetched, now: float) -> None:
        """See the end of something that was asked of the store."""
        asked, removal = self._asked, self._removal
        if asked is not None and event.ticket == asked.ticket and isinstance(event, Done) and not event.made:
            asked.why = _NOT_ASKED
        if removal is None or event.ticket != removal.ticket:
            return
        removal.ticket = 0
        if isinstance(event, Done):
            removal.is_asked = event.made is not None
            is_over = removal.is_asked and removal.is_sure
        else:
            is_over = event.entries is not None
            self._delete([entry.key for entry in event.entries or ()])
        if is_over:
            self._removal = None
        elif isinstance(event, Done) and removal.is_asked:
            removal.at = now
        else:
            removal.at = now + _AGAIN

    def answer(self, looks: Iterable[str], data: bytes, view: StoreView) -> None:
        """Answer questions, if they are there still. What was answered before to others that are gone is deleted."""
        self._looking = ()
        for name in looks:
            entry = view.looks.get(name)
            if self._asked is not None and name == self._asked.name:
                self._asked.answers[self._me] = data
            if entry is None or self._is_mine(name):
                continue
            old = [mine for mine in self._mine if mine not in view.looks][: _MOST_DELETED - 1]
            self._mine = [mine for mine in self._mine if mine not in old] + [name]
            put = Put(f"{records.LOOKS}{name}/{self._me}", data, OWN)
            deletes = [Delete(f"{records.LOOKS}{mine}/{self._me}") for mine in old]
            self._submit(Transaction((Created(entry.key, entry.created),), (put, *deletes)))

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
            if self._removal is not None and now < self._removal.at:
                self._tell_all(Found(None, {}, _NOT_ASKED))
            elif self._tells and self._asked is None and self._removal is None:
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
        self._asked, self._removal = None, _Removal(asked, self._me)

    def _tell_all(self, found: Found) -> None:
        tells, self._tells = self._tells, []
        self._due += [Looked(tell, found) for tell in tells]

    def _remove(self, now: float) -> None:
        """Have deleted what was asked and answered. Once the question is gone, no answer is written any more."""
        removal = self._removal
        if removal is None or removal.ticket:
            return
        if now < removal.at:
            self.wake = min(self.wake, removal.at)
        elif removal.is_asked:
            self._tickets -= 1
            removal.ticket = self._tickets
            self._due.append(Fetch(removal.ticket, removal.prefix))
        else:
            removal.ticket = self._delete(removal.keys)

    def _delete(self, keys: list[str]) -> int:
        """Have keys deleted. Returns the ticket of the last transaction; 0: there is nothing to delete."""
        ticket = 0
        for first in range(0, len(keys), _MOST_DELETED):
            some = keys[first : first + _MOST_DELETED]
            ticket = self._submit(Transaction((), tuple(Delete(key) for key in some)))
        return ticket

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
