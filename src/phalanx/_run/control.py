"""What people ask of a live run: how it is, and that it stops, restarts, pauses, or sends its workers a signal.

`control_socket` carries the questions. Of a job of many machines, the agent that is asked asks those of all nodes,
itself among them, and each answers for its own workers.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

from phalanx._base.text import name_ranks
from phalanx._base.threads import Latch
from phalanx._engine import host_signals
from phalanx._outcomes.failure import signal_name
from phalanx._run.control_socket import VERSION, Asker, ControlSocket, Question, RefusedError, Reply, refusal
from phalanx._run.group_team import GroupTeam

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx._rendezvous.life import Found
    from phalanx._run.job_run import JobRun

OF_NODES = ("status", "signal", "pause", "resume")
"""Questions that each node answers for its own workers."""

_ENDING = ("STOPPING", "SUCCEEDED", "FAILED", "STOPPED")  # states of an agent
_OPEN_WAIT = 1.0  # seconds
_APART = 0.5  # seconds between two signals that are two requests
_NO_STOP = "its launcher is a program that handles no signals now: end that by what it offers"


class Control:
    """Answers the questions about a run, or about a node's part in one, from `open` to `close`.

    Args:
        groups: Its workers.
        warn: Prints a line. Any thread may call it; it does not wait.

    Attributes:
        job: The job of many machines that it is a part of; None: it is none.
        first_rank: The rank of the first worker here.
        status: Returns how it is: what JSON can hold. Called by the socket's thread.
        stops: By which signals to this process it can be stopped; none: it cannot.
        restart: Has another attempt follow, for the reason that it is given; None: it cannot.
    """

    def __init__(self, groups: GroupTeam, warn: Callable[[str], None]) -> None:
        self._groups, self._warn = groups, warn
        self._socket = ControlSocket(self._answer, warn)
        self.job: JobRun | None = None
        self.first_rank = 0
        self.status: Callable[[], dict[str, Any]] = dict
        self.stops: Sequence[int] = ()
        self.restart: Callable[[str], None] | None = None
        self._stopped_by: Asker | None = None
        self._kills = False

    def open(self, folder: str) -> None:
        """Begin to answer, in a run's folder. A further call does nothing."""
        self._socket.open(folder)

    def wait_open(self) -> None:
        """Return once it answers; after a second, if it does not."""
        is_open = Latch()
        self._socket.call(is_open.open)
        is_open.wait(_OPEN_WAIT)

    def close(self) -> None:
        """Answer nobody any more. Idempotent."""
        self._socket.close()

    # --- a stop, which comes as a signal to this process: so it is one in whatever the process does at the time

    def death_signal(self, number: signal.Signals) -> signal.Signals:
        """Return by which signal the workers are to end that a signal to this process stops."""
        return signal.SIGKILL if self._kills else number

    def named(self, number: signal.Signals) -> str:
        """Return what a stop by a signal is called: by who has asked for it, if anybody has.

        >>> control = Control(GroupTeam(lambda attempt, before: None), print)
        >>> control.named(signal.SIGTERM)
        'SIGTERM'
        """
        return number.name if self._stopped_by is None else f"phalanx stop ({self._stopped_by})"

    @property
    def has_stopped(self) -> bool:
        """Whether a stop was asked for here."""
        return self._stopped_by is not None

    def _stop(self, question: Question) -> dict[str, Any]:
        handled = [number for number in self.stops if host_signals.handles(number)]
        if not handled:
            raise RefusedError(_NO_STOP)
        number = signal.SIGTERM if signal.SIGTERM in handled else handled[0]
        kills, is_further = question.arguments.get("now") is True, self.has_stopped
        self._stopped_by = self._stopped_by or question.asker
        self._kills = self._kills or kills
        os.kill(os.getpid(), number)
        if kills and is_further:  # signals that come at once are one: see `host_signals`
            self._socket.call_later(_APART, lambda: os.kill(os.getpid(), number))
        return {}

    def _restart(self, question: Question) -> dict[str, Any]:
        if self.restart is None:
            raise RefusedError("it cannot be restarted from here: its launcher is another program")
        if self.status().get("state") in _ENDING:
            raise RefusedError("it is being stopped, or has ended: no other attempt follows")
        self.restart(f"phalanx restart ({question.asker})")
        return {}

    # --- the socket's thread

    def _answer(self, question: Question, reply: Reply) -> None:
        if question.name in ("stop", "restart"):
            reply(_encoded({"nodes": [(self._stop if question.name == "stop" else self._restart)(question)]}))
        elif question.name not in OF_NODES and (self.job is None or question.name != "stacks"):
            raise RefusedError(f"this launcher does not know the question {question.name!r}")
        elif self.job is None:
            reply(_encoded({"nodes": [self._answer_here(question)]}))
        else:
            self._ask_nodes(self.job, question, reply)

    def _ask_nodes(self, job: JobRun, question: Question, reply: Reply) -> None:
        from phalanx._rendezvous import questions, stack_report
        from phalanx._rendezvous.records import MOST_QUESTION

        if question.name == questions.STACKS:
            job.ask(questions.STACKS, lambda found: reply(stack_report.tell(found)))
            return
        import json

        pid, uid, _ = question.asker
        what = json.dumps({**question.arguments, "pid": pid, "uid": uid, "host": os.uname().nodename})
        what = questions.STATUS if question.name == questions.STATUS else what
        if len(what) > MOST_QUESTION:
            raise RefusedError(f"the question is too long for the nodes of a job: {len(what)} characters")
        job.ask(what, lambda found: reply(nodes_of(found)))

    # --- a node's own workers

    def answer_node(self, what: str, then: Callable[[bytes], None]) -> None:
        """Answer what a node of the job asks, soon: on the socket's thread, so that no other waits for it."""
        self._socket.call(lambda: then(self._answered(what)))

    def _answered(self, what: str) -> bytes:
        import json

        from phalanx._rendezvous import questions

        try:
            arguments: dict[str, Any] = {"ask": what} if what == questions.STATUS else json.loads(what)
            asker = Asker(arguments.get("pid", 0), arguments.get("uid", 0), arguments.get("host", ""))
            name = arguments["ask"]
            if name not in OF_NODES:
                return questions.refuse(questions.NOT_KNOWN)
            return json.dumps(self._answer_here(Question(name, arguments, asker))).encode()
        except RefusedError as error:
            return questions.refuse(str(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, the job does not feel it, and the caller learns it
            return questions.refuse(f"its agent could not answer: {error}")

    def _answer_here(self, question: Question) -> dict[str, Any]:
        """Answer for the workers of this node. Raises RefusedError."""
        if question.name == "status":
            return self.status()
        host = os.uname().nodename
        if question.name == "signal":
            return {"host": host, "ranks": self._signal(question)}
        return {"host": host, "ranks": self._pause(question.asker, pauses=question.name == "pause")}

    def _signal(self, question: Question) -> list[int]:
        group = self._groups.group
        if group is None or not group.is_open:
            raise RefusedError("no worker runs now")
        ranks, number = question.arguments.get("ranks"), question.arguments.get("number")
        if type(number) is not int or not (ranks is None or _are_numbers(ranks)):
            raise RefusedError("expected a signal's `number`, and as `ranks` a list of numbers, or null")
        own = {self.first_rank + rank: rank for rank in group.alive}
        wanted = own if ranks is None else {rank: own[rank] for rank in ranks if rank in own}
        try:
            group.signal(number, wanted.values())
        except ValueError as error:
            raise RefusedError(str(error)) from None
        if wanted:
            self._warn(f"phalanx signal ({question.asker}): {signal_name(number)} to {name_ranks(wanted)}")
        return sorted(wanted)

    def _pause(self, asker: Asker, *, pauses: bool) -> list[int]:
        group = self._groups.group
        if group is None or not group.is_open:
            raise RefusedError("no worker runs now")
        if not pauses and not group.is_paused:
            raise RefusedError("its workers are not paused")
        if not pauses or not group.is_paused:
            (group.pause if pauses else group.resume)()
            if group.is_paused != pauses:
                raise RefusedError("its workers are being ended, or one has failed: they cannot be paused now")
            name, what = ("pause", "are paused until phalanx resume") if pauses else ("resume", "go on")
            self._warn(f"phalanx {name} ({asker}): the workers {what}")
        return sorted(self.first_rank + rank for rank in group.alive)


def _are_numbers(ranks: object) -> TypeGuard[list[int]]:
    return isinstance(ranks, list) and all(type(rank) is int for rank in ranks)


def nodes_of(found: Found) -> bytes:
    """Return the answer of all nodes of a job: of each what it has answered, or why it has not."""
    import json

    from phalanx._rendezvous import questions

    told = json.loads(questions.tell(found))
    members = told.get("members", [])
    if not members:
        return refusal(told["why"])
    nodes, why = [], {}
    for member in members:
        answer = told["answers"].get(member["id"], {"why": told["why"]})
        if "why" in answer:
            why[member["host"]] = answer["why"]
        else:
            nodes.append(answer)
    return _encoded({"nodes": nodes, "why": why})


def _encoded(answer: dict[str, Any]) -> bytes:
    import json  # for which no start is to wait

    return json.dumps({"version": VERSION, **answer}).encode()
