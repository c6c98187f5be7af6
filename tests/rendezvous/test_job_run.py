"""What a node is told by whoever carries it out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from phalanx._group.restart_policy import AttemptEnd
from phalanx._rendezvous import life, questions, stack_report
from phalanx._rendezvous.life import Found
from phalanx._run.job_run import JobRun, NodeTeam
from phalanx._run.runner import Runner
from phalanx._store.store import Away, Back, Changed

if TYPE_CHECKING:
    from phalanx._rendezvous.life import Effect


class Told:
    """A node that notes what it is told; and a team that notes what is said of the store."""

    wake = float("inf")

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.said: list[str | None] = []
        self.store_is = self.said.append

    def all_told(self, events: list[Any], _now: float) -> list[Effect]:
        self.told.append(events)
        return []

    def ask_leave(self, why: str, _now: float, **_: bool) -> list[Effect]:
        self.told.append(why)
        return []


def carried(it: Told) -> tuple[JobRun, Runner]:
    """A run that has begun, and what carries it."""
    run = JobRun(cast("Any", it), cast("Any", None), cast("Any", it))
    runner = Runner(cast("Any", it), run, signals=False)
    runner._has_begun = True
    return run, runner


def test_waiting_events_of_the_store_arrive_in_order() -> None:
    it = Told()
    run, runner = carried(it)
    events: list[Any] = [Changed("nodes/", revision, (), (f"nodes/{revision}",)) for revision in range(3)]
    for event in (Back(), *events):
        run.submit(run._store_events, event)
    run.ask_leave("preempted")
    run.submit(run._store_events, Away("no answer"))
    while runner._step() is None:
        pass
    assert it.told == [[Back(), *events], "preempted", [Away("no answer")]]
    assert it.said == [None, "no answer"]


class Asks(Told):
    """A node that has its team answer what somebody asks, and returns the answer; a team that knows no question."""

    def answer(self, what: str, generation: int, nodes: int, then: Any) -> None:
        NodeTeam.answer(cast("Any", self), what, generation, nodes, then)

    def ask(self, what: str, tell: Any, _now: float) -> list[Effect]:
        self.tell = tell
        return [life.Answer(what, 0, 2, ("a.1", "b.7"))]

    def has_answered(self, names: tuple[str, ...], data: bytes, _now: float) -> list[Effect]:
        assert names == ("a.1", "b.7")
        return [life.Answered(self.tell, Found(None, {"a": data}))]


def test_an_agent_that_does_not_know_a_question_answers_that() -> None:
    for what, why in (
        (questions.STACKS, "its agent is a program that shows no stacks"),
        ("signal", "its agent does not know that question"),
    ):
        it, found = Asks(), list[Found]()
        run, runner = carried(it)
        run.ask(what, found.append)
        while runner._step() is None:
            pass
        (told,) = found
        assert stack_report.read(told.answers["a"]).why == why


class Starts(Told):
    """A node that starts its workers at once, and ends them when it is asked to; and their team."""

    state = "WAITING"
    poll_seconds = None

    def __init__(self) -> None:
        super().__init__()
        self.done: list[Any] = []
        self.gone: AttemptEnd | None = None

    def ask_stop(self, *_: Any) -> list[Effect]:
        return [life.End(None)]

    def workers_gone(self, *_: Any) -> list[Effect]:
        return [life.Finish("stopped", "", None)]

    def assign(self, *_: Any) -> None:
        self.done.append("assign")

    def begin(self, *_: Any) -> None: ...

    def start(self, *_: Any) -> None:
        self.done.append("start")

    def is_up(self) -> bool:
        return True

    def ended(self) -> AttemptEnd | None:
        return self.gone

    def stop(self, death_signal: int, grace: float) -> None:
        self.done.append((death_signal, grace))
        self.gone = AttemptEnd("stopped")

    def account(self, _end: AttemptEnd) -> tuple[None, None, bytes]:
        return None, None, b""


def test_a_stop_during_a_start_keeps_its_signal_and_grace() -> None:
    it = Starts()
    run, runner = carried(it)
    runner._carry_out([life.Start(cast("Any", SimpleNamespace(generation=0)), 0)])
    run.ask_stop(2, "SIGINT", 77.0)
    runner.carry()
    assert run.finish is not None
    assert run.finish.state == "stopped"
    assert it.done == ["assign", "start", (2, 77.0)]
