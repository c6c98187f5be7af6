"""Where all ranks are: what nodes write of theirs, within bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx._rendezvous import records, stack_report
from phalanx._rendezvous.life import Found
from phalanx._rendezvous.records import MOST_SHARE, DamagedError, Job, Member
from phalanx._rendezvous.stack_report import Answer, JobStacks
from phalanx._stacks import dump

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
    assert len(data) <= (MOST_SHARE if nodes == 1 else records.share(nodes))
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
        assert len(data) <= (MOST_SHARE if nodes == 1 else 4 << 10)
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
        b'{"stacks": [{"ranks": [], "text": "' + b"x" * (MOST_SHARE + 1) + b'"}]}',
        b'{"why": "' + b"x" * 3000 + b'"}',
    ],
)
def test_what_is_out_of_bounds_is_no_answer(data: bytes) -> None:
    assert stack_report.read(data).why.startswith("what its agent has answered cannot be read: ")


def test_names_that_are_no_unicode_are_written() -> None:
    answer = stack_report.read(stack_report.write({0: text("caf\udce9")}, 0))
    assert answer == Answer((stack_report.Stacks(((0, 0),), text("caf?")),))
