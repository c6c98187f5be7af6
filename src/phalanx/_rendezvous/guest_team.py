"""`GuestTeam`: workers of a node that somebody else starts and ends. It knows their generation, and no process.

`guest` carries the node on a thread of its own, which calls the methods of `NodeTeam`; the others may be called by any
thread.
"""

from __future__ import annotations

from contextlib import suppress

from phalanx._agent.attempt_end import AttemptEnd
from phalanx._base import clock
from phalanx._base.control_chars import sanitise
from phalanx._base.latch import Latch
from phalanx._base.one_line import one_line
from phalanx._outcomes.result import RunProcsResult
from phalanx._rendezvous import evidence, records
from phalanx._rendezvous.job_run import NodeTeam
from phalanx._rendezvous.records import Job, Stop, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx._agent.master_port import ReservedPort
    from phalanx._rendezvous.records import Node


class Part:
    """The part of a node in one generation.

    Args:
        job: The job, as that generation has begun.
        rank: The node's group rank.

    Attributes:
        is_taken: Whether the workers' owner has been told of it.
        ended: Open: the generation has been ended, by whomever, or the job is over.
        why: Why, in one line; "": nobody has said.
        failure: What the owner has told of a worker's failure; None: nothing.
        end: How the workers ended, none of which is left; None: they may run.
    """

    def __init__(self, job: Job, rank: int) -> None:
        self.job = job
        self.rank = rank
        self.began = clock.now()
        self.is_taken = False
        self.ended = Latch()
        self.why = ""
        self.failure: AttemptEnd | None = None
        self.end: AttemptEnd | None = None


class GuestTeam(NodeTeam):
    """The workers of a node, which somebody else starts and ends.

    Args:
        me: The node's entry, as it enters the job.
        port: What is reserved for rank 0.
        changed: Called, by the node's thread, when there is a new `part`, or the generation has ended.

    Attributes:
        part: The part of this node in the latest generation that it takes part in; None: there was none.
        is_closing: Whether somebody has asked for the end of the job, or it is over.
        is_spare: Whether the generation that began last runs, or ran, without this node.
        away: Why the store does not answer; "": it does.
    """

    def __init__(self, me: Node, port: ReservedPort, changed: Callable[[], None]) -> None:
        self._me = me
        self._port = port
        self._changed = changed
        self._wake: Callable[[], None] = lambda: None
        self._fail: Callable[[int, Stop], None] = lambda _, __: None
        self.part: Part | None = None
        self.is_closing = self.is_spare = False
        self.away = ""

    # --- any thread

    def conclude(self, part: Part, end: AttemptEnd) -> None:
        """Say how the workers of a part have ended: none of them is left. The first word counts."""
        if part.end is None:
            part.end = end
            self._wake()

    def tell_failure(self, part: Part, error: str, rank: int | None, exitcode: int | None) -> None:
        """Say that a worker has failed: the other nodes hear of it at once. The first word counts."""
        if part.failure is None and part.end is None and not part.ended:
            part.failure = AttemptEnd("failed", rank, exitcode, one_line(error))
            self._fail(part.job.generation, self._stop(part, part.failure))

    # --- the node's thread

    def assign(self, job: Job, rank: int) -> None:
        """See `NodeTeam`."""
        self.part = Part(job, rank)
        self.is_spare = False

    def start(self, attempt: int, wake: Callable[[], None]) -> None:  # noqa: ARG002 - `assign` was told
        """See `Team`. The owner of the workers starts them."""
        self._wake = wake
        self._changed()

    def ended(self) -> AttemptEnd | None:
        """See `Team`."""
        return None if self.part is None else self.part.end

    def stop(self, death_signal: int, grace: float) -> None:  # noqa: ARG002 - the owner of the workers knows theirs
        """See `Team`."""
        self._end_part()

    def end(self, stop: Stop | None) -> None:  # noqa: ARG002 - it was heard
        """See `NodeTeam`."""
        self._end_part()

    def say(self, text: str) -> None:
        """See `Team`. Nothing is shown: the console is the owner's."""

    def when_failed(self, call: Callable[[int, Stop], None]) -> None:
        """See `NodeTeam`."""
        self._fail = call

    def account(self, end: AttemptEnd) -> tuple[Node, Stop | None, bytes]:
        """See `NodeTeam`."""
        part = self.part
        assert part is not None
        self._me = replace(
            self._me,
            outcome=end.state,
            uptime=clock.now() - part.began,
            step=end.step,
            port=self._port.renew(),
            error=records.one_line(end.error) if end.failed else "",
            rank=end.rank,
            exitcode=end.exitcode,
        )
        me, failed = self._me, end.failed
        told = evidence.write(me.id, me.host, "", RunProcsResult(), 0, end.error, machine=me.machine) if failed else b""
        return me, self._stop(part, end) if failed else None, told

    def heard(self, what: Job | Stop) -> None:
        """See `NodeTeam`."""
        part, job = self.part, what if isinstance(what, Job) else None
        if isinstance(what, Stop):
            self.is_closing = self.is_closing or what.kind == "signal"
            if part is not None and what.generation == part.job.generation:
                part.why = told(what)
        elif job is not None:
            self.is_closing = self.is_closing or job.phase == "over"
            if job.phase == "running":
                self.is_spare = job.rank_of(self._me.id) < 0
        # A later generation, too: this one's end was not seen.
        if part is not None and (what.generation == part.job.generation if job is None else self._is_past(part, job)):
            self._end_part()

    def store_is(self, why: str | None) -> None:
        """See `NodeTeam`."""
        self.away = why or ""

    def _is_past(self, part: Part, job: Job) -> bool:
        return job.phase == "over" or job.generation > part.job.generation

    def _end_part(self) -> None:
        if self.part is not None:
            self.part.ended.open()
        self._changed()

    def _stop(self, part: Part, end: AttemptEnd) -> Stop:
        error = records.one_line(end.error)
        me = self._me
        return Stop(part.job.generation, "failure", me.id, me.host, error, end.rank, end.exitcode)


def told(stop: Stop) -> str:
    """Return why a generation has ended, in one line. Who can write to the store has chosen the words.

    >>> told(Stop(0, "failure", "a", "host0", "ValueError: bad batch", rank=3))
    'rank 3 on host host0: ValueError: bad batch'
    """
    who = f"host {stop.host}" if stop.rank is None else f"rank {stop.rank} on host {stop.host}"
    return sanitise(one_line(f"{who}: {stop.error or stop.kind}"))


class Calls:
    """What is to be called when a generation ends. Any thread adds to it; exceptions of what is called are dropped."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], object]] = []
        self._told: Part | None = None
        self._is_over = False

    def add(self, call: Callable[[], object], part: Part | None) -> None:
        """Have ``call`` called at each end; at once, if ``part`` has ended."""
        self._calls.append(call)
        if part is not None and part.ended:
            self._call(call)

    def tell(self, part: Part | None, *, is_over: bool) -> None:
        """Call all, once for each part that has ended, and once more if all is over."""
        if part is not None and part.ended and (part is not self._told or is_over > self._is_over):
            self._told, self._is_over = part, is_over
            for call in list(self._calls):
                self._call(call)

    def _call(self, call: Callable[[], object]) -> None:
        with suppress(Exception):  # the caller's: the node goes on
            call()
