"""What a leader decides, in single cases; `test_simulator` has them all together."""

from __future__ import annotations

import math
from typing import Any

import pytest

from phalanx._rendezvous import membership
from phalanx._rendezvous.candidates import Notes, Seen
from phalanx._rendezvous.membership import Decision, decide
from phalanx._rendezvous.records import MOST_RESTARTS, VERSION, End, Job, Member, Node, Stop, read, replace, write
from phalanx._rendezvous.settings import RANK_TIMEOUT, Rules
from phalanx._rendezvous.store_view import Liveness, StoreView
from phalanx._store.store import Absent, Changed, Delete, Entry, Put, Snapshot, Transaction
from phalanx.agent import RestartPolicy

RULES = Rules(RestartPolicy(1), join_timeout=600.0, last_call=30.0, rejoin_delay=10.0, end_timeout=90.0)


def node(name: str, least: int = 2, most: int = 2, **facts: Any) -> Node:
    facts = {"address": f"10.0.0.{name}", "port": 1000, **facts}
    return Node(name, f"host-{name}", nproc=2, min_nodes=least, max_nodes=most, **facts)


def seen(*nodes: Node) -> dict[str, Seen]:
    return {one.id: Seen(one, index) for index, one in enumerate(nodes)}


def running(*names: str, generation: int = 0, least: int = 2, most: int = 2, **more: Any) -> Job:
    members = tuple(Member(name, f"host-{name}", 2, "default") for name in names)
    return Job(generation, "running", least, most, members, **more)


FORMING = Job(0, "forming", 2, 2)
FAILED = Stop(0, "failure", "b", "host-b", "ValueError: bad", 3, 1)
STOPPED: dict[str, Any] = {"generation": 0, "outcome": "stopped"}
DONE: dict[str, Any] = {"state": "done", "generation": 0, "outcome": "succeeded"}
LOST = Stop(0, "lost", "b", "host-b", "it is gone")


class Leader:
    """Decides at moments that the test names."""

    def __init__(self, job: Job, rules: Rules = RULES) -> None:
        self.job, self.rules, self.notes = job, rules, Notes(job, 0.0)

    def at(self, now: float, *nodes: Node, stop: Stop | None = None, cause: str | None = None) -> Any:
        """What it decides: a `Decision`, of which each test knows what is not None."""
        made = decide(self.job, stop, seen(*nodes), self.notes, now, self.rules, cause=cause)
        self.job = made.job or self.job
        return made


def living() -> Liveness:
    """What a node knows of a job that goes on, and of which somebody is left."""
    known = Liveness(0.0)
    known.is_new, known.has_lived = False, True
    return known


def names(job: Job | None) -> list[str]:
    assert job is not None
    return [member.id for member in job.members]


def test_a_generation_is_formed_when_all_are_there() -> None:
    leader = Leader(FORMING)
    assert leader.at(1, node("a")) == Decision(wake=600)
    made = leader.at(2, node("a"), node("b"))
    assert (made.job.phase, names(made.job)) == ("running", ["a", "b"])
    assert (made.job.address, made.job.port) == ("10.0.0.a", 1000)


def test_more_are_waited_for_before_the_first_generation_alone() -> None:
    facts: dict[str, Any] = {"least": 2, "most": 3}
    leader = Leader(Job(0, "forming", 2, 3))
    assert leader.at(5, node("a", **facts), node("b", **facts)) == Decision(wake=35)
    assert leader.at(34, node("a", **facts), node("b", **facts)) == Decision(wake=35)
    assert names(leader.at(35, node("a", **facts), node("b", **facts)).job) == ["a", "b"]
    again = Leader(Job(1, "forming", 2, 3, ends=(End(0, "lost", "c", "host-c"),)))
    assert names(again.at(1, node("a", **facts), node("b", **facts)).job) == ["a", "b"]
    full = Leader(Job(0, "forming", 2, 3))
    assert names(full.at(1, *(node(name, **facts) for name in "abc")).job) == ["a", "b", "c"]


def test_too_few_for_too_long_is_the_end() -> None:
    leader = Leader(FORMING)
    made = leader.at(600, node("a"))
    assert made.job.phase == "over"
    why = "within 10m00s, 1 of 2 nodes has come: host-a; 1 more is needed"
    assert (made.job.verdict.state, made.job.verdict.why) == ("failed", why)


def test_a_failure_is_followed_when_no_worker_is_left() -> None:
    leader = Leader(running("a", "b"))
    assert leader.at(1, node("a"), node("b"), stop=FAILED) == Decision(wake=91)
    gone = node("a", **STOPPED, uptime=7.0, step=12)
    assert leader.at(2, gone, node("b"), stop=FAILED) == Decision(wake=91)
    cause = node("b", generation=0, outcome="failed", uptime=6.0, error="KeyError: 'x'", rank=2, exitcode=1)
    made = leader.at(3, gone, cause, stop=FAILED)
    assert (made.job.generation, made.job.phase, names(made.job)) == (1, "running", ["a", "b"])
    end = made.job.ends[-1]
    assert (end.error, end.rank, end.uptime, end.step, end.failed) == ("KeyError: 'x'", 2, 7.0, 12, True)
    assert made.job.restarts == (0.0,)
    last = leader.at(9, replace(gone, generation=1), replace(cause, generation=1), stop=replace(FAILED, generation=1))
    assert (last.job.phase, last.job.verdict.why) == ("over", "1 of 1 restart used")


def test_two_jobs_of_one_id_are_told_apart_by_what_they_run() -> None:
    leader = Leader(FORMING)
    first, other = node("c", program="train.py"), node("a", program="eval.py")
    made = leader.at(1, first, other, node("b", program="eval.py", role="evaluator"))
    assert names(made.job) == ["c", "b"]
    assert dict(made.job.programs) == {"default": "train.py", "evaluator": "eval.py"}
    (who, why), *more = made.refused
    assert (who, more) == ("a", [])
    assert why.startswith("the job of this id runs train.py, and this node was told eval.py: another job needs another")
    # Though the first has gone; and where nobody has said what is run, nothing is compared.
    assert not leader.at(2, node("b", role="evaluator"), node("d"), node("e", program="train.py")).refused
    assert leader.at(2, node("b", role="evaluator"), other).refused == ((who, why),)


def test_launches_of_one_id_differ_by_their_arguments() -> None:
    first, other, more = (node(name, program="train.py", args=name[0]) for name in ("a", "b", "a2"))
    leader = Leader(FORMING)
    made = leader.at(1, first, more)
    assert names(made.job) == ["a", "a2"]
    (who, why), *others = leader.at(2, first, more, other, node("a3", program="train.py", args="a")).refused
    assert (who, others) == ("b", [])
    assert why == "the job of this id runs train.py with other arguments: another job needs another run id"
    again = Leader(
        Job(1, "forming", 2, 2, leader.job.members, ends=(End(0, "lost", "a2", "host-a2"),), args=leader.job.args)
    )
    made = again.at(1, replace(first, generation=0), other)  # a job that waits for machines is one of whoever comes
    assert (made.refused, names(made.job)) == ((), ["a", "b"])
    assert made.job.args == (("default", "a"), ("default", "b"))


def test_machines_with_own_arguments_are_not_compared() -> None:
    facts: dict[str, Any] = {"most": 3, "program": "train.py"}
    first, other, more = (node(name, args=name, **facts) for name in "abc")
    leader = Leader(Job(0, "forming", 2, 3))
    leader.at(1, first, other)
    assert names(leader.at(31, first, other).job) == ["a", "b"]
    assert not leader.at(32, first, more).refused  # b is not there
    alone = Leader(running("a", least=1, most=3, args=(("default", "a"),)))
    assert not alone.at(1, node("a", 1, args="a", **facts), node("b", 1, args="b", **facts)).refused


def test_who_has_no_part_in_the_job_does_not_say_what_it_runs() -> None:
    leader = Leader(FORMING)
    strange = node("x", most=3, program="old.py"), node("y", version=VERSION + 1, program="older.py")
    made = leader.at(1, *strange, node("a", program="train.py"), node("b", program="train.py"))
    assert names(made.job) == ["a", "b"]
    assert [name for name, _ in made.refused] == ["x", "y"]


def test_node_0_decides_what_runs_where_ranks_are_given() -> None:
    nodes = node("b", order=1, program="eval.py"), node("a", order=0, program="train.py")
    made = Leader(FORMING).at(1, *nodes)
    assert [name for name, why in made.refused if "runs train.py, and this node was told eval.py" in why] == ["b"]


def test_the_program_of_a_later_role_is_known_before_it_joins() -> None:
    facts: dict[str, Any] = {"least": 1, "most": 3}
    first = node("a", program="train.py", **facts)
    come = [node(name, role="evaluator", program=f"{name}.py", **facts) for name in "bc"]
    leader = Leader(running("a", least=1, most=3, programs=(("default", "train.py"),)))
    made = leader.at(1, first, *come)
    assert [(name, "runs b.py, and this node was told c.py" in why) for name, why in made.refused] == [("c", True)]
    stop = leader.at(11, first, *come).stop
    assert stop is not None
    assert stop.error.startswith("host host-b can take part")
    made = leader.at(12, replace(first, generation=0), *come, stop=stop)
    assert names(made.job) == ["a", "b"]  # c would be refused in the midst of it, and be taken for lost


CUT_OFF: dict[str, Any] = {
    "generation": 0, "outcome": "failed", "error": "ConnectionResetError: gone", "rank": 2, "exitcode": 1,
    "is_cut_off": True,
}  # fmt: skip


def test_another_nodes_failure_causes_a_lost_connection() -> None:
    gone, bad = node("b", **CUT_OFF), node("a", generation=0, outcome="failed", error="ValueError: x", rank=1)
    end = decided(running("a", "b"), FAILED, node("a", **STOPPED), gone)
    assert (end.kind, end.node, end.error, end.failed) == ("failure", "b", "ConnectionResetError: gone", True)
    end = decided(running("a", "b"), FAILED, bad, gone)
    assert (end.kind, end.node, end.error, end.rank, end.failed) == ("failure", "a", "ValueError: x", 1, True)
    end = decided(running("a", "b"), replace(FAILED, node="a", host="host-a"), bad, gone)
    assert (end.node, end.error) == ("a", "ValueError: x")
    end = decided(running("a", "b"), replace(FAILED, kind="hang"), bad, gone)
    assert (end.kind, end.node) == ("hang", "b")


def test_of_a_lost_connection_the_cause_is_a_node_that_is_lost() -> None:
    facts: dict[str, Any] = {"most": 3}
    job = running("a", "b", "c", most=3)
    stopped = node("a", **STOPPED, **facts)
    end = decided(job, FAILED, stopped, node("b", **CUT_OFF, **facts))
    assert (end.kind, end.node, end.rank, end.failed) == ("lost", "c", None, False)
    assert end.error == "node 2 is lost: its agent on host host-c is gone, or cut off"
    bad = node("b", generation=0, outcome="failed", error="ValueError: x", rank=3, **facts)
    assert decided(job, FAILED, stopped, bad).kind == "failure"
    # Of two nodes too few are left: that counts.
    end = decided(running("a", "b"), FAILED, node("b", **CUT_OFF))
    assert (end.kind, end.node, end.failed) == ("lost", "a", True)


def decided(job: Job, stop: Stop, *nodes: Node) -> End:
    made = Leader(job).at(1, *nodes, stop=stop)
    end: End = made.job.ends[-1]
    return end


def test_a_node_that_keeps_its_workers_is_not_awaited_for_ever() -> None:
    leader = Leader(running("a", "b", least=1), RULES)
    facts: dict[str, Any] = {"least": 1}
    gone = node("a", **STOPPED, **facts)
    assert leader.at(1, gone, node("b", **facts), stop=FAILED) == Decision(wake=91)
    assert names(leader.at(91, gone, node("b", **facts), stop=FAILED).job) == ["a"]


@pytest.mark.parametrize("kind", ["lost", "left"])
def test_a_node_that_leaves_costs_no_restart_if_enough_stay(kind: Any) -> None:
    leader = Leader(running("a", "b", "c", most=3), RULES._replace(policy=RestartPolicy(0)))
    facts: dict[str, Any] = {"most": 3, "generation": 0, "outcome": "stopped"}
    stop = Stop(0, kind, "b", "host-b", "it is gone")
    made = leader.at(1, node("a", **facts), node("c", **facts), stop=stop)
    assert (names(made.job), made.job.restarts) == (["a", "c"], ())
    assert not made.job.ends[-1].failed


def test_a_node_whose_entry_is_gone_for_a_moment_is_not_lost() -> None:
    """Etcd may have ended its lease by mistake; it enters again then."""
    leader = Leader(running("a", "b", "c", least=3, most=3), RULES._replace(lost_after=0.5, return_timeout=7.0))
    facts: dict[str, Any] = {"least": 3, "most": 3, "state": "running", "generation": 0}
    a, b, c = (node(name, **facts) for name in "abc")
    assert leader.at(1, a, c) == Decision(wake=1.5)
    assert leader.at(1.2, a, b, c) == Decision()
    assert leader.at(2, a, c) == Decision(wake=2.5)  # the time begins anew
    assert leader.at(2.4, a) == Decision(wake=2.5)
    made = leader.at(2.5, a)
    assert (made.stop.kind, made.stop.node) == ("lost", "b")


def test_a_leader_gives_others_time_to_reach_the_store_again() -> None:
    leader = Leader(running("a", "b"), RULES._replace(lost_after=0.5, return_timeout=7.0))
    leader.notes.regained = 20
    assert leader.at(20, node("a")) == Decision(wake=27)
    made = leader.at(27, node("a"))
    assert (made.stop.kind, made.stop.node) == ("lost", "b")


def test_a_node_back_as_a_generation_ends_is_not_the_cause() -> None:
    leader = Leader(running("a", "b"), RULES._replace(lost_after=0.5, return_timeout=7.0))
    gone = node("a", **CUT_OFF)
    stop = replace(FAILED, node="a", host="host-a")
    assert leader.at(2, gone, stop=stop) == Decision(wake=2.5)
    assert leader.at(2.1, gone, node("b", state="running", generation=0), stop=stop) == Decision(wake=92)
    leader.notes.regained = 3
    assert leader.at(3, gone, stop=stop) == Decision(wake=10)
    made = leader.at(4, gone, node("b", **STOPPED), stop=stop)
    assert (names(made.job), made.job.ends[-1].kind) == (["a", "b"], "failure")


@pytest.mark.parametrize("kind, phase", [("left", "forming"), ("signal", "over")])
def test_a_node_that_is_known_to_have_gone_is_not_waited_for(kind: Any, phase: str) -> None:
    leader = Leader(running("a", "b"), RULES._replace(lost_after=0.5))
    made = leader.at(2, node("a", **STOPPED), stop=Stop(0, kind, "b", "host-b"))
    assert made.job.phase == phase


def test_an_absent_store_counts_though_the_job_has_changed() -> None:
    leader = Leader(FORMING, RULES._replace(return_timeout=7.0))
    leader.at(1, node("a"), node("b"))
    leader.notes.regained = 20  # and the change is told, that was decided before
    assert leader.at(20, node("a")) == Decision(wake=27)


def test_a_node_is_lost_only_where_the_store_has_no_entry_of_it() -> None:
    """It may have come back, and the leader not have been told yet. One that cannot be read is no entry."""
    view, job = StoreView(), running("a", "b")
    view.take(Snapshot("job/", 5, (Entry("job/state", write(job), 5, 5),)))
    view.take(Snapshot("nodes/", 5, (Entry("nodes/a", write(node("a")), 4, 4),)))
    leader = membership.Leader(node("a"), RULES, lambda: 0.0, 3)
    made, _ = leader.decide(view, living(), 10.0)
    assert made is not None
    assert Absent("nodes/b") in made.conditions
    view.take(Changed("nodes/", 6, (Entry("nodes/b", b"?", 6, 6),), ()))
    made, _ = leader.decide(view, living(), 11.0)
    assert made is not None
    assert Absent("nodes/b") not in made.conditions


def test_a_failure_reported_before_a_lost_node_is_the_cause() -> None:
    leader = Leader(running("a", "b"), RULES._replace(lost_after=0.5))
    assert leader.at(1, node("a", state="running")) == Decision(wake=1.5)
    failed = Stop(0, "failure", "a", "host-a", "ValueError: bad", 0, 1)
    ended = node("a", generation=0, outcome="failed", error="ValueError: bad", rank=0, exitcode=1)
    assert leader.at(1.4, ended, stop=failed) == Decision(wake=1.5)
    made = leader.at(1.5, ended, stop=failed)
    assert (made.job.ends[-1].kind, made.job.ends[-1].rank) == ("failure", 0)


def test_too_few_after_a_loss_is_a_failure() -> None:
    here = node("a", **STOPPED)
    made = Leader(running("a", "b"), RULES._replace(policy=RestartPolicy(0))).at(1, here, stop=LOST)
    assert (made.job.verdict.state, made.job.verdict.stop) == ("failed", LOST)
    leader = Leader(running("a", "b"))
    made = leader.at(1, here, stop=LOST)
    assert (made.job.phase, made.job.restarts, made.wake) == ("forming", (0.0,), 601)
    assert names(leader.at(9, here, node("c")).job) == ["a", "c"]


def test_who_comes_when_all_are_gone_begins_anew() -> None:
    made = Leader(running("a", "b"), RULES._replace(policy=RestartPolicy(0))).at(1, node("c"), node("d"), stop=LOST)
    assert names(made.job) == ["c", "d"]


def test_a_spare_takes_the_rank_of_the_node_that_is_gone() -> None:
    stop = Stop(0, "lost", "a", "host-a", "it is gone")
    made = Leader(running("a", "b")).at(1, node("spare"), node("b", **STOPPED), stop=stop)
    assert names(made.job) == ["spare", "b"]


def test_nodes_that_stay_keep_their_ranks_where_there_is_no_gap() -> None:
    facts: dict[str, Any] = {"least": 2, "most": 4, "generation": 0, "outcome": "stopped"}
    leader = Leader(running("a", "b", "c", "d", most=4))
    made = leader.at(1, node("a", **facts), node("c", **facts), node("d", **facts), stop=LOST)
    assert names(made.job) == ["a", "d", "c"]


def test_a_node_that_comes_is_taken_after_a_while() -> None:
    facts: dict[str, Any] = {"least": 1, "most": 3}
    leader = Leader(running("a", least=1, most=3))
    assert leader.at(5, node("a", **facts), node("b", **facts)) == Decision(wake=15)
    made = leader.at(15, node("a", **facts), node("b", **facts))
    assert (made.stop.kind, made.stop.node) == ("grow", "b")
    gone = node("a", **STOPPED, **facts)
    made = leader.at(16, gone, node("b", **facts), stop=made.stop)
    assert (names(made.job), made.job.restarts) == (["a", "b"], ())
    full = Leader(running("a", "b"))
    assert full.at(99, node("a"), node("b"), node("c")) == Decision()


def test_success_is_that_of_all() -> None:
    leader = Leader(running("a", "b"))
    assert leader.at(1, node("a", **DONE), node("b")) == Decision()
    made = leader.at(2, node("a", **DONE), node("b", **DONE))
    assert made.job.verdict.state == "succeeded"
    assert leader.at(3) == Decision()


@pytest.mark.parametrize("phase", ["running", "forming"])
def test_a_signal_ends_the_job(phase: str) -> None:
    stop = Stop(0, "signal", "b", "host-b", "SIGINT", signal=2)
    job = running("a", "b") if phase == "running" else FORMING
    facts: dict[str, Any] = {"generation": 0, "outcome": "stopped"} if phase == "running" else {}
    made = Leader(job).at(1, node("a", **facts), node("b", **facts), stop=stop)
    assert (made.job.phase, made.job.verdict.state, made.job.verdict.stop) == ("over", "stopped", stop)


def test_a_delay_of_the_policy_is_kept() -> None:
    facts: dict[str, Any] = {"generation": 0, "outcome": "stopped", "uptime": 1.0}
    leader = Leader(running("a", "b"), RULES._replace(policy=RestartPolicy(3, backoff=8.0)))
    made = leader.at(10, node("a", **facts), node("b", **facts), stop=FAILED)
    assert (made.job.phase, made.job.delay, made.wake) == ("forming", 8.0, 18.0)
    assert leader.at(17, node("a", **facts), node("b", **facts)) == Decision(wake=18.0)
    assert names(leader.at(18, node("a", **facts), node("b", **facts)).job) == ["a", "b"]


def test_restarts_are_kept_as_ages_for_the_next_leader() -> None:
    facts: dict[str, Any] = {"generation": 1, "outcome": "stopped"}
    job = running("a", "b", generation=1, restarts=(50.0,))
    rules = RULES._replace(policy=RestartPolicy(1, window=60.0))
    stop = replace(FAILED, generation=1)
    late: Any = decide(job, stop, seen(node("a", **facts), node("b", **facts)), Notes(job, 1000.0), 1005.0, rules)
    assert late.job.phase == "over"
    notes = Notes(job, 1000.0)
    made: Any = decide(job, stop, seen(node("a", **facts), node("b", **facts)), notes, 1011.0, rules)
    assert (made.job.phase, made.job.restarts) == ("running", (61.0, 0.0))


def test_a_machine_that_fails_again_and_again_is_left_out() -> None:
    rules = RULES._replace(policy=RestartPolicy(9), exclude_after=2)
    leader = Leader(running("a", "b", least=1), rules)
    facts: dict[str, Any] = {"least": 1, "outcome": "stopped"}
    first = Node("b", nproc=2, port=1000, min_nodes=1, max_nodes=2, host="host-b", address="10.0.0.b", generation=0)
    assert leader.at(1, node("a", generation=0, **facts), first, stop=FAILED).asks
    leader.at(2, node("a", generation=0, **facts), first, stop=FAILED, cause=first.machine)
    again = replace(first, id="b2", generation=1)  # started again there
    assert leader.job.phase == "running"
    leader.job = replace(leader.job, members=(leader.job.members[0], again.member))
    stop = replace(FAILED, generation=1, node="b2")
    leader.at(3, node("a", generation=1, **facts), again, stop=stop, cause=again.machine)
    assert names(leader.job) == ["a"]
    assert leader.job.excluded == (first.machine,)
    third, namesake = replace(first, id="b3", generation=-1), replace(first, id="c", address="10.0.0.c", generation=-1)
    later = leader.at(9, node("a", generation=1, least=1), third, namesake)
    assert later.refused == (("b3", "workers of host host-b were the root cause 2 times in a row"),)


def test_an_unknown_cause_excludes_no_machine() -> None:
    rules = RULES._replace(policy=RestartPolicy(9), exclude_after=1)
    there = node("a", **STOPPED), node("b", generation=0, outcome="failed")
    leader = Leader(running("a", "b"), rules)
    assert leader.at(1, *there, stop=FAILED, cause="").job is not None
    assert (leader.job.phase, leader.job.blamed, leader.job.excluded) == ("running", "", ())
    grow = replace(FAILED, kind="grow")
    assert not Leader(running("a", "b"), rules).at(1, *there, stop=grow).asks
    assert not Leader(running("a", "b")).at(1, *there, stop=FAILED).asks


@pytest.mark.parametrize(
    "stranger, why",
    [
        (node("x", 3, 3), "the job is one of 2 nodes, and this node was told 3"),
        (node("x", 1, 2), "the job is one of 2 nodes, and this node was told 1 to 2"),
        (node("x", version=VERSION + 1), f"the agents of this job write entries of version {VERSION}, and this one"),
        (node("x", order=2), "its node rank is 2, and the job has 2 nodes: 0 to 1"),
    ],
)
def test_who_cannot_take_part_is_told_why(stranger: Node, why: str) -> None:
    made = Leader(FORMING).at(1, stranger, node("a"))
    assert made.job is None
    assert [name for name, _ in made.refused] == ["x"]
    assert made.refused[0][1].startswith(why)


def test_ranks_that_were_given() -> None:
    made = Leader(FORMING).at(1, node("a", order=1), node("b", order=0))
    assert names(made.job) == ["b", "a"]
    made = Leader(Job(0, "forming", 3, 3)).at(1, node("a", 3, 3), node("b", 3, 3, order=1), node("c", 3, 3))
    assert names(made.job) == ["a", "b", "c"]


def test_a_rank_that_is_given_twice_is_waited_for_a_while() -> None:
    leader = Leader(FORMING)
    twice = node("a", order=1), node("b", order=1)
    assert leader.at(1, *twice) == Decision(wake=1 + RANK_TIMEOUT)
    assert leader.at(1 + RANK_TIMEOUT - 1, *twice).refused == ()
    refused = leader.at(1 + RANK_TIMEOUT, *twice).refused
    assert refused == (("b", "its node rank is 1, and so is that of host host-a, which came first"),)
    assert names(leader.at(40, node("b", order=1), node("c", order=0)).job) == ["c", "b"]


def test_survivors_of_sigkill_end_the_job() -> None:
    facts: dict[str, Any] = {"most": 3, "generation": 0, "outcome": "stopped"}
    made = Leader(running("a", "b", "c", most=3)).at(1, node("a", survivors=1, **facts), node("c", **facts), stop=LOST)
    assert "1 worker outlived SIGKILL" in made.job.verdict.why


def test_nothing_is_decided_twice() -> None:
    assert Leader(running("a", "b")).at(1, node("a"), node("b")) == Decision(wake=math.inf)


def test_a_restart_whose_writing_was_lost_is_counted_once() -> None:
    facts: dict[str, Any] = {"generation": 0, "outcome": "stopped", "uptime": 1.0}
    job = running("a", "b")
    notes, rules = Notes(job, 0.0), RULES._replace(policy=RestartPolicy(3, backoff=8.0))
    there = seen(node("a", **facts), node("b", **facts))
    made: Any = None
    for now in (10.0, 11.0, 12.0):
        made = decide(job, FAILED, there, notes, now, rules)
        assert (made.job.restarts, made.wake) == ((0.0,), now + 8)
    assert decide(made.job, None, there, notes, 12.1, rules) == Decision(wake=20.0)
    for now in (20.0, 20.5):  # nor does the wait begin anew, if it is that writing
        again: Any = decide(made.job, None, there, notes, now, rules)
        assert (again.job.phase, again.job.restarts) == ("running", (now - 12.0,))


def test_a_restart_is_as_old_as_the_generation_after_it_at_least() -> None:
    facts: dict[str, Any] = {"generation": 1, "outcome": "stopped", "uptime": 55.0}
    job = running("a", "b", generation=1, restarts=(50.0,))
    rules = RULES._replace(policy=RestartPolicy(1, window=60.0))
    stop = replace(FAILED, generation=1)
    made: Any = decide(job, stop, seen(node("a", **facts), node("b", **facts)), Notes(job, 1000.0), 1001.0, rules)
    assert (made.job.phase, made.job.restarts) == ("running", (105.0, 0.0))


def test_a_rank_that_is_taken_is_refused_while_a_generation_runs() -> None:
    leader = Leader(running("a", "b"))
    there = node("late", order=1), node("a", order=0, state="running"), node("b", order=1, state="running")
    assert leader.at(5, *there) == Decision(wake=5 + RANK_TIMEOUT)
    made = leader.at(5 + RANK_TIMEOUT, *there)  # who takes part keeps it, though the other one's entry is older
    assert ([name for name, _ in made.refused], made.stop) == (["late"], None)
    other = node("later", order=0)
    assert leader.at(6 + RANK_TIMEOUT, *there, other).wake == 6 + 2 * RANK_TIMEOUT  # each has its own time


def test_a_restart_waits_for_a_node_that_has_succeeded() -> None:
    done: dict[str, Any] = {"least": 1, "most": 3, "generation": 0, "outcome": "succeeded"}
    ended = node("a", least=1, most=3, **STOPPED)
    stop = Stop(0, "lost", "c", "host-c", "it is gone")
    leader = Leader(running("a", "b", "c", least=1, most=3))
    assert leader.at(1, ended, node("b", state="done", **done), stop=stop) == Decision(wake=91)
    assert names(leader.at(2, ended, node("b", **done), stop=stop).job) == ["a", "b"]


def test_a_node_that_has_left_after_its_success() -> None:
    left: dict[str, Any] = {"state": "left", "generation": 0, "outcome": "succeeded", "most": 3, "order": 1}
    facts: dict[str, Any] = {"most": 3}
    done = node("a", state="done", generation=0, outcome="succeeded", **facts)
    made = Leader(running("a", "b", most=3)).at(1, done, node("b", **left))
    assert made.job.verdict.state == "succeeded"
    leader = Leader(running("a", "b", most=3))
    here = node("a", state="running", **facts), node("b", **left), node("c", order=1, **facts)
    assert leader.at(1, *here) == leader.at(99, *here) == Decision()  # nobody starts again what has succeeded
    failed = replace(FAILED, node="a")
    ended = node("a", generation=0, outcome="failed", **facts), *here[1:]
    assert names(leader.at(100, *ended, stop=failed).job) == ["a", "c"]


def leads(job: Job | None, *nodes: Node, keep: bool = True) -> Transaction:
    """What is written by a leader that finds a job so."""
    view, leader = StoreView(), membership.Leader(node("a"), RULES._replace(keep=keep), lambda: 0.0, 3)
    state = () if job is None else (Entry("job/state", write(job), 4, 4),)
    view.take(Snapshot("job/", 5, (*state, Entry("job/leader", b"a", 3, 3))))
    view.take(Snapshot("nodes/", 5, tuple(Entry(f"nodes/{one.id}", write(one), 5, 5) for one in nodes)))
    transaction, _ = leader.decide(view, living(), 1.0)
    assert transaction is not None
    return transaction


@pytest.mark.parametrize("keep", [True, False])
def test_the_node_that_makes_a_job_decides_whether_it_is_kept(keep: bool) -> None:
    [first] = leads(None, keep=keep).writes
    assert isinstance(first, Put)
    assert read(Job, Entry("job/state", first.value, 1, 1)).keep is keep
    done = [node(name, state="done", generation=0, outcome="succeeded") for name in "ab"]
    state, *deleted = leads(running("a", "b", keep=keep), *done, keep=not keep).writes
    assert isinstance(state, Put)
    over = read(Job, Entry("job/state", state.value, 1, 1))
    assert (over.phase, over.keep, over.is_kept) == ("over", keep, keep)
    assert deleted == ([Delete("kept/", below=True)] if keep else [])  # an earlier job's, whatever its evidence was


def test_a_job_that_has_never_run_leaves_what_was_kept_before() -> None:
    signal = Stop(0, "signal", "a", "host-a", "SIGINT", signal=2)
    view, leader = StoreView(), membership.Leader(node("a"), RULES, lambda: 0.0, 3)
    entries = Entry("job/state", write(replace(FORMING, keep=True)), 4, 4), Entry("job/stop/0", write(signal), 5, 5)
    view.take(Snapshot("job/", 5, (*entries, Entry("job/leader", b"a", 3, 3))))
    view.take(Snapshot("nodes/", 5, ()))
    transaction, _ = leader.decide(view, living(), 1.0)
    assert transaction is not None
    [state] = transaction.writes
    assert isinstance(state, Put)
    over = read(Job, Entry("job/state", state.value, 1, 1))
    assert (over.phase, over.is_kept) == ("over", False)


def test_many_are_refused_in_several_transactions() -> None:
    view, leader = StoreView(), membership.Leader(node("a"), RULES, lambda: 0.0, 3)
    job = Entry("job/state", write(Job(0, "forming", 2, 2)), 4, 4)
    view.take(Snapshot("job/", 5, (job, Entry("job/leader", b"a", 3, 3))))
    strangers = [node(f"x{number}", 3, 3) for number in range(200)]
    view.take(Snapshot("nodes/", 5, tuple(Entry(f"nodes/{one.id}", write(one), 5, 5) for one in strangers)))
    refused: set[str] = set()
    for revision in range(6, 10):
        transaction, _ = leader.decide(view, living(), 1.0)
        assert transaction is not None
        assert len(transaction.writes) + len(transaction.conditions) < 100  # etcd takes 128
        puts = [put for put in transaction.writes if isinstance(put, Put)]
        refused |= {put.key for put in puts}
        entries = tuple(Entry(put.key, put.value, revision, revision) for put in puts)
        view.take(Changed("job/", revision, entries, ()))
    assert len(refused) == 200
    assert leader.decide(view, living(), 1.0)[0] is None


def test_what_a_policy_allows_is_written_as_the_others_read_it() -> None:
    policy = RestartPolicy(1 << 20, backoff=1e13, backoff_cap=1e13)
    job = running("a", "b", restarts=(1.0,) * MOST_RESTARTS)
    made = Leader(job, RULES._replace(policy=policy)).at(1, node("a", **STOPPED), node("b", **STOPPED), stop=FAILED)
    assert read(Job, Entry("job/state", write(made.job), 1, 1)) == made.job
