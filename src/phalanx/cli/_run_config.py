"""The options of `phalanx run`: each is declared here, or in one of the classes that `RunOptions` has as bases."""

from __future__ import annotations

import os

import click

from phalanx._base.text import parse_duration
from phalanx._engine import host_signals
from phalanx._group.arguments import checked_notice
from phalanx._logs.specs import LEAST_ATTEMPTS
from phalanx._placement import devices, topology
from phalanx._rendezvous.endpoint import BACKENDS, is_here, read_settings, split_endpoint, split_listener
from phalanx._rendezvous.rdzv_conf import FILES
from phalanx._rendezvous.settings import MOST_ADDRESS, MOST_LINE, MOST_NODES, MOST_RUN_ID, STATIC
from phalanx._run.config import EVENTS
from phalanx._run.meeting import MASTER_ADDR
from phalanx._run.stdin import NONE
from phalanx._timers.specs import read_steps
from phalanx.cli._declare import (
    CONSOLE,
    END,
    LIST,
    LOGS,
    MACHINES,
    PLACEMENT,
    TEXT,
    TIMERS,
    WHOLE,
    WORKERS,
    Declared,
    Flag,
    Many,
    Maybe,
    Option,
    Pairs,
)
from phalanx.cli._options import (
    MOST_RANKS,
    ConsoleOptions,
    Count,
    Folder,
    Time,
    Whole,
    read_mode,
    read_ranks,
    read_size,
    read_strings,
    text_of,
)
from phalanx.cli._restarts import DEFAULT_FORWARDED, RestartOptions, read_handled, read_signals, signal_of
from phalanx.multiprocessing import Placement, Std

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


def read_commands(pair: tuple[str, str]) -> list[tuple[tuple[str, ...], str]]:
    """Read ``--on-event``: events and a command. Raises ValueError.

    >>> read_commands(("failed,hung", "mail -s $PHALANX_EVENT ada"))
    [(('failed', 'hung'), 'mail -s $PHALANX_EVENT ada')]
    """
    text, command = pair
    names = tuple(dict.fromkeys(name.strip().lower() for name in text.split(",")))
    if wrong := [name for name in names if name not in EVENTS]:
        raise ValueError(f"{wrong[0]!r} is no event; expected {', '.join(EVENTS)}, and then a command, as one word")
    if not command.strip():
        raise ValueError(f"{text}: expected a command for the shell, as one word, got {command!r}")
    return [(names, command)]


def read_rank(text: str) -> int:
    """Read ``--stdin``. Raises ValueError.

    >>> read_rank("3"), read_rank("none")
    (3, -1)
    """
    word = text.strip().lower()
    if word == "none":
        return NONE
    if not (word.isascii() and word.isdecimal()):
        raise ValueError(f"{text!r}: expected a global rank, like 0, or none")
    return int(word)


def read_terminals(text: str) -> range | list[int]:
    """Read ``--pty``. Raises ValueError.

    >>> read_terminals("0,4-5"), 1000 in read_terminals("all")
    ([0, 4, 5], True)
    """
    if text.strip().lower() == "all":
        return range(MOST_RANKS)
    try:
        return sorted(read_ranks(text))
    except ValueError as error:
        raise ValueError(f"{error}; or all") from None


def read_limits(text: str) -> dict[str, str | tuple[str, str]]:
    """Read resource limits. Raises ValueError.

    >>> read_limits("nofile=1024:4096,as=8GiB")
    {'nofile': ('1024', '4096'), 'as': '8GiB'}
    """
    limits: dict[str, str | tuple[str, str]] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or name in limits:
            msg = f"{text!r}: expected limits, each once, like nofile=4096,as=8GiB; the trouble is with {part!r}"
            raise ValueError(msg)
        soft, colon, hard = value.partition(":")
        limits[name] = (soft, hard) if colon else value
    try:
        Placement(rlimits=limits)
    except ValueError as error:
        raise ValueError(str(error).removeprefix("rlimits: ")) from None
    return limits


def read_nodes(text: str) -> tuple[int, int]:
    """Read ``--nnodes``: a number of machines, or the least and the most. Raises ValueError.

    >>> read_nodes("2"), read_nodes("1:4")
    ((2, 2), (1, 4))
    """
    least, colon, most = (part.strip() for part in text.partition(":"))
    numbers = [least, most] if colon else [least, least]
    if not all(number.isascii() and number.isdecimal() and len(number) <= len(str(MOST_NODES)) for number in numbers):
        msg = f"{text!r}: expected how many machines there are, like 2; or the least and the most, like 2:4"
        raise ValueError(msg)
    first, last = map(int, numbers)
    if not 1 <= first <= last <= MOST_NODES:
        raise ValueError(f"{text!r}: expected 1 to {MOST_NODES} machines, and no more at least than at most")
    return first, last


def read_endpoints(text: str) -> list[tuple[str, int]]:
    """Read ``--rdzv-endpoint``: hosts and ports, of any machines; there may be several of an etcd. Raises ValueError.

    >>> read_endpoints("localhost:0"), read_endpoints("a:1,b"), read_endpoints("")
    ([('localhost', 0)], [('a', 1), ('b', 0)], [])
    """
    found = [split_endpoint(part) for part in text.split(",") if text.strip()]
    if any(set(host) & set(" \t/@") or not (host or len(found) == 1) for host, _ in found):
        msg = f"expected the name or the address of a machine and a port, like localhost:29500, got {text!r}"
        raise ValueError(msg)
    return found


def read_conf(text: str) -> dict[str, str]:
    """Read ``--rdzv-conf``. Raises ValueError.

    >>> read_conf("timeout=60")
    {'timeout': '60'}
    """
    settings = read_settings(text)
    if "password" in settings:
        msg = "password: it would be seen by all users of this machine; password_file=PATH names a file that holds it"
        raise ValueError(msg)
    return settings


def read_address(text: str) -> str:
    """Read ``--local-addr``: an address of this machine. Raises ValueError.

    >>> read_address("127.0.0.1")
    '127.0.0.1'
    """
    text = text.strip()
    if not text or len(text) > MOST_ADDRESS or not is_here(text):
        msg = f"{text!r}: expected the name or an address of this machine; --master-addr takes any"
        raise ValueError(msg)
    return text


class WorkerOptions(Declared, section=WORKERS):
    """What is started, how often, and what it is called."""

    nproc_per_node = Option(
        devices.count, default="1", metavar="N|auto|cpu|gpu", written=TEXT + WHOLE, sentence="Workers on this machine."
    )
    module = Flag("-m", sentence="SCRIPT is a module, as for python -m.")
    no_python = Flag(sentence="SCRIPT is a binary, started as it is.")
    run_path = Flag(sentence="Run SCRIPT by runpy.run_path, in workers started by --start-method.")
    run_id = Maybe(text_of(MOST_RUN_ID), metavar="NAME", sentence="Name of the run. Default: the date and time.")
    role = Option(text_of(MOST_LINE), default="default", sentence="ROLE_NAME of the workers.")
    preload = Maybe(
        read_strings,
        metavar="MODULE,...",
        sentence="Import these modules once: the workers start as forks that have them.",
    )
    start_method = Option(
        str,
        kind=click.Choice(["spawn", "forkserver", "fork"]),
        default="spawn",
        sentence="Start method of --run-path. Other scripts, and binaries, are executed afresh.",
    )
    stdin = Maybe(
        read_rank,
        metavar="RANK|none",
        written=TEXT + WHOLE,
        sentence="Global rank that reads the stdin of phalanx run. Default: 0 in a run of one worker, else none.",
    )
    pty = Maybe(
        read_terminals,
        metavar="RANK,...|all",
        written=LIST,
        sentence="Global ranks that have a terminal of their own, like 0,4-7: see phalanx attach.",
    )
    detach = Flag(sentence="Return when all ranks of this machine are up; the run goes on without the terminal.")


class LogOptions(Declared, section=LOGS):
    """Where output goes, and what is kept of it."""

    redirects = Maybe(
        Std.from_str,
        "-r",
        metavar="STREAMS",
        written=TEXT + WHOLE,
        sentence="Streams that go to files only: 1 stdout, 2 stderr, 3 both; or by local rank, 0:3,1:2.",
    )
    tee = Maybe(
        Std.from_str,
        "-t",
        metavar="STREAMS",
        written=TEXT + WHOLE,
        sentence="Streams that go to files and to the console. Default: 3.",
    )
    log_dir = Maybe(
        str,
        kind=Folder(os.devnull),  # which torchrun's users give to have no logs
        paths=("",),
        metavar="FOLDER",
        sentence="Folder for the runs' logs; /dev/null: none are kept. Default: ~/.local/state/phalanx/runs.",
    )
    logs_specs = Maybe(
        str, metavar="NAME", sentence="Plugin that chooses the log files: an entry point of torchrun.logs_specs."
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
        sentence="Destination of the agent's events: console, or an entry point of phalanx.event_handlers.",
    )
    metrics_port = Maybe(
        split_listener,
        metavar="[HOST:]PORT",
        written=TEXT + WHOLE,
        sentence="Serve /metrics (for Prometheus) and /healthz (for probes) over HTTP. Default host: 127.0.0.1.",
    )
    log_mode = Maybe(
        read_mode, metavar="MODE", sentence="Permissions of the run's folders, for colleagues: 750, 755. Default: 700."
    )
    keep_attempts = Count(
        least=LEAST_ATTEMPTS,
        sentence="Keep the folders of the first attempt and of the last N (5 or more). Default: 100.",
    )
    keep_runs = Count(least=1, sentence="Keep the newest N runs of the folder, remove the others. Default: keep all.")
    sample = Time(
        endless=False,
        default="5",
        sentence="Time between two samples of the workers, in samples.jsonl, by which slow ranks are found; 0: none.",
    )
    on_report = Option(
        str,
        kind=click.Choice(["never", "failure", "always"]),
        default="failure",
        sentence="When to write the run's page, report.html, beside its logs; its path ends the report.",
    )
    duplicate_stdout_filters = Many(
        read_strings,
        metavar="TEXT,...",
        sentence="Write lines that hold one of these also to filtered_stdout.log, for all ranks.",
    )
    duplicate_stderr_filters = Many(read_strings, metavar="TEXT,...", sentence="The same for stderr.")
    local_ranks_filter = Many(
        read_ranks, section=CONSOLE, metavar="RANK,...", sentence="Local ranks whose output the console shows."
    )


class EndOptions(Declared, section=END):
    """What ends a run, and how long each step of that takes."""

    hang_timeout = Time(
        zero=False,
        endless=False,
        section=TIMERS,
        sentence="Report a rank as hung when its last phalanx.timer.beat() is older. Default: expect none.",
    )
    on_expiry = Option(
        steps,
        section=TIMERS,
        default="kill",
        metavar="STEP[:TIME],...",
        sentence="What follows when a timer expires: report, dump, terminate, kill.",
    )
    breakpoint_timeout = Time(
        zero=False,
        section=TIMERS,
        sentence="Report a rank that stands at a breakpoint for longer, to which nobody attaches. Default: 1h.",
    )
    post_mortem = Flag(
        section=TIMERS, sentence="The first rank that raises an exception stands there, for phalanx debug."
    )
    debugpy = Maybe(
        int,
        kind=Whole(0, 65535),
        metavar="PORT",
        written=WHOLE,
        section=TIMERS,
        sentence="debugpy listens in each rank, at PORT and those after it; 0: at free ports. "
        "Every user of this machine can run code there.",
    )
    debugpy_wait = Flag(section=TIMERS, sentence="With --debugpy, each rank waits for an editor to attach.")
    grace = Time(
        "--shutdown-timeout",
        default="30",
        variables=("PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"),
        sentence="Time between SIGTERM and SIGKILL.",
    )
    settle = Time(
        default="0.03", sentence="Time between the first failure and the stop of the others, for evidence of their own."
    )
    linger = Time(
        default="10", sentence="How long processes left behind (an upload) may run after all workers succeeded."
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
    on_event = Pairs(
        read_commands,
        metavar="EVENT,... COMMAND",
        sentence="Command after an event, with the report as its stdin: started, hung, straggler, restarted, failed, "
        "stopped, succeeded. Can be repeated.",
    )
    signals_to_handle = Option(
        read_handled,
        default=host_signals.DEFAULT,
        metavar="NAME,...",
        variables=(host_signals.SIGNALS_ENV,),
        sentence="Signals to phalanx run that stop the run; none: none does.",
    )
    signals_forward = Option(
        read_signals,
        default=",".join(number.name.removeprefix("SIG") for number in DEFAULT_FORWARDED),
        metavar="NAME,...",
        sentence="Signals to phalanx run that are passed on to the workers; none: none are.",
    )


class PlacementOptions(Declared, section=PLACEMENT):
    """Where workers run, and within which bounds."""

    cpu_bind = Option(
        str,
        default="none",
        metavar="none|core|numa|LIST",
        sentence="CPUs of each worker: whole cores, a NUMA node, or a list for each, as 0-3;4-7.",
    )
    numa_binding = Maybe(
        str,
        kind=click.Choice(topology.NEAR_GPUS),
        sentence="CPUs of each worker near the GPU of its local rank: of its node, its socket, a part of the node.",
    )
    nice = Option(
        int,
        kind=Whole(-20, 19),
        default="0",
        metavar="N",
        written=WHOLE,
        shows_default=False,
        sentence="Add this to the nice value of the workers.",
    )
    rlimit = Maybe(
        read_limits, metavar="NAME=VALUE,...", sentence="Resource limits of each worker, like nofile=4096,as=8GiB."
    )
    virtual_local_rank = Flag(sentence="Each worker sees one device, at index 0, and LOCAL_RANK is 0.")


class MachineOptions(Declared, section=MACHINES):
    """Where workers meet, and what torchrun's users say of machines."""

    master_addr = Option(str, default=MASTER_ADDR, sentence="MASTER_ADDR of the workers.")
    master_port = Option(
        int,
        kind=Whole(0, 65535),
        default="0",
        metavar="PORT",
        written=WHOLE,
        shows_default=False,
        sentence="MASTER_PORT of the workers. Default: a port that is reserved for the run.",
    )
    local_addr = Maybe(
        read_address, metavar="HOST", sentence="An address of this machine: MASTER_ADDR, unless that is given."
    )
    rdzv_id = Maybe(text_of(MOST_RUN_ID), metavar="NAME", written=TEXT + WHOLE, sentence="Another name of --run-id.")
    rdzv_backend = Option(
        str,
        kind=click.Choice(BACKENDS),
        default=STATIC,
        metavar="NAME",
        sentence="How machines meet. static: with --node-rank; c10d: at one of them; etcd: at an etcd of yours.",
    )
    rdzv_endpoint = Option(
        read_endpoints,
        default="",
        metavar="HOST[:PORT],...",
        sentence="Address of the etcd, or of the machine that has the store. For one machine: localhost:0.",
    )
    insecure = Flag(sentence="Serve the store without a secret, to everybody who reaches its port.")
    rdzv_conf = Option(
        read_conf,
        default="",
        paths=FILES,
        metavar="KEY=VALUE,...",
        sentence="Settings of the rendezvous: join_timeout=600,last_call_timeout=30,lease_ttl=5, and files of TLS.",
    )
    rejoin_delay = Time(endless=False, default="30", sentence="Delay of the restart that takes in a new machine.")
    on_sigterm = Maybe(
        str,
        kind=click.Choice(["leave", "stop"]),
        sentence="Effect of SIGTERM: this machine leaves, or all stop. Default: leave, with MIN:MAX or as a spare.",
    )
    exclude_after = Count(
        least=1,
        metavar="K",
        sentence="Exclude a machine whose workers were the root cause K times in a row. Default: never.",
    )
    node_check = Maybe(
        str,
        metavar="COMMAND",
        sentence="Command before each attempt: no worker starts on the machine unless it exits with 0.",
    )
    exit_barrier_timeout = Time(
        default="300", sentence="How long a machine whose workers have ended waits for those of the others."
    )
    keep = Flag(sentence="Keep the job's end in the etcd, until the next job of this id.")
    standalone = Flag(section="", sentence="Run on this machine alone, without a store; ignore what a scheduler sets.")
    nnodes = Maybe(
        read_nodes,
        metavar="N|MIN:MAX",
        written=TEXT + WHOLE,
        sentence="Number of machines. Default: that of a scheduler, or 1.",
    )
    node_rank = Maybe(
        int,
        kind=Whole(min=0),
        metavar="N",
        written=TEXT + WHOLE,
        sentence="With static: this machine's rank. Default: that of a scheduler, or 0.",
    )


class RunOptions(
    WorkerOptions, RestartOptions, LogOptions, ConsoleOptions, EndOptions, PlacementOptions, MachineOptions
):
    """All options of `phalanx run`, whose values `phalanx._run.config.RunConfig` has."""
