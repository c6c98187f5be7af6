"""`GuestTeam`: workers of a node that somebody else starts and ends. It knows their generation, and no process.

`guest` carries the node on a thread of its own, which calls the methods of `NodeTeam`; the others may be called by any
thread.
"""

from __future__ import annotations

from contextlib import suppress

from phalanx._agent.attempt_end import AttemptEnd
from phalanx._base import clock
from phalanx._base.latch import Latch
from phalanx._base.one_line import one_line
from phalanx._outcomes.result import RunProcsResult
from phalanx._rendezvous import stack_report
from phalanx._rendezvous.evidence import Left, account, stop_of
from phalanx._rendezvous.job_run import JobRun, NodeTeam
from phalanx._rendezvous.records import Job, Stop
from phalanx._rendezvous.words import told as in_words
from phalanx._rendezvous.words import unreachable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx._agent.master_port import ReservedPort
    from phalanx._rendezvous.effects import Missing
    from phalanx._rendezvous.records import Node
    from phalanx._rendezvous.settings import Machines


class Owner:
    """Whoever has the workers of a guest, as the node sees it. The node's thread calls all of this, and waits for none.

    By default, the workers show no stacks, and go on while the process is stopped.
    """

    def come(self, run: JobRun, later: Callable[[Callable[[], str]], None], patience: float) -> None:
        """Begin what the workers need and what asks for no part in the job, see `NodeTeam.come`.

        Args:
            run: What carries the node: any thread may ask it.
            later: See `NodeTeam.come`.
            patience: Seconds after which an import has failed.
        """

    def expect(self, seconds: float) -> None:
        """Have the workers ended, unless this is called again within so many seconds."""

    def take_stacks(self, generation: int, nodes: int, then: Callable[[bytes], None]) -> None:  # noqa: ARG002 - see below
        """Take the stacks of the workers of a generation, see `NodeTeam.look`."""
        then(stack_report.write({}, 0, why=stack_report.NONE_SHOWN))

    def hangs_elsewhere(self) -> None:
        """Have the stacks of the workers written, for a rank of another node hangs. Their end follows."""


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
        machines: What the node is told of its job.
        owner: Whoever has the workers.

    Attributes:
        part: The part of this node in the latest generation that it takes part in; None: there was none.
        is_closing: Whether somebody has asked for the end of the job, or it is over.
        is_spare: Whether the generation that began last runs, or ran, without this node.
        away: Why the store does not answer; "": it does.
    """

    def __init__(
        self, me: Node, port: ReservedPort, changed: Callable[[], None], warn: Callable[[str], None],
        machines: Machines, owner: Owner,
    ) -> None:  # fmt: skip
        self._me = me
        self._port = port
        self._changed = changed
        self._warn, self._machines, self._owner = warn, machines, owner
        self._whys: set[str] = set()  # why the store does not answer, as was said since it did last
        self._wake: Callable[[], None] = lambda: None
        self._fail: Callable[[int, Stop], None] = lambda _, __: None
        self.part: Part | None = None
        self.is_closing = self.is_spare = False
        self.away = ""
        self.run: JobRun | None = None
        """What carries the node: set before it begins."""

    # --- any thread

    def conclude(self, part: Part, end: AttemptEnd) -> None:
        """Say how the workers of a part have ended: none of them is left. The first word counts."""
        if part.end is None:
            part.end = end
            self._wake()

    def tell_failure(
        self, part: Part, error: str, rank: int | None, exitcode: int | None, *, is_hang: bool = False
    ) -> None:
        """Say that a worker has failed: the other nodes hear of it at once, in the words that are told first.

        The part ends with those that are told last. ``is_hang``: a timer has found it.
        """
        is_first = part.failure is None
        if part.end is not None or (is_first and part.ended):
            return
        part.failure = AttemptEnd("failed", rank, exitcode, one_line(error))
        if is_first:
            generation = part.job.generation
            self._fail(generation, stop_of(self._me, generation, error, rank, exitcode, is_hang=is_hang))

    # --- the node's thread

    def come(self, later: Callable[[Callable[[], str]], None]) -> None:
        """See `NodeTeam`."""
        assert self.run is not None
        self._ask(self._owner.come, self.run, later, self._machines.join_timeout)

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
        self._ask(self._owner.expect, seconds)

    def look(self, generation: int, nodes: int, then: Callable[[bytes], None]) -> None:
        """See `NodeTeam`."""
        self._ask(self._owner.take_stacks, generation, nodes, then)

    def say(self, text: str) -> None:
        """See `Team`. Nothing is shown: the console is the owner's."""

    def when_failed(self, call: Callable[[int, Stop], None]) -> None:
        """See `NodeTeam`."""
        self._fail = call

    def account(self, end: AttemptEnd) -> tuple[Node, Stop | None, bytes]:
        """See `NodeTeam`."""
        part = self.part
        assert part is not None
        left, uptime = part.left or Left(RunProcsResult()), clock.now() - part.began
        self._me, stop, told = account(self._me, part.job, part.rank, end, uptime, self._port.renew(), left)
        is_said = part.left is not None or end.failed
        return self._me, stop, told if is_said else b""

    def heard(self, what: Job | Stop) -> None:
        """See `NodeTeam`."""
        part, job = self.part, what if isinstance(what, Job) else None
        if isinstance(what, Stop):
            self.is_closing = self.is_closing or what.kind == "signal"
            if part is not None and what.generation == part.job.generation:
                part.why = in_words(what)
            if what.kind == "hang" and what.node != self._me.id:
                self._ask(self._owner.hangs_elsewhere)  # before their end, which follows
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
            self._warn(f"{self._machines.where} does not answer ({one_line(why)}); it is tried again")

    def _is_past(self, part: Part, job: Job) -> bool:
        return job.phase == "over" or job.generation > part.job.generation

    def _ask(self, call: Callable[..., object], *args: object) -> None:
        with suppress(Exception):  # the owner's: the node goes on
            call(*args)

    def _end_part(self) -> None:
        if self.part is not None:
            self.part.ended.open()
        self._changed()


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
