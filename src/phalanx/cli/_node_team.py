"""The workers of one node of a job, for `phalanx run`: who they are in each generation, and what is said of it."""

from __future__ import annotations

from phalanx._agent.history import describe_restart
from phalanx._base import clock
from phalanx._base.clock import format_duration
from phalanx._base.control_chars import sanitise
from phalanx._base.one_line import one_line
from phalanx._base.rank_ranges import name_ranks
from phalanx._events import agent_kinds, kinds
from phalanx._outcomes.result import RunProcsResult
from phalanx._rendezvous import evidence
from phalanx._rendezvous.job_run import NodeTeam
from phalanx._rendezvous.records import Stop, replace
from phalanx.cli._run_group import RunTeam

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from phalanx._agent.attempt_end import AttemptEnd
    from phalanx._agent.master_port import ReservedPort
    from phalanx._events.kinds import Event
    from phalanx._rendezvous.records import End, Job, Node

    Envs = Callable[[Job, int], Mapping[int, Mapping[str, str]]]

PLANNED = ("grow", "left", "signal")
"""Ends of a generation of which workers are given notice: nobody has failed."""


class MachineTeam(RunTeam, NodeTeam):
    """The workers of this node.

    Args:
        me: The node's entry, as it enters the job.
        port: What is reserved for rank 0.
        envs: Returns the environments of the workers, by local rank, of a node of that group rank in a job.
        where: Where the nodes meet, in words.
        grace: Seconds between SIGTERM and SIGKILL.
        options: See `RunTeam`.
    """

    def __init__(
        self, me: Node, port: ReservedPort, envs: Envs, *args: Any, where: str, grace: float, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._me = me
        self._port = port
        self._envs = envs
        self.where = where
        # Of a range of nodes, attempts that end because nodes come and go are not counted.
        self.attempts = self.policy.attempts if me.min_nodes == me.max_nodes else ""
        self._grace = grace
        self._job: Job | None = None
        self._first = 0  # the rank in the job of local rank 0
        self._began = 0.0
        self.away = ""
        self._is_spare = False  # whether that was said
        self._told = 0  # the generation of which it was said that it follows
        self.stopped: Stop | None = None
        """Why the latest generation has ended, as the job has it."""

    # --- what the node decides

    def assign(self, job: Job, rank: int) -> None:
        """See `NodeTeam`."""
        self._job, self._began = job, clock.now()
        self._first = first_rank(job, rank)
        for local, env in self._envs(job, rank).items():
            self._groups.envs[local] = dict(env)
        self._emit(agent_kinds.AgentState, job.generation, state="STARTING")
        hosts = [member.host for member in job.members]
        count = sum(member.nproc for member in job.members)
        mine = name_ranks(range(self._first, self._first + job.members[rank].nproc))
        again = f"attempt {job.generation + 1}{self.attempts}: " if job.generation else ""
        self._mention(f"{again}{len(hosts)} nodes ({_names(hosts)}), {count} workers; this is node {rank}, with {mine}")

    def end(self, stop: Stop | None) -> None:
        """See `NodeTeam`. The workers are given notice of what is planned, and only of that."""
        self.drop_standby()
        group = self.group
        if group is None:
            return
        group.order_close(None, self._grace)
        if group.notice is not None and (stop is None or stop.kind not in PLANNED):
            group.order_close(None, self._grace)  # a second order ends the notice: there is nobody left to save with

    def heard(self, what: Job | Stop) -> None:
        """See `NodeTeam`."""
        if isinstance(what, Stop):
            self.stopped = what
            if what.kind == "signal" and what.node == self._me.id:
                return  # it was said when it came
            self.say(f"phalanx: {told(what)}; stopping the workers")
            return
        if self._job is None:
            self._say_spare(what)
        if self._job is None or what.generation <= self._told or what.phase == "over":
            return
        self._told = what.generation
        last = what.ends[-1]
        cause = one_line(told(last))
        self._emit(
            agent_kinds.RestartDecided, self._job.generation, delay=what.delay, counted=last.failed, cause=cause,
            step=last.step, why="",
        )  # fmt: skip
        how = "failed" if last.failed else "ended"
        step = "" if last.step is None else f", step {last.step}"
        self.say(
            f"phalanx: attempt {last.generation + 1}{self.attempts} {how} after {format_duration(last.uptime)}: "
            f"{cause}{step}; {describe_restart(what.delay)}"
        )

    def _say_spare(self, job: Job) -> None:
        """Say that the job runs without this node, which has not taken part yet."""
        if job.phase == "running" and job.rank_of(self._me.id) < 0 and not self._is_spare:
            self._is_spare = True
            why = "is a spare" if len(job.members) >= job.max_nodes else "takes part soon"
            self._mention(f"the job runs on {len(job.members)} nodes; this node {why}")

    def _mention(self, text: str) -> None:
        """Show a line of ours while no worker runs here. Does not wait."""
        self._speak(sanitise(f"phalanx: {text}"))

    def store_is(self, why: str | None) -> None:
        """See `NodeTeam`."""
        if why is None:
            if self.away:
                self.say(f"phalanx: {self.where} answers again")
            self.away = ""
        elif not self.away:
            self.away = why
            runs = "the workers go on, " if self.group is not None and self.group.is_open else ""
            self.say(f"phalanx: {self.where} does not answer ({one_line(why)}); {runs}it is tried again")

    # --- what the workers do

    def when_failed(self, call: Callable[[int, Stop], None]) -> None:
        """See `NodeTeam`."""

        def take(events: list[Event]) -> None:
            for event in events:
                if isinstance(event, kinds.WorkerExited) and event.state == "failed":
                    rank = self._first + event.rank
                    error = one_line(event.how)
                    call(event.attempt, self._stop(event.attempt, error, rank, event.exitcode))

        self.record.stream.subscribe("phalanx-failure", take)

    def account(self, end: AttemptEnd) -> tuple[Node, Stop | None, bytes]:
        """See `NodeTeam`."""
        assert self._job is not None
        generation, now = self._job.generation, clock.now()
        self._emit(
            agent_kinds.AttemptEnded, generation, state=end.state, rank=end.rank, exitcode=end.exitcode,
            error=end.error, step=end.step, survivors=end.survivors, seconds=now - self._began,
        )  # fmt: skip
        me = self._me = replace(
            self._me,
            outcome=end.state,
            uptime=now - self._began,
            step=end.step,
            survivors=end.survivors,
            port=self._port.renew(),
            error=end.error if end.failed else "",
            rank=end.rank,
            exitcode=end.exitcode,
        )
        stop = self._stop(generation, end.error, end.rank, end.exitcode) if end.failed else None
        result = self.result or RunProcsResult()
        folder = self._groups.log_dir
        error = end.error if end.failed and not result.failures else ""
        return me, stop, evidence.write(
            me.id, me.host, folder, result, self._first, error, len(self._job.members)
        )  # fmt: skip

    def _stop(self, generation: int, error: str, rank: int | None, exitcode: int | None) -> Stop:
        return Stop(generation, "failure", self._me.id, self._me.host, error, rank, exitcode)

    def _emit(self, kind: type[Event], attempt: int, **fields: Any) -> None:
        self.record.stream.emit(kind, attempt, clock.now_ns(), **fields)


def first_rank(job: Job, rank: int, role: str | None = None) -> int:
    """Return the rank in the job of a node's first worker; with a ``role``, its rank among the workers of that.

    >>> from phalanx._rendezvous.records import Job, Member
    >>> job = Job(0, "running", 2, 2, (Member("a", "a", 2, "reader"), Member("b", "b", 3, "trainer")))
    >>> first_rank(job, 1), first_rank(job, 1, "trainer"), first_rank(job, 2)
    (2, 0, 5)
    """
    return sum(member.nproc for member in job.members[:rank] if role is None or member.role == role)


def told(stop: Stop | End) -> str:
    """Return why a generation ends, in words. Who can write to the store has chosen them: none has any effect."""
    stop = replace(stop, error=sanitise(one_line(stop.error)), host=sanitise(one_line(stop.host)))
    if stop.kind in ("failure", "hang"):
        who = f"host {stop.host}" if stop.rank is None else f"rank {stop.rank} on host {stop.host}"
        return f"{who}, {stop.error}" if stop.error else f"{who} failed"
    if stop.kind == "signal":
        return f"{stop.error} on host {stop.host}"
    if stop.kind == "left":
        return f"host {stop.host} leaves: {stop.error}"
    return stop.error


def _names(hosts: list[str], most: int = 8) -> str:
    names = list(dict.fromkeys(hosts))
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
