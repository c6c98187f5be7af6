"""`GuestTeam`: workers of a node that somebody else starts and ends. It knows their generation, and no process.

`guest` carries the node on a thread of its own, which calls the methods of `NodeTeam`; the others may be called by any
thread.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

from phalanx._agent.attempt_end import AttemptEnd
from phalanx._base import clock
from phalanx._base.latch import Latch
from phalanx._base.one_line import one_line
from phalanx._outcomes.result import RunProcsResult, is_cut_off
from phalanx._rendezvous import evidence, records
from phalanx._rendezvous.job_ranks import first_rank
from phalanx._rendezvous.job_run import NodeTeam
from phalanx._rendezvous.records import Job, Stop, replace
from phalanx._rendezvous.words import told, unreachable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx._agent.master_port import ReservedPort
    from phalanx._rendezvous.effects import Missing
    from phalanx._rendezvous.records import Node
    from phalanx._timers.hang_reporter import HangReporter


class Left(NamedTuple):
    """What the workers of a part have left.

    Attributes:
        result: What became of them, by local rank.
        log_dir: Where their logs are; "": nowhere.
        hangs: Knows where they were, if one was found to hang; None: nothing does.
    """

    result: RunProcsResult
    log_dir: str = ""
    hangs: HangReporter | None = None

    @property
    def survivors(self) -> int:
        """How many have outlived SIGKILL."""
        return sum(outcome.state == "abandoned" for outcome in self.result.outcomes.values())

    @property
    def is_cut_off(self) -> bool:
        """Whether the first failure is a lost connection, whose cause is elsewhere as a rule."""
        root = self.result.root_cause
        return root is not None and is_cut_off(root)


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
        left: What they have left, for the report on the job: told before their end. None: nothing was told.
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
        self.left: Left | None = None


class GuestTeam(NodeTeam):
    """The workers of a node, which somebody else starts and ends.

    Args:
        me: The node's entry, as it enters the job.
        port: What is reserved for rank 0.
        changed: Called, by the node's thread, when there is a new `part`, or the generation has ended.
        warn: Called with a line that the user should see, by the same thread. It must not wait.
        where: Where the nodes meet, in words.
        expect: Called with seconds: see `NodeTeam.expect`. By the same thread.

    Attributes:
        part: The part of this node in the latest generation that it takes part in; None: there was none.
        is_closing: Whether somebody has asked for the end of the job, or it is over.
        is_spare: Whether the generation that began last runs, or ran, without this node.
        away: Why the store does not answer; "": it does.
    """

    def __init__(
        self, me: Node, port: ReservedPort, changed: Callable[[], None], warn: Callable[[str], None], where: str,
        expect: Callable[[float], object],
    ) -> None:  # fmt: skip
        self._me = me
        self._port = port
        self._changed = changed
        self._warn, self._where, self._expect = warn, where, expect
        self._whys: set[str] = set()  # why the store does not answer, as was said since it did last
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
        """Say that a worker has failed: the other nodes hear of it at once, in the words that are told first.

        The part ends with those that are told last.
        """
        is_first = part.failure is None
        if part.end is not None or (is_first and part.ended):
            return
        part.failure = AttemptEnd("failed", rank, exitcode, one_line(error))
        if is_first:
            self._fail(part.job.generation, self._stop(part, part.failure))

    # --- the node's thread

    def assign(self, job: Job, rank: int) -> None:
        """See `NodeTeam`."""
        if wrong := unreachable(job):
            self._warn(wrong)
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

    def expect(self, seconds: float) -> None:
        """See `NodeTeam`."""
        with suppress(Exception):  # the caller's: the node goes on
            self._expect(seconds)

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
            survivors=0 if part.left is None else part.left.survivors,
            port=self._port.renew(),
            error=records.one_line(end.error) if end.failed else "",
            rank=end.rank,
            exitcode=end.exitcode,
            is_cut_off=end.failed and part.left is not None and part.left.is_cut_off,
        )
        return self._me, self._stop(part, end) if end.failed else None, self._evidence(part, end)

    def _evidence(self, part: Part, end: AttemptEnd) -> bytes:
        """Return what is told of the workers; b"": nothing, where none has failed and nobody has said more."""
        if part.left is None and not end.failed:
            return b""
        me, job, left = self._me, part.job, part.left or Left(RunProcsResult())
        error = end.error if end.failed and not left.result.failures else ""
        return evidence.write(
            me.id, me.host, left.log_dir, left.result, first_rank(job, part.rank), error, left.hangs, len(job.members),
            me.machine,
        )  # fmt: skip

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

    def miss(self, missing: Missing) -> None:
        """See `NodeTeam`."""
        self._warn(missing.line)

    def store_is(self, why: str | None) -> None:
        """See `NodeTeam`."""
        self.away = why or ""
        if why is None:
            self._whys.clear()
        elif why not in self._whys:
            self._whys.add(why)
            self._warn(f"{self._where} does not answer ({one_line(why)}); it is tried again")

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
