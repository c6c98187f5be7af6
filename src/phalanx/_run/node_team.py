"""The workers of one node of a job, for `phalanx run`: who they are in each generation, and what is said of it."""

from __future__ import annotations

import shlex
import signal
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from phalanx._base import clock
from phalanx._base.clock import format_duration
from phalanx._base.stderr import mention
from phalanx._base.text import how_many, name_ranks, one_line
from phalanx._base.tty import sanitise
from phalanx._events import agent_kinds
from phalanx._group.restart_policy import AttemptEnd
from phalanx._outcomes.result import RunProcsResult
from phalanx._rendezvous.candidates import have_other_args
from phalanx._rendezvous.conclusion import follows, reason_of, told, unreachable
from phalanx._rendezvous.evidence import Left, account, stop_of
from phalanx._rendezvous.life import Missing
from phalanx._rendezvous.records import Job, Node, Stop, first_rank
from phalanx._run.group_team import COMMON_STOP_SECONDS
from phalanx._run.job_run import JobRun, NodeTeam
from phalanx._run.master_port import ReservedPort
from phalanx._run.node_workers import LOOK, NodeWorkers
from phalanx._run.run_events import FailureWatch, WorkerFailure
from phalanx._run.run_team import Place, RunTeam
from phalanx._run.runner import NoAttemptError
from phalanx.multiprocessing import PreloadError

Envs = Callable[[Job, int], Mapping[int, Mapping[str, str]]]

_NODE_RANK, _LOCAL_ADDR, _CONF = "--node-rank", "--local-addr", "--rdzv-conf"
_CONF_OF_ONE_MACHINE = ("is_host", "bind")
_PREFIXES = ("PHALANX", "PET")


class CommandLine(NamedTuple):
    """What was typed here.

    Attributes:
        head: The command and its options.
        program: The script and its arguments; empty: they are in a job file.
        variables: Names of variables that are options, too.
    """

    head: list[str]
    program: list[str]
    variables: list[str]

    def on_other(self, rank: int) -> str:
        """Return what is to be typed on a machine of that node rank; -1: the ranks are not given.

        >>> here = CommandLine(["phalanx", "run", "--nnodes=2", "--node-rank", "0"], ["x.py", "--node-rank", "7"], [])
        >>> here.on_other(1)
        'phalanx run --nnodes=2 --node-rank 1 x.py --node-rank 7'
        >>> CommandLine(["phalanx", "run", "--rdzv-conf=is_host=yes", "--local-addr", "a"], ["x"], []).on_other(1)
        'phalanx run --node-rank=1 x'
        """
        head: list[str] = []
        words = iter(self.head)
        for word in words:
            name, equals, value = word.partition("=")
            name = name.replace("_", "-")
            if name not in (_NODE_RANK, _LOCAL_ADDR, _CONF):
                head.append(word)
                continue
            value = _value_there(name, value if equals else next(words, ""), rank)
            if value:
                head += [f"{name}={value}"] if equals else [name, value]
        if rank >= 0 and not any(word.partition("=")[0] == _NODE_RANK for word in head):
            head.insert(2 if head[1:2] == ["run"] else 1, f"{_NODE_RANK}={rank}")
        return shlex.join([*head, *self.program])


def _value_there(name: str, value: str, rank: int) -> str:
    """Return the value of an option on a machine of that node rank; "": it is left out."""
    if name == _LOCAL_ADDR:
        return ""
    if name == _NODE_RANK:
        return str(rank) if rank >= 0 else value
    return ",".join(part for part in value.split(",") if part.partition("=")[0].strip() not in _CONF_OF_ONE_MACHINE)


def command_line(
    argv: list[str], program: list[str], environ: Mapping[str, str], options: Iterable[str]
) -> CommandLine:
    """Return what was typed, in its parts.

    Args:
        argv: The whole command line.
        program: The script and its arguments, as they are run.
        environ: The environment.
        options: The names of all options, with underscores.

    >>> command_line(["phalanx", "run", "x", "1"], ["x", "1"], {"PET_NNODES": "2", "PET_HOME": "/"}, ["nnodes"])
    CommandLine(head=['phalanx', 'run'], program=['x', '1'], variables=['PET_NNODES'])
    """
    is_typed = argv[len(argv) - len(program) :] == program
    known = {f"{prefix}_{name.upper()}" for prefix in _PREFIXES for name in options}
    head = argv[: len(argv) - len(program)] if is_typed else argv
    return CommandLine(head, program if is_typed else [], sorted(known.intersection(environ)))


PLANNED = ("grow", "left", "signal")
"""Ends of a generation of which workers are given notice: nobody has failed."""


class MachineTeam(RunTeam, NodeTeam):
    """The workers of this node.

    Args:
        me: The node's entry, as it enters the job.
        port: What is reserved for rank 0.
        envs: Returns the environments of the workers, by local rank, of a node of that group rank in a job.
        where: Where the nodes meet, in words.
        hosted: Whether one of their agents has the store.
        typed: What was typed here: what another machine is to run is made of it; None: something else starts them.
        is_alone: Whether no other machine can come, by the endpoint.
        grace: Seconds between SIGTERM and SIGKILL.
        patience: Seconds after which an import of what is preloaded has failed.
        keeps: Whether this node would keep what the job was.
        options: See `RunTeam`.
    """

    def __init__(
        self, me: Node, port: ReservedPort, envs: Envs, *args: Any, where: str, hosted: bool, is_alone: bool,
        typed: CommandLine | None, grace: float, patience: float, keeps: bool,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, **options)
        self._me = me
        self._port = port
        self._envs = envs
        self.where, self.hosted = where, hosted
        self._typed, self._is_alone = typed, is_alone
        self._told_rank: int | None = None  # for which node rank it was said what is to be typed
        self._grace = grace
        self._job: Job | None = None
        self._going_on = -1  # the generation whose workers are not to end, as far as is known here; -1: none
        self._first = 0  # the rank in the job of local rank 0
        self._keeps = keeps  # until it was said that the job does not
        self.away = ""
        self._whys: set[str] = set()  # why the store does not answer, as was said since it did last
        self._is_spare = False  # whether that was said
        self._has_compared = False  # whether it was said that machines have different arguments
        self._left_out = 0  # machines of which that was said
        self._told = 0  # the generation of which it was said that it follows
        self._held: deque[tuple[float, int, Stop]] = deque()  # failures, and when the others are told of them
        self._workers = NodeWorkers(self, me.nproc, self.warn, self._groups.warm, self._imported, self.control)
        self._patience = patience
        self._has_failed_check = False
        self._run: JobRun

    @property
    def has_taken_part(self) -> bool:
        """Whether workers have run here, or were to."""
        return self._job is not None

    # --- what is imported while the node waits

    def come(self, run: JobRun) -> None:
        """See `NodeTeam`. What is to be preloaded is imported."""
        self._run = run
        self.events.subscribe("phalanx-failure", FailureWatch(self._see_failure))
        self._workers.come(run, self._patience)

    def _imported(self, error: PreloadError | None) -> None:
        """Print how an import has ended."""
        if error is not None:
            mention(f"phalanx: Error: {error}")
        elif self._is_spare and self._workers.are_imported():
            self._mention(f"this node has imported {self._workers.modules}")

    def _prepare(self, attempt: int) -> None:
        """See `RunTeam`. The workers wait for what is preloaded, too. A node that comes has passed its check."""
        self._workers.preload()
        if attempt:
            super()._prepare(attempt)

    def _may_start(self) -> bool:
        if self._has_failed_check or not self._workers.are_imported():
            return False  # the end of the import wakes
        try:
            return super()._may_start()
        except NoAttemptError as error:  # the job may go on without this node, which ends its part by `end` or `stop`
            self._has_failed_check = True
            self._run.ask_leave(str(error))
            return False

    def is_up(self) -> bool:
        """See `Team`."""
        is_up = super().is_up()
        if is_up:
            self.tell_state("RUNNING")
        return is_up

    def tell_state(self, state: str) -> None:
        """Emit how far the agent is, see `phalanx._run.attempts`, if it has taken part."""
        if self._job is not None:
            self.emit(agent_kinds.AgentState, self._job.generation, state=state)

    def _start_group(self, attempt: int) -> None:
        super()._start_group(attempt)
        self._workers.started(self._groups.log_dir)

    def close(self) -> None:
        """See `Team`."""
        self._workers.close_door()
        super().close()
        self._workers.close()

    # --- what the node decides

    def assign(self, job: Job, rank: int) -> None:
        """See `NodeTeam`."""
        self._job, self._going_on = job, job.generation
        self._held.clear()
        self._wait_no_more()
        self._first = first_rank(job, rank)
        self._workers.begin(job.generation, self._first)
        for local, env in self._envs(job, rank).items():
            self._groups.envs[local] = dict(env)
        role = self._me.role
        self._place = Place(
            rank, len(job.members), self._first, first_rank(job, rank, role), first_rank(job, len(job.members), role)
        )
        self.emit(agent_kinds.AgentState, job.generation, state="STARTING")
        hosts = [member.host for member in job.members]
        count = sum(member.nproc for member in job.members)
        mine = name_ranks(range(self._first, self._first + job.members[rank].nproc))
        again = f"attempt {job.generation}: " if job.generation else ""
        self._mention(
            f"{again}{how_many(len(hosts), 'node')} ({_names(hosts)}), {how_many(count, 'worker')}; "
            f"this is node {rank}, with {mine}"
        )
        if wrong := unreachable(job):
            self._mention(wrong)
        if self._me.args and have_other_args(job, self._me.role) and not self._has_compared:
            self._has_compared = True
            here = one_line(shlex.join(self._groups.command))
            self._mention(f"nodes of this job run {self._me.program} with different arguments; this one runs {here}")

    def answer(self, what: str, generation: int, nodes: int, then: Callable[[bytes], None]) -> None:
        """See `NodeTeam`."""
        self._workers.answer(what, generation, nodes, then)

    def expect(self, seconds: float) -> None:
        """See `NodeTeam`."""
        self._workers.expect(seconds)

    def _order_end(self) -> None:
        """End the workers because of `cause`. They are given notice of what is planned, and only of that."""
        self._wait_no_more()
        self._pending = -1
        if self.check is not None:
            self.check.stop(signal.SIGTERM, self._grace)
        group = self.group
        if group is None:
            return
        group.order_close(None, self._grace)
        if group.notice is not None and (self.cause is None or self.cause.kind not in PLANNED):
            group.order_close(None, self._grace)  # a second order ends the notice: there is nobody left to save with

    def _wait_no_more(self) -> None:
        self._workers.last_look.drop()
        self.poll_seconds = None

    def ended(self) -> AttemptEnd | None:
        """See `Team`."""
        if self._workers.last_look.is_over(clock.now()):
            self._order_end()
        self._tell_held()
        return super().ended()

    def stop(self, death_signal: int | None, grace: float) -> None:
        """See `Team`. A signal waits for no stacks."""
        self._going_on = -1
        self._held.clear()  # it was announced why they end
        if death_signal is not None:
            self._workers.last_look.hurry(self.group)
            self.poll_seconds = None
            super().stop(death_signal, grace)
        elif self._workers.last_look.puts_off(clock.now()):
            self.poll_seconds = LOOK
        else:
            self._order_end()

    def heard(self, what: Job | Stop) -> None:
        """See `NodeTeam`."""
        if isinstance(what, Stop):
            self._going_on = -1
            self._emit_stop(what)
            if what.kind == "hang" and what.node != self._me.id:
                self._workers.hangs_elsewhere(self._wake)  # before their end, which is ordered next
            if what.kind == "signal":
                self.tell_state("STOPPING")
                self.common.note(clock.now_ns())  # all machines may have been sent it, and this process not yet
            if what.kind == "signal" and what.node == self._me.id:
                return  # it was said when it came
            self.say(f"phalanx: {told(what)}; stopping the workers")
            return
        if self._keeps and not what.keep:
            self._keeps = False
            self._mention("--keep is without effect: the job was begun by a machine without it")
        if self._job is None:
            self._say_spare(what)
        if self._job is None or what.generation <= self._told or what.phase == "over":
            return
        self._told = what.generation
        for machine in what.excluded[self._left_out :]:
            host = sanitise(one_line(machine.partition(" ")[0]))
            cause = "its workers were the root cause too often in a row"
            self.say(f"phalanx: host {host} is left out from now on: {cause}")
            self.emit(agent_kinds.MachineExcluded, self._job.generation, host=host, cause=cause)
        self._left_out = len(what.excluded)
        last = what.ends[-1]
        cause = one_line(told(last))
        self.emit(
            agent_kinds.RestartDecided, self._job.generation, delay=what.delay, counted=last.failed, cause=cause,
            step=last.step, why="", reason=reason_of(last),
        )  # fmt: skip
        how = "failed" if last.failed else "ended"
        step = "" if last.step is None else f", step {last.step}"
        self.say(
            f"phalanx: attempt {last.generation} {how} after {format_duration(last.uptime)}: {cause}{step}; "
            f"{follows(what, self.policy)}"
        )

    def _emit_stop(self, stop: Stop) -> None:
        if self._job is not None:
            place = self._job.rank_of(stop.node)
            self.emit(
                agent_kinds.JobStopping, stop.generation, reason=stop.kind, host=stop.host, rank=stop.rank,
                group_rank=place if place >= 0 else None, cause=one_line(told(stop)),
            )  # fmt: skip

    def _say_spare(self, job: Job) -> None:
        """Say that the job runs without this node, which has not taken part yet."""
        if job.phase == "running" and job.rank_of(self._me.id) < 0 and not self._is_spare:
            self._is_spare = True
            why = "is a spare" if len(job.members) >= job.max_nodes else "takes part soon"
            self._mention(f"the job runs on {how_many(len(job.members), 'node')}; this node {why}{self._preloaded()}")

    def _preloaded(self) -> str:
        """Return how far the import is of what is preloaded, to be added to a line; "": nothing is."""
        if not self._workers.modules:
            return ""
        try:
            return f", and {'has imported' if self._workers.are_imported() else 'imports'} {self._workers.modules}"
        except PreloadError:  # `_imported` prints it
            return ""

    def came_late(self) -> None:
        """See `NodeTeam`."""
        self._mention("a job of this id is over; this node has come too late for it, and waits for the next one")

    def miss(self, missing: Missing) -> None:
        """See `NodeTeam`. What a missing machine is to run is what runs here, but for its rank."""
        self._mention(missing.line)
        if self._typed is None or missing.is_enough or missing.rank == self._told_rank:
            return
        self._told_rank = missing.rank
        there = "on a machine that is missing" if missing.rank < 0 else f"on the machine of node {missing.rank}"
        there = "on this machine, once more" if self._is_alone else there
        there += f", with {', '.join(self._typed.variables)} as here" if self._typed.variables else ""
        self._mention(f"{there}: {self._typed.on_other(missing.rank)}")

    def _mention(self, text: str) -> None:
        """Show a line of ours while no worker runs here. Does not wait."""
        self._speak(sanitise(f"phalanx: {text}"))

    def store_is(self, why: str | None) -> None:
        """See `NodeTeam`."""
        if why is None:
            if self.away:
                self.say(f"phalanx: {self.where} answers again")
            self.away = ""
            self._whys.clear()
            return
        self.away = why
        if why not in self._whys:
            self._whys.add(why)
            go_on = self._going_on >= 0 and self.group is not None and self.group.is_open
            runs = "the workers go on, " if go_on else ""
            self.say(f"phalanx: {self.where} does not answer ({one_line(why)}); {runs}it is tried again")

    # --- what the workers do

    def _see_failure(self, failure: WorkerFailure) -> None:
        """Tell the others of a failure. On the thread of the events."""
        attempt = failure.attempt
        if attempt == self._going_on:
            self._going_on = -1  # the group falls together
        rank = self._first + failure.local_rank
        stop = stop_of(self._me, attempt, failure.error, rank, failure.exitcode, is_hang=failure.is_hang)
        if failure.is_hang:
            self._run.worker_failed(attempt, stop)
            return
        # It may be the effect of a signal that has not reached this process yet. What follows from a failure that is
        # held back is held back with it.
        may_stop = stop.kind == "failure" and stop.exitcode is not None and self.common.may_explain(stop.exitcode)
        if may_stop or self._held:
            self._held.append((clock.now() + COMMON_STOP_SECONDS, attempt, stop))
            self._wake()
        else:
            self._run.worker_failed(attempt, stop)

    def _tell_held(self) -> None:
        """Tell the failures that were held back for long enough."""
        if self.common.has_come or self._workers.last_look.end_at is not None:  # they are being ended, and why was said
            self._held.clear()
        if not self._held:
            return
        left = self._held[0][0] - clock.now()
        if left > 0:
            self.poll_seconds = left
            return
        self.poll_seconds = None
        while self._held:
            _, attempt, stop = self._held.popleft()
            self._run.worker_failed(attempt, stop)

    def account(self, end: AttemptEnd) -> tuple[Node, Stop | None, bytes]:
        """See `NodeTeam`."""
        assert self._job is not None
        self.emit(
            agent_kinds.AttemptEnded, self._job.generation, state=end.state, rank=end.rank, exitcode=end.exitcode,
            error=end.error, step=end.step, survivors=end.survivors, seconds=end.uptime,
        )  # fmt: skip
        if end.state != "succeeded":
            self.tell_state("WAITING")
        hangs = None if self.group is None else self.group.hang_report
        left = Left(self.result or RunProcsResult(), self._groups.log_dir, hangs)
        rank, port = self._place.group_rank, self._port.renew()
        self._me, stop, told = account(self._me, self._job, rank, end, end.uptime, port, left)
        return self._me, stop, told


def _names(hosts: list[str], most: int = 8) -> str:
    names = list(dict.fromkeys(hosts))
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
