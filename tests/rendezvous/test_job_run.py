"""What a node is told by whoever carries it out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

from phalanx._rendezvous.job_run import JobRun
from phalanx._store.store import Away, Back, Changed

if TYPE_CHECKING:
    from phalanx._rendezvous.effects import Effect

pytestmark = pytest.mark.once


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

    def ask_leave(self, why: str, _now: float) -> list[Effect]:
        self.told.append(why)
        return []


def test_what_the_store_has_told_meanwhile_is_told_at_once_and_in_order() -> None:
    it = Told()
    run = JobRun(cast("Any", it), cast("Any", None), cast("Any", it), signals=False)
    run._has_begun = True
    events: list[Any] = [Changed("nodes/", revision, (), (f"nodes/{revision}",)) for revision in range(3)]
    for event in (Back(), *events):
        run._hear(event)
    run.ask_leave("preempted")
    run._hear(Away("no answer"))
    while run._step() is None:
        pass
    assert it.told == [[Back(), *events], "preempted", [Away("no answer")]]
    assert it.said == [None, "no answer"]
