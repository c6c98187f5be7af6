"""Whether somebody is left of the job that the store holds, or it is an earlier one of its id. Pure.

What was written by agents that were killed may outlive them a while; so may a job that has just ended.
"""

from __future__ import annotations

import math

from phalanx._rendezvous import records
from phalanx._rendezvous.store_view import StoreView
from phalanx._rendezvous.writes import OwnEntry

CONCEDED = 1.0
"""Seconds for which a node that has just come leaves it to the others to lead: they know whether the job lives."""


class Liveness:
    """What a node knows of whether the job is one that lives.

    Args:
        patience: Seconds after which a leader finds that nobody is left, see `Leader`.

    Attributes:
        is_new: Whether this node has found no job that goes on.
        has_lived: Whether it has found that somebody is left of that.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self.is_new, self.has_lived = True, False
        self._is_late = False  # whether an earlier job was met
        self._led = 0, 0.0  # since which revision the leader leads, and since when this node knows

    def reach_store(self, now: float) -> None:
        """Reach the store, for the first time or again: who leads is not known yet."""
        self._led = 0, now

    def prove(self, view: StoreView, own: OwnEntry, now: float, *, is_away: bool) -> None:
        """Find out whether the job lives, from what is known now. ``is_away``: the store does not answer.

        It lives if this node takes part; if its leader has changed it since this node came; or if it has had the same
        leader for longer than such a one takes to find that nobody is left.
        """
        job = view.known_job()
        leader, since = view.leader()
        if self._led[0] != since:
            self._led = since, now
        if job is None or job.phase == "over" or view.is_job_gone():  # the last: it is another one
            return
        is_led = leader not in ("", own.node.id) and not is_away and now >= self._led[1] + 3 * self._patience
        is_changed = own.entered is not None and view.job()[1] > own.revision
        self.has_lived = self.has_lived or is_led or is_changed or job.rank_of(own.node.id) >= 0

    def find_earlier(self, view: StoreView) -> bool:
        """Find out whether the job `is_new`: one that ends when this node comes is an earlier one of its id.

        Returns whether such a one is met, for the first time. Raises DamagedError.
        """
        job, _ = view.job()
        is_over = job is not None and job.phase == "over"
        is_ending = is_over if self.has_lived else view.is_ending()
        self.is_new = self.is_new and (job is None or is_ending)
        if not self.has_lived and view.is_job_gone():  # nobody was left of it
            view.forget_job()
            self.is_new = job is None or is_ending
        is_first = self.is_new and job is not None and not self._is_late
        self._is_late = self._is_late or is_first
        return is_first

    def conceded_until(self, view: StoreView, *, hosts: bool | None) -> float:
        """Return until when others are to lead, not this node. ``hosts``: see `Participant`. Raises DamagedError."""
        job, _ = view.job()
        if view.told(records.JOB) == 0 or view.leader()[0]:
            return math.inf
        if job is None and hosts is False:
            return math.inf  # what it is to be, the node says that hosts the store: it is there, and stays if refused
        is_known = self.has_lived or job is None or job.phase == "over"
        return -math.inf if is_known else self._led[1] + CONCEDED
