"""The run of one node of a job of many machines, from its entry to its end: signals, the report, the exit code."""

from __future__ import annotations

import os
import random
import signal
import sys

import click

from phalanx._base.host_names import is_loopback
from phalanx._base.stderr import say
from phalanx._base.text import how_many, one_line
from phalanx._base.tty import use_colour
from phalanx._engine import host_signals
from phalanx._engine.host_signals import choosing
from phalanx._rendezvous.conclusion import conclude, earlier_attempts, failed_attempts, told
from phalanx._rendezvous.entrance import come
from phalanx._rendezvous.node import Participant
from phalanx._rendezvous.rdzv_conf import NOT_FOR_WORKERS
from phalanx._rendezvous.records import Node, first_rank
from phalanx._rendezvous.settings import NO_FORK, agent_id
from phalanx._run.job_run import JobRun, shortened
from phalanx._run.node_team import MachineTeam, command_line
from phalanx._run.run_team import forwarding, see_through
from phalanx._run.runner import Runner
from phalanx._store.etcd import INSTALL
from phalanx.cli._run_plan import reserve_port
from phalanx.cli.report import child_failed, show_report

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import ExitStack

    from phalanx._rendezvous.conclusion import Conclusion
    from phalanx._rendezvous.entrance import Entrance
    from phalanx._rendezvous.evidence import JobEvidence
    from phalanx._rendezvous.life import Finish
    from phalanx._rendezvous.records import Job
    from phalanx._rendezvous.settings import Machines
    from phalanx._run.run_events import Asked
    from phalanx._run.services import Services
    from phalanx.cli._run_logs import RunLogs
    from phalanx.cli._run_plan import RunPlan
    from phalanx.multiprocessing.errors import ChildFailedError


def run_node(
    plan: RunPlan, machines: Machines, services: Services | None, until_end: ExitStack, asked: Asked
) -> tuple[int, ChildFailedError | None]:
    """Run this machine's part of a job of many. Returns the exit code, and what the report is about.

    ``asked``: what was asked for.
    """
    if not machines.is_hosted and plan.config.run_path and plan.config.start_method == "fork":
        msg = f"--start-method: {NO_FORK}"
        raise click.UsageError(msg)
    check = plan.node_check()
    if check is not None:
        from phalanx._run.node_check import pass_check

        until_end.callback(check.close)
        try:
            why = pass_check(check, machines.join_timeout)
        except OSError as error:
            raise click.ClickException(str(error)) from None
        if why:
            msg = f"--node-check: {why}"
            raise click.ClickException(msg)
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
        observers=plan.observers(services),
        where=machines.where, hosted=machines.is_hosted, is_alone=is_loopback(machines.host_and_port()[0]),
        typed=typed, grace=config.grace, patience=machines.join_timeout, keeps=machines.keep,
        signals=config.signals_to_handle, asked=asked, check=check,
    )  # fmt: skip
    notice = 0.0 if config.notice is None else config.notice[1]
    rules = machines.rules(plan.policy, config.grace, notice, config.orphan_grace)
    node = Participant(
        me, rules, barrier=machines.barrier, hosts=entrance.hosts,
        away_timeout=machines.away_timeout, chance=random.random,
    )  # fmt: skip
    colour = use_colour(sys.stderr, plan.console.color)
    with choosing(config.signals_to_handle), forwarding(plan.forwarded, team), plan.stdin.job_control():
        run = JobRun(node, entrance.store, team, away_timeout=machines.away_timeout)
        on_sigterm = _on_sigterm(config.on_sigterm, machines, entrance)
        code = see_node_through(run, team, plan.specs, config.grace, entrance.end, on_sigterm, colour=colour)
    return code, team.error


def _on_sigterm(wish: str | None, machines: Machines, entrance: Entrance) -> str:
    """Return what SIGTERM does: "leave": this node leaves the job; "stop": all do; "spare": it leaves if it is one."""
    if entrance.hosts:
        return "stop"  # the job ends with its store
    return wish or ("leave" if machines.min_nodes < machines.max_nodes else "spare")


def digest(args: Sequence[str]) -> str:
    """Return what tells arguments from others, and tells nobody what they are.

    >>> digest(["--lr", "0.1"]) == digest(["--lr", "0.1"]) != digest(["--lr 0.1"])
    True
    """
    import hashlib

    return hashlib.blake2b("\0".join(args).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def _come(plan: RunPlan, machines: Machines, until_end: ExitStack) -> Entrance:
    """Come to the store, or have it. Raises ClickException."""
    try:
        entrance = come(machines, plan.run_id, say)
    except ImportError as error:
        msg = f"--rdzv-backend {machines.backend}: {error}; {INSTALL}"
        raise click.ClickException(msg) from None
    except OSError as error:
        msg = f"{plan.meeting.source or f'--rdzv-backend {machines.backend}'}: {error}"
        raise click.ClickException(msg) from None
    if entrance.end is not None:
        until_end.callback(entrance.end, 0.0)  # `see_node_through` has ended it, unless that went wrong
    return entrance


def see_node_through(
    run: JobRun,
    team: MachineTeam,
    logs: RunLogs,
    grace: float,
    end: Callable[[float], None] | None,
    on_sigterm: str,
    *,
    colour: bool,
) -> int:
    """Take part in the job until it is over, and say what became of it. Returns the exit code.

    Once the node has left, a signal shortens waits, and changes nothing else. ``end`` ends the store, if it is here;
    ``on_sigterm``: see `_on_sigterm`.
    """
    return see_through(
        team,
        lambda: _run_all(run, team, grace, on_sigterm),
        lambda finish, stopped: _conclude(finish, stopped, team, logs, colour=colour),
        lambda: None if end is None else shortened(end, run.patience),
    )


def _run_all(run: JobRun, team: MachineTeam, grace: float, on_sigterm: str) -> tuple[Finish, signal.Signals | None]:
    """Carry the node's part out. Returns how it ended, and by which signal it was to end here, or None."""
    asked, leaves = "", False

    def stop(number: signal.Signals) -> None:
        nonlocal asked, leaves
        kills = number == signal.SIGKILL
        if not kills:
            asked = number.name
            is_to_leave = on_sigterm == "leave" or (on_sigterm == "spare" and run.is_spare)
            leaves = is_to_leave and number == signal.SIGTERM
        if kills:
            host_signals.ignore()
            team.say("phalanx: killing the workers")
        elif run.finish is None:
            what = "this node leaves the job" if leaves else "stopping the job on all nodes"
            team.say(f"phalanx: {asked}: {what} (at most {grace:g} s; once more to kill)")
        if leaves:
            run.ask_leave(asked, kills=kills)
        else:
            run.ask_stop(number, asked, 0.0 if kills else grace)

    try:
        with Runner(team, run) as runner:
            first = runner.carry_to_end(stop, team)
            assert run.finish is not None
            return run.finish, None if first is None else first.sigval
    except (OSError, ValueError) as error:
        team.record_end("failed", 1, str(error))
        raise click.ClickException(str(error)) from None


def _conclude(finish: Finish, stopped: signal.Signals | None, team: MachineTeam, logs: RunLogs, *, colour: bool) -> int:
    """Record how the run has ended, and report what went wrong. Returns the exit code."""
    job = finish.job
    end = conclude(finish, stopped or 0, _failing(finish, team))
    team.tell_state({"succeeded": "SUCCEEDED", "failed": "FAILED"}.get(end.state, "STOPPED"))
    if end.state == "succeeded":
        return _succeed(job, team)
    if end.state == "stopped" or (end.state == "left" and end.left is None and stopped is not None):
        return _conclude_stop(end, job, team)
    if finish.state != "failed" or job is None:
        say(f"Error: {_failing(finish, team)}")
        if end.left is None:
            team.record_end("failed", end.code, end.cause)
            return end.code
    left, stop = end.left, None if job is None or job.verdict is None else job.verdict.stop
    assert left is not None
    assert job is not None
    for line in (*left.errors, *left.damaged):
        say(f"Error: {line}")
    earlier = earlier_attempts(job, has_failed=finish.state == "failed")
    if left.summary and not any(left.summary in failure.detail for failure in left.failures.values()):
        say(left.summary)  # nothing is left of the rank that hangs
    why = finish.why if finish.state == "failed" else _failing(finish, team)
    if end.result is None:
        for line in earlier:
            say(line)
        cause = told(stop) if stop is not None else why
        further = f"; {why}" if why and why != cause else ""
        say(f"Error: {cause}{further}")
        report = _without_failures(team.name, f"{cause}{further}", left, earlier, logs)
        team.record_end("failed", end.code, cause, report)
        return end.code
    team.error = child_failed(team.name, end.result, logs, earlier, why, log_dir=left.log_dir, lost=left.lost)
    team.record_end("failed", end.code, end.cause, team.error.format_msg())
    show_report(team.error, colour=colour)
    return end.code


def _without_failures(name: str, cause: str, left: JobEvidence, earlier: list[str], logs: RunLogs) -> str:
    """Return the report on a job that has failed, where no worker has."""
    from phalanx._outcomes.report import format_summary

    detail = [line for line in (*left.errors, *left.damaged, left.summary) if line]
    endings = {rank: outcome.describe() for rank, outcome in left.outcomes.items()}
    logs_of = left.log_dir or logs.run_log_dir or ""
    return format_summary(name, "failed", cause=cause, detail=detail, endings=endings, log_dir=logs_of, earlier=earlier)


def _conclude_stop(end: Conclusion, job: Job | None, team: MachineTeam) -> int:
    for line in [] if job is None else failed_attempts(job):
        say(line)
    say(f"the job was stopped: {end.cause}" if end.state == "stopped" else end.cause)
    team.record_end("stopped", end.code, end.cause)
    return end.code


def _succeed(job: Job | None, team: MachineTeam) -> int:
    if job is not None and job.generation:
        say(f"attempt {job.generation} has succeeded")
    if job is not None and job.verdict is not None and not team.has_taken_part:
        say(f"this node was a spare, and was not needed: the job has succeeded on {how_many(len(job.members), 'node')}")
    if job is not None and job.verdict is None:
        say("the workers of this node have succeeded; it waits no longer for those of other nodes, which go on")
    team.record_end("succeeded", 0)
    return 0


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
