"""What is in the store: it is read with types and bounds, and nothing that anybody writes there does any harm."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from phalanx._rendezvous import evidence, records
from phalanx._rendezvous.evidence import JobEvidence, Left
from phalanx._rendezvous.records import MOST_SHARE, DamagedError, End, Job, Member, Node, Refusal, Stop
from phalanx._rendezvous.store_view import StoreView
from phalanx._stacks.dump import Ended, Frame
from phalanx._store.store import Changed, Entry, Snapshot
from phalanx.multiprocessing import Outcome, ProcessFailure, RunProcsResult

if TYPE_CHECKING:
    from phalanx._stacks.dump import Location


KINDS: tuple[Any, ...] = (Node, Job, Stop, Refusal)
NODE = Node("a", "host-a", "10.0.0.1", 2)
STOP = Stop(3, "failure", "b", "host-b", "ValueError", 5, 1)


@pytest.mark.parametrize(
    "record", [NODE, STOP, Refusal("full"), Job(0, "running", 1, 2, (Member("a", "host-a", 2, "x"),))]
)
def test_what_is_written_is_read_back(record: Any) -> None:
    kind: Any = type(record)
    assert records.read(kind, Entry("key", records.write(record), 1, 1)) == record


@given(st.binary(max_size=200))
def test_garbage_is_damaged(data: bytes) -> None:
    for kind in KINDS:
        with pytest.raises(DamagedError, match="job/x: "):
            records.read(kind, Entry("job/x", data, 1, 1))


@pytest.mark.parametrize(
    "data, what",
    [
        (b'{"id":"../a","host":"h","address":"a","nproc":2}', "matching regex"),
        (b'{"id":"a","host":"h","address":"a","nproc":0}', "Expected `int` >= 1"),
        (b'{"id":"a","host":"h","address":"a","nproc":2,"port":65536}', "Expected `int` <= 65535"),
        (b'{"id":"a","host":"' + b"h" * 3000 + b'","address":"a","nproc":2}', "length <= 2000"),
        (b'{"id":"a","host":"h","address":"a","nproc":2,"state":"gone"}', "Invalid enum value 'gone'"),
        (b'{"id":"a\\n","host":"h","address":"a","nproc":2}', "matching regex"),
        (b'{"id":"a","host":"h","address":"a","nproc":2,"step":99999999999999999999}', "Expected `int` <= "),
        (b'{"id":"a","host":"h","address":"a","nproc":2,"uptime":NaN}', "malformed"),
        (b'{"id":"a","host":"\xff","address":"a","nproc":2}', "nodes/a: 'utf-8' codec"),
        (b'{"id":"a","host":"h","address":"a","nproc":2,"x":' + b"[" * 1_000_000, "within each other, too deep"),
        (b"[" * 5000, "Expected `object`, got `array`"),
    ],
)
def test_what_cannot_be_is_named(data: bytes, what: str) -> None:
    with pytest.raises(DamagedError, match=what):
        records.read(Node, Entry("nodes/a", data, 1, 1))


def test_a_job_whose_parts_do_not_fit_together_is_damaged() -> None:
    end, member = End(0, "failure", "a", "host-a"), Member("a", "host-a", 2, "x")
    right = Job(1, "running", 1, 2, (member,), ends=(end,))
    wrong: tuple[tuple[str, dict[str, Any]], ...] = (
        ("generation", {"generation": -1, "ends": ()}),
        ("min_nodes", {"min_nodes": 3}),
        ("members", {"members": ()}),
        ("members", {"members": (member, member)}),
        ("ends", {"ends": ()}),
        ("verdict", {"phase": "over"}),
    )
    for name, changes in wrong:
        data = records.write(records.replace(right, **changes))
        with pytest.raises(DamagedError, match=rf"job/state: `\$\.{name}` does not fit the rest"):
            records.read_job(Entry("job/state", data, 1, 1))
    assert records.read_job(Entry("job/state", records.write(right), 1, 1)) == right


def entry(key: str, at: int, value: bytes = b"", created: int = 0) -> Entry:
    return Entry(key, value, created or at, at)


def test_what_comes_late_or_twice_changes_nothing() -> None:
    view = StoreView()
    early = Changed("job/", 7, (entry("job/leader", 7, b"c"),), ())
    view.take(early)
    assert view.told("job/") == 0  # most is not known yet
    view.take(Snapshot("job/", 5, (entry("job/leader", 4, b"a"),)))
    assert view.leader() == ("c", 7)
    view.take(Changed("job/", 6, (entry("job/leader", 6, b"b"),), ()))
    assert view.leader() == ("c", 7)
    view.take(Changed("job/", 9, (), ("job/leader",)))
    view.take(Changed("job/", 8, (entry("job/leader", 8, b"d"),), ()))
    view.take(early)
    assert view.leader() == ("", 0)
    view.take(Snapshot("job/", 12, (entry("job/leader", 11, b"e"),)))
    assert (view.leader(), view.told("job/")) == (("e", 11), 12)
    view.take(Snapshot("job/", 13, ()))
    assert view.leader() == ("", 0)


def test_a_node_that_cannot_be_read_is_none() -> None:
    view = StoreView()
    good, other = records.write(NODE), records.write(NODE)
    view.take(Snapshot("nodes/", 5, (entry("nodes/a", 3, good), entry("nodes/b", 4, other), entry("nodes/c", 5, b"x"))))
    assert list(view.nodes) == ["a"]  # that of b is a's
    view.take(Changed("nodes/", 6, (entry("nodes/a", 6, b"x"),), ()))
    assert view.nodes == {}
    newer = b'{"id":"c","version":2,"nproc":"many"}'
    view.take(Changed("nodes/", 7, (entry("nodes/c", 7, newer),), ()))
    assert {name: seen.node.version for name, seen in view.nodes.items()} == {"c": 2}  # so that it is refused
    view.forget("nodes/")
    assert view.told("nodes/") == 0


def failure(rank: int, message: str, **more: Any) -> ProcessFailure:
    return ProcessFailure(rank, 4242, 1, "<N/A>", rank=rank, **more).replace(message=message)


def left(node: str, *failures: ProcessFailure, first: int = 0) -> bytes:
    result = RunProcsResult(
        failures={each.local_rank: each for each in failures},
        outcomes={rank: Outcome(rank, 4242 + rank, "stopped", -15, 15) for rank in range(2)},
    )
    return evidence.write(Node(node, f"host-{node}", node, 2), Left(result, f"/logs/{node}"), first)


def test_the_node_that_was_the_first_to_tell_has_the_root_cause() -> None:
    entries = [
        entry("evidence/3/a", 4, left("a", failure(0, "KeyError: 1"))),
        entry("evidence/3/b", 9, left("b", failure(1, "ValueError: 2"), first=4)),
    ]
    found = JobEvidence(entries, STOP)
    assert list(found.failures) == [5, 0]
    root = RunProcsResult(failures=dict(found.failures)).root_cause
    assert root is not None
    assert (root.rank, root.host, root.message) == (5, "host-b", "ValueError: 2")
    assert found.log_dir == "/logs/b"
    assert list(found.outcomes) == [0, 1, 4, 5]


def test_a_lost_connection_is_not_the_cause_of_another_failure() -> None:
    lost = failure(1, "ConnectionResetError: peer", observed_ns=10).replace(evidence_ns=5)
    entries = [
        entry("evidence/3/b", 4, left("b", lost, first=4)),
        entry("evidence/3/a", 9, left("a", failure(0, "KeyError: 1"))),
    ]
    assert list(JobEvidence(entries, STOP).failures) == [0, 5]
    assert JobEvidence(entries, STOP).machine == "host-a a"
    assert JobEvidence(entries[:1], STOP).machine == ""


def test_of_lost_connections_alone_the_lost_host_is_the_cause() -> None:
    cut_off = failure(1, "ConnectionResetError: peer", observed_ns=10).replace(evidence_ns=5)
    stop = Stop(3, "lost", "c", "host-c", "node 2 is lost")
    entries = [entry("evidence/3/b", 4, left("b", cut_off, first=4))]
    assert JobEvidence(entries, stop).lost == ("host-c", "node 2 is lost")
    assert JobEvidence(entries, STOP).lost is None
    entries.append(entry("evidence/3/a", 9, left("a", failure(0, "KeyError: 1"))))
    assert JobEvidence(entries, stop).lost is None


@example(b'{"node":"\xff","host":"h"}')
@example(b'{"x":' + b"[" * 100_000)
@given(st.binary(max_size=200))
def test_damaged_evidence_is_named_and_harms_nothing(data: bytes) -> None:
    found = JobEvidence([entry("evidence/3/a", 4, data), entry("evidence/3/b", 5, left("b", failure(1, "E")))], STOP)
    assert len(found.damaged) == 1
    assert found.damaged[0].startswith("evidence/3/a: ")
    assert list(found.failures) == [1]


MEMBERS = [Member("a", "host-a", 2, "x"), Member("b", "host-b", 2, "x"), Member("c", "host-c", 2, "x")]
REDUCE, READ = Frame("/u/train.py", 41, "all_reduce"), Frame("/u/data.py", 17, "read_batch")
HANG = Stop(3, "hang", "b", "host-b", "Hang", 3, -9)


class Hangs:
    """What a node knows of a hang; of local rank 1, the summary for its own group."""

    def __init__(self, *where: Location, summary: str = "") -> None:
        self.whereabouts = {rank: (one, False) for rank, one in enumerate(where)}
        self.summaries = {1: summary} if summary else {}


def seen(node: str, first: int, hangs: Hangs, *failures: ProcessFailure) -> bytes:
    result = RunProcsResult(failures={each.local_rank: each for each in failures})
    return evidence.write(Node(node, f"host-{node}", node, 2), Left(result, hangs=hangs), first)  # type: ignore[arg-type] # as above


def hang(detail: str) -> ProcessFailure:
    data = {"message": {"message": "Hang", "extraInfo": {"observer": "timer"}}}
    return failure(1, "Hang: 'step' was not left").replace(error_file_data=data, detail=detail)


def test_the_hanging_rank_that_others_wait_for_is_the_cause() -> None:
    entries = [
        entry("evidence/3/b", 4, seen("b", 2, Hangs(REDUCE, REDUCE, summary="both"), hang("2 ms over\nboth\nfiles"))),
        entry("evidence/3/c", 5, seen("c", 4, Hangs(REDUCE, READ, summary="c"), hang("3 ms over\nc\nfiles"))),
        entry("evidence/3/a", 6, seen("a", 0, Hangs(REDUCE, REDUCE))),
    ]
    found = JobEvidence(entries, HANG, MEMBERS)
    assert found.summary == (
        "5 of 6 ranks wait in all_reduce (train.py:41); rank 5 on host host-c is in read_batch (data.py:17)"
    )
    assert list(found.failures) == [5, 3]
    details = [one.detail for one in found.failures.values()]
    assert details == [f"{late} ms over\n{found.summary}\nfiles" for late in (3, 2)]
    assert found.machine == "host-c c"  # not that of b, which was the first to say so


def test_a_machine_that_others_wait_for_is_the_cause() -> None:
    entries = [
        entry("evidence/3/b", 4, seen("b", 2, Hangs(REDUCE, REDUCE), hang("2 ms over\nfiles"))),
        entry("evidence/3/c", 5, seen("c", 4, Hangs(REDUCE, READ))),
        entry("evidence/3/a", 6, seen("a", 0, Hangs(REDUCE, REDUCE))),
    ]
    assert JobEvidence(entries, HANG, MEMBERS).machine == "host-c c"
    assert JobEvidence(entries[::2], HANG, MEMBERS).machine == ""  # nobody is elsewhere, as far as is known
    unread = entry("evidence/3/c", 5, seen("c", 4, Hangs(REDUCE, "it offers none")))
    assert JobEvidence([entries[0], unread, entries[2]], HANG, MEMBERS).machine == ""


def test_of_a_node_that_tells_nothing_nothing_is_known() -> None:
    entries = [
        entry("evidence/3/a", 4, seen("a", 0, Hangs(REDUCE, Ended("exit code 1")))),
        entry("evidence/3/b", 5, seen("b", 2, Hangs("py-spy may not read it (ptrace)", READ), hang("2 ms over"))),
    ]
    assert JobEvidence(entries, HANG, MEMBERS).summary == (
        "rank 0 on host host-a is in all_reduce (train.py:41); "
        "nothing is known of 2 ranks (ranks 4-5 on host host-c); rank 1 on host host-a has ended (exit code 1); "
        "rank 2 on host host-b shows no Python stack (py-spy may not read it (ptrace)); "
        "rank 3 on host host-b is in read_batch (data.py:17)"
    )
    assert JobEvidence(entries[:1], STOP, MEMBERS).summary == ""  # nobody hangs
    lost = JobEvidence([], HANG, MEMBERS)
    assert lost.summary == "nothing is known of 6 ranks (ranks 0-5 on hosts host-a, host-b, host-c)"


def test_places_of_many_ranks_are_few_bytes() -> None:
    member = [Member("a", "host-a", 10_000, "x")]
    most = seen("a", 0, Hangs(*[REDUCE] * 9_999, READ))
    assert len(most) < 1000
    assert JobEvidence([entry("evidence/3/a", 4, most)], HANG, member).summary == (
        "9999 of 10000 ranks are in all_reduce (train.py:41); rank 9999 on host host-a is in read_batch (data.py:17)"
    )
    mixed = seen("a", 0, Hangs(*(Frame("t.py", rank % 7 * rank, "f" * 999) for rank in range(3000))))
    assert len(mixed) < MOST_SHARE // 2
    summary = JobEvidence([entry("evidence/3/a", 4, mixed)], HANG, member).summary
    assert re.search(r"nothing is known of \d+ ranks \(ranks .{1,300} on host host-a\)", summary)
    in_turn = seen("a", 0, Hangs(*[REDUCE, READ] * 5000))
    assert len(in_turn) < MOST_SHARE // 2
    assert "of 10000 ranks are in all_reduce" in JobEvidence([entry("evidence/3/a", 4, in_turn)], HANG, member).summary


def test_who_writes_places_of_others_is_not_heard() -> None:
    runs = b'"ranks":[[0,2147483647],[0,2147483647],[7,3],[1,1]]'
    data = seen("a", 0, Hangs(REDUCE)).replace(b'"ranks":[[0,0]]', runs)
    assert runs in data
    assert JobEvidence([entry("evidence/3/a", 4, data)], HANG, MEMBERS).summary == (
        "2 of 6 ranks are in all_reduce (train.py:41); nothing is known of 4 ranks (ranks 2-5 on hosts host-b, host-c)"
    )
    data = data.replace(b'"all_reduce"', b'"' + b"x" * 401 + b'"')
    assert JobEvidence([entry("evidence/3/a", 4, data)], STOP, MEMBERS).damaged


def failing(count: int, **facts: Any) -> RunProcsResult:
    made = {rank: ProcessFailure(rank, 1, 1, "", rank=rank, host="h").replace(**facts) for rank in range(count)}
    return RunProcsResult(failures=made, outcomes={rank: Outcome(rank, 1, "failed", 1, None) for rank in made})


@pytest.mark.parametrize(
    "facts",
    [
        {"message": "no such file: \udcff"},
        {"traceback": "\0" * 300_000},
        {"timestamp": 10**15},
        {"exitcode": 2**32 - 1},
    ],
    ids=lambda facts: next(iter(facts)),
)
def test_whatever_a_worker_has_left_is_read_by_the_others(facts: dict[str, Any]) -> None:
    data = evidence.write(NODE, Left(failing(1, **facts), "/tmp/\udcff"), 5, "\udcff")
    found = JobEvidence([Entry("evidence/0/a", data, 1, 1)], None)
    assert (found.damaged, list(found.failures), list(found.outcomes)) == ([], [5], [5])


def test_evidence_is_bounded_and_keeps_the_first_failure() -> None:
    told = failing(200, message="ValueError: bad", traceback="x" * 9000)
    for nodes, most in ((1, MOST_SHARE), (1000, records.ALL_SHARES // 1000), (10000, 4096)):
        data = evidence.write(NODE, Left(told), 0, nodes=nodes)
        assert len(data) <= most
        first = JobEvidence([Entry("evidence/0/a", data, 1, 1)], None).failures[0]
        assert (first.message, len(first.traceback) > most // 20) == ("ValueError: bad", True)
