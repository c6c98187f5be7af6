"""The run of one node of a job of many machines: its entry to the job, what a signal does, and how it has ended."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from phalanx._base.host_names import is_loopback
from phalanx._base.stderr import say
from phalanx._base.text import how_many, one_line
from phalanx._engine import host_signals
from phalanx._rendezvous.conclusion import conclude, earlier_attempts, failed_attempts, told
from phalanx._rendezvous.entrance import Entrance, come
from phalanx._rendezvous.evidence import JobEvidence
from phalanx._rendezvous.life import Finish
from phalanx._rendezvous.node import Participant
from phalanx._rendezvous.rdzv_conf import NOT_FOR_WORKERS
from phalanx._rendezvous.records import Job, Node, first_rank
from phalanx._rendezvous.settings import NO_FORK, Machines, agent_id
from phalanx._run.config import RunError
from phalanx._run.ends import RunEnd, child_failed
from phalanx._run.job_run import JobRun
from phalanx._run.logs import RunLogs
from phalanx._run.node_team import MachineTeam, command_line
from phalanx._run.plan import RunPlan, reserve_port
from phalanx._run.run_events import Asked
from phalanx._run.services import Services
from phalanx._store.etcd import INSTALL


class JobNode:
    """This machine's part of a job of many. Raises ValueError, RunError: it cannot take part."""

    def __init__(
        self, plan: RunPlan, machines: Machines, services: Services | None, until_end: ExitStack, asked: Asked
    ) -> None:
        if not machines.is_hosted and plan.config.run_path and plan.config.start_method == "fork":
            msg = f"--start-method: {NO_FORK}"
            raise ValueError(msg)
        check = plan.node_check()
        if check is not None:
            from phalanx._run.node_check import pass_check

            until_end.callback(check.close)
            try:
                why = pass_check(check, machines.join_timeout)
            except OSError as error:
                raise RunError(str(error)) from None
            if why:
                msg = f"--node-check: {why}"
                raise RunError(msg)
        entrance = _come(plan, machines, until_end)
        port = until_end.enter_context(reserve_port())
        variables = {**(services.variables if services else {}), **NOT_FOR_WORKERS}
        groups = plan.groups(None, variables)
        until_end.callback(groups.close)
        config = plan.config
        host = os.uname().nodename
        # A scheduler starts one command on all machines: there, scripts of one name in two folders are two scripts.
        folder = [os.path.abspath(config.script)] if plan.meeting.is_scheduled else []
        me = Node(
            agent_id(host), host, entrance.address, config.nproc_per_node, config.role, port.number,
            order=machines.node_rank, min_nodes=machines.min_nodes, max_nodes=machines.max_nodes,
            program=one_line(os.path.basename(groups.script)), args=digest([*folder, *config.args]),
            policy=one_line(plan.policy.describe()),
        )  # fmt: skip

        def envs(job: Job, rank: int) -> Mapping[int, Mapping[str, str]]:
            role = config.role
            world = sum(member.nproc for member in job.members)
            master_addr, master_port = entrance.master(job)
            return plan.envs(
                first_rank(job, rank), world, variables, first_in_role=first_rank(job, rank, role),
                role_world_size=first_rank(job, len(job.members), role), group_rank=rank,
                group_world_size=len(job.members), master_addr=master_addr, master_port=master_port,
                attempt=job.generation,
            )  # fmt: skip

        program = [config.script, *config.args]
        typed = None if plan.meeting.is_scheduled else command_line(asked.argv, program, os.environ, vars(config))
        team = MachineTeam(
            me, port, envs, groups, plan.policy, run_id=plan.run_id, keep_runs=config.keep_runs,
            status=plan.status, observers=plan.observers(),
            where=machines.where, hosted=machines.is_hosted, is_alone=is_loopback(machines.host_and_port()[0]),
            typed=typed, grace=config.grace, patience=machines.join_timeout, keeps=machines.keep,
            signals=config.signals_to_handle, asked=asked, check=check, sample=config.sample,
            commands=plan.event_commands(has_store=entrance.hosts),
        )  # fmt: skip
        notice = 0.0 if config.notice is None else config.notice[1]
        rules = machines.rules(plan.policy, config.grace, notice, config.orphan_grace)
        node = Participant(
            me, rules, barrier=machines.barrier, hosts=entrance.hosts,
            away_timeout=machines.away_timeout, chance=random.random,
        )  # fmt: skip
        self.team = team
        self.run = JobRun(node, entrance.store, team, away_timeout=machines.away_timeout)
        self._entrance = entrance
        # "leave": this node leaves the job; "stop": all do; "spare": it leaves if it is one.
        self._on_sigterm = config.on_sigterm or ("leave" if machines.min_nodes < machines.max_nodes else "spare")
        if entrance.hosts:
            self._on_sigterm = "stop"  # the job ends with its store
        self._grace, self._asked, self._leaves = config.grace, "", False

    def stop(self, number: signal.Signals) -> None:
        """Leave the job, or stop it on all nodes; by SIGKILL, as before, but at once."""
        number, grace = self.team.control.death_signal(number), self._grace
        kills = number == signal.SIGKILL
        self._asked = self._asked or self.team.control.named(number)
        if not kills:
            is_to_leave = self._on_sigterm == "leave" or (self._on_sigterm == "spare" and self.run.is_spare)
            self._leaves = is_to_leave and number == signal.SIGTERM and not self.team.control.has_stopped
        if kills:
            host_signals.ignore()
            self.team.say("phalanx: killing the workers")
        elif self.run.finish is None:
            what = "this node leaves the job" if self._leaves else "stopping the job on all nodes"
            self.team.say(f"phalanx: {self._asked}: {what} (at most {grace:g} s; once more to kill)")
        if self._leaves:
            self.run.ask_leave(self._asked, kills=kills)
        else:
            self.run.ask_stop(number, self._asked, 0.0 if kills else grace)

    def end_store(self) -> None:
        """End the store, if it is here. A signal shortens the wait."""
        if self._entrance.end is not None:
            host_signals.shortened(self._entrance.end, self.run.patience)


def digest(args: Sequence[str]) -> str:
    """Return what tells arguments from others, and tells nobody what they are.

    >>> digest(["--lr", "0.1"]) == digest(["--lr", "0.1"]) != digest(["--lr 0.1"])
    True
    """
    import hashlib

    return hashlib.blake2b("\0".join(args).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def _come(plan: RunPlan, machines: Machines, until_end: ExitStack) -> Entrance:
    """Come to the store, or have it. Raises RunError."""
    try:
        entrance = come(machines, plan.run_id, say)
    except ImportError as error:
        msg = f"--rdzv-backend {machines.backend}: {error}; {INSTALL}"
        raise RunError(msg) from None
    except OSError as error:
        msg = f"{plan.meeting.source or f'--rdzv-backend {machines.backend}'}: {error}"
        raise RunError(msg) from None
    if entrance.end is not None:
        until_end.callback(entrance.end, 0.0)  # `end_store` has ended it, unless that went wrong
    return entrance


def conclude_node(finish: Finish, stopped: signal.Signals | None, team: MachineTeam, logs: RunLogs) -> RunEnd:
    """Return how the run of a node has ended. ``stopped``: the signal by which it was to end here; None: none."""
    job, failing = finish.job, _failing(finish, team)
    end = conclude(finish, stopped or 0, failing)
    team.tell_state({"succeeded": "SUCCEEDED", "failed": "FAILED"}.get(end.state, "STOPPED"))
    if end.state == "succeeded":
        return RunEnd("succeeded", 0, printed=_success(job, team))
    if end.state == "stopped" or (end.state == "left" and end.left is None and stopped is not None):
        last = f"the job was stopped: {end.cause}" if end.state == "stopped" else end.cause
        return RunEnd("stopped", end.code, end.cause, printed=(*([] if job is None else failed_attempts(job)), last))
    has_failed = finish.state == "failed"
    printed = [] if has_failed and job is not None else [f"Error: {failing}"]
    left = end.left
    if left is None:
        return RunEnd("failed", end.code, end.cause, printed=tuple(printed))
    assert job is not None
    stop = None if job.verdict is None else job.verdict.stop
    printed += [f"Error: {line}" for line in (*left.errors, *left.damaged)]
    earlier = earlier_attempts(job, has_failed=has_failed)
    if left.summary and not any(left.summary in failure.detail for failure in left.failures.values()):
        printed.append(left.summary)  # nothing is left of the rank that hangs
    why = finish.why if has_failed else failing
    if end.result is None:
        cause = told(stop) if stop is not None else why
        further = f"; {why}" if why and why != cause else ""
        printed += [*earlier, f"Error: {cause}{further}"]
        report = _without_failures(team.name, f"{cause}{further}", left, earlier, logs)
        return RunEnd("failed", end.code, cause, report, tuple(printed))
    error = child_failed(team.name, end.result, logs, earlier, why, log_dir=left.log_dir, lost=left.lost)
    return RunEnd("failed", end.code, end.cause, error.format_msg(), (*printed, error), error)


def _without_failures(name: str, cause: str, left: JobEvidence, earlier: list[str], logs: RunLogs) -> str:
    """Return the report on a job that has failed, where no worker has."""
    from phalanx._outcomes.report import format_summary

    detail = [line for line in (*left.errors, *left.damaged, left.summary) if line]
    endings = {rank: outcome.describe() for rank, outcome in left.outcomes.items()}
    logs_of = left.log_dir or logs.run_log_dir or ""
    return format_summary(name, "failed", cause=cause, detail=detail, endings=endings, log_dir=logs_of, earlier=earlier)


def _success(job: Job | None, team: MachineTeam) -> tuple[str, ...]:
    """Return what is printed where the job, or this node's part of it, has succeeded."""
    lines = [f"attempt {job.generation} has succeeded"] if job is not None and job.generation else []
    if job is not None and job.verdict is not None and not team.has_taken_part:
        nodes = how_many(len(job.members), "node")
        lines.append(f"this node was a spare, and was not needed: the job has succeeded on {nodes}")
    if job is not None and job.verdict is None:
        rest = "it waits no longer for those of other nodes, which go on"
        lines.append(f"the workers of this node have succeeded; {rest}")
    return tuple(lines)


def _failing(finish: Finish, team: MachineTeam) -> str:
    """Return why this node has had no part in the end of the job."""
    where = team.where
    if finish.state == "unreachable":
        return f"{where} has not answered in time: {team.away}"
    if finish.state == "timeout":
        return f"nobody has decided in time who takes part ({where})"
    if finish.state == "damaged":
        return f"what {where} holds of the job cannot be read: {one_line(finish.why)}"
    if finish.state == "refused":
        return f"this node is not taken: {one_line(finish.why)}"
    if finish.state == "unknown":
        why = f"how the job ends is not known here: {finish.why or 'it has ended without this node'}"
        if team.away and team.hosted:
            why += f"; {where} does not answer ({one_line(team.away)}): "
            why += "a store ends with the agent that has it, an etcd of your own does not (--rdzv-backend etcd)"
        return why
    return f"this node has left the job: {finish.why}"
