"""``phalanx run``: a script, a module or a binary as a group of workers, or as this machine's part of a job of many.

Owns what a person reads of a run, and the exit code. What a run does is `phalanx._run`'s business.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from contextlib import ExitStack
from functools import partial
from typing import Any

import click
from click.core import ParameterSource

from phalanx._base.stderr import mention, say, tell
from phalanx._base.tty import use_colour
from phalanx._engine import host_signals
from phalanx._engine.host_signals import choosing
from phalanx._outcomes.failure import signal_name
from phalanx._run.attempts import Attempts
from phalanx._run.config import GONE, RunConfig, RunError, is_here_gone
from phalanx._run.ends import RunEnd, conclude_run
from phalanx._run.plan import RunPlan, in_our_words, reserve_port
from phalanx._run.run_team import RunTeam, forwarding, restoring, see_through
from phalanx._run.runner import NoAttemptError, Runner
from phalanx.cli._commands import SETTINGS, Command, argv_of, cli, meant, put
from phalanx.cli._declare import as_job_file, click_options, job_of, sections, set_job, typed
from phalanx.cli._restarts import check_heeded, forwarded, restart_policy
from phalanx.cli._run_config import ELSEWHERE, RunOptions
from phalanx.multiprocessing import KeeperLostError, PContext, PreloadError, SignalException

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from click.shell_completion import CompletionItem

    from phalanx._run.detach import Detached
    from phalanx._run.run_events import Asked
    from phalanx.multiprocessing.errors import ChildFailedError

_NAME = "phalanx run"
_ASKING = ("Job files", ["--job-file", "--print-config", "--dry-run"])
_SHELL = ("The shell", ["--print-completion"])
_SHELLS = ("bash", "zsh", "fish")
_GONE = "the workers have ended by such a signal, too"
_OF_LAUNCHERS = ("--nproc-per-node", "--nnodes", "--max-restarts", "--standalone", "--no-python", "--rdzv-")
"""Options, or how their names begin, that scripts do not have, as they may have ``--log-dir`` or ``--master-port``."""

_PROGRAM = object()
"""The context's object where a program calls `main`."""

_OUR = "PHALANX_"
_OURS = {
    *("PHALANX_JOB_SECRET", "PHALANX_ETCD_PASSWORD", "PHALANX_STACK_SIGNAL", "PHALANX_SHIM_PYTHON"),
    "PHALANX_SERVE_TOKEN",
    # A command of --on-event has them.
    *("PHALANX_EVENT", "PHALANX_EVENT_ATTEMPT", "PHALANX_EVENT_CAUSE", "PHALANX_EVENT_HOST", "PHALANX_EVENT_RANK"),
    *("PHALANX_EVENT_RUN_DIR", "PHALANX_EVENT_RUN_ID"),
    # A worker has them.
    *("PHALANX_GROUP", "PHALANX_STEP", "PHALANX_STOP_FLAG", "PHALANX_TIMERS", "PHALANX_DESCRIPTORS"),
    *("PHALANX_TRACEBACKS", "PHALANX_DEBUGGER", "PHALANX_DEBUGPY_LISTEN"),
}
"""Variables of ours that set no option."""

_OF_TESTS = (
    *("PHALANX_TEST_", "PHALANX_CUTS", "PHALANX_ROUNDS", "PHALANX_INJECTOR"),
    *("PHALANX_BENCHMARK", "PHALANX_PEER_"),
)
_OF_SERVICES = re.compile(r"\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_\w+)?)")
"""What Kubernetes calls variables for a service, of which one may be called phalanx."""

_SETTINGS = {**SETTINGS, "allow_interspersed_args": False}  # everything after the script is the script's


def _read_job(ctx: click.Context, _param: click.Parameter, paths: tuple[str, ...]) -> None:
    if not paths or ctx.resilient_parsing:
        return
    if len(paths) > 1:
        raise click.BadParameter(f"there can be one job file, and there are {len(paths)}: {', '.join(paths)}")
    if not os.path.isabs(paths[0]) and is_here_gone():
        raise click.BadParameter(f"{paths[0]!r}: {GONE}; give an absolute path")
    from phalanx.cli import _job_file

    set_job(ctx, _job_file.read(paths[0], RunOptions, ELSEWHERE))


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
    cls=Command, context_settings=_SETTINGS, sections=[*sections(RunOptions), _ASKING, _SHELL], absent=ELSEWHERE
)
@click_options(RunOptions)
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
    ctx: click.Context, /, script: str | None, args: tuple[str, ...], *, print_config: bool, dry_run: bool,
    **options: Any,
) -> None:  # fmt: skip
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
    known = [name for param in ctx.command.params for name in param.envvar or ()]
    notes = _notes_on_variables(os.environ, known)
    if script is not None:
        notes += _notes_on_args(ctx, script, args)
    starts = not (print_config or dry_run)
    try:
        detached = _detach(ctx, config) if config.detach and starts else None
        with ExitStack() as until_end:
            policy, chosen = restart_policy(config), forwarded(config.signals_forward, config.signals_to_handle)
            unheeded = check_heeded(config, policy, typed(ctx))
            plan = RunPlan(config, policy, chosen, unheeded, makes_folder=starts)
            plan.specs.notes = [*notes, *plan.specs.notes]
            if print_config:
                from phalanx.cli._dry_run import rehearse

                rehearse(plan)
                put(as_job_file(ctx, RunOptions, config))
            elif dry_run:
                from phalanx.cli._dry_run import show

                show(plan)
            else:
                until_end.callback(_say_unread, plan)
                asked = _asked(ctx, plan)
                if detached is not None:
                    plan.detached = detached
                    detached.leave_terminal(plan.specs, plan.run_id, config.nproc_per_node)
                sys.exit(_run(plan, until_end, asked))
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    except RunError as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:  # before a group was open, or after
        sys.exit(128 + signal.SIGINT)
    except SignalException as error:  # the third, or a later one, between two lines of ours
        sys.exit(128 + error.sigval)


def _detach(ctx: click.Context, config: RunConfig) -> Detached:
    """Return in the launcher, a fork of this process, see `phalanx._run.detach`."""
    if ctx.obj is _PROGRAM:
        raise ValueError("--detach: phalanx.run.main returns when the run has ended; start phalanx run as a command")
    from phalanx._run.detach import detach

    return detach(config)


def _say_unread(plan: RunPlan) -> None:
    for text in plan.stdin.unread():  # it came after the start
        say(text)


class _WorkersFailed(SystemExit):
    """The end of a run whose workers have failed: ``error`` has the failures."""

    def __init__(self, code: int, error: ChildFailedError) -> None:
        super().__init__(code)
        self.error = error


def _run(plan: RunPlan, until_end: ExitStack, asked: Asked) -> int:
    services, machines = plan.services(until_end), plan.meeting.machines
    if plan.debug_ports is not None:
        plan.debug_ports.reserve(until_end)
    if machines is not None:
        from phalanx._run.job_node import JobNode, conclude_node

        node = JobNode(plan, machines, services, until_end, asked)
        runner = Runner(node.team, node.run)
        return _see_through(plan, node.team, runner, lambda: node.run.finish, node.stop, conclude_node, node.end_store)
    reserved = None if plan.meeting.master_port else until_end.enter_context(reserve_port())
    groups = plan.groups(reserved, services.variables if services else {})
    until_end.callback(groups.close)
    config = plan.config
    team = RunTeam(
        groups, plan.policy, run_id=plan.run_id, keep_runs=config.keep_runs, status=plan.status,
        observers=plan.observers(), signals=config.signals_to_handle, asked=asked, check=plan.node_check(),
        sample=config.sample, commands=plan.event_commands(),
    )  # fmt: skip

    def stop(number: signal.Signals) -> None:
        death = team.control.death_signal(number)
        seconds = 0.0 if death == signal.SIGKILL else config.grace
        if death == signal.SIGKILL:
            host_signals.ignore()  # beyond, there is nothing to be asked for, and a worker may send them without end
        _say_stop(attempts, team, death, seconds)
        attempts.ask_stop(death, seconds)

    attempts = Attempts(team.policy)
    team.control.restart = partial(attempts.ask_restart, signal.SIGTERM, config.grace)
    runner = Runner(team, attempts, events=team.events)
    return _see_through(plan, team, runner, lambda: attempts.ending, stop, conclude_run)


def _see_through(
    plan: RunPlan, team: RunTeam, runner: Runner, ending: Callable[[], Any], stop: Callable[[signal.Signals], None],
    conclude: Callable[..., RunEnd], at_end: Callable[[], object] = lambda: None,
) -> int:  # fmt: skip
    """Carry a run out, from its record's beginning to its end, and print how it has ended. Returns the exit code.

    ``ending``: returns how the attempts have ended, for ``conclude``. ``stop``: called with the first signal, then with
    SIGKILL. Signals raise SignalException until ``team`` is released. ``at_end``: called when no worker is left,
    whatever has happened.
    """
    is_job = plan.meeting.machines is not None
    failed = None
    if plan.detached is not None:
        team.on_up = plan.detached.report_up

    def carry() -> tuple[Any, signal.Signals | None]:
        try:
            with runner:
                first = runner.carry_to_end(stop, team)
                return ending(), None if first is None else team.control.death_signal(first.sigval)
        except (PreloadError, NoAttemptError, KeeperLostError) as error:
            say(f"Error: {error}")
            team.record_end("failed", 1, str(error))
            raise SystemExit(1) from error
        except (OSError, ValueError) as error:
            text = str(error) if is_job else in_our_words(error, team.group)
            is_usage = isinstance(error, ValueError) and not is_job
            team.record_end("failed", 2 if is_usage else 1, text)
            raise (ValueError if is_usage else RunError)(text) from None

    def report(ended: Any, stopped: signal.Signals | None) -> int:
        nonlocal failed
        end = conclude(ended, stopped, team, plan.specs)
        team.record_end(end.state, end.code, end.cause, end.report)
        for part in end.printed:
            if isinstance(part, str):
                say(part)
            else:
                _show_report(part, colour=use_colour(sys.stderr, plan.console.color))
        _write_page(plan, end)
        failed = end.error
        return end.code

    signals = plan.config.signals_to_handle
    with choosing(signals), forwarding(plan.forwarded, team), plan.stdin.job_control():
        code = see_through(team, carry, report, at_end)
    if failed is not None:
        raise _WorkersFailed(code, failed)
    return code


def _write_page(plan: RunPlan, end: RunEnd) -> None:
    """Write the page of a run that has ended, if it is to have one, and print where it is."""
    folder, wanted = plan.specs.run_log_dir, plan.config.on_report
    if plan.specs.is_kept and folder and wanted in ("always", {"failed": "failure"}.get(end.state)):
        from phalanx._page.products import page_at_end

        if line := page_at_end(folder):
            say(line)


def _say_stop(attempts: Attempts, team: RunTeam, death: signal.Signals, seconds: float) -> None:
    """Print what a signal has brought about, above the live lines of a terminal."""
    by = team.control.named(death)
    if attempts.state == "WAITING":
        mention(f"phalanx: {by}: no other attempt is started")
    elif team.group is not None and team.group.is_open:
        text = f"phalanx: {by}: {_announced(team.group, death, seconds)}"
        if not team.group.say(text):
            mention(text)
    elif team.check is not None and team.check.is_under_way:
        mention(f"phalanx: {by}: ending --node-check; no attempt is started")
    elif team.is_put_off:
        mention(f"phalanx: {by}: the run is stopped; {_GONE}")


def _announced(group: PContext, death: signal.Signals, seconds: float) -> str:
    """Return what is said of a stop of the workers."""
    if death == signal.SIGKILL:
        return "killing the workers"
    if group.notice is None:
        return f"stopping the workers (at most {seconds:g} s; once more to kill them)"
    number, span = group.notice
    spans = f"{span:g} s from now, SIGKILL at most {seconds:g} s later; once more to kill them"
    return f"giving the workers notice of a stop by {signal_name(number)} ({death.name} {spans})"


_LOOKS: dict[str, dict[str, Any]] = {
    "rule": {"dim": True}, "title": {"fg": "red", "bold": True}, "heading": {"bold": True}, "error": {"fg": "red"},
}  # fmt: skip
"""Of the lines of a report."""


def _show_report(error: ChildFailedError, *, colour: bool) -> None:
    from phalanx.errors import format_report

    tell(format_report(
        error.name, error.failures, outcomes=error.outcomes, log_dir=error.log_dir, lost=error.lost,
        earlier=error.earlier, gave_up=error.gave_up,
        style=(lambda kind, line: click.style(line, **_LOOKS.get(kind, {}))) if colour else None,
    ))  # fmt: skip


def _asked(ctx: click.Context, plan: RunPlan) -> Asked:
    """Return what is kept in the run's folder of what was asked for."""
    from phalanx._rendezvous.rdzv_conf import secrets_of
    from phalanx._run.run_events import Asked

    secrets = [] if plan.meeting.machines is None else secrets_of(plan.config.rdzv_conf, os.environ)
    try:
        config = as_job_file(ctx, RunOptions, plan.config, secrets)
    except click.UsageError:  # an argument is not UTF-8, and no job file can hold it
        config = ""
    return Asked(argv_of(ctx), config)


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
    return RunConfig(script=script, args=args, env=dict(job.env) if job is not None else {}, **options)


def _notes_on_args(ctx: click.Context, script: str, args: Sequence[str]) -> list[str]:
    """Return a line on options of a launcher that stand after the script, and that nobody has given before it."""
    unset = {
        name for param in ctx.command.params for name in param.opts
        if name.startswith(_OF_LAUNCHERS) and ctx.get_parameter_source(param.name or "") is ParameterSource.DEFAULT
    }  # fmt: skip
    typed = [arg.partition("=")[0] for arg in args[: args.index("--") if "--" in args else None]]
    found = [name for name in dict.fromkeys(typed) if name.replace("_", "-") in unset]
    if not found:
        return []
    them = "it goes" if len(found) == 1 else "they go"
    return [f"{', '.join(found)} after SCRIPT: {them} to {script}; options of phalanx run stand before SCRIPT"]


def _notes_on_variables(environ: Mapping[str, str], known: Iterable[str]) -> list[str]:
    """Return a line on variables that are called as those of options are, and are none. ``PET_`` is not ours alone.

    Nothing in a worker: its launcher has said it.
    """
    if "PHALANX_GROUP" in environ:
        return []
    real, found = {name for name in (*known, *_OURS) if name.startswith(_OUR)}, []
    for name in sorted(environ.keys() - real):
        if not name.startswith(_OUR) or not environ[name] or name.startswith(_OF_TESTS) or _OF_SERVICES.fullmatch(name):
            continue
        near = re.search(r"'(\w+)'", meant(name.removeprefix(_OUR), [each.removeprefix(_OUR) for each in sorted(real)]))
        found.append(f"{name} (did you mean {_OUR}{near[1]}?)" if near else name)
    return [f"set in the environment, and unknown: {', '.join(found)}"] if found else []


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
            run(args, prog_name=_NAME, obj=_PROGRAM)
        except _WorkersFailed as end:
            end.error.is_reported = True
            raise end.error from None
        except SystemExit as end:
            if end.code:
                raise


if __name__ == "__main__":
    run(prog_name=_NAME)
