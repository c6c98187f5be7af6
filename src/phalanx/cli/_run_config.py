"""The options of `phalanx run`: each is declared here, or in one of the classes that `RunConfig` has as bases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from phalanx._engine import host_signals
from phalanx._logs.specs import LEAST_ATTEMPTS
from phalanx._placement import accelerators
from phalanx._rendezvous.bounds import MOST_LINE, MOST_RUN_ID
from phalanx.cli._console import ConsoleOptions
from phalanx.cli._declare import (
    CONSOLE,
    END,
    LIST,
    LOGS,
    NUMBER,
    TEXT,
    TIMERS,
    WHOLE,
    WORKERS,
    Declared,
    Flag,
    Many,
    Maybe,
    Option,
)  # fmt: skip
from phalanx.cli._meet import MachineOptions
from phalanx.cli._options import Count, Time, read_mode, read_ranks, read_size, read_strings, text_of, time_of
from phalanx.cli._placement import PlacementOptions
from phalanx.cli._restarts import DEFAULT_FORWARDED, RestartOptions, read_handled, read_signals
from phalanx.cli._run_options import LogDir, read_notice, steps
from phalanx.cli._stdin import read_rank
from phalanx.multiprocessing import Std


class WorkerOptions(Declared, section=WORKERS):
    """What is started, how often, and what it is called."""

    nproc_per_node = Option(
        accelerators.count,
        default="1",
        metavar="N|auto|cpu|gpu",
        written=TEXT + WHOLE,
        torchrun="--nproc-per-node",
        sentence="Workers on this machine.",
    )
    module = Flag("-m", torchrun="--module", sentence="SCRIPT is a module, as for python -m.")
    no_python = Flag(torchrun="--no-python", sentence="SCRIPT is a binary, started as it is.")
    run_path = Flag(
        torchrun="--run-path",
        sentence="Run SCRIPT by runpy.run_path, in workers that are started as --start-method says.",
    )
    run_id = Maybe(text_of(MOST_RUN_ID), metavar="NAME", sentence="What the run is called. Default: the date and time.")
    role = Option(text_of(MOST_LINE), default="default", torchrun="--role", sentence="ROLE_NAME of the workers.")
    preload = Maybe(
        read_strings,
        metavar="MODULE,...",
        written=LIST,
        sentence="Modules to import once: the workers are forks that have them already.",
    )
    start_method = Option(
        str,
        kind=click.Choice(["spawn", "forkserver", "fork"]),
        default="spawn",
        torchrun="--start-method",
        sentence="How workers of --run-path are started. Other scripts, and binaries, are executed afresh.",
    )
    stdin = Maybe(
        read_rank,
        metavar="RANK|none",
        written=TEXT + WHOLE,
        sentence="Global rank that reads the stdin of phalanx run. Default: 0 in a run of one worker, else none.",
    )


class LogOptions(Declared, section=LOGS):
    """Where output goes, and what is kept of it."""

    redirects = Maybe(
        Std.from_str,
        "-r",
        metavar="STREAMS",
        written=TEXT + WHOLE,
        torchrun="--redirects",
        sentence="Streams that go to files only: 1 stdout, 2 stderr, 3 both; or by local rank, 0:3,1:2.",
    )
    tee = Maybe(
        Std.from_str,
        "-t",
        metavar="STREAMS",
        written=TEXT + WHOLE,
        torchrun="--tee",
        sentence="Streams that go to files and to the console. Default: 3.",
    )
    log_dir = Maybe(
        str,
        kind=LogDir(),
        paths=("",),
        metavar="FOLDER",
        torchrun="--log-dir",
        sentence="Folder for the runs' logs; /dev/null: none are kept. Default: ~/.local/state/phalanx/runs.",
    )
    logs_specs = Maybe(
        str,
        metavar="NAME",
        torchrun="--logs-specs",
        sentence="A plugin that says which files there are: an entry point of torchrun.logs_specs.",
    )
    log_max_size = Maybe(
        read_size,
        metavar="SIZE",
        written=TEXT + WHOLE,
        sentence="Set log files aside when they would grow beyond, as stdout.log.1, ...: 100MB, 1GiB.",
    )
    log_keep = Count(
        least=1, sentence="Keep N of each log that were set aside; remove the oldest. Default: all are kept."
    )
    log_compress = Flag(sentence="Compress log files that were set aside, to stdout.log.1.gz, ...")
    event_log_handler = Option(
        str,
        default="null",
        metavar="NAME",
        torchrun="--event-log-handler",
        sentence="Where the events of torchrun's agent go: console, or an entry point of phalanx.event_handlers.",
    )
    log_mode = Maybe(
        read_mode, metavar="MODE", sentence="Permissions of the run's folders, for colleagues: 750, 755. Default: 700."
    )
    keep_attempts = Count(
        least=LEAST_ATTEMPTS,
        sentence="Keep the folders of the first attempt and of the last N (5 or more), no others. Default: 100.",
    )
    keep_runs = Count(
        least=1, sentence="Remove runs in the folder but for the newest N, this one among them. Default: all are kept."
    )
    duplicate_stdout_filters = Many(
        read_strings,
        metavar="TEXT,...",
        torchrun="--duplicate-stdout-filters",
        sentence="Write lines that hold one of these also to filtered_stdout.log, for all ranks.",
    )
    duplicate_stderr_filters = Many(
        read_strings, metavar="TEXT,...", torchrun="--duplicate-stderr-filters", sentence="The same for stderr."
    )
    local_ranks_filter = Many(
        read_ranks,
        section=CONSOLE,
        metavar="RANK,...",
        torchrun="--local-ranks-filter",
        sentence="Local ranks whose output the console shows.",
    )


class EndOptions(Declared, section=END):
    """What ends a run, and how long each step of that takes."""

    hang_timeout = Maybe(
        time_of(zero=False, endless=False),
        section=TIMERS,
        metavar="TIME",
        written=TEXT + NUMBER,
        sentence="A rank whose last phalanx.timer.beat() is older is hung. Default: none is expected.",
    )
    on_expiry = Option(
        steps,
        section=TIMERS,
        default="kill",
        metavar="STEP[:TIME],...",
        written=LIST,
        sentence="What follows when a timer expires: report, dump, terminate, kill.",
    )
    grace = Time(
        "--shutdown-timeout",
        default="30",
        variables=("PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"),
        torchrun="--shutdown-timeout",
        sentence="Time between SIGTERM and SIGKILL.",
    )
    settle = Time(
        default="0.1",
        sentence="Time for the others to leave evidence after the first failure, before they are stopped.",
    )
    linger = Time(
        default="10",
        sentence="Time for what workers that have all succeeded left behind (an upload), before it is ended.",
    )
    notice = Maybe(
        read_notice,
        metavar="SIGNAL:TIME",
        sentence="What a planned stop begins with: a signal, and time before SIGTERM, like USR1:60.",
    )
    orphan_grace = Time(
        endless=False, default="0", sentence="Time between SIGTERM and SIGKILL when phalanx run itself is killed."
    )
    no_force_color = Flag(
        section=CONSOLE, sentence="Leave FORCE_COLOR out of the workers' environment where the console has colours."
    )
    drain = Time(default="10", sentence="Time that the end waits, at most, for a console that reads slowly.")
    signals_to_handle = Option(
        read_handled,
        default=host_signals.DEFAULT,
        metavar="NAME,...",
        written=LIST,
        variables=(host_signals.SIGNALS_ENV,),
        torchrun="--signals-to-handle",
        sentence="Signals to phalanx run that stop the run; none: none does.",
    )
    signals_forward = Option(
        read_signals,
        default=",".join(number.name.removeprefix("SIG") for number in DEFAULT_FORWARDED),
        metavar="NAME,...",
        written=LIST,
        sentence="Signals to phalanx run that are passed on to the workers; none: none are.",
    )


class RunConfig(
    WorkerOptions, RestartOptions, LogOptions, ConsoleOptions, EndOptions, PlacementOptions, MachineOptions
):
    """What `phalanx run` was asked for, whoever said it: the command line, a job file, the environment, or nobody.

    Args:
        script: The script, the module or the binary.
        args: Its arguments.
        env: Variables for all workers, beside those that they get anyway.
        options: The values of all options.
    """

    script: str
    args: tuple[str, ...]
    env: dict[str, str]

    def __init__(self, script: str, args: tuple[str, ...], env: Mapping[str, str], **options: Any) -> None:
        super().__init__(**options)
        vars(self).update(script=script, args=args, env=dict(env))
