"""``phalanx run``: a script, a module or a binary as a group of workers on this machine.

Owns the options, the workers' environment and the exit code. Knows nothing of how a group is kept together.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import ExitStack

import click

from phalanx._agent.worker_env import worker_env
from phalanx._base.tty import use_colour
from phalanx._placement import accelerators
from phalanx.cli import _python
from phalanx.cli._attempt_groups import AttemptGroups, reserve_port
from phalanx.cli._command import SETTINGS, Command
from phalanx.cli._options import (
    Whole,
    checking_seconds,
    console_options,
    console_specs,
    option,
    read_mode,
    read_ranks,
    read_size,
    read_strings,
    reading,
    repeatable,
)
from phalanx.cli._placement import placement_options, take_placement
from phalanx.cli._restarts import POLICY, forwarded, forwarding, restart_options, restart_policy, restoring
from phalanx.cli._run_checks import check_command, check_preload, check_ranks, check_rotation, check_shown, timer_specs
from phalanx.cli._run_group import RunTeam, see_through
from phalanx.cli._run_logs import run_logs, umask_notes
from phalanx.cli._run_options import ABSENT, ELSEWHERE, SECTIONS, LogDir, only, read_notice, steps
from phalanx.cli._say import say
from phalanx.cli._streams import check_no_logs, check_streams
from phalanx.multiprocessing import SignalException, Std

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

_NAME = "phalanx run"
_SETTINGS = {**SETTINGS, "allow_interspersed_args": False}  # everything after the script is the script's


@click.command(cls=Command, context_settings=_SETTINGS, sections=SECTIONS, absent={**ELSEWHERE, **ABSENT})
@option(
    "--nproc-per-node",
    callback=reading(accelerators.count),
    metavar="N|auto|cpu|gpu",
    default="1",
    show_default=True,
    help="Workers on this machine.",
)
@option("-m", "--module", is_flag=True, help="SCRIPT is a module, as for python -m.")
@option("--no-python", is_flag=True, help="SCRIPT is a binary, started as it is.")
@option("--run-id", metavar="NAME", help="What the run is called. Default: the date and time.")
@option("--role", default="default", show_default=True, help="ROLE_NAME of the workers.")
@option(
    "--log-dir",
    type=LogDir(),
    help="Folder for the runs' logs; /dev/null: none are kept. Default: ~/.local/state/phalanx/runs.",
)
@option(
    "-r",
    "--redirects",
    callback=reading(Std.from_str),
    metavar="STREAMS",
    help="Streams that go to files only: 1 stdout, 2 stderr, 3 both; or by local rank, 0:3,1:2.",
)
@option(
    "-t",
    "--tee",
    callback=reading(Std.from_str),
    metavar="STREAMS",
    help="Streams that go to files and to the console. Default: 3.",
)
@repeatable(
    "--local-ranks-filter",
    read=read_ranks,
    metavar="RANK,...",
    help="Local ranks whose output the console shows.",
)
@console_options
@option("--drain", type=str, callback=checking_seconds(), default=10.0, show_default=True, metavar="SECONDS",
        help="Time that the end waits, at most, for a console that reads slowly.")  # fmt: skip
@option("--log-max-size", callback=reading(read_size), metavar="SIZE",
        help="Set log files aside when they would grow beyond, as stdout.log.1, ...: 100MB, 1GiB.")  # fmt: skip
@option("--log-keep", type=Whole(min=1), metavar="N",
        help="Keep N of each log that were set aside; remove the oldest. Default: all are kept.")  # fmt: skip
@option("--log-compress", is_flag=True, help="Compress log files that were set aside, to stdout.log.1.gz, ...")
@option("--log-mode", callback=reading(read_mode), metavar="MODE",
        help="Permissions of the run's folders, for colleagues: 750, 755. Default: 700.")  # fmt: skip
@option("--keep-runs", type=Whole(min=1), metavar="N",
        help="Remove runs in the folder but for the newest N, this one among them. Default: all are kept.")  # fmt: skip
@repeatable("--duplicate-stdout-filters", read=read_strings, metavar="TEXT,...",
            help="Write lines that hold one of these also to filtered_stdout.log, for all ranks.")  # fmt: skip
@repeatable("--duplicate-stderr-filters", read=read_strings, metavar="TEXT,...",
            help="The same for stderr.")  # fmt: skip
@option("--grace", "--shutdown-timeout", also=("PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"), type=str,
        callback=checking_seconds(), default=30.0, show_default=True, metavar="SECONDS",
        help="Time between SIGTERM and SIGKILL.")  # fmt: skip
@option("--settle", type=str, callback=checking_seconds(), default=0.1, show_default=True, metavar="SECONDS",
         help="Time for the others to leave evidence after the first failure, before they are stopped.")  # fmt: skip
@option("--linger", type=str, callback=checking_seconds(), default=10.0, show_default=True, metavar="SECONDS",
         help="Time for what workers that have all succeeded left behind (an upload), before it is ended.")  # fmt: skip
@option("--orphan-grace", type=str, callback=checking_seconds(endless=False), default=0.0, show_default=True,
        metavar="SECONDS", help="Time between SIGTERM and SIGKILL when phalanx run itself is killed.")  # fmt: skip
@option("--notice", callback=reading(read_notice), metavar="SIGNAL:SECONDS",
        help="What a planned stop begins with: a signal, and time before SIGTERM, like USR1:60.")  # fmt: skip
@option("--hang-timeout", type=str, callback=checking_seconds(zero=False, endless=False), metavar="SECONDS",
         help="A rank whose last phalanx.timer.beat() is older is hung. Default: none is expected.")  # fmt: skip
@option("--on-expiry", callback=reading(steps), default="kill", show_default=True, metavar="STEP[:SECONDS],...",
        help="What follows when a timer expires: report, dump, terminate, kill.")  # fmt: skip
@option("--preload", callback=reading(read_strings), metavar="MODULE,...",
        help="Modules to import once: the workers are forks that have them already.")  # fmt: skip
@option("--start-method", type=click.Choice(["spawn", "forkserver", "fork"]), default="spawn", show_default=True,
         help="How functions are started. Scripts and binaries are always executed afresh.")  # fmt: skip
@restart_options
@placement_options
@option("--master-addr", default="127.0.0.1", show_default=True, help="MASTER_ADDR of the workers.")
@option("--master-port", type=Whole(0, 65535), default=0, metavar="PORT",
         help="MASTER_PORT of the workers. Default: a port that is reserved for the run.")  # fmt: skip
@option("--standalone", is_flag=True, hidden=True, help="Accepted: one machine without a store is what this is.")
@option("--nnodes", default="1", hidden=True, callback=only("1", "1:1", why="it runs on one machine"))
@option("--node-rank", default="0", hidden=True, callback=only("0", why="it runs on one machine"))
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(script: str, args: tuple[str, ...], **options: Any) -> None:
    """Run SCRIPT as a group of workers on this machine.

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
    try:
        with ExitStack() as until_end:
            sys.exit(_run(script, args, until_end, **options))
    except KeyboardInterrupt:  # before a group was open, or after
        sys.exit(128 + signal.SIGINT)
    except SignalException as error:  # the third, or a later one, between two lines of ours
        sys.exit(128 + error.sigval)


def _run(
    script: str,
    args: tuple[str, ...],
    until_end: ExitStack,
    *,
    nproc_per_node: int,
    module: bool,
    no_python: bool,
    run_id: str | None,
    role: str,
    log_dir: str | None,
    redirects: Std | dict[int, Std] | None,
    tee: Std | dict[int, Std] | None,
    local_ranks_filter: list[int] | None,
    grace: float,
    settle: float,
    linger: float,
    orphan_grace: float,
    notice: tuple[int, float] | None,
    master_addr: str,
    master_port: int,
    log_max_size: int | None,
    log_keep: int | None,
    log_compress: bool,
    log_mode: int | None,
    keep_runs: int | None,
    duplicate_stdout_filters: list[str] | None,
    duplicate_stderr_filters: list[str] | None,
    hang_timeout: float | None,
    on_expiry: tuple[tuple[str, float], ...],
    preload: list[str] | None,
    start_method: str,  # noqa: ARG001 - of functions, which only the library starts
    standalone: bool,  # noqa: ARG001 - this, and those below, can only say what holds here anyway
    nnodes: str,  # noqa: ARG001 - as above
    node_rank: str,  # noqa: ARG001 - as above
    monitor_interval: float | None,  # noqa: ARG001 - nothing polls
    signals_forward: list[signal.Signals],
    **shown: Any,
) -> int:
    python = _python.executable()
    check_command(script, module=module, no_python=no_python)
    check_preload(preload, no_python=no_python, python=python)
    local_ranks = None if local_ranks_filter is None else set(local_ranks_filter)
    check_ranks(nproc_per_node, redirects, tee, local_ranks)
    timers = timer_specs(on_expiry, hang_timeout)
    if redirects is None and tee is None:
        tee = Std.ALL
    run_id = run_id or time.strftime("%Y%m%d-%H%M%S")
    policy = restart_policy(**{name: shown.pop(name) for name in POLICY})
    forwards = forwarded(signals_forward)
    placement, extra, said = take_placement(shown, nproc_per_node)
    console = console_specs(**shown)
    check_shown(nproc_per_node, console.ranks)
    redirects, tee = redirects or Std.NONE, tee or Std.NONE
    filters = {"stdout": duplicate_stdout_filters, "stderr": duplicate_stderr_filters}
    bounds = {"max_size": log_max_size, "keep": log_keep, "compress": log_compress, "mode": log_mode}
    if log_dir == os.devnull:
        check_no_logs(console, filters, {**bounds, "keep_runs": keep_runs})
        notes = []
    else:
        notes = check_streams(nproc_per_node, redirects, tee, local_ranks, console, filters)
    check_rotation(log_max_size, keep=log_keep, compress=log_compress)
    specs = run_logs(log_dir, redirects, tee, local_ranks, bounds)
    reserved = None if master_port else until_end.enter_context(reserve_port())
    envs = {
        rank: worker_env(
            rank,
            nproc_per_node,
            role=role,
            run_id=run_id,
            master_addr=master_addr,
            master_port=reserved.number if reserved else master_port,
            max_restarts=policy.max_restarts,
        )
        | extra[rank]
        for rank in range(nproc_per_node)
    }
    rest: dict[str, Any] = {"settle": settle, "grace": grace, "linger": linger, "orphan_grace": orphan_grace}
    rest |= {"notice": notice, "placement": placement, "timers": timers, "speak": say, "console": console}
    rest |= {f"duplicate_{stream}_filters": texts for stream, texts in filters.items()}
    groups = AttemptGroups(
        script, args, envs, specs, module=module, no_python=no_python, python=python, preload=preload, port=reserved,
        options=rest,
    )  # fmt: skip
    until_end.callback(groups.close)
    team = RunTeam(groups, policy, run_id=run_id, keep_runs=keep_runs)
    specs.keeps_few = keep_runs is not None
    doubts = [] if no_python else _python.doubts(script)
    specs.notes = [*specs.notes, *doubts, *said, *notes, *umask_notes(log_mode)]
    with forwarding(forwards, team):
        return see_through(team, specs, grace, colour=use_colour(sys.stderr, console.color))


def main(args: Sequence[str] | None = None) -> None:
    """``python -m phalanx.cli.run``: where ``python -m torch.distributed.run`` stood. ``args``: as on a command line.

    Raises SystemExit with the exit code, which is 0 for a success, too.
    """
    with restoring():
        run(args, prog_name=_NAME)


if __name__ == "__main__":
    run(prog_name=_NAME)
