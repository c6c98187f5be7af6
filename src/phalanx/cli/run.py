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
from phalanx.cli import _python
from phalanx.cli._attempt_groups import AttemptGroups, reserve_port
from phalanx.cli._command import SETTINGS, Command
from phalanx.cli._console import console_specs
from phalanx.cli._declare import click_options, sections
from phalanx.cli._placement import place
from phalanx.cli._restarts import forwarded, forwarding, restart_policy, restoring
from phalanx.cli._run_checks import check_command, check_preload, check_ranks, check_rotation, check_shown, timer_specs
from phalanx.cli._run_config import RunConfig
from phalanx.cli._run_group import RunTeam, see_through
from phalanx.cli._run_logs import run_logs, umask_notes
from phalanx.cli._run_options import ABSENT, ELSEWHERE
from phalanx.cli._say import say
from phalanx.cli._streams import check_no_logs, check_streams
from phalanx.multiprocessing import SignalException, Std

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

_NAME = "phalanx run"
_SETTINGS = {**SETTINGS, "allow_interspersed_args": False}  # everything after the script is the script's


@click.command(cls=Command, context_settings=_SETTINGS, sections=sections(RunConfig), absent={**ELSEWHERE, **ABSENT})
@click_options(RunConfig)
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
            sys.exit(_run(RunConfig(script, args, {}, **options), until_end))
    except KeyboardInterrupt:  # before a group was open, or after
        sys.exit(128 + signal.SIGINT)
    except SignalException as error:  # the third, or a later one, between two lines of ours
        sys.exit(128 + error.sigval)


def _run(config: RunConfig, until_end: ExitStack) -> int:
    nprocs, script, no_python = config.nproc_per_node, config.script, config.no_python
    python = _python.executable()
    check_command(script, module=config.module, no_python=no_python)
    check_preload(config.preload, no_python=no_python, python=python)
    local_ranks = None if config.local_ranks_filter is None else set(config.local_ranks_filter)
    redirects, tee = config.redirects, config.tee
    check_ranks(nprocs, redirects, tee, local_ranks)
    timers = timer_specs(config.on_expiry, config.hang_timeout)
    if redirects is None and tee is None:
        tee = Std.ALL
    run_id = config.run_id or time.strftime("%Y%m%d-%H%M%S")
    policy = restart_policy(config)
    forwards = forwarded(config.signals_forward)
    placement, extra, said = place(config, nprocs)
    console = console_specs(config, drain=config.drain)
    check_shown(nprocs, console.ranks)
    redirects, tee = redirects or Std.NONE, tee or Std.NONE
    filters = {"stdout": config.duplicate_stdout_filters, "stderr": config.duplicate_stderr_filters}
    bounds = {
        "max_size": config.log_max_size, "keep": config.log_keep, "compress": config.log_compress,
        "mode": config.log_mode,
    }  # fmt: skip
    if config.log_dir == os.devnull:
        check_no_logs(console, filters, {**bounds, "keep_runs": config.keep_runs})
        notes = []
    else:
        notes = check_streams(nprocs, redirects, tee, local_ranks, console, filters)
    check_rotation(config.log_max_size, keep=config.log_keep, compress=config.log_compress)
    specs = run_logs(config.log_dir, redirects, tee, local_ranks, bounds)
    reserved = None if config.master_port else until_end.enter_context(reserve_port())
    envs = {
        rank: worker_env(
            rank,
            nprocs,
            role=config.role,
            run_id=run_id,
            master_addr=config.master_addr,
            master_port=reserved.number if reserved else config.master_port,
            max_restarts=policy.max_restarts,
        )
        | extra[rank]
        for rank in range(nprocs)
    }
    rest: dict[str, Any] = {"settle": config.settle, "grace": config.grace, "linger": config.linger}
    rest |= {"orphan_grace": config.orphan_grace, "notice": config.notice, "placement": placement, "timers": timers}
    rest |= {"speak": say, "console": console}
    rest |= {f"duplicate_{stream}_filters": texts for stream, texts in filters.items()}
    groups = AttemptGroups(
        script, config.args, envs, specs, module=config.module, no_python=no_python, python=python,
        preload=config.preload, port=reserved, options=rest,
    )  # fmt: skip
    until_end.callback(groups.close)
    team = RunTeam(groups, policy, run_id=run_id, keep_runs=config.keep_runs)
    specs.keeps_few = config.keep_runs is not None
    doubts = [] if no_python else _python.doubts(script)
    specs.notes = [*specs.notes, *doubts, *said, *notes, *umask_notes(config.log_mode)]
    with forwarding(forwards, team):
        return see_through(team, specs, config.grace, colour=use_colour(sys.stderr, console.color))


def main(args: Sequence[str] | None = None) -> None:
    """``python -m phalanx.cli.run``: where ``python -m torch.distributed.run`` stood. ``args``: as on a command line.

    Raises SystemExit with the exit code, which is 0 for a success, too.
    """
    with restoring():
        run(args, prog_name=_NAME)


if __name__ == "__main__":
    run(prog_name=_NAME)
