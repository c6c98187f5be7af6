"""What a node does about what its store and its workers tell, in single cases; `test_simulator` has them together."""

from __future__ import annotations

import math
from typing import Any

import pytest

from phalanx._rendezvous import candidates, evidence, life, records
from phalanx._rendezvous.node import HOST_PATIENCE, PATIENCE, Participant
from phalanx._rendezvous.records import End, Job, Member, Missing, Node, Refusal, Stop, Verdict, replace
from phalanx._rendezvous.settings import Rules
from phalanx._store.store import (
    JOB,
    KEPT,
    OWN,
    Absent,
    Away,
    Back,
    Changed,
    Delete,
    Done,
    Entry,
    Fetched,
    LeaseLost,
    Put,
    Refused,
    Snapshot,
    Unchanged,
)
from phalanx.agent import RestartPolicy
from phalanx.multiprocessing import ProcessFailure, RunProcsResult

ME = Node("a", "host-a", "10.0.0.1", 2, min_nodes=2, max_nodes=2, port=1000)
MEMBERS = (Member("b", "host-b", 2, "default"), Member("a", "host-a", 2, "default"))
RUNS = Job(0, "running", 2, 2, MEMBERS, "10.0.0.2", 1001)
ENDS = (End(0, "failure", "b", "host-b", "exit code 1", 0, 1, failed=True),)
RULES = Rules(RestartPolicy(1), join_timeout=100.0, end_timeout=20.0)


class Story:
    """A node, and a store that is told by the test."""

    def __init__(self, rules: Rules = RULES, *, away: bool = False, **options: Any) -> None:
        self.node = Participant(ME, rules, **options)
        self.now = 0.0
        self.revision = 10
        self.created: dict[str, int] = {}
        self.asked: list[Any] = []
        self.due = self.take(self.node.begin(0.0))
        if away:
            self.tell(Away("no answer"))
        self.tell(Back())
        self.tell(Snapshot("job/", self.revision, ()))

    def take(self, due: list[life.Effect]) -> list[Any]:
        self.asked += [each for each in due if isinstance(each, life.Submit)]
        self.due = due
        return due

    def tell(self, event: Any) -> list[Any]:
        return self.take(self.node.all_told((event,), self.now))

    def writes(self, key: str, record: Any) -> list[Any]:
        self.revision += 1
        value = record if isinstance(record, bytes) else records.write(record)
        entry = Entry(key, value, self.created.setdefault(key, self.revision), self.revision)
        return self.tell(Changed("job/", self.revision, (entry,), ()))

    def answer(self, made: bool | None = True) -> list[Any]:
        self.revision += 1
        return self.tell(Done(self.asked.pop(0).ticket, made, self.revision))

    def wait(self, seconds: float) -> list[Any]:
        self.now += seconds
        return self.take(self.node.tick(self.now))

    def gone(self, outcome: Any, evidence: bytes = b"") -> list[Any]:
        """The workers are gone."""
        return self.take(self.node.workers_gone(replace(ME, outcome=outcome), evidence, self.now))

    def entry(self) -> Node:
        put = self.asked[-1].transaction.writes[0]
        return records.read(Node, Entry(put.key, put.value, 1, 1))

    def enter(self) -> Story:
        self.answer()
        self.writes("job/leader", b"b")
        self.asked.clear()
        return self

    def run(self) -> Story:
        self.enter().writes("job/state", RUNS)
        return self


def kinds(due: list[life.Effect]) -> list[str]:
    return [type(each).__name__ for each in due]


def test_it_enters_and_leads_if_nobody_does() -> None:
    story = Story()
    assert [put.key for put in story.asked[0].transaction.writes] == ["nodes/a"]
    story.answer()
    lead = story.asked[0].transaction
    assert (lead.conditions, lead.writes) == ((Absent("job/leader"),), (Put("job/leader", b"a", OWN),))
    story.answer()
    due = story.writes("job/leader", b"a")
    assert kinds(due) == ["Watch"]
    due = story.tell(Snapshot("nodes/", story.revision, (Entry("nodes/a", records.write(ME), 11, 11),)))
    assert Absent("job/state") in story.asked[0].transaction.conditions


def test_a_job_is_begun_by_the_node_that_hosts_its_store() -> None:
    story = Story(hosts=False)
    story.answer()
    assert story.asked == []
    story.writes("job/state", replace(FORMS, max_nodes=2))
    story.wait(RULES.join_timeout / 2)
    assert [put.key for asked in story.asked for put in asked.transaction.writes] == ["job/leader"]
    hosting = Story(hosts=True)
    hosting.answer()
    assert [put.key for put in hosting.asked[0].transaction.writes] == ["job/leader"]


FORMS = Job(0, "forming", 2, 4)


def test_a_leader_reports_which_nodes_are_missing_until_when() -> None:
    story = Story(RULES._replace(last_call=50.0))
    story.answer()
    story.answer()
    story.writes("job/leader", b"a")
    story.tell(Snapshot("nodes/", story.revision, (Entry("nodes/a", records.write(ME), 11, 11),)))
    story.answer()
    story.writes("job/state", replace(FORMS, min_nodes=2, max_nodes=2))
    story.asked.clear()
    assert story.wait(2.9) == []
    story.wait(0.1)
    (asked,) = story.asked
    assert asked.transaction.conditions == (Unchanged("job/state", story.revision),)
    (put,) = asked.transaction.writes
    told = Missing(0, "1 of 2 nodes has come: host-a; 1 more is needed", -1, 97.0)
    assert (put.key, records.read(Missing, Entry(put.key, put.value, 1, 1)), put.lease) == ("job/waiting", told, JOB)
    assert story.answer() == []
    assert story.writes("job/waiting", told) == [told]
    assert story.wait(9.9) == []
    assert replace(told, seconds=87.0) in story.wait(0.1)


def test_a_node_says_who_is_missing_as_the_leader_has_it() -> None:
    story = Story().enter()
    story.writes("job/state", FORMS)
    story.writes("job/waiting", Missing(7, "of another generation", -1, 97.0))
    assert story.wait(3.0) == []
    told = Missing(0, "2 of 2 to 4 nodes have come: a, b; 2 more may come", -1, 30.0, is_enough=True)
    assert story.writes("job/waiting", told) == [told]
    assert story.wait(5.0) == []
    more = replace(told, words="3 of 2 to 4 nodes have come: a, b, c; 1 more may come", seconds=25.0)
    assert story.writes("job/waiting", more) == [more]
    assert story.writes("job/waiting", b"[]")[-1].state == "damaged"


def test_it_starts_as_the_job_says_and_tells_of_a_failure_once() -> None:
    story = Story().run()
    assert life.Start(RUNS, 1) in story.due
    stop = Stop(0, "failure", "a", "host-a", "exit code 1", 2, 1)
    story.take(story.node.workers_failed(stop, story.now))
    told = story.asked[0].transaction
    assert told.conditions == (Absent("job/stop/0"), Unchanged("job/state", story.revision))
    assert told.writes == (Put("job/stop/0", records.write(stop), JOB),)
    story.writes("job/stop/0", replace(stop, node="b"))  # another one was the first
    story.answer(made=False)
    assert story.asked == []
    story.gone("failed", b"left")
    assert (story.entry().state, story.entry().generation, story.entry().outcome) == ("ready", 0, "failed")
    assert story.asked[0].transaction.writes[1] == Put("evidence/0/a", b"left", JOB)


def test_a_lease_that_is_lost_costs_no_workers() -> None:
    story = Story().run()
    story.tell(Away("no answer"))
    story.wait(50)
    story.tell(LeaseLost())
    story.tell(Back())
    assert story.node.state == "RUNNING"
    assert (story.entry().state, story.entry().generation) == ("running", 0)
    assert "End" not in kinds(story.due)


def test_a_job_that_has_gone_on_without_it_does() -> None:
    story = Story().run()
    story.tell(Away("no answer"))
    story.tell(LeaseLost())
    story.tell(Back())
    due = story.writes("job/state", replace(RUNS, generation=1, members=MEMBERS[:1], ends=ENDS))
    assert life.End(None) in due
    story.answer()
    story.gone("stopped")
    assert (story.node.state, story.entry().state) == ("WAITING", "ready")


def test_a_node_reports_workers_that_end_late_before_ready() -> None:
    story = Story().run()
    story.writes("job/stop/0", Stop(0, "failure", "b", "host-b", "exit code 1", 0, 1))
    assert story.asked == []
    story.writes("job/state", replace(RUNS, generation=1, phase="forming", ends=ENDS))  # it is not waited for any more
    assert (story.node.state, story.entry().state, story.entry().generation) == ("STOPPING", "running", 0)
    story.answer()
    story.writes("job/state", replace(RUNS, generation=1, members=MEMBERS[:1], ends=ENDS))
    assert story.asked == []  # once
    story.gone("stopped")
    assert (story.node.state, story.entry().state) == ("WAITING", "ready")


ANOTHER = Entry("job/state", records.write(replace(RUNS, members=MEMBERS[:1])), 90, 91)


@pytest.mark.parametrize("left", [(), (ANOTHER, Entry("job/leader", b"b", 89, 89))], ids=["nothing", "another job"])
def test_a_job_of_which_nothing_is_left_is_over(left: tuple[Entry, ...]) -> None:
    story = Story().run()
    due = story.tell(Snapshot("job/", 92, left))
    assert kinds(due) == ["End"]
    story.gone("stopped")
    finish = finish_of(story.due)
    assert finish.state == "unknown"


def test_it_waits_for_the_others_and_then_leaves() -> None:
    story = Story(barrier=7.0).run()
    story.gone("succeeded")
    assert (story.node.state, story.entry().state) == ("DONE", "done")
    put = story.asked[-1].transaction.writes[1]
    assert (put.key, put.lease) == ("nodes/a/done", JOB)  # it stays when the node has gone
    story.answer()
    assert story.node.wake == 7.0
    assert story.wait(7) == [life.Finish("succeeded", "", RUNS)]


def test_the_end_of_the_job_brings_what_the_workers_have_left() -> None:
    story = Story().run()
    stop = Stop(0, "failure", "b", "host-b", "exit code 1", 0, 1)
    story.writes("job/stop/0", stop)
    story.gone("stopped", b"mine")
    story.answer()
    over = replace(RUNS, generation=1, phase="over", ends=ENDS, verdict=Verdict("failed", "1 of 1 restart used", stop))
    fetch = story.writes("job/state", over)[-1]
    assert fetch.prefix == "evidence/0/"
    entry = Entry("evidence/0/b", b"its", 3, 3)
    due = story.tell(Fetched(fetch.ticket, (entry,)))
    assert due == [life.Finish("failed", "1 of 1 restart used", over, (entry,))]
    assert story.node.wake == math.inf


def test_ctrl_c_while_it_waits_ends_the_job_or_the_wait() -> None:
    story = Story().enter()
    story.writes("job/state", replace(RUNS, phase="forming", members=()))
    story.take(story.node.ask_stop(2, "SIGINT", 3.0, story.now))
    put = story.asked[0].transaction.writes[0]
    told = records.read(Stop, Entry(put.key, put.value, 1, 1))
    assert (told.kind, told.generation, told.signal) == ("signal", 0, 2)
    due = story.wait(PATIENCE)
    assert kinds(due) == ["Finish"]
    assert due[0].state == "stopped"


def test_ctrl_c_while_the_store_is_not_there_ends_it_at_once() -> None:
    story = Story().enter()
    story.tell(Away("no answer"))
    assert kinds(story.take(story.node.ask_stop(2, "SIGINT", 30.0, story.now))) == ["Finish"]


def test_ctrl_c_ends_the_workers_without_the_store() -> None:
    story = Story().run()
    story.tell(Away("no answer"))
    assert kinds(story.take(story.node.ask_stop(2, "SIGINT", 3.0, story.now))) == ["End"]
    due = story.gone("stopped")
    assert kinds(due) == ["Finish"]


def test_another_generation_is_asked_for() -> None:
    story = Story().enter()
    assert kinds(story.take(story.node.ask_restart("asked", story.now))) == []  # nothing runs
    story.writes("job/state", RUNS)
    story.take(story.node.ask_restart("asked", story.now))
    put = story.asked[-1].transaction.writes[0]
    told = records.read(Stop, Entry(put.key, put.value, 1, 1))
    assert (told.kind, told.error) == ("grow", "asked, on host host-a")
    due = story.writes("job/stop/0", put.value)
    assert due == [life.Heard(told), life.End(told)]
    spare = Story().enter()
    spare.writes("job/state", replace(RUNS, generation=3, members=MEMBERS[1:], ends=ENDS))
    spare.take(spare.node.ask_restart("asked", spare.now))
    assert spare.asked[-1].transaction.writes[0].key == "job/stop/3"


def test_a_failure_goes_before_a_generation_that_is_asked_for() -> None:
    story = Story().run()
    story.asked.clear()
    story.tell(Away("no answer"))
    story.take(story.node.ask_restart("asked", story.now))
    failure = Stop(0, "failure", "a", "host-a", "exit code 1", 0, 1)
    story.take(story.node.workers_failed(failure, story.now))
    story.tell(Back())
    assert records.write(failure) in [put.value for one in story.asked for put in one.transaction.writes]


def test_the_end_of_an_earlier_job_is_not_read() -> None:
    story = Story().enter()
    story.writes("job/stop/0", Stop(0, "failure", "b", "host-b", "exit code 1", 0, 1))
    assert kinds(story.writes("job/state", RUNS)) == ["Heard", "Start"]


@pytest.mark.parametrize("away", [True, False])
def test_nobody_waits_for_ever(away: bool) -> None:
    story = Story().enter()
    story.tell(Changed("job/", story.revision + 1, (), ("job/leader",)))
    if away:
        story.tell(Away("no answer"))
    due = story.wait(100.0 if away else 100.0 + 20.0 + PATIENCE)
    finish = due[-1]
    assert finish.state == ("unreachable" if away else "timeout")


def test_a_refusal() -> None:
    story = Story().enter()
    assert story.writes("job/refused/a", Refusal("there is no room")) == [life.Finish("refused", "there is no room")]
    assert Story().tell(Refused("wrong password")) == [life.Finish("refused", "wrong password")]


def test_a_refusing_store_is_left_when_the_workers_are_gone() -> None:
    story = Story().run()
    why = Stop(0, "left", "a", "host-a", "permission denied")
    assert story.tell(Refused("permission denied")) == [life.Heard(why), life.End(None)]
    assert story.wait(36000) == []
    due = story.gone("stopped")
    assert due == [life.Finish("refused", "permission denied", RUNS)]
    ends = Story().run()
    ends.writes("job/stop/0", Stop(0, "failure", "b", "host-b", "exit code 1", 0, 1))
    assert ends.tell(Refused("permission denied")) == []  # they are being ended already
    assert kinds(ends.gone("stopped")) == ["Finish"]
    done = Story().run()
    done.gone("succeeded")
    assert kinds(done.tell(Refused("permission denied"))) == ["Finish"]


@pytest.mark.parametrize("key", ["job/state", "job/stop/0"])
def test_garbage_while_workers_run_is_named_when_they_are_gone(key: str) -> None:
    story = Story().run()
    assert kinds(story.writes(key, b'{"generation": "x"}')) == ["Heard", "End"]
    assert story.tell(Away("no answer")) == []  # what is told then changes nothing
    finish = finish_of(story.gone("stopped"))
    assert (finish.state, finish.why) == ("damaged", f"{key}: Expected `int`, got `str` - at `$.generation`")


@pytest.mark.parametrize("state", [b'{"version":2,"phase":["new"]}', records.write(replace(RUNS, version=2))])
def test_a_job_of_another_version_is_not_misread(state: bytes) -> None:
    why = (
        "job/state is of version 2, and this agent knows version 1: the agents of this job are of another release of "
        "Phalanx"
    )
    story = Story().enter()
    assert story.writes("job/state", state) == [life.Finish("refused", why)]
    runs = Story().run()
    assert kinds(runs.writes("job/state", state)) == ["Heard", "End"]
    finish = finish_of(runs.gone("stopped"))
    assert (finish.state, finish.why) == ("refused", why)


@pytest.mark.parametrize("together", [False, True])
def test_a_generation_that_ends_before_its_start_is_missed(together: bool) -> None:
    story = Story().enter()
    revision = story.revision
    stop = Stop(0, "signal", "b", "host-b", "SIGINT", signal=2)
    runs = Entry("job/state", records.write(RUNS), revision + 1, revision + 1)
    ends = Entry("job/stop/0", records.write(stop), revision + 2, revision + 2)
    told = [Changed("job/", entry.modified, (entry,), ()) for entry in ((runs, ends) if together else (ends, runs))]
    for events in [told] if together else [[event] for event in told]:
        assert "Start" not in kinds(story.take(story.node.all_told(events, story.now)))
    assert (story.entry().generation, story.entry().outcome) == (0, "not started")


def test_a_write_that_may_have_been_made_is_made_again() -> None:
    story = Story()
    first = story.asked[0].transaction
    story.answer(made=None)
    assert story.asked == []
    story.wait(1.0)
    assert story.asked[0].transaction == first


def test_it_goes_when_it_is_asked_to() -> None:
    story = Story().run()
    due = story.take(story.node.ask_leave("preempted", story.now))
    assert kinds(due) == ["End", "Submit"]
    put = story.asked[0].transaction.writes[0]
    assert records.read(Stop, Entry(put.key, put.value, 1, 1)).kind == "left"
    story.answer()
    story.gone("stopped")
    finish = story.answer()[-1]
    assert (finish.state, finish.why) == ("left", "preempted")


def finish_of(due: list[Any]) -> life.Finish:
    assert isinstance(due[-1], life.Finish)
    return due[-1]


def nodes_are(story: Story, *names: str) -> list[life.Effect]:
    story.revision += 1
    entries = tuple(Entry(f"nodes/{name}", records.write(replace(ME, id=name)), 11, story.revision) for name in names)
    return story.tell(Snapshot("nodes/", story.revision, entries))


def succeed(story: Story) -> list[life.Effect]:
    story.gone("succeeded")
    story.answer()
    over = replace(RUNS, phase="over", verdict=Verdict("succeeded"))
    return story.writes("job/state", over)


@pytest.mark.parametrize("is_late", [False, True])
def test_the_host_of_the_store_leaves_last_if_that_is_soon(is_late: bool) -> None:
    story = Story(hosts=True, barrier=1.0).run()
    story.gone("succeeded")
    story.answer()
    assert story.wait(1000.0) == []  # the workers of the others go on
    due = story.writes("job/state", replace(RUNS, phase="over", verdict=Verdict("succeeded")))
    assert life.Watch("nodes/") in due
    assert nodes_are(story, "a", "b") == []
    finish = finish_of(story.wait(HOST_PATIENCE) if is_late else nodes_are(story, "a"))
    assert (finish.state, finish.ends_job) == ("succeeded", not is_late)


@pytest.mark.parametrize("hosts", [None, False])
def test_a_leader_waits_unless_another_node_hosts_the_store(hosts: bool | None) -> None:
    story = Story(hosts=hosts).run()
    story.writes("job/leader", b"a")
    nodes_are(story, "a", "b")
    story.asked.clear()
    due = succeed(story)
    assert (story.node.state == "LEFT") == (hosts is False)
    if hosts is None:
        due = nodes_are(story, "a")
    finish = finish_of(due)
    assert (finish.state, finish.ends_job) == ("succeeded", hosts is None)


def test_a_leader_ends_no_job_at_another_nodes_store() -> None:
    """The entry of the host may be gone, where it was busy for longer than a lease lasts; it has yet to read."""
    story = Story(hosts=False).run()
    story.writes("job/leader", b"a")
    nodes_are(story, "a")
    story.asked.clear()
    assert not finish_of(succeed(story)).ends_job


def test_it_gives_up_without_the_node_that_hosts_the_store() -> None:
    story = Story(hosts=False, away_timeout=60.0).run()
    story.tell(Away("connection refused"))
    assert story.wait(59.0) == []
    due = story.wait(1.0)
    why = "its store has not answered for 1m00s"
    assert due == [life.Heard(Stop(0, "left", "a", "host-a", why)), life.End(None)]
    finish = finish_of(story.gone("stopped", b"left"))
    assert (finish.state, finish.why, finish.evidence) == ("unknown", why, ())


def test_own_evidence_is_reported_when_the_store_is_gone() -> None:
    story = Story(hosts=False, away_timeout=60.0).run()
    story.tell(Away("connection refused"))
    story.take(story.node.workers_failed(Stop(0, "failure", "a", "host-a", "exit code 1", 2, 1), story.now))
    story.gone("failed", b"left")
    finish = finish_of(story.wait(60.0))
    assert (finish.state, finish.evidence) == ("unknown", (Entry("evidence/0/a", b"left", 0, 0),))


def test_a_job_that_was_stopped_needs_no_store_to_end() -> None:
    story = Story(hosts=False, away_timeout=60.0).run()
    stop = Stop(0, "signal", "b", "host-b", "SIGINT", signal=2)
    story.writes("job/stop/0", stop)
    story.tell(Away("connection refused"))
    story.gone("stopped")
    finish = finish_of(story.wait(PATIENCE))
    assert finish.state == "stopped"
    assert finish.job is not None
    assert finish.job.verdict == Verdict("stopped", "", stop)


def test_a_spare_waits_for_the_next_generation_for_any_time() -> None:
    story = Story().enter()
    other = replace(RUNS, members=(MEMBERS[0], Member("c", "host-c", 2, "default")))
    story.writes("job/state", other)
    story.wait(36000)
    following = replace(other, generation=1, phase="forming", ends=ENDS, delay=8.0)
    assert story.writes("job/state", following) == [life.Heard(following)]
    assert story.node.wake == 36000 + 8 + candidates.ROLL_CALL_AFTER
    assert story.wait(8 + candidates.ROLL_CALL_AFTER) == []
    assert story.node.wake == 36000 + 8 + 100 + 20 + PATIENCE
    stuck = Story().enter()
    stuck.writes("job/state", other)
    stuck.wait(36000)
    stuck.writes("job/stop/0", Stop(0, "failure", "b", "host-b", "exit code 1", 0, 1))
    assert (stuck.node.state, stuck.node.wake) == ("WAITING", 36000 + 100 + 20 + PATIENCE)
    [finish] = stuck.wait(100 + 20 + PATIENCE)  # its agent keeps its lease, and decides nothing
    assert finish.state == "timeout"
    led = Story().enter()
    led.writes("job/state", other)
    led.wait(36000)
    assert led.tell(Changed("job/", led.revision + 1, (), ("job/leader",))) == []
    assert (led.node.state, led.node.wake) == ("WAITING", 36000 + 100 + 20 + PATIENCE)


def test_a_node_that_goes_on_after_its_success_takes_that_back() -> None:
    story = Story().run()
    story.gone("succeeded")
    story.answer()
    story.writes("job/stop/0", Stop(0, "failure", "b", "host-b", "exit code 1", 0, 1))
    put, took_back = story.asked[-1].transaction.writes
    assert (story.node.state, story.entry().state, put.lease) == ("WAITING", "ready", OWN)
    assert took_back == Delete("nodes/a/done")


FAILED = Stop(0, "failure", "a", "host-a", "exit code 1", 2, 1)
OVER = replace(RUNS, phase="over", keep=True, verdict=Verdict("failed", "no restart", FAILED))
LEADERS = {"b": ("kept/evidence/0/a",), "a": ("kept/evidence/0/a", "kept/job/state")}


def failed(leader: str) -> Story:
    """A node whose workers have failed, and whose job is to be kept."""
    story = Story().enter()
    story.writes("job/leader", leader.encode())
    story.writes("job/state", replace(RUNS, keep=True))
    story.take(story.node.workers_failed(FAILED, story.now))
    story.gone("failed", b"left")
    while story.asked:
        story.answer()
    return story


@pytest.mark.parametrize("leader", LEADERS)
def test_each_node_keeps_its_evidence_and_the_leader_the_job(leader: str) -> None:
    story = failed(leader)
    fetch = next(each for each in story.writes("job/state", OVER) if isinstance(each, life.Fetch))
    told = story.asked[-1].transaction
    assert told.conditions == (Unchanged("job/state", story.revision),)
    values = {"kept/evidence/0/a": b"left", "kept/job/state": records.write(OVER)}
    assert told.writes == tuple(Put(key, values[key], KEPT) for key in LEADERS[leader])
    assert story.tell(Snapshot("nodes/", story.revision, ())) == []
    assert story.tell(Fetched(fetch.ticket, ())) == []  # not before it is written
    assert isinstance(story.answer()[-1], life.Finish)


@pytest.mark.parametrize("made", [None, False])
def test_a_failed_write_is_retried_unless_the_job_is_gone(made: bool | None) -> None:
    story = failed("b")
    fetch = next(each for each in story.writes("job/state", OVER) if isinstance(each, life.Fetch))
    story.tell(Fetched(fetch.ticket, ()))
    due = story.answer(made)
    assert kinds(due) == ([] if made is None else ["Finish"])
    assert kinds(story.wait(1.0)) == (["Submit"] if made is None else [])
    assert kinds(story.wait(PATIENCE)) == (["Finish"] if made is None else [])


@pytest.mark.parametrize("over", [
    replace(OVER, keep=False),
    replace(OVER, members=()),
    replace(OVER, verdict=Verdict("stopped", "", replace(FAILED, kind="signal"))),
    replace(OVER, generation=1, verdict=Verdict("failed", "", replace(FAILED, generation=1))),
], ids=["not to be kept", "never ran", "stopped", "a later attempt"])  # fmt: skip
def test_what_is_not_kept(over: Job) -> None:
    story = failed("b")
    story.writes("job/state", over)
    assert story.asked == []


SPARE = replace(RUNS, members=(MEMBERS[0], Member("c", "host-c", 2, "default")))


@pytest.mark.parametrize("hosts", [None, True])
def test_a_spare_that_cannot_start_workers_leaves_the_job(hosts: bool | None) -> None:
    story = Story(hosts=hosts).enter()
    assert story.take(story.node.cannot_start("no module", story.now)) == []
    forming = replace(SPARE, phase="forming", members=())
    story.writes("job/state", forming)
    assert story.node.state == "WAITING"
    due = story.writes("job/state", SPARE)
    assert due[1:] == ([] if hosts else [life.Finish("left", "no module", SPARE)])
    again = Story(hosts=hosts).enter()
    again.writes("job/state", SPARE)
    due = again.take(again.node.cannot_start("no module", again.now))
    assert due == ([] if hosts else [life.Finish("left", "no module", SPARE)])


def test_a_node_that_failed_to_start_workers_tries_again() -> None:
    story = Story().enter()
    story.take(story.node.cannot_start("no module", story.now))
    assert life.Start(RUNS, 1) in story.writes("job/state", RUNS)
    assert story.take(story.node.cannot_start("no module", story.now)) == []  # its workers' end is going to tell that
    assert story.node.state == "RUNNING"
    story.gone("failed")
    assert story.node.state == "WAITING"


def test_a_departure_after_its_success_does_not_undo_that() -> None:
    story = Story().run()
    story.gone("succeeded")
    story.answer()
    leaves = story.take(story.node.ask_leave("preempted", story.now))
    assert leaves == [life.Finish("succeeded", "preempted", RUNS)]
    failed = Story().run()
    failed.gone("succeeded")
    failed.take(failed.node.ask_leave("preempted", failed.now))
    due = failed.writes("job/stop/0", Stop(0, "failure", "b", "host-b", "exit code 1", 0, 1))
    assert life.Finish("left", "preempted", RUNS) in due


def test_unreadable_evidence_is_read_again_without_a_new_verdict() -> None:
    story = Story().enter()
    story.writes("job/state", replace(RUNS, phase="forming", members=()))
    stop = Stop(0, "failure", "b", "host-b", "exit code 1", 0, 1)
    fetch = story.writes("job/state", replace(RUNS, phase="over", verdict=Verdict("failed", "", stop)))[-1]
    assert story.tell(Fetched(fetch.ticket, None)) == []
    assert story.node.wake == 1.0
    assert kinds(story.wait(1.0)) == ["Fetch"]
    assert story.tell(Away("no answer")) == []
    finish = story.wait(PATIENCE)[-1]
    assert finish.state == "failed"


def test_ctrl_c_as_a_generation_ends_stops_the_next_one() -> None:
    story = Story().run()
    story.writes("job/stop/0", Stop(0, "failure", "b", "host-b", "exit code 1", 0, 1))
    story.take(story.node.ask_stop(2, "SIGINT", 3.0, story.now))
    put = story.asked[0].transaction.writes[0]
    assert put.key == "job/stop/1"
    told = records.read(Stop, Entry(put.key, put.value, 1, 1))
    assert (told.kind, told.generation) == ("signal", 1)


def test_a_job_that_is_over_when_it_comes_is_an_earlier_one() -> None:
    story = Story()
    story.answer()
    story.writes("job/leader", b"b")
    story.answer(made=False)
    stop = Stop(0, "failure", "x", "host-x", "exit code 1", 0, 1)
    over = Job(0, "over", 1, 1, (Member("x", "host-x", 2, "default"),), verdict=Verdict("failed", "", stop))
    story.writes("job/stop/0", stop)
    assert story.writes("job/state", over) == [life.Earlier()]
    modified = story.revision
    assert story.node.state == "WAITING"
    story.tell(Changed("job/", story.revision + 1, (), ("job/leader",)))
    story.answer()
    story.writes("job/leader", b"a")
    nodes_are(story, "a", "x")
    assert story.asked == []  # who has had part in it may yet read what is left
    nodes_are(story, "a")
    made = story.asked[0].transaction
    assert made.conditions[1] == Unchanged("job/state", modified)
    assert made.writes == (Delete("job/state"), Delete("job/stop/0"))
    story.answer()
    story.tell(Changed("job/", story.revision, (), ("job/state", "job/stop/0")))
    assert [put.key for put in story.asked[0].transaction.writes] == ["job/state"]  # of the next job


def test_a_leader_reads_evidence_before_it_excludes_a_machine() -> None:
    story = Story(RULES._replace(exclude_after=1, policy=RestartPolicy(9)))
    story.answer()
    story.writes("job/leader", b"a")
    story.writes("job/state", RUNS)
    other = Node("b", "host-b", "10.0.0.2", 2, min_nodes=2, max_nodes=2, generation=0, outcome="failed")
    mine = replace(ME, generation=0, outcome="stopped")
    nodes = (Entry("nodes/b", records.write(other), 11, 30), Entry("nodes/a", records.write(mine), 11, 31))
    story.tell(Snapshot("nodes/", story.revision, nodes))
    story.asked.clear()
    due = story.writes("job/stop/0", Stop(0, "failure", "a", "host-a", "it was the first to say so", 2))
    due += story.take(story.node.workers_gone(mine, b"", story.now))
    fetch = next(each for each in due if isinstance(each, life.Fetch))
    assert fetch.prefix == "evidence/0/"
    assert [effect for effect in story.wait(0.1) if isinstance(effect, life.Fetch)] == []  # once
    failed = RunProcsResult(failures={0: ProcessFailure(0, 42, 1, "<N/A>", rank=0)})
    lost = evidence.write(other, evidence.Left(failed), 0)
    story.asked.clear()
    story.tell(Fetched(fetch.ticket, None))  # in vain: again in a while
    again = next(each for each in story.wait(2) if isinstance(each, life.Fetch))
    story.tell(Fetched(again.ticket, (Entry("evidence/0/b", lost, 12, 12),)))
    put = next(one for each in story.asked for one in each.transaction.writes if one.key == "job/state")
    assert records.read(Job, Entry(put.key, put.value, 1, 1)).excluded == (other.machine,)


def test_a_leader_with_its_store_again_waits_for_the_others() -> None:
    for regains in ((Away("no answer"), Back()), (LeaseLost(),)):
        story = Story(RULES._replace(lost_after=0.5, return_timeout=9.0))
        story.answer()
        story.writes("job/leader", b"a")
        story.writes("job/state", RUNS)
        story.tell(Snapshot("nodes/", story.revision, (Entry("nodes/a", records.write(ME), 11, 11),)))
        assert story.node.wake == 0.5  # it has just begun
        story.now = 0.4
        for event in regains:
            story.tell(event)
        assert story.node.wake == 9.4
        story.asked.clear()
        story.now = 9.4
        story.tell(Changed("job/", story.revision, (), ()))
        assert [put.key for each in story.asked for put in each.transaction.writes] == ["job/stop/0"]


# --- a job, or a store, that takes the place of another one

THEIRS = (Member("x", "host-x", 1, "default"), Member("y", "host-y", 1, "default"))
MADE = Job(0, "forming", 2, 2)


@pytest.mark.parametrize("phase", ["running", "over"])
@pytest.mark.parametrize("together", [False, True])
def test_a_newcomer_waits_for_the_next_job_of_the_id(phase: str, together: bool) -> None:
    story = Story(RULES._replace(return_timeout=10.0))
    story.writes("job/leader", b"b")
    verdict = Verdict("succeeded") if phase == "over" else None
    story.writes("job/state", replace(RUNS, phase=phase, members=THEIRS, verdict=verdict))
    story.answer()
    at = story.revision
    made = Entry("job/state", records.write(MADE), at + 2, at + 2)
    told = [Changed("job/", at + 1, (), ("job/state",)), Changed("job/", at + 2, (made,), ())]
    for events in [told] if together else [[event] for event in told]:
        assert "Finish" not in kinds(story.take(story.node.all_told(events, story.now)))
    story.revision += 2
    assert story.node.state == "WAITING"
    story.created["job/state"] = at + 2
    assert "Start" in kinds(story.writes("job/state", RUNS))


@pytest.mark.parametrize("at_once", [False, True])
def test_a_waiting_newcomer_leaves_when_asked_to(at_once: bool) -> None:
    story = Story()
    story.writes("job/leader", b"x")
    story.writes("job/state", replace(RUNS, phase="over", members=THEIRS, verdict=Verdict("succeeded")))
    story.answer()
    finish = finish_of(story.take(story.node.ask_leave("SIGTERM", story.now, at_once=at_once)))
    assert (finish.state, finish.why) == ("left", "SIGTERM")


@pytest.mark.parametrize("lost", [Back(b"another"), Changed("job/", 500, (), ("job/state",))], ids=["store", "job"])
def test_a_wanted_departure_holds_whatever_the_job_does(lost: Any) -> None:
    story = Story().run()
    story.take(story.node.ask_leave("SIGTERM", story.now))
    story.tell(lost)
    story.gone("stopped")
    finish = finish_of(story.due or story.wait(PATIENCE))
    assert (finish.state, finish.why) == ("left", "SIGTERM")


def test_own_evidence_is_reported_when_another_job_is_there() -> None:
    story = Story().run()
    story.take(story.node.workers_failed(Stop(0, "failure", "a", "host-a", "exit code 7", 2, 7), story.now))
    other = Entry("job/state", records.write(replace(RUNS, members=THEIRS)), 90, 91)
    story.tell(Snapshot("job/", 92, (other, Entry("job/leader", b"x", 89, 89))))
    story.gone("failed", b"mine")
    finish = finish_of(story.due or story.wait(PATIENCE))
    assert (finish.state, finish.job, finish.evidence) == ("unknown", RUNS, (Entry("evidence/0/a", b"mine", 0, 0),))


def test_a_verdict_that_was_heard_outlives_the_store() -> None:
    story = Story().run()
    over = replace(RUNS, phase="over", verdict=Verdict("failed", "too few"))
    story.writes("job/state", over)
    story.tell(Away("no answer"))
    story.tell(Back(b"another"))
    story.gone("stopped")
    finish = finish_of(story.due or story.wait(PATIENCE))
    assert (finish.state, finish.job, finish.ends_job) == ("failed", over, False)


def test_a_leading_spare_does_not_remove_a_live_job() -> None:
    story = Story(RULES._replace(return_timeout=10.0, lost_after=0.5))
    story.writes("job/leader", b"x")
    story.writes("job/state", replace(RUNS, members=THEIRS))
    story.answer()
    story.revision += 1
    story.tell(Changed("job/", story.revision, (), ("job/leader",)))
    story.created.pop("job/leader")
    story.wait(1.0)
    story.asked.clear()
    story.writes("job/leader", b"a")
    nodes_are(story, "a", "x", "y")
    story.wait(10.0)
    story.wait(3600.0)
    story.asked.clear()
    nodes_are(story, "a")
    removed = [write.key for each in story.asked for write in each.transaction.writes if isinstance(write, Delete)]
    assert "job/state" not in removed


@pytest.mark.parametrize("away", [False, True])
def test_a_newcomer_removes_a_job_that_has_no_node_left(away: bool) -> None:
    story = Story(RULES._replace(return_timeout=10.0, lost_after=0.5), away=away)
    story.writes("job/state", replace(RUNS, members=THEIRS))
    story.answer()
    story.wait(1.0)
    story.asked.clear()
    story.writes("job/leader", b"a")
    nodes_are(story, "a")
    assert story.asked == []
    story.wait(0.6)
    if away:  # the others may need as long to have it again
        assert story.asked == []
        story.wait(10.0)
    assert story.asked[-1].transaction.writes == (Delete("job/state"),)
