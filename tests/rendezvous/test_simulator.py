"""Thousands of simulated jobs, in which all goes wrong that can; and mistakes in what is decided, which are seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from phalanx._rendezvous import candidates, conclusion, membership, node, store_view
from phalanx._rendezvous.membership import Decision
from phalanx._rendezvous.records import replace
from phalanx._store.store import Created, Delete, Transaction, Unchanged
from tests.rendezvous import simulator
from tests.rendezvous.simulator import BrokenError, Setting, Simulation, play, setting_of

if TYPE_CHECKING:
    from collections.abc import Callable


SEEDS = 3000
"""Of the tests; `python -m tests.rendezvous.simulator 0 100000` plays more."""

ENOUGH = 1000
"""Seeds within which a mistake is seen."""


@pytest.mark.parametrize("first", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(500, SEEDS, 500))])
def test_no_story_breaks_a_rule(first: int) -> None:
    for seed in range(first, first + 500):
        try:
            play(seed)
        except Exception as error:
            error.add_note(f"python -m tests.rendezvous.simulator {seed}")
            raise


def test_the_same_seed_is_the_same_story() -> None:
    told: list[list[str]] = [[], []]
    for lines in told:
        play(4, lines.append)
    assert told[0] == told[1]
    assert len(told[0]) > 10


@pytest.mark.parametrize("nodes", [4, 64, 256])
def test_what_a_node_asks_of_the_store_does_not_depend_on_their_number(nodes: int) -> None:
    simulation = Simulation(Setting(nodes, nodes, nodes), 1).run()
    generations = len(simulation.all_formed)
    assert generations == 1
    assert all(node.finish is not None and node.finish.state == "succeeded" for node in simulation.nodes)
    asked = sorted(node.submitted for node in simulation.nodes)
    # Its coming; leadership, if nobody had it then; the end of its workers. The leader: the job, and two changes of it.
    assert asked[nodes // 2] <= 3
    assert asked[-2] <= 4
    assert asked[-1] <= 8


@pytest.mark.parametrize("first", [0, pytest.param(200, marks=pytest.mark.long)])
def test_who_asks_where_the_ranks_are_is_told_whatever_happens(first: int) -> None:
    count = 0
    for seed in range(first, first + 200):
        try:
            story = Simulation(setting_of(seed)._replace(looks=12), seed).run()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        count += sum(node.looks for node in story.nodes)
    assert count > 200


@pytest.mark.long
@pytest.mark.parametrize("nodes", [4, 64, 256])
def test_a_look_at_all_ranks_costs_one_write_of_each_node(nodes: int) -> None:
    simulation = Simulation(Setting(nodes, nodes, nodes, lasts=400.0), 1)
    simulation.at(60.0, lambda: simulation.nodes[0].ask_look())  # noqa: PLW0108 - there is none yet
    simulation.run()
    submitted = [node.submitted_for_looks for node in simulation.nodes]
    assert submitted == [2, *[1] * (nodes - 1)]  # the question and its removal; an answer of each other node


def first_broken(seeds: int = ENOUGH) -> str:
    """What the first story tells that breaks a rule."""
    for seed in range(seeds):
        try:
            play(seed)
        except (BrokenError, LookupError, IndexError) as error:
            return f"{seed}: {error}"
    return ""


def does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the workers of a node for ended that run."""
    monkeypatch.setattr(candidates, "has_ended", lambda *_: True)


def counts_no_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the restarts that were made."""
    monkeypatch.setattr(membership, "_ages", lambda *_: ())
    real = membership._follow

    def follow(job: Any, stop: Any, nodes: Any, notes: Any, *more: Any) -> Any:
        notes.restarts = []
        return real(job, stop, nodes, notes, *more)

    monkeypatch.setattr(membership, "_follow", follow)


def gives_a_rank_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the rank of a node that is gone to one that has a rank."""
    real = candidates.ranked

    def ranked(job: Any, ready: list[str], nodes: Any) -> list[str]:
        chosen = real(job, ready, nodes)
        return [*chosen[:-1], chosen[0]] if job.ends else chosen

    monkeypatch.setattr(candidates, "ranked", ranked)


def overwrites_the_first_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write why a generation ends though another has said so."""
    real = node.Participant._submit

    def submit(self: Any, what: str, transaction: Transaction) -> None:
        real(self, what, transaction._replace(conditions=()) if what == "stop" else transaction)

    monkeypatch.setattr(node.Participant, "_submit", submit)


def leads_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write decisions though another one leads, or the job has changed."""
    real = membership.Leader.decide

    def decide(self: Any, *args: Any) -> tuple[Transaction | None, float]:
        transaction, wake = real(self, *args)
        if transaction is not None:
            kept = tuple(each for each in transaction.conditions if not isinstance(each, Created | Unchanged))
            transaction = transaction._replace(conditions=kept)
        return transaction, wake

    monkeypatch.setattr(membership.Leader, "decide", decide)


def goes_on_with_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Form a generation of fewer nodes than the least."""
    real = membership._form

    def form(job: Any, *more: Any) -> Any:
        formed, wake = real(replace(job, min_nodes=1), *more)
        return replace(formed, min_nodes=job.min_nodes), wake

    monkeypatch.setattr(membership, "_form", form)


def waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up no wait for nodes that do not come: neither the leader does, nor a node by itself."""
    monkeypatch.setattr(node.Participant, "_wait_for_job", lambda _: None)
    real = membership.decide

    def decide(job: Any, *more: Any) -> Decision:
        made = real(job, *more)
        ends = made.job is not None and made.job.phase == "over" and job.phase == "forming" and not job.ends
        return Decision() if ends else made

    monkeypatch.setattr(membership, "decide", decide)


def keeps_no_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave before what is to be kept is written."""
    real = store_view.Kept.due
    monkeypatch.setattr(store_view.Kept, "due", lambda *args, leads: real(*args, leads=True) if leads else ())


def keeps_what_was_kept_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the evidence of an earlier job be among that of a later one."""
    real = membership.Leader.decide

    def decide(self: Any, *args: Any) -> tuple[Transaction | None, float]:
        transaction, wake = real(self, *args)
        if transaction is not None:
            kept = tuple(each for each in transaction.writes if not (isinstance(each, Delete) and each.below))
            transaction = transaction._replace(writes=kept)
        return transaction, wake

    monkeypatch.setattr(membership.Leader, "decide", decide)


def leaves_without_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a signal end the reading of what the workers have left."""
    real = node.Participant._wait_for_end
    monkeypatch.setattr(
        node.Participant, "_wait_for_end", lambda self: self._see("READ") if self._asked is not None else real(self)
    )


def loses_a_success(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have it go with the lease that workers have succeeded."""
    real = store_view.OwnEntry.write
    monkeypatch.setattr(store_view.OwnEntry, "write", lambda self: Transaction((), real(self).writes[:1]))


def succeeds_without_knowing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take an end that is not known for a success."""
    real = node.Participant._finish

    def finish(self: Any, end: Any) -> None:
        real(self, end._replace(state="succeeded") if end.state == "unknown" else end)

    monkeypatch.setattr(node.Participant, "_finish", finish)


def holds_on_to_a_store_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a store that was started again for the one before."""
    monkeypatch.setattr(node.Participant, "_forget_store", lambda _: None)


def goes_on_with_a_job_that_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a job for one that lives, whoever is left of it."""
    monkeypatch.setattr(store_view.Liveness, "prove", lambda self, *_, **__: setattr(self, "has_lived", True))


def ends_the_store_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for no node that is lost to come back and learn of the end."""
    monkeypatch.setattr(store_view.StoreView, "awaits_lost", lambda _: False)


def concludes_with_a_code_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit with 1 whatever a worker has failed with."""
    real = conclusion.conclude

    def conclude(*args: Any) -> conclusion.Conclusion:
        end = real(*args)
        return end._replace(code=1) if end.state == "failed" else end

    monkeypatch.setattr(conclusion, "conclude", conclude)


@pytest.mark.long
@pytest.mark.parametrize(
    "mistake, seen",
    [
        (does_not_wait, "is formed, and the workers of"),
        (counts_no_restarts, ""),
        (gives_a_rank_twice, "has a node twice"),
        (overwrites_the_first_word, "was written twice"),
        (leads_for_ever, "generation"),
        (goes_on_with_too_few, "nodes"),
        (waits_for_ever, "has not left: WAITING"),
        (keeps_no_evidence, "was to be"),
        (keeps_what_was_kept_before, "is kept, and"),
        (leaves_without_reading, "leaves without what the workers have left"),
        (loses_a_success, "is called lost, and its workers have succeeded"),
        (succeeds_without_knowing, "exits with 0"),
        (holds_on_to_a_store_that_is_gone, ""),
        (goes_on_with_a_job_that_was_killed, "follows a job of which nobody is left"),
        (ends_the_store_at_once, "the lost one may come back"),
        (concludes_with_a_code_of_its_own, "exits with 1, and workers have failed"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_mistake_is_seen(
    mistake: Callable[[pytest.MonkeyPatch], None], seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert simulator.play is play
    mistake(monkeypatch)
    found = first_broken()
    assert found
    assert seen in found
