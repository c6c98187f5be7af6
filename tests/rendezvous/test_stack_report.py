"""Where all ranks are: what nodes write of theirs, within bounds, and what they ask and answer, event by event."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx._rendezvous import life, records, stack_report
from phalanx._rendezvous.life import Found, Look, Looked
from phalanx._rendezvous.records import DamagedError, Job, Member, Stop, Verdict, replace
from phalanx._rendezvous.stack_report import INTERVAL, MOST_ANSWER, PATIENCE, Answer, JobStacks
from phalanx._stacks import dump
from phalanx._store.store import OWN, Away, Back, Changed, Created, Delete, Done, Entry, Put, Snapshot
from tests.rendezvous.test_node import RUNS, Story, kinds

MEMBERS = (Member("a", "host-a", 2, "x"), Member("b", "host-b", 3, "x"))
JOB = Job(0, "running", 2, 2, MEMBERS)


def text(function: str, *, threads: int = 0, deep: int = 0, state: str = "") -> str:
    """Stacks as faulthandler writes them."""
    lines = [f"# {state}"] if state else []
    for number in range(threads):
        lines += [f"Thread 0x{number + 2:x} (most recent call first):", f'  File "{"/x" * 200}.py", line 1 in idle', ""]
    lines.append("Thread 0x1 (most recent call first):")
    lines += [f'  File "/v/site-packages/l{"l" * 100}.py", line {line} in inner' for line in range(deep)]
    return "\n".join([*lines, f'  File "/home/me/train.py", line 8 in {function}', ""])


def job(**answers: bytes) -> JobStacks:
    return JobStacks(stack_report.tell(Found(JOB, answers, "its agent has not answered")))


def test_equal_stacks_are_told_once() -> None:
    texts = {
        0: text("reduce"),
        1: text("reduce").replace("0x1", "0x7"),
        2: text("read"),
        3: dump.EXITED,
        4: dump.EXITED,
    }
    answer = stack_report.read(stack_report.write(texts, 10))
    assert [(one.ranks, one.text) for one in answer.stacks] == [
        (((10, 11),), texts[0]), (((12, 12),), texts[2]), (((13, 14),), dump.EXITED)
    ]  # fmt: skip
    assert (answer.why, answer.cut) == ("", 0)


def test_a_rank_that_is_stopped_is_not_put_with_those_that_run() -> None:
    texts = {0: text("reduce"), 1: text("reduce", state="it is stopped, by SIGSTOP or a debugger")}
    assert len(stack_report.read(stack_report.write(texts, 0)).stacks) == 2


@pytest.mark.parametrize(
    "threads, deep, nodes, cut",
    [(0, 0, 1, 0), (3, 0, 1, 0), (20, 0, 1, 1), (20, 60, 1, 2), (20, 60, 400, 3), (0, 0, 400, 0)],
)
def test_what_is_too_long_is_cut_and_every_rank_stays(threads: int, deep: int, nodes: int, cut: int) -> None:
    count = 64 if nodes == 1 else 16
    texts = {rank: text(f"step_{rank}", threads=threads, deep=deep) for rank in range(count)}
    data = stack_report.write(texts, 0, nodes)
    assert len(data) <= (MOST_ANSWER if nodes == 1 else stack_report.ALL_BYTES // nodes)
    answer = stack_report.read(data)
    assert answer.cut == cut
    where = {first: dump.location(one.text) for one in answer.stacks for first, _ in one.ranks}
    assert where == {rank: dump.Frame("/home/me/train.py", 8, f"step_{rank}") for rank in range(count)}


def test_of_too_many_places_the_largest_and_the_rarest_are_told() -> None:
    texts = {rank: text(f"step_{min(rank, 900)}_{'x' * 150}") for rank in range(1000)}
    texts |= {rank: text(f"pair_{rank // 2}_{'x' * 150}") for rank in range(600)}
    data = stack_report.write(texts, 0, 2000)
    assert len(data) <= 4 << 10
    answer = stack_report.read(data)
    assert answer.stacks[0].ranks == ((900, 999),)
    assert answer.stacks[1].ranks == ((600, 600),)
    told = JobStacks(stack_report.tell(Found(Job(0, "running", 1, 1, (Member("a", "h", 1000, "x"),)), {"a": data})))
    assert told.texts[0] == "# no Python stack: it is left out: those of its host are too long\n"
    assert told.notes == ["host h: one frame of each rank is shown, for all of it is too long"]


def test_one_text_that_is_too_long_loses_its_middle() -> None:
    for nodes in (1, 5000):
        data = stack_report.write({0: "# no Python stack: it is no Python program\n" + "x" * (1 << 20)}, 0, nodes)
        assert len(data) <= (MOST_ANSWER if nodes == 1 else 4 << 10)
        assert stack_report.read(data).stacks[0].text.startswith("# no Python stack: it is no Python program\nxx")


def test_the_ranks_of_a_job() -> None:
    told = job(b=stack_report.write({0: text("reduce"), 2: text("read")}, 2, 2))
    assert told.texts == {
        0: "# no Python stack: its agent has not answered\n",
        1: "# no Python stack: its agent has not answered\n",
        2: text("reduce"),
        3: "# no Python stack: it is left out: those of its host are too long\n",
        4: text("read"),
    }
    assert told.ranks.name([0, 4]) == "ranks 0, 4 on hosts host-a, host-b"
    told = job(a=stack_report.write({}, 0, why="its agent is a program that shows no stacks"), b=b"")
    assert told.texts[1] == "# no Python stack: its agent is a program that shows no stacks\n"
    assert told.texts[2].startswith("# no Python stack: what its agent has answered cannot be read: ")
    assert job().why == "its agent has not answered"


def test_a_node_tells_of_its_own_ranks_alone() -> None:
    rogue = b'{"stacks": [{"ranks": [[0, 2147483647]], "text": "lies"}]}'
    assert job(b=rogue).texts[1] == "# no Python stack: its agent has not answered\n"
    assert set(job(b=rogue).texts) == {0, 1, 2, 3, 4}


@given(st.binary(max_size=200))
def test_garbage_is_no_answer(data: bytes) -> None:
    assert stack_report.read(data).why.startswith("what its agent has answered cannot be read: ")
    with pytest.raises(DamagedError):
        JobStacks(data)


@pytest.mark.parametrize(
    "data",
    [
        b'{"cut": 4}',
        b'{"stacks": [{"ranks": [[-1, 2]], "text": ""}]}',
        b'{"stacks": [{"ranks": [[0]], "text": ""}]}',
        b'{"stacks": [{"ranks": [], "text": "' + b"x" * (MOST_ANSWER + 1) + b'"}]}',
        b'{"why": "' + b"x" * 3000 + b'"}',
    ],
)
def test_what_is_out_of_bounds_is_no_answer(data: bytes) -> None:
    assert stack_report.read(data).why.startswith("what its agent has answered cannot be read: ")


def test_names_that_are_no_unicode_are_written() -> None:
    answer = stack_report.read(stack_report.write({0: text("caf\udce9")}, 0))
    assert answer == Answer((stack_report.Stacks(((0, 0),), text("caf?")),))


# --- questions and answers, event by event

ASKED = records.write(records.Look("b", 0))
REMOVAL = Delete("job/look/a.1"), Delete("looks/a.1/", below=True)


class Asks(Story):
    """A node, "a", of a job with "b"; and somebody who asks on it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.told: list[Found] = []

    def ask(self) -> list[life.Effect]:
        return self._take(self.node.ask_look(self.told.append, self.now))

    def looked(self, look: Any, data: bytes = b"here") -> list[life.Effect]:
        return self._take(self.node.has_looked(look.looks, data, self.now))

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
    assert kinds(due) == ["Watch", "Submit", "Look"]
    assert due[0] == life.Watch("looks/a.1/")
    put = Put("job/look/a.1", records.write(records.Look("a", 0)), OWN)
    assert written(story) == ((), (put,))
    assert due[2] == Look(0, 2, ("a.1",))
    assert story.node.wake == PATIENCE
    story.answer()
    assert story.writes("job/look/a.1", put.value) == []  # our own workers are being looked at
    assert story.looked(due[2]) == []  # our own answer needs no store
    assert story.answers("a.1", "stranger", b"lies") == []
    due = story.answers("a.1", "b", b"there")
    assert kinds(due) == ["Looked", "Unwatch", "Submit"]
    assert due[0].found == Found(RUNS, {"a": b"here", "b": b"there"}, "")  # type: ignore[union-attr] # as kinds says
    assert written(story) == ((), REMOVAL)
    story.answer()
    assert story.removes("job/look/a.1") == []
    assert story.node.wake > 1e9


def test_who_does_not_answer_is_waited_for_no_longer_than_agreed() -> None:
    story = Asks().running()
    story.looked(only(Look, story.ask()))
    story.answer()
    assert story.wait(PATIENCE - 0.1) == []
    due = story.wait(0.1)
    assert only(Looked, due).found == Found(RUNS, {"a": b"here"}, "its agent has not answered within 5.0s")
    assert story.asked[0].transaction.writes == REMOVAL
    assert story.answers("a.1", "b", b"late") == []
    assert story.answer() == []  # the question is gone: no node can answer any more


def test_who_asks_meanwhile_waits_for_the_next_look() -> None:
    story = Asks().running()
    look = only(Look, story.ask())
    assert story.ask() == []
    story.looked(look)
    assert kinds(story.answers("a.1", "b", b"there")) == ["Looked", "Unwatch", "Submit"]
    assert story.ask() == []  # what was asked is to be deleted first
    story.answer()
    due = story.answer()
    assert kinds(due) == ["Watch", "Submit"]
    assert story.node.wake == INTERVAL  # the workers here were looked at just now
    assert only(Look, story.wait(INTERVAL)).looks == ("a.2",)
    story.answers("a.2", "b", b"again")
    due = story.looked(Look(0, 2, ("a.2",)))
    assert kinds(due) == ["Looked", "Looked", "Unwatch", "Submit"]  # two have asked


def test_a_node_answers_who_asks() -> None:
    story = Asks().running()
    due = story.writes("job/look/b.1", ASKED)
    assert due == [Look(0, 2, ("b.1",))]
    assert story.writes("job/look/b.1", ASKED) == []  # once
    story.looked(only(Look, due))
    created = story.created["job/look/b.1"]
    assert written(story) == (
        (Created("job/look/b.1", created),), (Put("looks/b.1/a", b"here", OWN),)
    )  # fmt: skip
    story.answer()
    # Those who ask together are answered by one look, a second after the last one.
    assert story.writes("job/look/b.2", ASKED) == []
    assert story.removes("job/look/b.1") == []
    assert story.writes("job/look/c.7", records.write(records.Look("c", 0))) == []
    assert story.node.wake == INTERVAL
    due = story.wait(INTERVAL)
    assert due == [Look(0, 2, ("b.2", "c.7"))]
    assert story.writes("job/look/b.3", ASKED) == []
    story.removes("job/look/b.2")  # who has asked has gone
    story.looked(due[0])
    (answer,) = story.asked
    assert answer.transaction.writes == (Put("looks/c.7/a", b"here", OWN),)
    assert only(Look, story.wait(INTERVAL)).looks == ("b.3",)


def test_questions_that_are_not_for_this_node_are_not_answered() -> None:
    story = Asks().running()
    assert story.writes("job/look/b.1", records.write(records.Look("b", 7))) == []
    assert story.writes("job/look/b.2", b"[]") == []
    assert story.writes("job/look/b.3", b'{"node": "b"}') == []
    spare = Asks()
    spare.enter().writes("job/state", replace(RUNS, members=RUNS.members[:1]))
    assert spare.writes("job/look/b.1", ASKED) == []
    due = spare.ask()
    assert kinds(due) == ["Watch", "Submit"]  # a spare may ask
    found = only(Looked, spare.answers("a.1", "b", b"there")).found
    assert (found.answers, found.why) == ({"b": b"there"}, "")


def test_a_generation_that_ends_meanwhile() -> None:
    story = Asks().running()
    story.looked(only(Look, story.ask()))
    assert kinds(story.writes("job/stop/0", Stop(0, "failure", "b", "host-b"))) == ["Heard", "End"]  # they are there
    ends = (records.End(0, "failure", "b", "host-b"),)
    due = story.writes("job/state", replace(RUNS, generation=1, phase="forming", ends=ends))
    assert only(Looked, due).found == Found(RUNS, {"a": b"here"}, "the attempt has ended meanwhile")
    due = story.ask()
    assert only(Looked, due).found == Found(None, {}, "no attempt of the job runs now")


def test_a_store_that_is_away() -> None:
    story = Asks().running()
    story.ask()
    due = story.tell(Away("no answer"))
    assert only(Looked, due).found == Found(RUNS, {}, "the store does not answer any more")
    assert only(Looked, story.ask()).found == Found(None, {}, "the store does not answer")
    assert story.looked(Look(0, 2, ("a.1",))) == []  # too late
    due = story.tell(Back())
    assert only(life.Submit, due).transaction == ((), REMOVAL)
    due = story.tell(Done(only(life.Submit, due).ticket, None, 0))
    assert (due, story.node.wake) == ([], 1.0)
    assert only(Looked, story.ask()).found == Found(None, {}, "the store could not be asked")
    due = story.wait(1.0)
    assert only(life.Submit, due).transaction == ((), REMOVAL)
    story.tell(Done(only(life.Submit, due).ticket, True, 99))
    assert only(Looked, story.tell(Away("again")) + story.ask()).found.why == "the store does not answer"


def test_a_question_that_was_not_written() -> None:
    story = Asks().running()
    story.ask()
    assert only(Looked, story.answer(made=None)).found.why == "the store could not be asked"


def test_nobody_is_told_twice_or_of_too_much() -> None:
    story = Asks().running()
    story.looked(only(Look, story.ask()))
    long = Entry("looks/a.1/b", b"x" * (MOST_ANSWER + 1), 1, 50)
    due = story.tell(Snapshot("looks/a.1/", 50, (long,)))
    assert only(Looked, due).found.answers == {"a": b"here", "b": b""}
    assert story.tell(Snapshot("looks/a.1/", 51, (long,))) == []


def test_a_job_that_is_over_has_nobody_to_ask() -> None:
    story = Asks().running()
    story.ask()
    over = replace(RUNS, phase="over", verdict=Verdict("failed"))
    due = story.writes("job/state", over)
    assert only(Looked, due).found.why == "the attempt has ended meanwhile"
