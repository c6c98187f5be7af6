"""``phalanx run``: a script, a module or a binary as a group of workers, or as this machine's part of a job of many.

Owns the options, the workers' environment and the exit code. Knows nothing of how a group is kept together.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import ExitStack

import click

from phalanx._base.clock import format_duration
from phalanx._base.stderr import mention, say
from phalanx._base.tty import use_colour
from phalanx._engine import host_signals
from phalanx._engine.host_signals import choosing
from phalanx._group.restart_policy import AttemptEnd, describe_attempts
from phalanx._outcomes.failure import signal_name
from phalanx._outcomes.result import verdict
from phalanx._run.attempts import Attempts, Ending
from phalanx._run.run_team import RunTeam, forwarding, restoring, see_through
from phalanx._run.runner import NoAttemptError, Runner
from phalanx.cli._commands import SETTINGS, Command, argv_of, cli, put
from phalanx.cli._declare import click_options, job_of, sections, set_job, typed
from phalanx.cli._options import GONE, is_here_gone
from phalanx.cli._run_config import ELSEWHERE, RunConfig, notes_on_args, notes_on_variables
from phalanx.cli._run_plan import RunPlan, in_our_words, reserve_port
from phalanx.cli.report import child_failed, show_report
from phalanx.multiprocessing import KeeperLostError, PContext, PreloadError, RunProcsResult, SignalException

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from click.shell_completion import CompletionItem

    from phalanx._rendezvous.settings import Machines
    from phalanx._run.run_events import Asked
    from phalanx._run.services import Services
    from phalanx.cli._run_logs import RunLogs
    from phalanx.multiprocessing.errors import ChildFailedError

_NAME = "phalanx run"
_ASKING = ("Job files", ["--job-file", "--print-config", "--dry-run"])
_SHELL = ("The shell", ["--print-completion"])
_SHELLS = ("bash", "zsh", "fish")
_GONE = "the workers have ended by such a signal, too"
_SETTINGS = {**SETTINGS, "allow_interspersed_args": False}  # everything after the script is the script's


def _read_job(ctx: click.Context, _param: click.Parameter, paths: tuple[str, ...]) -> None:
    if not paths or ctx.resilient_parsing:
        return
    if len(paths) > 1:
        raise click.BadParameter(f"there can be one job file, and there are {len(paths)}: {', '.join(paths)}")
    if not os.path.isabs(paths[0]) and is_here_gone():
        raise click.BadParameter(f"{paths[0]!r}: {GONE}; give an absolute path")
    from phalanx.cli import _job_file

    set_job(ctx, _job_file.read(paths[0], RunConfig, ELSEWHERE))


def _complete_file(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def _print_completion(ctx: click.Context, _param: click.Parameter, shell: str | None) -> None:
    if shell is None or ctx.resilient_parsing:
        return
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    put(kind(cli, {}, "phalanx", "_PHALANX_COMPLETE").source())
    ctx.exit()


@click.command(
    cls=Command, context_settings=_SETTINGS, sections=[*sections(RunConfig), _ASKING, _SHELL], absent=ELSEWHERE
)
@click_options(RunConfig)
@click.option("-f", "--job-file", type=click.Path(readable=False), multiple=True, is_eager=True, expose_value=False,
              callback=_read_job, metavar="FILE",
              help="Read options, SCRIPT and ARGS from a job file. The command line goes before it.")  # fmt: skip
@click.option("--print-config", is_flag=True, help="Print the options that hold as a job file; start nothing.")
@click.option("--dry-run", is_flag=True, help="Print what each rank would be given; start nothing.")
@click.option("--print-completion", type=click.Choice(_SHELLS), is_eager=True, expose_value=False,
              callback=_print_completion,
              help="Print what has a shell complete `phalanx`, for a file that it reads.")  # fmt: skip
@click.argument("script", required=False, metavar="SCRIPT", shell_complete=_complete_file)
@click.argument("args", nargs=-1, type=click.UNPROCESSED, shell_complete=_complete_file)
@click.pass_context
def run(
    ctx: click.Context,
    /,
    script: str | None,
    args: tuple[str, ...],
    *,
    print_config: bool,
    dry_run: bool,
    **options: Any,
) -> None:
    """Run SCRIPT as a group of workers: on this machine, or on several, with one `phalanx run` on each.

    \b
    phalanx run --nproc-per-node 4 train.py --lr 0.1
    phalanx run --nproc-per-node auto -m package.train
    phalanx run --nproc-per-node 2 --no-python ./a.out

    Every worker finds RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and their like in its environment.
    When one fails, the others are stopped, and the report names the failure that came first. The first Ctrl-C stops
    the workers gracefully, the second at once.

    Exit code: 0, or that of the root cause (128 + n for signal n). Every option can be set by the environment, as
    PHALANX_NPROC_PER_NODE=4 (or PET_NPROC_PER_NODE).
    """  # noqa: D301 - the one backslash is click's mark for lines to be left as they are
    if print_config and dry_run:
        raise click.UsageError("--print-config and --dry-run exclude each other")
    args = _without_separator(ctx, script, args)
    config = _config(ctx, script, args, options)
    try:
        with ExitStack() as until_end:
            plan = RunPlan(config, makes_folder=not (print_config or dry_run), typed=typed(ctx))
            plan.specs.notes = [*_notes(ctx, script, args), *plan.specs.notes]
            if print_config:
                _print_config(ctx, plan)
            elif dry_run:
                from phalanx.cli._dry_run import show

                show(plan)
            else:
                until_end.callback(_say_unread, plan)
                sys.exit(_run(plan, until_end, _asked(ctx, plan)))
    except KeyboardInterrupt:  # before a group was open, or after
        sys.exit(128 + signal.SIGINT)
    except SignalException as error:  # the third, or a later one, between two lines of ours
        sys.exit(128 + error.sigval)


def _say_unread(plan: RunPlan) -> None:
    for text in plan.stdin.unread():  # it came after the start
        say(text)


class _WorkersFailed(SystemExit):
    """The end of a run whose workers have failed: ``error`` has the failures."""

    def __init__(self, code: int, error: ChildFailedError) -> None:
        super().__init__(code)
        self.error = error


def _run(plan: RunPlan, until_end: ExitStack, asked: Asked) -> int:
    services = _services(plan, until_end)
    if plan.meeting.machines is not None:
        return _run_node(plan, plan.meeting.machines, services, until_end, asked)
    reserved = None if plan.meeting.master_port else until_end.enter_context(reserve_port())
    groups = plan.groups(reserved, services.variables if services else {})
    until_end.callback(groups.close)
    config, colour = plan.config, use_colour(sys.stderr, plan.console.color)
    team = RunTeam(
        groups, plan.policy, run_id=plan.run_id, keep_runs=config.keep_runs,
        observers=plan.observers(services),
        signals=config.signals_to_handle, asked=asked, check=plan.node_check(),
    )  # fmt: skip
    with choosing(config.signals_to_handle), forwarding(plan.forwarded, team), plan.stdin.job_control():
        code = see_through(
            team,
            lambda: _run_all(team, config.grace),
            lambda ending, stopped: _conclude(ending, stopped, team, plan.specs, colour=colour),
        )
    if team.error is not None:
        raise _WorkersFailed(code, team.error)
    return code


def _run_all(team: RunTeam, grace: float) -> tuple[Ending, signal.Signals | None]:
    """Carry all attempts out. Returns how it ended, and by which signal it was stopped, or None.

    Signals raise SignalException from then on, until ``team`` is released. Raises ClickException; and SystemExit where
    what could not be started has been reported.
    """

    def stop(death: signal.Signals) -> None:
        seconds = 0.0 if death == signal.SIGKILL else grace
        if death == signal.SIGKILL:
            host_signals.ignore()  # beyond, there is nothing to be asked for, and a worker may send them without end
        _say_stop(attempts, team, death, seconds)
        attempts.ask_stop(death, seconds)

    try:
        attempts = Attempts(team.policy)
        with Runner(team, attempts, events=team.events) as runner:
            first = runner.carry_to_end(stop, team)
            return attempts.ending, None if first is None else first.sigval
    except (PreloadError, NoAttemptError, KeeperLostError) as error:
        say(f"Error: {error}")
        team.record_end("failed", 1, str(error))
        raise SystemExit(1) from error
    except OSError as error:
        team.record_end("failed", 1, text := in_our_words(error, team.group))
        raise click.ClickException(text) from None
    except ValueError as error:
        team.record_end("failed", 2, text := in_our_words(error, team.group))
        raise click.UsageError(text) from None


def _conclude(ending: Ending, stopped: signal.Signals | None, team: RunTeam, specs: RunLogs, *, colour: bool) -> int:
    """Record how the run ended, and report what went wrong. Returns the exit code."""
    result = team.result or RunProcsResult()
    last = ending.ends[-1] if ending.ends else AttemptEnd("stopped")
    attempt = f"attempt {last.number}"
    error = None
    if result.failures:
        error = child_failed(team.name, result, specs, describe_attempts(ending.ends[:-1]), ending.why)
    report = "" if error is None else error.format_msg()
    if stopped is not None and ending.state == "stopped":
        code = 128 + stopped
        cause = f"{stopped.name}, after {attempt}: {last.describe()}" if last.failed else stopped.name
        team.record_end("stopped", code, cause, report)
        _report_stop(error, ending, cause, colour=colour)
        return code
    team.error = error
    code, cause = verdict(result)
    if team.lost is not None:
        say(f"Error: {team.lost}")
        code, cause = code or 1, str(team.lost)
    elif last.state == "not started":
        why = last.error if ending.error is None else in_our_words(ending.error, team.group)
        say(f"Error: {why}")
        code, cause = 1, last.error
    if len(ending.ends) > 1:
        cause = cause and f"{attempt}: {cause}"
        if not code:
            say(f"{attempt} has succeeded, after {format_duration(last.uptime)}")
    team.record_end("failed" if code else "succeeded", code, cause, report)
    _report(error, result, ending, colour=colour)
    return code


def _say_stop(attempts: Attempts, team: RunTeam, death: signal.Signals, seconds: float) -> None:
    """Say what a signal has brought about, above the live lines of a terminal."""
    if attempts.state == "WAITING":
        mention(f"phalanx: {death.name}: no other attempt is started")
    elif team.group is not None and team.group.is_open:
        text = f"phalanx: {death.name}: {_announced(team.group, death, seconds)}"
        if not team.group.say(text):
            mention(text)
    elif team.check is not None and team.check.is_under_way:
        mention(f"phalanx: {death.name}: ending --node-check; no attempt is started")
    elif team.is_put_off:
        mention(f"phalanx: {death.name}: the run is stopped; {_GONE}")


def _announced(group: PContext, death: signal.Signals, seconds: float) -> str:
    """Return what is said of a stop of the workers."""
    if death == signal.SIGKILL:
        return "killing the workers"
    if group.notice is None:
        return f"stopping the workers (at most {seconds:g} s; once more to kill them)"
    number, span = group.notice
    spans = f"{span:g} s from now, SIGKILL at most {seconds:g} s later; once more to kill them"
    return f"giving the workers notice of a stop by {signal_name(number)} ({death.name} {spans})"


def _report_stop(error: ChildFailedError | None, ending: Ending, cause: str, *, colour: bool) -> None:
    """Say which attempts had failed before the run was stopped: the latest in full, if no other had begun after it."""
    failed = [end for end in ending.ends if end.failed]
    if not failed:
        return
    if error is not None and failed[-1] is ending.ends[-1]:
        show_report(error, colour=colour)
    else:
        for line in describe_attempts(failed):
            say(line)
    say(f"stopped by {cause}")


def _report(error: ChildFailedError | None, result: RunProcsResult, ending: Ending, *, colour: bool) -> None:
    """Say what went wrong, if anything did."""
    if error is not None:
        show_report(error, colour=colour)
        return
    for rank, outcome in result.outcomes.items():
        if outcome.state != "succeeded" or outcome.early:
            say(f"rank {rank}: {outcome.describe()}")
    if ending.state == "failed":
        for line in describe_attempts(ending.ends[:-1]):
            say(line)


def _run_node(plan: RunPlan, machines: Machines, services: Services | None, until_end: ExitStack, asked: Asked) -> int:
    """Run this machine's part of a job of many."""
    from phalanx.cli._run_node import run_node

    code, error = run_node(plan, machines, services, until_end, asked)
    if error is not None:
        raise _WorkersFailed(code, error)
    return code


def _services(plan: RunPlan, until_end: ExitStack) -> Services | None:
    """Start what the environment asks for beside the workers; None: nothing, and what makes it is not loaded."""
    if os.environ.keys().isdisjoint({"TORCHELASTIC_ENABLE_FILE_TIMER", "TORCHELASTIC_HEALTH_CHECK_PORT", "LOGLEVEL"}):
        return None
    from phalanx._run.services import Services, log_shown

    until_end.enter_context(log_shown())
    try:
        return until_end.enter_context(Services(plan.health_address, plan.run_id, plan.policy.max_restarts))
    except OSError as error:
        raise click.ClickException(error.strerror or str(error)) from None


def _asked(ctx: click.Context, plan: RunPlan) -> Asked:
    """Return what is kept in the run's folder of what was asked for."""
    from phalanx._rendezvous.rdzv_conf import secrets_of
    from phalanx._run.run_events import Asked
    from phalanx.cli._run_config import as_job_file

    secrets = [] if plan.meeting.machines is None else secrets_of(plan.config.rdzv_conf, os.environ)
    try:
        config = as_job_file(ctx, plan.config, secrets)
    except click.UsageError:  # an argument is not UTF-8, and no job file can hold it
        config = ""
    return Asked(argv_of(ctx), config)


def _print_config(ctx: click.Context, plan: RunPlan) -> None:
    from phalanx.cli._dry_run import rehearse
    from phalanx.cli._run_config import as_job_file

    rehearse(plan)
    put(as_job_file(ctx, plan.config))


def _without_separator(ctx: click.Context, script: str | None, args: tuple[str, ...]) -> tuple[str, ...]:
    """Leave out the one ``--`` between script and arguments, as torchrun's parser does: unless one stood before both.

    The script gets any other.
    """
    if script is None or args[:1] != ("--",) or argv_of(ctx)[-len(args) - 2] == "--":
        return args
    return args[1:]


def _config(ctx: click.Context, script: str | None, args: tuple[str, ...], options: dict[str, Any]) -> RunConfig:
    """Return what was asked for. A script on the command line takes the place of the job file's and its arguments."""
    job = job_of(ctx)
    if script is None and job is not None:
        script, args = job.script, job.args
    if script is None:
        param = next(param for param in ctx.command.params if param.name == "script")
        raise click.MissingParameter(ctx=ctx, param=param)
    return RunConfig(script, args, job.env if job is not None else {}, **options)


def _notes(ctx: click.Context, script: str | None, args: tuple[str, ...]) -> list[str]:
    """Return lines on what somebody has said, and is not heard."""
    known = [name for param in ctx.command.params for name in param.envvar or ()]
    return [*notes_on_variables(os.environ, known), *(notes_on_args(ctx, script, args) if script is not None else [])]


def main(args: Sequence[str] | None = None) -> None:
    """Run a script as ``phalanx run`` does, and return when it has succeeded: for programs that called torchrun's main.

    Args:
        args: As on a command line; None: those of this process.

    Raises:
        ChildFailedError: Workers have failed; the report is on stderr.
        SystemExit: The arguments are wrong, or ask for help; nothing could be started; or a signal stopped the run. Its
            code is that of ``phalanx run``.
    """
    with restoring():
        try:
            run(args, prog_name=_NAME)
        except _WorkersFailed as end:
            end.error.is_reported = True
            raise end.error from None
        except SystemExit as end:
            if end.code:
                raise


if __name__ == "__main__":
    run(prog_name=_NAME)
