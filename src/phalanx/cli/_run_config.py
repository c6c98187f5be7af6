"""The options of `phalanx run`: each is declared here, or in one of the classes that `RunConfig` has as bases.

Owns also what is printed of options and variables that are none of them (those of other launchers, and misspelled
ones), and the options that hold, as a job file: for ``--print-config``, and for `job.toml` in a run's folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click
from click.core import ParameterSource

from phalanx._base.text import parse_duration
from phalanx._engine import host_signals
from phalanx._group.arguments import checked_notice
from phalanx._logs.specs import LEAST_ATTEMPTS
from phalanx._placement import devices
from phalanx._rendezvous.settings import MOST_LINE, MOST_RUN_ID
from phalanx._timers.specs import read_steps
from phalanx.cli._commands import meant
from phalanx.cli._declare import (
    CONSOLE,
    END,
    LIST,
    LOGS,
    NUMBER,
    SECTIONS,
    TEXT,
    TIMERS,
    WHOLE,
    WORKERS,
    Declared,
    Flag,
    Many,
    Maybe,
    Option,
    declarations,
    given,
    job_of,
    origin,
)  # fmt: skip
from phalanx.cli._meet import MachineOptions
from phalanx.cli._options import (
    ConsoleOptions,
    Count,
    Folder,
    Time,
    read_mode,
    read_ranks,
    read_size,
    read_strings,
    text_of,
    time_of,
)
from phalanx.cli._placement import PlacementOptions
from phalanx.cli._restarts import DEFAULT_FORWARDED, RestartOptions, read_handled, read_signals, signal_of
from phalanx.cli._stdin import read_rank
from phalanx.multiprocessing import Std

ELSEWHERE = {
    "--name": "it is --run-id here",
    "--env": "workers inherit the environment of phalanx run (A=1 phalanx run ...); a job file (-f) has [env]",
    "--quiet": "-r 3 keeps the output of the workers in files alone; the report of a failure stays",
    "--keep-going": "a command that is to go on when another fails is a run of its own; see Many commands in the guide",
    "--restart": "all workers are started again, see --max-restarts; one that is to start again by itself is a run "
    "of its own, see Many commands in the guide",
    "--no-standby": "restarts have no standby any more; leave it out (--preload makes them fast)",
    "--use-env": "the rank is in LOCAL_RANK, as with torchrun; leave it out",
    **dict.fromkeys(
        ("-n", "--nprocs", "--num-processes", "--num-procs", "--num-workers", "--workers", "--num-gpus", "--gpus"),
        "it is --nproc-per-node here",
    ),
}
"""Options of other launchers and of earlier versions, and what they are here."""

_OF_LAUNCHERS = ("--nproc-per-node", "--nnodes", "--max-restarts", "--standalone", "--no-python", "--rdzv-")
"""Options, or how their names begin, that scripts do not have, as they may have ``--log-dir`` or ``--master-port``."""

_OUR = "PHALANX_"
_OURS = {
    *("PHALANX_JOB_SECRET", "PHALANX_ETCD_PASSWORD", "PHALANX_STACK_SIGNAL", "PHALANX_SHIM_PYTHON"),
    # A worker has them.
    *("PHALANX_GROUP", "PHALANX_STEP", "PHALANX_STOP_FLAG", "PHALANX_TIMERS", "PHALANX_DESCRIPTORS"),
    *("PHALANX_TRACEBACKS", "PHALANX_DEBUGGER"),
}
"""Variables of ours that set no option."""

_OF_TESTS = (
    *("PHALANX_TEST_", "PHALANX_CUTS", "PHALANX_ROUNDS", "PHALANX_INJECTOR"),
    *("PHALANX_BENCHMARK", "PHALANX_PEER_"),
)
_OF_SERVICES = re.compile(r"\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_\w+)?)")
"""What Kubernetes calls variables for a service, of which one may be called phalanx."""


class LogDir(Folder):
    """A folder, or /dev/null, which torchrun's users give to have no logs."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See `click.ParamType`."""
        return value if value == os.devnull else super().convert(value, param, ctx)


def steps(text: str) -> tuple[tuple[str, float], ...]:
    """Read ``--on-expiry``. Raises ValueError."""
    try:
        return read_steps(text)
    except ValueError as error:
        raise ValueError(str(error).removeprefix("on_expiry: ")) from None


def read_notice(text: str) -> tuple[int, float]:
    """Read ``--notice``: a signal and a time. Raises ValueError.

    >>> read_notice("USR1:60"), read_notice("SIGUSR2:2m")
    ((10, 60.0), (12, 120.0))
    """
    name, _, span = text.partition(":")
    wrong = f"{text!r}: expected a signal that a process can handle and a time, more than 0, like USR1:60 or USR1:2m"
    try:
        notice = checked_notice((signal_of(name, wrong), parse_duration(span)))
    except ValueError:
        raise ValueError(wrong) from None
    assert notice is not None
    return notice


class WorkerOptions(Declared, section=WORKERS):
    """What is started, how often, and what it is called."""

    nproc_per_node = Option(
        devices.count,
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
        sentence="Run SCRIPT by runpy.run_path, in workers started by --start-method.",
    )
    run_id = Maybe(text_of(MOST_RUN_ID), metavar="NAME", sentence="Name of the run. Default: the date and time.")
    role = Option(text_of(MOST_LINE), default="default", torchrun="--role", sentence="ROLE_NAME of the workers.")
    preload = Maybe(
        read_strings,
        metavar="MODULE,...",
        written=LIST,
        sentence="Import these modules once: the workers start as forks that have them.",
    )
    start_method = Option(
        str,
        kind=click.Choice(["spawn", "forkserver", "fork"]),
        default="spawn",
        torchrun="--start-method",
        sentence="Start method of --run-path. Other scripts, and binaries, are executed afresh.",
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
        sentence="Plugin that chooses the log files: an entry point of torchrun.logs_specs.",
    )
    log_max_size = Maybe(
        read_size,
        metavar="SIZE",
        written=TEXT + WHOLE,
        sentence="Rotate log files at this size, to stdout.log.1, ...: 100MB, 1GiB.",
    )
    log_keep = Count(least=1, sentence="Keep N rotated files of each log, and remove the oldest. Default: keep all.")
    log_compress = Flag(sentence="Compress rotated log files, to stdout.log.1.gz, ...")
    event_log_handler = Option(
        str,
        default="null",
        metavar="NAME",
        torchrun="--event-log-handler",
        sentence="Destination of the agent's events: console, or an entry point of phalanx.event_handlers.",
    )
    log_mode = Maybe(
        read_mode, metavar="MODE", sentence="Permissions of the run's folders, for colleagues: 750, 755. Default: 700."
    )
    keep_attempts = Count(
        least=LEAST_ATTEMPTS,
        sentence="Keep the folders of the first attempt and of the last N (5 or more). Default: 100.",
    )
    keep_runs = Count(
        least=1,
        sentence="Keep the newest N runs of the folder, remove the others. Default: keep all.",
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
        sentence="Report a rank as hung when its last phalanx.timer.beat() is older. Default: expect none.",
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
        default="0.03",
        sentence="Time between the first failure and the stop of the others, for evidence of their own.",
    )
    linger = Time(
        default="10",
        sentence="How long processes left behind (an upload) may run after all workers succeeded.",
    )
    notice = Maybe(
        read_notice,
        metavar="SIGNAL:TIME",
        sentence="Begin a planned stop with this signal, and wait before SIGTERM, like USR1:60.",
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


def notes_on_args(ctx: click.Context, script: str, args: Sequence[str]) -> list[str]:
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


def notes_on_variables(environ: Mapping[str, str], known: Iterable[str]) -> list[str]:
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


LEFT_OUT = "# left out, a secret: "
"""What stands before the name of a variable in a job file that was made without its value."""

_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
_WIDTH = 40
_LINE = "command line"
_SECRET = re.compile(
    r"SECRET|PASSW(?:OR)?D|PASSPHRASE|(?:^|_)(?:API|AUTH)?(?:TOKEN|KEYS?|CREDENTIALS?)(?:_|$)|_(?:PWD|PASS|PAT)$",
    re.IGNORECASE,
)
_NO_SECRET = re.compile(r"_(?:FILE|PATH|DIR)$", re.IGNORECASE)  # it says where one is
_PASSWORD_IN_URL = re.compile(r"://[^/?#\s:@]*:[^/?#\s@]+@")


def quoted_path(path: str) -> str:
    """Return a path as a job file has it, where ``~`` and ``$`` have a meaning.

    >>> quoted_path("~/a$b"), quoted_path("worker_${local_rank}.py")
    ('./~/a$$b', 'worker_${local_rank}.py')
    """
    text = path.replace("$", "$$").replace("$${local_rank}", "${local_rank}")
    return f"./{text}" if text.startswith("~") else text


def is_secret(name: str, text: str = "") -> bool:
    """Whether a variable's value is a secret, by its name; or has one, as a URL with a password.

    >>> [name for name in ("HF_TOKEN", "PGPASSWORD", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY") if not is_secret(name)]
    []
    >>> [name for name in ("TOKENIZERS_PARALLELISM", "MAX_TOKENS", "PWD", "TLS_KEY_FILE") if is_secret(name)]
    []
    >>> is_secret("STORE", "redis://:hunter2@store:6379/0"), is_secret("STORE", "http://store:80/a@b")
    (True, False)
    """
    is_named = _SECRET.search(name) and not _NO_SECRET.search(name)
    return bool(is_named or _PASSWORD_IN_URL.search(text))


def as_job_file(ctx: click.Context, config: RunConfig, secrets: Iterable[str] | None = None) -> str:
    """Return a job file that says what the options say, and in comments who has said it. Raises UsageError.

    ``secrets``: None: all is there. Else variables of ``[env]`` that are secrets are left out, and a comment names each
    of them, and these. So it does in any case with those that the job file itself has left out.
    """
    lines = ["# What phalanx run was asked for: phalanx run -f FILE reads it.", ""]
    job = job_of(ctx)
    typed = job is None or ctx.params["script"] is not None
    for key, said in (("script", _string(quoted_path(config.script))), ("args", _list(config.args))):
        lines.append(_commented(f"{key} = {said}", _LINE if typed or job is None else job.where(key)))
    for heading in (*SECTIONS, ""):
        every = [declared for declared in declarations(RunConfig) if declared.section == heading]
        lines += ["", f"# {heading or 'Accepted, without effect'}"]
        unset = []
        for declared in every:
            if (text := _text(ctx, declared)) is None:
                unset.append(declared.long[2:])
            else:
                lines.append(_commented(f"{declared.long[2:]} = {text}", _said(ctx, declared)))
        lines += [f"# not set: {', '.join(unset)}"] if unset else []
    hidden = [] if secrets is None else [name for name, text in config.env.items() if is_secret(name, text)]
    shown = {name: text for name, text in config.env.items() if name not in hidden}
    before = [] if job is None else job.left_out
    if left := dict.fromkeys([*(secrets or []), *hidden, *before]):
        lines += ["", *(f"{LEFT_OUT}{name}" for name in left)]
    if shown and job is not None:
        lines += ["", "[env]", *(_commented(f"{name} = {_string(text)}", job.where("env", name))
                                 for name, text in shown.items())]  # fmt: skip
    return "\n".join(lines) + "\n"


def _said(ctx: click.Context, declared: Option[Any]) -> str:
    """Who has said it."""
    if ctx.get_parameter_source(declared.name) is ParameterSource.COMMANDLINE:
        return _LINE
    param = next(param for param in ctx.command.params if param.name == declared.name)
    return origin(ctx, param).removeprefix("in ").removesuffix(" in the environment") or "default"


def _text(ctx: click.Context, declared: Option[Any]) -> str | None:
    """Return the value as a job file has it; None: there is none."""
    if isinstance(declared, Flag):
        return str(bool(ctx.params[declared.name])).lower()
    value = given(ctx, declared)
    if value is None or ctx.params[declared.name] is None:
        return None
    if isinstance(value, (tuple, list)):
        return _list(value)
    if int in declared.written and (declared.written == WHOLE or re.fullmatch(r"0|-?[1-9]\d{0,17}", value)):
        return str(int(value))
    if float in declared.written and (str not in declared.written or re.fullmatch(r"\d{1,9}\.\d{1,9}", value)):
        return repr(float(value))
    return _string(declared.with_paths(value, quoted_path))


def _list(values: Iterable[str]) -> str:
    return f"[{', '.join(map(_string, values))}]"


def _string(text: str) -> str:
    """Write a string of TOML. Raises UsageError for one that no job file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        msg = f"--print-config: {text!r} is not UTF-8, and no job file can hold it"
        raise click.UsageError(msg) from None
    escaped = "".join(
        _ESCAPES.get(char) or (char if char >= " " and char != "\x7f" else f"\\u{ord(char):04x}") for char in text
    )
    return f'"{escaped}"'


def _commented(text: str, said: str) -> str:
    printed = "".join(char if char.isprintable() else "?" for char in said)  # a path can have any characters
    return f"{text:<{_WIDTH}} # {printed}"
