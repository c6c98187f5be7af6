"""Which nodes can take part in a generation of a job, in which order, and for whom it waits. Pure.

Owns what the leader of a job has noted of when it saw what.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from phalanx._base.text import format_ranks, how_many
from phalanx._base.tty import sanitise
from phalanx._rendezvous.records import VERSION, Job, Node
from phalanx._rendezvous.settings import Rules


class Seen(NamedTuple):
    """A node as the store has it: its entry, and the revisions at which that was made, and last written."""

    node: Node
    created: int
    modified: int = 0


class Notes:
    """When a leader saw what, by its own clock: of one phase of one generation, but for the restarts.

    A decision may not be made, and be taken again: what it would change here is ``planned``, until the job is so.
    """

    def __init__(self, job: Job, now: float) -> None:
        self.restarts: list[float] = []
        """When restarts were decided that count."""
        self.twice: dict[str, float] = {}
        """Since when nodes have a rank that another one has: that one's lease may yet run out."""
        self.regained = -math.inf
        """When the leader had the store again that was away, or a lease in place of one that was lost."""
        self.planned: Notes | None = None
        self.of = -1, ""
        self.turn(job, now)

    def turn(self, job: Job, now: float) -> None:
        """Note in which phase the job is."""
        count = len(job.restarts)
        self.restarts = self.restarts[:count] + [now - age for age in job.restarts[len(self.restarts) :]]
        if self.of == (job.generation, job.phase):
            return
        if self.planned is not None and self.planned.of == (job.generation, job.phase):
            self.planned.regained = self.regained  # it may have been since then
            self.__dict__.update(self.planned.__dict__)
        else:
            self.of = job.generation, job.phase
            self.since = now
            self.enough: float | None = None  # since when the minimum is there
            self.more: float | None = None  # since when nodes wait that could take part
            self.ending: float | None = None  # since when a `Stop` is there
            self.missing: dict[str, float] = {}  # since when the entries are gone of nodes that take part
        self.planned = None

    def after(self, job: Job, now: float) -> Notes:
        """Return what is to be noted once the job is that."""
        planned = copy.copy(self)
        planned.planned = None
        planned.turn(job, now)
        return planned


def refusals(job: Job, nodes: Mapping[str, Seen], notes: Notes, now: float, rules: Rules) -> dict[str, str]:
    """Return why which nodes cannot take part."""
    found = {name: why for name, (node, *_) in nodes.items() if (why := _refusal(job, node, rules))}
    # A node that is refused for another reason does not decide what the others run. Else the first one to come does;
    # where ranks are given, node 0, whenever it comes: it hosts the store, and does not leave if refused.
    come = sorted(without(nodes, found).values(), key=lambda seen: (seen.node.order != 0, seen.created))
    runs = dict(programs(job, (node for node, *_ in come if node.state != "left")))
    found |= {
        name: f"the job of this id runs {runs[node.role]}, and this node was told {node.program}: another job needs"
        " another run id, and workers of another kind another role"
        for name, (node, *_) in nodes.items()
        if name not in found and runs.get(node.role, node.program) != node.program != ""
    }
    found |= _with_other_args(job, without(nodes, found))
    twice = _twice(job, without(nodes, found))
    notes.twice = {name: notes.twice.get(name, now) for name in twice}
    for name, first in twice.items():
        if now >= notes.twice[name] + rules.rank_timeout:
            host = nodes[first].node.host
            found[name] = f"its node rank is {nodes[name].node.order}, and so is that of host {host}, which came first"
    return found


def without(nodes: Mapping[str, Seen], those: Mapping[str, str]) -> Mapping[str, Seen]:
    """Return the nodes but for those."""
    return {name: seen for name, seen in nodes.items() if name not in those} if those else nodes


def programs(job: Job, chosen: Iterable[Node]) -> tuple[tuple[str, str], ...]:
    """Return what workers of which role run, once these nodes take part."""
    runs = dict(job.programs)
    for node in chosen:
        if node.program:
            runs.setdefault(node.role, node.program)
    return tuple(runs.items())


def arguments(job: Job, chosen: Iterable[Node]) -> tuple[tuple[str, str], ...]:
    """Return the arguments that workers of which role get, once these nodes take part: two of a role, if they differ.

    They stay known when their machines are gone: what the others have does not become what all have.
    """
    given = dict.fromkeys(job.args)
    for node in chosen:
        if node.args and sum(role == node.role for role, _ in given) < 2:  # noqa: PLR2004 - more say nothing more
            given[node.role, node.args] = None
    return tuple(given)


def have_other_args(job: Job, role: str) -> bool:
    """Whether machines of a role have given their workers different arguments."""
    return sum(its == role for its, _ in job.args) > 1


def _with_other_args(job: Job, nodes: Mapping[str, Seen]) -> dict[str, str]:
    """Return why which nodes cannot take part whose workers would get other arguments than all those that run get.

    Of a job whose machines have different arguments nobody knows what is right; nor of a machine that is the only one
    of its role. A job that waits for machines is one of whoever comes.
    """
    if job.phase != "running":
        return {}
    members, roles = set(job.ids), Counter(member.role for member in job.members)
    given = {role: args for role, args in job.args if roles[role] > 1 and not have_other_args(job, role)}
    return {
        name: f"the job of this id runs {node.program} with other arguments: another job needs another run id"
        for name, (node, *_) in nodes.items()
        if name not in members and node.args and given.get(node.role, node.args) != node.args
    }


def was_told_the_same(job: Job, node: Node) -> bool:
    """Whether a node was told of as many nodes as a job has, and of the same restarts."""
    return (node.min_nodes, node.max_nodes) == (job.min_nodes, job.max_nodes) and (
        "" in (job.policy, node.policy) or job.policy == node.policy
    )


def _refusal(job: Job, node: Node, rules: Rules) -> str:
    """Return why a node by itself cannot take part; "": it can."""
    if node.version != VERSION:
        return f"the agents of this job write entries of version {VERSION}, and this one {node.version}"
    wanted = f"{_span(job.min_nodes, job.max_nodes)} {_noun(job.max_nodes)}"
    if (job.min_nodes, job.max_nodes) != (node.min_nodes, node.max_nodes):
        return f"the job is one of {wanted}, and this node was told {_span(node.min_nodes, node.max_nodes)}"
    if not was_told_the_same(job, node):
        return f"the job has {job.policy}, and this node was told {node.policy}"
    if node.machine in job.excluded:
        return f"workers of host {node.host} were the root cause {how_many(rules.exclude_after, 'time')} in a row"
    if node.order >= job.max_nodes:
        return f"its node rank is {node.order}, and the job has {wanted}: 0 to {job.max_nodes - 1}"
    return ""


def _twice(job: Job, nodes: Mapping[str, Seen]) -> dict[str, str]:
    """Return the nodes whose rank another one has that takes part, or came first; and that one."""
    given = [(name, seen) for name, seen in nodes.items() if seen.node.order >= 0 and seen.node.state != "left"]
    if len({seen.node.order for _, seen in given}) == len(given):
        return {}
    members = set(job.ids)
    given.sort(key=lambda item: (item[0] not in members, item[1].created))
    first: dict[int, str] = {}
    return {name: first[node.order] for name, (node, *_) in given if first.setdefault(node.order, name) != name}


def ranked(job: Job, ready: list[str], nodes: Mapping[str, Seen]) -> list[str]:
    """Return who takes part, by rank: that which was given; else that of before; else one that is free."""
    there = set(ready)
    before = [name for name in job.ids if name in there]
    count = min(len(ready), job.max_nodes)
    stays = set(before)
    chosen = (before + [name for name in ready if name not in stays])[:count]
    orders = {name: nodes[name].node.order for name in chosen}
    if all(order >= 0 for order in orders.values()):
        return sorted(chosen, key=orders.__getitem__)
    ranks = {member.id: rank for rank, member in enumerate(job.members)}
    places: list[str | None] = [None] * count
    left = []
    for name in sorted(chosen, key=lambda name: orders[name] < 0):
        rank = orders[name] if orders[name] >= 0 else ranks.get(name, -1)
        if 0 <= rank < count and places[rank] is None:
            places[rank] = name
        else:
            left.append(name)
    return [left.pop(0) if name is None else name for name in places]


def ready(job: Job, nodes: Mapping[str, Seen]) -> list[str]:
    """Return the nodes that can take part in the generation that is to come, in the order in which they came."""
    last = job.generation - (job.phase == "forming")
    found = sorted((created, name) for name, (node, created, _) in nodes.items() if node.state == "ready")
    if not found:
        return []
    members, twice = set(job.ids), _twice(job, nodes)
    return [
        name
        for _, name in found
        if name not in twice and nodes[name].node.machine not in job.excluded
        if name not in members or nodes[name].node.generation >= last
    ]


def has_ended(job: Job, node: Node) -> bool:
    """Whether a node whose generation ends has nothing more to do with it, and says that it goes on, or goes."""
    return node.generation >= job.generation and node.state in ("ready", "left")


def has_succeeded(job: Job, node: Node) -> bool:
    """Whether all workers that a node runs of a generation have succeeded."""
    return node.generation >= job.generation and node.state in ("done", "left") and node.outcome == "succeeded"


def _span(least: int, most: int) -> str:
    return str(least) if least == most else f"{least} to {most}"


ROLL_CALL_AFTER = 3.0
"""Seconds that a node waits before it says for whom."""

ROLL_CALL_REPEATS = (10.0, 300.0)
"""Seconds after which it says so again though nothing has changed: at first, doubled each time, and at most."""

ROLL_CALL_CHANGES = 5.0
"""Seconds between two lines on what has changed, at most: as many seconds as there were lines."""

MOST_NAMED = 8
"""Nodes that are named one by one."""


def call_roll(nodes: Iterable[Node], least: int, most: int) -> tuple[str, tuple[int, ...]]:
    """Return who has come and who is missing, in words; and the node ranks that are missing, if they were given.

    ``nodes``: those that have come, and can take part. ``least``, ``most``: how many are to come.

    >>> from phalanx._rendezvous.records import Node
    >>> call_roll([Node("a", "h1", "", 8, order=0), Node("c", "h3", "", 8, order=2)], 4, 4)
    ('2 of 4 nodes have come: 0 (h1), 2 (h3); nodes 1, 3 are missing', (1, 3))
    >>> call_roll([Node("a", "h1", "10.0.0.1", 8)], 2, 4)
    ('1 of 2 to 4 nodes has come: h1; 1 more is needed', ())
    >>> call_roll([], 2, 2)
    ('none of 2 nodes has come; 2 more are needed', ())
    >>> call_roll([Node("a", "h1", "10.0.0.1", 8), Node("b", "h2", "10.0.0.2", 8)], 2, 4)
    ('2 of 2 to 4 nodes have come: h1, h2; 2 more may come', ())
    """
    there = list(nodes)
    count = "none" if not there else len(there)
    text = f"{count} of {_span(least, most)} {_noun(most)} {'have' if len(there) > 1 else 'has'} come"
    missing: tuple[int, ...] = ()
    if there and all(node.order >= 0 for node in there):
        there.sort(key=lambda node: node.order)
        missing = tuple(sorted(set(range(least)) - {node.order for node in there}))
        names = [f"{node.order} ({sanitise(node.host)})" for node in there]
    else:
        names = [sanitise(node.host) for node in there]
    if len(names) > MOST_NAMED:
        names[MOST_NAMED:] = [f"{len(names) - MOST_NAMED} more"]
    text += f": {', '.join(names)}" if names else ""
    if missing:
        return f"{text}; {_noun(len(missing))} {format_ranks(missing)} {_are(len(missing))} missing", missing
    left = least - len(there)
    if left <= 0:
        return f"{text}; {most - len(there)} more may come", ()
    return f"{text}; {left} more {_are(left)} needed", ()


class RollCall:
    """When a node that waits says for whom: some seconds after it has begun, when that changes, and now and then.

    Attributes:
        wake: When to `call` again, though nothing has changed; inf: never.
    """

    def __init__(self) -> None:
        self.wake = math.inf
        self._said = ""
        self._count = 0
        self._last = self._again = 0.0

    def call(self, text: str, since: float, now: float) -> bool:
        """Return whether ``text`` is to be reported now. ``since``: when the node began to wait.

        >>> roll = RollCall()
        >>> [(roll.call("1 of 2", 0.0, now), roll.wake) for now in (1.0, 3.0, 9.0, 13.0)]
        [(False, 3.0), (True, 13.0), (False, 13.0), (True, 33.0)]
        >>> [(roll.call("1 of 3", 0.0, now), roll.wake) for now in (14.0, 15.0)]
        [(False, 15.0), (True, 25.0)]
        """
        if not self._said:
            due = since + ROLL_CALL_AFTER
        elif text != self._said:
            due = min(self._again, self._last + min(float(self._count), ROLL_CALL_CHANGES))
        else:
            due = self._again
        if now < due:
            self.wake = due
            return False
        again = (
            ROLL_CALL_REPEATS[0] if text != self._said else min(2 * (self._again - self._last), ROLL_CALL_REPEATS[1])
        )
        self._said, self._last, self._again, self._count = text, now, now + again, self._count + 1
        self.wake = self._again
        return True


def _noun(count: int) -> str:
    return "node" if count == 1 else "nodes"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"
