"""What the nodes of a job ask each other, and answer: event by event."""

from __future__ import annotations

import json
from typing import Any

import pytest

from phalanx._rendezvous import life, questions, records
from phalanx._rendezvous.questions import INTERVAL, PATIENCE, STACKS, STATUS, UNDER_WAY
from phalanx._store.store import OWN, Away, Back, Changed, Created, Delete, Done, Entry, Put, Snapshot
from tests.rendezvous.test_node import RUNS, Story, kinds

ASKED = records.write(records.Question("b", 0))
REMOVAL = Delete("job/look/a.1"), Delete("looks/a.1/", below=True)


class Asks(Story):
    """A node, "a", of a job with "b"; and somebody who asks on it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.told: list[life.Found] = []

    def ask(self, what: str = STACKS) -> list[life.Effect]:
        return self.take(self.node.ask(what, self.told.append, self.now))

    def answered(self, answer: Any, data: bytes = b"here") -> list[life.Effect]:
        return self.take(self.node.has_answered(answer.names, data, self.now))

    def answers(self, name: str, node: str, data: bytes) -> list[life.Effect]:
        self.revision += 1
        prefix = f"looks/{name}/"
        return self.tell(Changed(prefix, self.revision, (Entry(f"{prefix}{node}", data, 1, self.revision),), ()))

    def removes(self, key: str) -> list[life.Effect]:
        self.revision += 1
        self.created.pop(key, None)
        return self.tell(Changed("job/", self.revision, (), (key,)))

    def running(self) -> Asks:
        self.run()
        self.asked.clear()
        return self


def written(story: Asks) -> tuple[Any, ...]:
    """The conditions and the writes of what has been asked of the store, and not been answered."""
    return tuple(story.asked[0].transaction)


def only(kind: type[Any], due: list[life.Effect]) -> Any:
    (one,) = [each for each in due if isinstance(each, kind)]
    return one


def test_all_answer_and_nothing_is_left() -> None:
    story = Asks().running()
    due = story.ask()
    assert kinds(due) == ["Watch", "Submit", "Answer"]
    assert due[0] == life.Watch("looks/a.1/")
    put = Put("job/look/a.1", records.write(records.Question("a", 0)), OWN)
    assert written(story) == ((), (put,))
    assert due[2] == life.Answer(STACKS, 0, 2, ("a.1",))
    assert story.node.wake == PATIENCE
    story.answer()
    assert story.writes("job/look/a.1", put.value) == []  # our own workers are being looked at
    assert story.answered(due[2]) == []  # our own answer needs no store
    assert story.answers("a.1", "stranger", b"lies") == []
    due = story.answers("a.1", "b", b"there")
    assert kinds(due) == ["Answered", "Unwatch", "Submit"]
    assert due[0].found == life.Found(RUNS, {"a": b"here", "b": b"there"}, "")  # type: ignore[union-attr] # as kinds says
    assert written(story) == ((), REMOVAL)
    story.answer()
    assert story.removes("job/look/a.1") == []
    assert story.node.wake > 1e9


def test_a_node_that_does_not_answer_is_not_waited_for_for_long() -> None:
    story = Asks().running()
    story.answered(only(life.Answer, story.ask()))
    story.answer()
    assert story.wait(PATIENCE - 0.1) == []
    due = story.wait(0.1)
    assert only(life.Answered, due).found == life.Found(RUNS, {"a": b"here"}, "its agent has not answered within 5.0s")
    assert story.asked[0].transaction.writes == REMOVAL
    assert story.answers("a.1", "b", b"late") == []
    assert story.answer() == []  # the question is gone: no node can answer any more


def test_who_asks_meanwhile_waits_for_the_next_look() -> None:
    story = Asks().running()
    look = only(life.Answer, story.ask())
    assert story.ask() == []
    story.answered(look)
    assert kinds(story.answers("a.1", "b", b"there")) == ["Answered", "Unwatch", "Submit"]
    assert story.ask() == []  # what was asked is to be deleted first
    story.answer()
    due = story.answer()
    assert kinds(due) == ["Watch", "Submit"]
    assert story.node.wake == INTERVAL  # the workers here were looked at just now
    assert only(life.Answer, story.wait(INTERVAL)).names == ("a.2",)
    story.answers("a.2", "b", b"again")
    due = story.answered(life.Answer(STACKS, 0, 2, ("a.2",)))
    assert kinds(due) == ["Answered", "Answered", "Unwatch", "Submit"]  # two have asked


def test_a_node_answers_who_asks() -> None:
    story = Asks().running()
    due = story.writes("job/look/b.1", ASKED)
    assert due == [life.Answer(STACKS, 0, 2, ("b.1",))]
    assert story.writes("job/look/b.1", ASKED) == []  # once
    story.answered(only(life.Answer, due))
    created = story.created["job/look/b.1"]
    assert written(story) == (
        (Created("job/look/b.1", created),), (Put("looks/b.1/a", b"here", OWN),)
    )  # fmt: skip
    story.answer()
    # Those who ask together are answered by one look, a second after the last one.
    assert story.writes("job/look/b.2", ASKED) == []
    assert story.removes("job/look/b.1") == []
    assert story.writes("job/look/c.7", records.write(records.Question("c", 0))) == []
    assert story.node.wake == INTERVAL
    due = story.wait(INTERVAL)
    assert due == [life.Answer(STACKS, 0, 2, ("b.2", "c.7"))]
    assert story.writes("job/look/b.3", ASKED) == []
    story.removes("job/look/b.2")  # who has asked has gone
    story.answered(due[0])
    (answer,) = story.asked
    assert answer.transaction.writes == (Put("looks/c.7/a", b"here", OWN),)
    assert only(life.Answer, story.wait(INTERVAL)).names == ("b.3",)


def test_questions_that_are_not_for_this_node_are_not_answered() -> None:
    story = Asks().running()
    assert story.writes("job/look/b.1", records.write(records.Question("b", 7))) == []
    assert story.writes("job/look/b.2", b"[]") == []
    assert story.writes("job/look/b.3", b'{"node": "b"}') == []
    spare = Asks()
    spare.enter().writes("job/state", records.replace(RUNS, members=RUNS.members[:1]))
    assert spare.writes("job/look/b.1", ASKED) == []
    due = spare.ask()
    assert kinds(due) == ["Watch", "Submit"]  # a spare may ask
    found = only(life.Answered, spare.answers("a.1", "b", b"there")).found
    assert (found.answers, found.why) == ({"b": b"there"}, "")


def test_a_generation_that_ends_meanwhile() -> None:
    story = Asks().running()
    story.answered(only(life.Answer, story.ask()))
    assert kinds(story.writes("job/stop/0", records.Stop(0, "failure", "b", "host-b"))) == [
        "Heard",
        "End",
    ]  # they are there
    ends = (records.End(0, "failure", "b", "host-b"),)
    due = story.writes("job/state", records.replace(RUNS, generation=1, phase="forming", ends=ends))
    assert only(life.Answered, due).found == life.Found(RUNS, {"a": b"here"}, "the attempt has ended meanwhile")
    due = story.ask()
    assert only(life.Answered, due).found == life.Found(None, {}, "no attempt of the job runs now")


def test_a_store_that_is_away() -> None:
    story = Asks().running()
    story.ask()
    due = story.tell(Away("no answer"))
    assert only(life.Answered, due).found == life.Found(RUNS, {}, "the store does not answer any more")
    assert only(life.Answered, story.ask()).found == life.Found(None, {}, "the store does not answer")
    assert story.answered(life.Answer(STACKS, 0, 2, ("a.1",))) == []  # too late
    due = story.tell(Back())
    assert only(life.Submit, due).transaction == ((), REMOVAL)
    due = story.tell(Done(only(life.Submit, due).ticket, None, 0))
    assert (due, story.node.wake) == ([], 1.0)
    assert only(life.Answered, story.ask()).found == life.Found(None, {}, "the store could not be asked")
    due = story.wait(1.0)
    assert only(life.Submit, due).transaction == ((), REMOVAL)
    story.tell(Done(only(life.Submit, due).ticket, True, 99))
    assert only(life.Answered, story.tell(Away("again")) + story.ask()).found.why == "the store does not answer"


def test_a_question_that_was_not_written() -> None:
    story = Asks().running()
    story.ask()
    assert only(life.Answered, story.answer(made=None)).found.why == "the store could not be asked"


def test_nobody_is_told_twice_or_of_too_much() -> None:
    story = Asks().running()
    story.answered(only(life.Answer, story.ask()))
    long = Entry("looks/a.1/b", b"x" * (records.MOST_SHARE + 1), 1, 50)
    due = story.tell(Snapshot("looks/a.1/", 50, (long,)))
    assert only(life.Answered, due).found.answers == {"a": b"here", "b": b""}
    assert story.tell(Snapshot("looks/a.1/", 51, (long,))) == []


# --- questions of the callers

DO = '{"ask":"signal","number":10}'


def question(node: str, what: str = DO, generation: int = 0) -> bytes:
    return records.write(records.Question(node, generation, what))


def asked(due: list[life.Effect]) -> list[tuple[str, tuple[str, ...]]]:
    """What a node is to answer."""
    return [(one.what, one.names) for one in due if isinstance(one, life.Answer)]


def test_each_is_answered_by_itself_and_at_once() -> None:
    story = Asks().running()
    story.writes("job/look/b.1", question("b"))
    created = story.created["job/look/b.1"]
    assert written(story) == ((Created("job/look/b.1", created),), (Put("looks/b.1/a", b"", OWN),))  # it begins
    story.writes("job/look/b.2", question("b"))
    assert story.writes("job/look/b.1", question("b")) == []  # it is the same one
    assert asked(story.answer() + story.answer()) == [(DO, ("b.1",)), (DO, ("b.2",))]  # the same, twice
    due = story.writes("job/look/c.1", ASKED)
    assert asked(due) == [(STACKS, ("c.1",))]
    assert asked(story.writes("job/look/c.2", question("c", STATUS))) == [(STATUS, ("c.2",))]  # no `INTERVAL`
    story.answered(life.Answer(DO, 0, 2, ("b.2",)), b"{}")
    (answer,) = story.asked
    assert answer.transaction.writes == (Put("looks/b.2/a", b"{}", OWN),)
    story.answer()
    assert story.answered(life.Answer(DO, 0, 2, ("b.2",)), b"{}") == []  # once
    assert story.asked == []


def test_no_more_than_some_are_answered_at_a_time() -> None:
    story = Asks().running()
    for number in range(UNDER_WAY + 2):
        story.writes(f"job/look/b.{number}", question("b", f"{number}"))
    begun = [one for _ in range(UNDER_WAY) for one in asked(story.answer())]
    assert [what for what, _ in begun] == [str(number) for number in range(UNDER_WAY)]
    assert story.asked == []
    story.removes("job/look/b.3")  # who has asked it waits no more
    assert asked(story.answer()) == [("8", ("b.8",))]
    story.removes("job/look/b.9")
    story.answered(life.Answer("0", 0, 2, ("b.0",)))
    assert [put.key for one in story.asked for put in one.transaction.writes] == ["looks/b.0/a"]


@pytest.mark.parametrize("made", [False, None])
def test_what_nobody_waits_for_is_not_done(made: bool | None) -> None:
    story = Asks().running()
    story.writes("job/look/b.1", question("b"))
    assert asked(story.answer(made)) == []
    assert asked(story.writes("job/look/b.1", question("b"))) == []
    asker = Asks().running()
    asker.ask(DO)
    asker.answered(life.Answer(DO, 0, 2, ("a.1",)), b"{}")
    assert asker.answers("a.1", "b", b"") == []  # it has only begun
    assert kinds(asker.answers("a.1", "b", b"{}")) == ["Answered", "Unwatch", "Submit"]


def test_a_question_that_comes_late_again_is_not_answered_again() -> None:
    story = Asks().running()
    story.writes("job/look/b.1", question("b"))
    entry = Entry("job/look/b.1", question("b"), story.revision, story.revision)
    assert len(asked(story.answer())) == 1
    story.removes("job/look/b.1")
    story.tell(Snapshot("job/", story.revision + 1, ()))
    story.tell(Changed("job/", entry.modified, (entry,), ()))
    assert story.asked == []


def test_those_who_ask_how_the_ranks_are_share_an_answer() -> None:
    story = Asks().running()
    first = [*story.ask(STATUS), *story.ask(STATUS), *story.ask(DO), *story.ask(DO), *story.ask(STATUS)]
    assert asked(first) == [(STATUS, ("a.1",)), (DO, ("a.2",)), (DO, ("a.3",))]
    story.answered(life.Answer(STATUS, 0, 2, ("a.1",)), b"{}")
    story.answer()
    assert kinds(story.answers("a.1", "b", b"{}")) == ["Answered", "Unwatch", "Submit"]
    for _ in range(2):
        story.answer()
    assert asked(story.answer()) == [(STATUS, ("a.4",))]
    story.answered(life.Answer(STATUS, 0, 2, ("a.4",)), b"{}")
    assert kinds(story.answers("a.4", "b", b"{}")) == ["Answered", "Answered", "Unwatch", "Submit"]


def test_no_more_than_some_are_asked_at_a_time() -> None:
    story = Asks().running()
    due = [effect for _ in range(UNDER_WAY + 1) for effect in story.ask(DO)]
    assert len(asked(due)) == UNDER_WAY
    due = story.wait(PATIENCE)
    assert len([one for one in due if isinstance(one, life.Answered)]) == UNDER_WAY
    answered = [one for _ in range(2 * UNDER_WAY) for one in asked(story.answer())]
    assert answered == [(DO, (f"a.{UNDER_WAY + 1}",))]


def test_between_attempts_the_nodes_of_the_last_one_are_asked() -> None:
    story = Asks()
    story.enter().writes("job/state", records.Job(0, "forming", 2, 2))
    assert only(life.Answered, story.ask(DO)).found == life.Found(None, {}, "no attempt of the job runs now")
    story = Asks().running()
    ends = (records.End(0, "failure", "b", "host-b"),)
    forming = records.replace(RUNS, generation=1, phase="forming", ends=ends)
    story.writes("job/stop/0", records.Stop(0, "failure", "b", "host-b"))
    story.writes("job/state", forming)
    story.asked.clear()
    story.writes("job/look/b.1", question("b"))  # of the one before
    assert story.asked == []
    story.writes("job/look/b.2", question("b", generation=1))
    assert asked(story.answer()) == [(DO, ("b.2",))]
    assert asked(story.writes("job/look/b.3", question("b", STACKS, 1))) == []
    due = story.ask(DO)
    assert asked(due) == [(DO, ("a.1",))]
    story.answered(only(life.Answer, due), b"{}")
    assert only(life.Answered, story.answers("a.1", "b", b"{}")).found == life.Found(forming, {"a": b"{}", "b": b"{}"})
    story.ask(DO)
    due = story.writes("job/state", records.replace(forming, phase="over", verdict=records.Verdict("failed")))
    assert only(life.Answered, due).found.why == "the attempt has ended meanwhile"


def test_what_is_too_long_is_neither_asked_nor_answered() -> None:
    story = Asks().running()
    due = story.ask("x" * (records.MOST_QUESTION + 1))
    assert only(life.Answered, due).found == life.Found(None, {}, "a question has 4096 characters at most")
    assert asked(story.writes("job/look/b.1", question("b", "x" * (records.MOST_QUESTION + 1)))) == []
    story.writes("job/look/b.2", question("b"))
    story.answered(only(life.Answer, story.answer()), b"x" * (records.MOST_SHARE + 1))
    assert story.asked[-1].transaction.writes[0].value == b'{"why":"what its agent has to answer is too long"}'


def test_what_the_nodes_answer_is_one_object() -> None:
    answers = {"a": b'{"ranks": [7]}', "b": b"[1]", "c": b'{"a": ' * 100_000, "e": b"\xff"}
    found = json.loads(questions.tell(life.Found(RUNS, answers, "late")))
    assert (found["generation"], found["why"]) == (0, "late")
    assert [member["host"] for member in found["members"]] == ["host-b", "host-a"]
    answers = found["answers"]
    assert answers["a"] == {"ranks": [7]}
    assert answers["b"] == {"why": "what its agent has answered cannot be read: b: Expected `object`, got `array`"}
    assert [set(answers[node]) for node in "ce"] == [{"why"}] * 2
    nobody = json.loads(questions.tell(life.Found(None, {}, "the store does not answer")))
    assert nobody == {"generation": -1, "members": [], "answers": {}, "why": "the store does not answer"}
