"""Who takes part in a generation of a job, and what follows when one ends. Pure: the leader decides, and `node` acts.

`decide` is given what the store holds, and returns what is to be written, if anything is. It holds:

- a node takes part only while its entry is there and says that it is ready;
- a node that takes part and whose entry is gone is lost when it has not come back within `settings.Rules.lost_after`;
- while a generation runs, the first `Stop` that is written ends it, whoever writes it; the next one is formed when each
  node of it has ended its workers, has gone, or has had `settings.Rules.end_timeout` for it;
- nodes that stay keep their ranks where that leaves no gap; the ranks of those that are gone go to whoever is ready;
- what follows a failure is the restart policy's, once for the whole job; a node that comes, or goes, costs no restart,
  and one that is lost none while the minimum is there.

Moments are of the leader's monotonic clock. What was noted by another leader is not known: waits begin anew.

`Leader` makes the decisions transactions of the store. The agent whose id ``job/leader`` holds leads, for as long as
that key is there: it goes with the agent's lease. Each transaction has the condition that it is the same key still, and
that the job is as the decision has found it: a leader that was stopped or cut off, and does not know that another one
leads, changes nothing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from phalanx._base.clock import format_duration
from phalanx._base.text import how_many
from phalanx._group import restart_policy
from phalanx._group.restart_policy import AttemptEnd
from phalanx._rendezvous import candidates, records
from phalanx._rendezvous.candidates import Notes, Seen
from phalanx._rendezvous.evidence import JobEvidence
from phalanx._rendezvous.records import (
    LONGEST_DELAY,
    MOST_ENDS,
    MOST_RESTARTS,
    End,
    Job,
    Missing,
    Node,
    Refusal,
    Stop,
    Verdict,
    one_line,
    replace,
)
from phalanx._rendezvous.settings import Rules
from phalanx._rendezvous.store_view import Liveness, StoreView
from phalanx._store.store import JOB, Absent, Created, Delete, Entry, Put, Transaction, Unchanged


class Decision(NamedTuple):
    """What is to be written.

    Attributes:
        job: What follows; None: it stays.
        stop: Why the generation that runs ends; None: it does not.
        refused: Why which nodes are not taken.
        wake: When to decide again, though nothing has changed; inf: never.
        asks: Whether the machine of the root cause is to be told first, see `decide`.
    """

    job: Job | None = None
    stop: Stop | None = None
    refused: tuple[tuple[str, str], ...] = ()
    wake: float = math.inf
    asks: bool = False


def decide(
    job: Job,
    stop: Stop | None,
    nodes: Mapping[str, Seen],
    notes: Notes,
    now: float,
    rules: Rules,
    chance: float = 0.0,
    cause: str | None = None,
) -> Decision:
    """Decide what follows.

    Args:
        job: The job as it is.
        stop: Why its generation ends; None: nobody has said.
        nodes: The nodes whose entries are there, by their ids.
        notes: The leader's; they are brought up to date.
        now: The present moment (monotonic seconds).
        rules: What is held to.
        chance: A random number, 0 to 1, for the jitter of a delay.
        cause: The machine that `evidence` calls the root cause of the generation's failure; "": none is known. None:
            nobody has looked yet.
    """
    notes.turn(job, now)
    if job.phase == "over":
        return Decision()
    before = job
    refused = candidates.refusals(job, nodes, notes, now, rules)
    again = min((at + rules.rank_timeout for name, at in notes.twice.items() if name not in refused), default=math.inf)
    nodes = candidates.without(nodes, refused)
    if job.phase == "running":
        told = _while_running(job, stop, nodes, notes, now, rules)
        if told is not None:
            return told._replace(refused=tuple(refused.items()), wake=min(told.wake, again))
        assert stop is not None
        if rules.exclude_after and stop.kind in ("failure", "hang"):
            if cause is None:
                return Decision(refused=tuple(refused.items()), wake=again, asks=True)
            job = _blame(job, cause, rules)
        following, planned = _follow(job, stop, nodes, notes, now, rules, chance)
        stop = None
    else:
        following, planned = job, notes
    formed, wake = _form(following, stop, nodes, planned, now, rules)
    if formed != before:
        notes.planned = planned.after(formed, now)
    return Decision(None if formed == before else formed, None, tuple(refused.items()), min(wake, again))


def _while_running(
    job: Job, stop: Stop | None, nodes: Mapping[str, Seen], notes: Notes, now: float, rules: Rules
) -> Decision | None:
    """Decide while a generation runs; None: it has ended because of ``stop``."""
    notes.missing = {name: notes.missing.get(name, now) for name in job.ids if name not in nodes}
    if stop is not None:
        if notes.ending is None:
            notes.ending = now
        until = notes.ending + rules.end_timeout
        if now >= until:
            return None
        if any(name in nodes and not candidates.has_ended(job, nodes[name].node) for name in job.ids):
            return Decision(wake=until)
        gone = stop.node if stop.kind in ("lost", "left") else ""
        back = max((_lost_at(name, notes, rules) for name in notes.missing if name != gone), default=-math.inf)
        return Decision(wake=min(until, back)) if now < back and stop.kind != "signal" else None
    if notes.missing:
        return _wait_for_missing(job, notes, now, rules)
    if all(candidates.has_succeeded(job, nodes[name].node) for name in job.ids):
        return Decision(job=replace(job, phase="over", verdict=Verdict("succeeded"), delay=0.0))
    return _look_for_more(job, nodes, notes, now, rules)


def _lost_at(name: str, notes: Notes, rules: Rules) -> float:
    """Return when a node is lost whose entry is gone."""
    return max(notes.missing[name] + rules.lost_after, notes.regained + rules.return_timeout)


def _wait_for_missing(job: Job, notes: Notes, now: float, rules: Rules) -> Decision:
    """End the generation if the entry of a node that takes part has been gone for long enough."""
    soonest = math.inf
    for rank, member in enumerate(job.members):
        if member.id in notes.missing:
            until = _lost_at(member.id, notes, rules)
            if now >= until:
                return Decision(stop=_lost(job, rank))
            soonest = min(soonest, until)
    return Decision(wake=soonest)


def _look_for_more(job: Job, nodes: Mapping[str, Seen], notes: Notes, now: float, rules: Rules) -> Decision:
    """End the generation, some time after nodes have come that can take part: not where one has succeeded already."""
    members = job.ids
    there = set(members)
    is_closed = len(members) >= job.max_nodes or any(
        candidates.has_succeeded(job, nodes[name].node) for name in members
    )
    come = [] if is_closed else [name for name in candidates.ready(job, nodes) if name not in there]
    if not come:
        notes.more = None
        return Decision()
    if notes.more is None:
        notes.more = now
    until = notes.more + rules.rejoin_delay
    if now < until:
        return Decision(wake=until)
    first = nodes[come[0]].node
    who = f"host {first.host}" if len(come) == 1 else how_many(len(come), "host")
    error = f"{who} can take part, and takes part from now on"
    return Decision(stop=Stop(job.generation, "grow", first.id, first.host, one_line(error)))


def _follow(
    job: Job, stop: Stop, nodes: Mapping[str, Seen], notes: Notes, now: float, rules: Rules, chance: float
) -> tuple[Job, Notes]:
    """Return what follows a generation whose workers are gone, and what is to be noted then."""
    there = sorted((nodes[name] for name in job.ids if name in nodes), key=lambda seen: seen.modified)
    its = [seen.node for seen in there if seen.node.generation == job.generation]
    stop = _find_cause(_in_full(stop, its), job, its, nodes)
    end = End(
        job.generation, stop.kind, stop.node, stop.host, stop.error, stop.rank, stop.exitcode,
        uptime=max((node.uptime for node in its), default=0.0),
        step=max((node.step for node in its if node.step is not None), default=None),
        survivors=sum(node.survivors for node in its),
    )  # fmt: skip
    # What another leader has written of restarts is as old as this generation, at least.
    ages = [age + end.uptime for age in job.restarts]
    restarts = [min(moment, now - age) for moment, age in zip(notes.restarts, ages, strict=True)]
    following = replace(job, generation=job.generation + 1, phase="forming", delay=0.0, address="", port=0)
    enough = len(candidates.ready(following, nodes)) >= job.min_nodes
    # Where nobody is left of those that took part, who comes now begins anew.
    anew = not any(name in nodes and nodes[name].node.state != "left" for name in job.ids)
    uncounted = stop.kind in ("grow", "left") or (stop.kind == "lost" and (enough or anew))
    end = replace(end, failed=stop.kind != "signal" and (not uncounted or end.survivors > 0))
    ends = (*job.ends, end)[-MOST_ENDS:]
    following = replace(following, ends=ends)
    if stop.kind == "signal":
        following = _over(following, "stopped", "", stop)
    elif end.failed:
        decision = restart_policy.decide(rules.policy, [_attempt(each) for each in ends], restarts, now, chance)
        if decision.retries:
            restarts = (restarts + [now] * decision.counted)[-MOST_RESTARTS:]
            following = replace(following, delay=min(decision.delay, LONGEST_DELAY))
        else:
            following = _over(following, "failed", decision.why, stop)
    planned = copy.copy(notes)
    planned.restarts = restarts
    following = replace(following, restarts=_ages(planned, now))
    return following, planned.after(following, now)


def _in_full(stop: Stop, nodes: list[Node]) -> Stop:
    """Return why a generation has ended, in the words that its node has found for it since."""
    for node in nodes:
        if node.id == stop.node and node.error and stop.kind == "failure":
            return replace(stop, error=node.error, rank=node.rank, exitcode=node.exitcode)
    return stop


def _find_cause(stop: Stop, job: Job, its: list[Node], nodes: Mapping[str, Seen]) -> Stop:
    """Return why a generation has ended whose first failure is a worker's that has lost a connection.

    The cause is at the connection's other end: a worker of another node that has failed of something else, though its
    node was later to say so; or a node that is lost, which is known when its lease has run out. ``its``: the nodes that
    have ended their workers, the first one first.
    """
    if stop.kind != "failure" or not any(node.id == stop.node and node.is_cut_off for node in its):
        return stop
    for node in its:
        if node.error and not node.is_cut_off:
            return Stop(job.generation, "failure", node.id, node.host, node.error, node.rank, node.exitcode)
    return next((_lost(job, rank) for rank, name in enumerate(job.ids) if name not in nodes), stop)


def _lost(job: Job, rank: int) -> Stop:
    """Return that the node of a rank is lost."""
    member = job.members[rank]
    error = f"node {rank} is lost: its agent on host {member.host} is gone, or cut off"
    return Stop(job.generation, "lost", member.id, member.host, one_line(error))


def _form(
    job: Job, stop: Stop | None, nodes: Mapping[str, Seen], notes: Notes, now: float, rules: Rules
) -> tuple[Job, float]:
    """Return a job whose next generation is formed, if it can be, and when to look again."""
    if job.phase == "over":
        return job, math.inf
    if stop is not None and stop.kind == "signal":
        return _over(job, "stopped", "", stop), math.inf
    until = notes.since + job.delay + rules.join_timeout
    is_early = len(nodes) < job.min_nodes and now < until  # this is decided again for each node that comes
    ready = [] if is_early else candidates.ready(job, nodes)
    if len(ready) < job.min_nodes:
        notes.enough = None
        if now < until:
            return job, until
        last = job.ends[-1] if job.ends else None
        words, _ = candidates.call_roll((nodes[name].node for name in ready), job.min_nodes, job.max_nodes)
        missing = f"within {format_duration(rules.join_timeout)}, {words}"
        stop = last and Stop(last.generation, last.kind, last.node, last.host, last.error, last.rank, last.exitcode)
        return _over(job, "failed", missing, stop), math.inf
    if notes.enough is None:
        notes.enough = now
    # More may come before the first generation alone: later ones are awaited by workers that could run.
    until = max(notes.since + job.delay, notes.enough + (0.0 if job.ends else rules.last_call))
    if now < (notes.since + job.delay if len(ready) >= job.max_nodes else until):
        return job, (notes.since + job.delay if len(ready) >= job.max_nodes else until)
    chosen = candidates.ranked(job, ready, nodes)
    first = nodes[chosen[0]].node
    taken = [nodes[name].node for name in chosen]
    return replace(
        job, phase="running", members=tuple(node.member for node in taken), address=first.address, port=first.port,
        delay=0.0, restarts=_ages(notes, now), programs=candidates.programs(job, taken),
        args=candidates.arguments(job, taken),
    ), math.inf  # fmt: skip


def _blame(job: Job, machine: str, rules: Rules) -> Job:
    """Note whose workers were the root cause; leave a machine out for which that is so too often.

    It is the machine's count, not an agent's: one that is started again there has another id.
    """
    if not machine:
        return job
    times = job.times + 1 if job.blamed == machine else 1
    excluded = job.excluded
    if times >= rules.exclude_after and machine not in excluded:
        excluded = (*excluded, machine)
    return replace(job, blamed=machine, times=times, excluded=excluded)


def _attempt(end: End) -> AttemptEnd:
    """Return the end of a generation as the restart policy knows it."""
    return AttemptEnd(
        "failed" if end.failed else "stopped", end.rank, end.exitcode, end.error, end.step, end.survivors,
        end.generation, 0.0, end.uptime,
    )  # fmt: skip


def _over(job: Job, state: str, why: str, stop: Stop | None) -> Job:
    verdict = Verdict(state, one_line(why), stop)  # type: ignore[arg-type] # the states are those of a verdict
    return replace(job, phase="over", verdict=verdict, delay=0.0)


def _ages(notes: Notes, now: float) -> tuple[float, ...]:
    return tuple(max(0.0, now - moment) for moment in notes.restarts)


MOST_REFUSED = 64
"""Nodes that are refused in one transaction: etcd takes 128 operations at most."""


class Leader:
    """What a leader has noted, and decides.

    Args:
        me: Its own entry: a job that is not there yet is made with its numbers of nodes, and its policy.
        rules: What the job holds to.
        chance: Returns a random number, 0 to 1.
        since: The revision at which it became the leader.

    Attributes:
        decided: The revision that its last decision has made; nothing is decided before that is told.
        asks: The generation whose evidence is to be read for its next decision, see `learn`; -1: none.
    """

    def __init__(self, me: Node, rules: Rules, chance: Callable[[], float], since: int) -> None:
        self._nodes, self._policy = (me.min_nodes, me.max_nodes), me.policy
        self._rules = rules
        self._chance = chance
        self.since = since
        self._notes: Notes | None = None
        self._began: float | None = None  # when it could decide first
        self.decided = 0
        self.asks = -1
        self._cause: tuple[int, str] = -1, ""  # of which generation which machine is the root cause

    def learn(self, entries: Iterable[Entry], view: StoreView) -> None:
        """See the evidence of the generation that it `asks` for. Raises DamagedError."""
        job, _ = view.job()
        if job is not None and job.generation == self.asks:
            self._cause = job.generation, JobEvidence(entries, view.stop(job.generation), job.members).machine

    def missing(self, view: StoreView, now: float) -> tuple[Transaction, str] | None:
        """Return the write of who is missing in a generation that waits, and a text that changes when that does.

        As of the last `decide`. None: it waits for nobody, as far as is known. Raises DamagedError.
        """
        (job, modified), notes = view.job(), self._notes
        if job is None or notes is None or not view.told(records.NODES):
            return None
        there = candidates.ready(job, view.nodes)
        is_enough = len(there) >= job.min_nodes
        if is_enough and (len(there) >= job.max_nodes or job.ends):
            return None  # it begins
        since = notes.since + job.delay
        enough = since if notes.enough is None else notes.enough
        until = max(since, enough + self._rules.last_call) if is_enough else since + self._rules.join_timeout
        if until == math.inf:
            return None
        words, ranks = candidates.call_roll((view.nodes[name].node for name in there), job.min_nodes, job.max_nodes)
        rank = ranks[0] if ranks else -1
        missing = Missing(job.generation, records.one_line(words), rank, max(0.0, until - now), is_enough)
        transaction = Transaction((Unchanged(records.STATE, modified),), (_put(records.WAITING, missing),))
        return transaction, "\n".join((words, *there))  # who comes is to know how long it lasts

    def decide(
        self, view: StoreView, liveness: Liveness, now: float, regained: float = -math.inf
    ) -> tuple[Transaction | None, float]:
        """Return what is to be written now, and when to ask again. None: nothing. Raises DamagedError.

        A job that is over is of others where this node has found none that goes on: what is left of it is removed, once
        none of them is there. One that goes on may have had its agents killed until somebody is found to be left of it.
        ``regained``: when this node had the store again that was away.
        """
        if not view.told(records.NODES) or self.decided > view.told(records.JOB):
            return None, math.inf
        mine = Created(records.LEADER, self.since)
        job, modified = view.job()
        if job is None:
            first = _put(records.STATE, Job(0, "forming", *self._nodes, keep=self._rules.keep, policy=self._policy))
            return Transaction((mine, Absent(records.STATE)), (first,)), math.inf
        self._began = now if self._began is None else self._began
        if liveness.is_new if job.phase == "over" else not liveness.has_lived:
            until = self._of_others_until(job, view, regained)
            if now < until or not _is_left(job, view):
                return (None, until) if now < until else (_remove_job(mine, modified, view), math.inf)
            liveness.has_lived = liveness.has_lived or job.phase != "over"
        if self._notes is None:
            self._notes = Notes(job, now)
        self._notes.regained = regained
        stop = view.stop(job.generation)
        cause = self._cause[1] if self._cause[0] == job.generation else None
        made = decide(job, stop, view.nodes, self._notes, now, self._rules, self._chance(), cause)
        self.asks = job.generation if made.asks else -1
        conditions: list[Absent | Created | Unchanged] = [mine, Unchanged(records.STATE, modified)]
        refused = [(node, why) for node, why in made.refused if not view.refusal(node)]
        # The others with the next decision, which follows when this one is told.
        writes: list[Put | Delete] = [
            _put(f"{records.REFUSED}{node}", Refusal(why)) for node, why in refused[:MOST_REFUSED]
        ]
        if made.job is not None:
            writes.append(_put(records.STATE, made.job))
            old = f"{records.STOP}{job.generation - 1}"  # a node that has not seen it sees a later generation
            writes += [Delete(old)] if view.entry(old) else []
            if made.job.is_kept:  # in the place of an earlier one, see `Kept`
                writes.append(Delete(records.KEPT, below=True))
        if made.stop is not None:
            key = f"{records.STOP}{job.generation}"
            conditions.append(Absent(key))
            writes.append(_put(key, made.stop))
            entry = f"{records.NODES}{made.stop.node}"
            if made.stop.kind == "lost" and view.entry(entry) is None:  # it may have come back just now
                conditions.append(Absent(entry))
        return Transaction(tuple(conditions), tuple(writes)) if writes else None, made.wake

    def _of_others_until(self, job: Job, view: StoreView, regained: float) -> float:
        """Return until when nothing is decided of a job that this node has had no part in: see `decide`."""
        assert self._began is not None
        patience = self._rules.return_timeout
        longest = max(self._began, min(regained, self._began + patience)) + patience
        if not _is_left(job, view):  # they may come back
            return longest if regained > -math.inf else self._began + self._rules.lost_after
        if job.phase == "over":
            return math.inf  # they leave
        return longest if job.ids else self._began  # those that were killed a moment ago are gone then


def _is_left(job: Job, view: StoreView) -> bool:
    """Whether a node is there that takes part in a job; if none has yet, one that was told the same of it."""
    if not job.ids:
        return any(candidates.was_told_the_same(job, seen.node) for seen in view.nodes.values())
    return any(name in view.nodes and view.nodes[name].node.state != "left" for name in job.ids)


def _remove_job(mine: Created, modified: int, view: StoreView) -> Transaction:
    """Return the end of what is left of a job of which nobody is: the next one is new."""
    keys = (records.STATE, *view.keys(records.STOP), *view.keys(records.REFUSED)[:MOST_REFUSED])
    return Transaction((mine, Unchanged(records.STATE, modified)), tuple(Delete(key) for key in keys))


def _put(key: str, record: Job | Stop | Refusal | Missing) -> Put:
    return Put(key, records.write(record), JOB)
