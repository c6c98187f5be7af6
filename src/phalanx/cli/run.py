"""``phalanx run``: a script, a module or a binary as a group of workers on this machine.

Owns the options, the workers' environment and the exit code. Knows nothing of how a group is kept together.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import sys
import time

import click

from phalanx._base import interrupts, procfs
from phalanx._base.stderr import mention, tell
from phalanx._base.tty import coloured, printable
from phalanx._engine.host_signals import signals_to_handle
from phalanx._group.warm import check_preload
from phalanx._outcomes.failure import NOT_AVAILABLE
from phalanx._outcomes.result import verdict
from phalanx._placement import accelerators
from phalanx._runs.paths import place_of_new_runs
from phalanx._runs.recorder import Recorder
from phalanx._timers.specs import TimerSpecs, read_steps
from phalanx.cli import _python
from phalanx.cli._command import SETTINGS, Command
from phalanx.cli._options import (
    Folder,
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
from phalanx.cli._place import MANY
from phalanx.cli._placement import placement_options, take_placement
from phalanx.cli._streams import check_no_logs, check_streams
from phalanx.multiprocessing import (
    DefaultLogsSpecs,
    KeeperLostError,
    LogsDest,
    PContext,
    PreloadError,
    RunProcsResult,
    ScriptContext,
    SignalException,
    Std,
    SubprocessContext,
)
from phalanx.multiprocessing.errors import ChildFailedError, record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from phalanx._runs.recorder import Seen

_SETTINGS = {**SETTINGS, "allow_interspersed_args": False}  # everything after the script is the script's


def _only(*accepted: str, why: str) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """An option of torchrun's that people have in their scripts, as far as its value says what holds here anyway."""

    def read(text: str) -> str:
        if text not in accepted:
            msg = f"{text!r}: this version of phalanx run takes {' or '.join(accepted)} only; {why}"
            raise ValueError(msg)
        return text

    return reading(read)


class _LogDir(Folder):
    """A folder, or /dev/null, which torchrun's users give to have no logs."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See `click.ParamType`."""
        return value if value == os.devnull else super().convert(value, param, ctx)


def _steps(text: str) -> tuple[tuple[str, float], ...]:
    try:
        return read_steps(text)
    except ValueError as error:
        raise ValueError(str(error).removeprefix("on_expiry: ")) from None


_SECTIONS = (
    ("First", ("--nproc-per-node", "--module", "--no-python", "--log-dir", "--run-id", "--hang-timeout")),
    (
        "What the console shows",
        ("--redirects", "--tee", "--local-ranks-filter", "--ranks", "--grep", "--exclude", "--ignore-case",
         "--after-context", "--before-context", "--context", "--fold", "--timestamps", "--elapsed", "--log-format",
         "--log-line-prefix-template", "--color", "--raw"),
    ),
    (
        "Log files",
        ("--log-max-size", "--log-keep", "--log-compress", "--log-mode", "--keep-runs", "--duplicate-stdout-filters",
         "--duplicate-stderr-filters"),
    ),
    ("The end", ("--grace", "--settle", "--linger", "--drain", "--on-expiry")),
    ("Where and how workers run", ("--cpu-bind", "--nice", "--rlimit", "--virtual-local-rank", "--preload",
                                   "--start-method")),
    ("What workers find in the environment", ("--role", "--master-addr", "--master-port")),
)  # fmt: skip

_ONE_MACHINE = "not there yet: it is about many machines, and this runs on one; leave it out"
_ABSENT = {
    "--rdzv-backend": _ONE_MACHINE,
    "--rdzv-endpoint": _ONE_MACHINE,
    "--rdzv-id": f"{_ONE_MACHINE}, or name the run with --run-id",
    "--rdzv-conf": _ONE_MACHINE,
    "--local-addr": _ONE_MACHINE,
    "--monitor-interval": "torchrun looks at its workers so often; nothing polls here, leave it out",
    "--run-path": "leave it out: here, every script runs in an interpreter of its own, as python -u runs it",
    "--numa-binding": "torchrun binds so to NUMA nodes; here it is --cpu-bind numa",
    "--signals-to-handle": "set TORCHELASTIC_SIGNALS_TO_HANDLE",
    "--event-log-handler": "torchrun records events of its agent; here, run.json and events.jsonl of a run have them",
    "--logs-specs": "torchrun finds a class by entry point; from Python, start_processes takes logs_specs",
}
"""Options of torchrun's that are not there, and why."""

_ELSEWHERE = {
    "--use-env": "the rank is in LOCAL_RANK, as with torchrun; leave it out",
    **dict.fromkeys(
        ("-n", "--nprocs", "--num-processes", "--num-procs", "--num-workers", "--workers", "--num-gpus", "--gpus"),
        "it is --nproc-per-node here",
    ),
}
"""Options of other launchers, and what they are here."""


@click.command(cls=Command, context_settings=_SETTINGS, sections=_SECTIONS, absent={**_ELSEWHERE, **_ABSENT})
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
    type=_LogDir(),
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
@option("--hang-timeout", type=str, callback=checking_seconds(zero=False, endless=False), metavar="SECONDS",
         help="A rank whose last phalanx.timer.beat() is older is hung. Default: none is expected.")  # fmt: skip
@option("--on-expiry", callback=reading(_steps), default="kill", show_default=True, metavar="STEP[:SECONDS],...",
        help="What follows when a timer expires: report, dump, terminate, kill.")  # fmt: skip
@option("--preload", callback=reading(read_strings), metavar="MODULE,...",
        help="Modules to import once: the workers are forks that have them already.")  # fmt: skip
@option("--start-method", type=click.Choice(["spawn", "forkserver", "fork"]), default="spawn", show_default=True,
         help="How functions are started. Scripts and binaries are always executed afresh.")  # fmt: skip
@placement_options
@option("--master-addr", default="127.0.0.1", show_default=True, help="MASTER_ADDR of the workers.")
@option("--master-port", type=Whole(0, 65535), default=0, metavar="PORT",
         help="MASTER_PORT of the workers. Default: a free port.")  # fmt: skip
@option("--standalone", is_flag=True, hidden=True, help="Accepted: one machine without a store is what this is.")
@option("--nnodes", default="1", hidden=True, callback=_only("1", "1:1", why="it runs on one machine"))
@option("--node-rank", default="0", hidden=True, callback=_only("0", why="it runs on one machine"))
@option("--max-restarts", default="0", hidden=True, callback=_only("0", why="it does not restart"))
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
        sys.exit(_run(script, args, **options))
    except KeyboardInterrupt:  # before a group was open, or after
        sys.exit(128 + signal.SIGINT)
    except SignalException as error:  # the third, or a later one, between two lines of ours
        sys.exit(128 + error.sigval)


def _run(
    script: str,
    args: tuple[str, ...],
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
    max_restarts: str,  # noqa: ARG001 - as above
    **shown: Any,
) -> int:
    python = _python.executable()
    _check_command(script, module=module, no_python=no_python)
    _check_preload(preload, no_python=no_python, python=python)
    local_ranks = None if local_ranks_filter is None else set(local_ranks_filter)
    _check_ranks(nproc_per_node, redirects, tee, local_ranks)
    timers = _timers(on_expiry, hang_timeout)
    if redirects is None and tee is None:
        tee = Std.ALL
    run_id = run_id or time.strftime("%Y%m%d-%H%M%S")
    placement, extra, said = take_placement(shown, nproc_per_node)
    console = console_specs(**shown)
    _check_shown(nproc_per_node, console.ranks)
    redirects, tee = redirects or Std.NONE, tee or Std.NONE
    filters = {"stdout": duplicate_stdout_filters, "stderr": duplicate_stderr_filters}
    bounds = {"max_size": log_max_size, "keep": log_keep, "compress": log_compress, "mode": log_mode}
    if log_dir == os.devnull:
        check_no_logs(console, filters, {**bounds, "keep_runs": keep_runs})
        notes = []
    else:
        notes = check_streams(nproc_per_node, redirects, tee, local_ranks, console, filters)
    for name, is_given in (("--log-keep", log_keep is not None), ("--log-compress", log_compress)):
        if is_given and log_max_size is None:
            msg = f"{name}: files are set aside only with --log-max-size; give that, too, like --log-max-size 100MB"
            raise click.UsageError(msg)
    specs = _logs(log_dir, redirects, tee, local_ranks, bounds)
    port = master_port or _free_port(master_addr)
    envs = {
        rank: worker_env(rank, nproc_per_node, role=role, run_id=run_id, master_addr=master_addr, master_port=port)
        | extra[rank]
        for rank in range(nproc_per_node)
    }
    argv = dict.fromkeys(envs, args)
    rest: dict[str, Any] = {"settle": settle, "grace": grace, "linger": linger, "placement": placement}
    rest |= {"timers": timers, "speak": _say, "console": console}
    rest |= {f"duplicate_{stream}_filters": texts for stream, texts in filters.items()}
    group: PContext
    if no_python:
        group = SubprocessContext(script, script, argv, envs, specs, **rest)
    else:
        rest |= {"module": module, "python": python, "preload": preload or ()}
        group = ScriptContext(script, script, argv, envs, specs, **rest)
    command = [*(["-m"] if module else []), script, *args]
    recorder = Recorder(
        group.name,
        group.envs,
        lambda: group.logs,
        lambda: _look(group),
        run_id=run_id,
        command=command,
        say=lambda text: None if group.say(f"phalanx: {text}") else _say(text),
        keep_runs=keep_runs,
    )
    specs.keeps_few = keep_runs is not None
    doubts = [] if no_python else _python.doubts(script)
    specs.notes = [*specs.notes, *doubts, *said, *notes, *_of_umask(log_mode)]
    return _see_through(group, recorder, specs, grace, colour=coloured(sys.stderr, console.color))


def _see_through(group: PContext, recorder: Recorder, specs: _RunLogs, grace: float, *, colour: bool) -> int:
    """Start the group, wait for its end, and say what became of it. Returns the exit code."""
    try:
        group.start()
        recorder.running()
        # Now: at the end there may be no descriptor, or no disk. And whole: a handler's exception in the midst of an
        # import can leave the lock of the import system taken, for which the thread that writes run.json would wait.
        with interrupts.whole():
            from phalanx.errors import format_report  # noqa: F401 - see above

        result = group.wait()
    except SignalException as error:
        try:
            code = _stop(group, error.sigval, grace)
        except SignalException:  # the second has come at once
            code = _stop(group, error.sigval, grace, at_once=True)
        failed = _failed_before(group)
        if failed is None:
            recorder.ended("stopped", code, error.sigval.name)
            return code
        result = failed
    except KeeperLostError as error:
        _say(f"Error: {error}")
        known = RunProcsResult(failures=dict(error.failures))
        code = verdict(known)[0] or 1
        recorder.ended("failed", code, str(error))
        _report(group.name, known, specs, colour=colour)
        return code
    except PreloadError as error:
        _say(f"Error: {error}")
        recorder.ended("failed", 1, str(error))
        return 1
    except OSError as error:
        recorder.ended("failed", 1, text := _in_our_words(error, group))
        raise click.ClickException(text) from None
    except ValueError as error:
        recorder.ended("failed", 2, text := _in_our_words(error, group))
        raise click.UsageError(text) from None
    finally:
        group.close(signal.SIGKILL)  # ended already, unless one more signal has broken out of `_stop`
    code, cause = verdict(result)
    recorder.ended("failed" if code else "succeeded", code, cause)
    _report(group.name, result, specs, colour=colour)
    return code


def _in_our_words(error: Exception, group: PContext) -> str:
    """What the library says of the program, said of what the user has given."""
    head, text = "entrypoint: ", str(error)
    if not text.startswith(head):
        return text
    chosen = isinstance(group, ScriptContext) and os.environ.get(_python.CHOICE)
    return f"{_python.CHOICE if chosen else 'SCRIPT'}: {text.removeprefix(head)}"


class _RunLogs(DefaultLogsSpecs):
    """Says where the run's logs are, and what else there is to say, before the first worker can say anything."""

    notes: Sequence[str] = ()
    keeps_few = False

    def reify(self, envs: Mapping[int, Mapping[str, str]]) -> LogsDest:
        """See `LogsSpecs.reify`."""
        try:
            logs = super().reify(envs)
        except OSError as error:
            msg = f"--log-dir: {error}"
            raise click.ClickException(msg) from None
        where = f"logs in {self.run_log_dir}" if self.is_kept else "no logs are kept"
        _say(f"{len(envs)} worker{'s' * (len(envs) > 1)}, {where}")
        for note in self.notes:
            _say(note)
        kept = _count_in(os.path.dirname(self.run_log_dir)) if self.run_log_dir else 0
        if kept > MANY and not self.keeps_few:
            where = os.path.dirname(self.run_log_dir or "")
            more = "phalanx runs prune removes old runs, --keep-runs N keeps so many"
            _say(f"{kept:,} folders are in {where}; {more}")
        return logs


def _count_in(folder: str) -> int:
    try:
        with os.scandir(folder) as entries:
            return sum(entry.is_dir(follow_symlinks=False) for entry in entries)
    except OSError:
        return 0


def worker_env(
    rank: int, world_size: int, *, role: str, run_id: str, master_addr: str, master_port: int
) -> dict[str, str]:
    """The variables that a worker finds, with the names and meanings that torch programs read."""
    size, me = str(world_size), str(rank)
    return {
        "RANK": me,
        "LOCAL_RANK": me,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": me,
        "ROLE_NAME": role,
        "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 serves the store at MASTER_PORT, not we
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),  # as torchrun has it
    }


def _check_preload(preload: list[str] | None, *, no_python: bool, python: str) -> None:
    if not preload:
        return
    if no_python:
        raise click.UsageError("--preload and --no-python exclude each other: a binary imports nothing")
    if python != sys.executable:
        msg = f"--preload: workers are forks of this interpreter, {sys.executable}; PYTHON_EXEC is {python}"
        raise click.UsageError(msg)
    if "__main__" in preload:
        raise click.UsageError("--preload: __main__ is the script, which every worker runs; name what it imports")
    try:
        check_preload(preload)
    except ValueError as error:
        msg = f"--{error}"
        raise click.UsageError(msg) from None


def _check_command(script: str, *, module: bool, no_python: bool) -> None:
    """Look for the script, before anything starts. Raises UsageError."""
    if no_python:
        if module:
            raise click.UsageError("--module and --no-python exclude each other")
        return
    if module:
        if not script or os.sep in script or (script.endswith(".py") and os.path.isfile(script)):
            msg = f"--module: {script!r} is no module's name, like package.train; for a file, leave -m out"
            raise click.UsageError(msg)
        return
    try:
        is_folder = stat.S_ISDIR(os.stat(script).st_mode)
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            msg = f"script {script!r}: {error.strerror}"
            raise click.UsageError(msg) from None
        msg = f"script {script!r} does not exist{_meant(script)}"
        raise click.UsageError(msg) from None
    if is_folder and not os.path.exists(os.path.join(script, "__main__.py")):
        msg = f"script {script!r} is a folder without a __main__.py"
        raise click.UsageError(msg)


def _meant(script: str) -> str:
    """A hint for somebody who has named a script that is not there."""
    import difflib  # these two are not on the way to a start
    import shutil

    if shutil.which(script):
        return f"; to run the program {script!r}, give --no-python; a Python script needs neither"
    folder, name = os.path.split(script)
    close: list[str] = []
    with contextlib.suppress(OSError):  # it is not there either, or not for us to read
        close = difflib.get_close_matches(name, os.listdir(folder or "."), n=1)
    return f"; did you mean {os.path.join(folder, close[0])!r}?" if close else ""


def _check_ranks(nproc: int, *choices: Any) -> None:
    for name, choice in zip(("--redirects", "--tee", "--local-ranks-filter"), choices, strict=True):
        if isinstance(choice, (dict, set)):
            wrong = sorted(rank for rank in choice if not 0 <= rank < nproc)
            if wrong:
                msg = f"{name}: there is no local rank {', '.join(map(str, wrong))}; ranks are 0 to {nproc - 1}"
                raise click.UsageError(msg)


def _check_shown(world_size: int, ranks: Iterable[int] | None) -> None:
    wrong = sorted(rank for rank in ranks or () if rank >= world_size)
    if wrong:
        msg = f"--ranks: there is no rank {', '.join(map(str, wrong))}; ranks are 0 to {world_size - 1}"
        raise click.UsageError(msg)


def _logs(
    log_dir: str | None,
    redirects: Std | Mapping[int, Std],
    tee: Std | Mapping[int, Std],
    ranks: set[int] | None,
    bounds: Mapping[str, Any],
) -> _RunLogs:
    """Logs in ``log_dir``, or in the default place."""
    said = []
    if log_dir is None:
        log_dir, is_temporary = place_of_new_runs(bounds["mode"])
        if is_temporary:
            said = [f"the home folder cannot be written to; runs are kept in {log_dir or 'a temporary folder'}"]
    try:
        specs = _RunLogs(log_dir, redirects, tee, ranks, **bounds)
    except OSError as error:
        msg = f"--log-dir: {str(error).removeprefix('log_dir: ')}"
        raise click.UsageError(msg) from None
    specs.notes = said
    return specs


def _of_umask(mode: int | None) -> list[str]:
    """What is to be said of files that the umask keeps from those whom the folders are opened for."""
    kept = (mode or 0) & (umask := procfs.umask()) & 0o055
    if not kept:
        return []
    who = "the group" if kept & 0o050 else "others"
    return [f"--log-mode {mode:o}: the umask, {umask:03o}, keeps the files from {who}; {umask & ~kept:03o} would not"]


def _free_port(addr: str) -> int:
    """Find a port that is free now. Nothing can hold it until the workers bind it."""
    try:
        with socket.create_server((addr, 0)) as server:
            return int(server.getsockname()[1])
    except OSError:  # a name of another interface, or one that does not resolve here: any interface's will do
        with socket.create_server(("", 0)) as server:
            return int(server.getsockname()[1])


def _stop(group: PContext, first: signal.Signals, grace: float, *, at_once: bool = False) -> int:
    """Close the group: gracefully, and at once on a further signal. Cleanup is never abandoned.

    Beyond the second there is nothing to be asked for, and a worker may send them without end: they are ignored.
    """
    death, seconds = first, grace
    while True:
        try:
            if at_once:
                death, seconds = signal.SIGKILL, 0.0
                for number in signals_to_handle():
                    signal.signal(number, signal.SIG_IGN)
            if group.is_open:
                text = (
                    "killing the workers"
                    if death == signal.SIGKILL
                    else f"stopping the workers (at most {seconds:g} s; once more to kill them)"
                )
                text = f"phalanx: {death.name}: {text}"
                if not group.say(text):  # above the live lines of a terminal
                    mention(text)
            group.close(death, seconds)
        except SignalException:
            at_once = True
        except KeeperLostError:
            return 128 + first
        else:
            return 128 + first


def _look(group: PContext) -> Seen:
    """What is known of a group now."""
    try:
        pids = group.pids()
    except RuntimeError:  # it was never up
        return {}, None
    try:
        return pids, group.wait(0)
    except RuntimeError:  # nor is it; or its keeper was killed
        return pids, None


def _failed_before(group: PContext) -> RunProcsResult | None:
    """The result of a stopped group, if a rank had failed by itself before that."""
    try:
        result = group.wait(0)
    except KeeperLostError as error:
        result = RunProcsResult(failures=dict(error.failures))
    except RuntimeError:  # it was never up
        return None
    return result if result is not None and result.failures else None


def _timers(on_expiry: tuple[tuple[str, float], ...], hang_timeout: float | None) -> TimerSpecs:
    try:
        return TimerSpecs(on_expiry, hang_timeout)
    except ValueError as error:
        raise click.BadParameter(str(error).removeprefix("hang_timeout: "), param_hint="--hang-timeout") from None


def _report(name: str, result: RunProcsResult, logs: _RunLogs, *, colour: bool) -> None:
    """Say what went wrong, if anything did."""
    if not result.failures:
        for rank, outcome in result.outcomes.items():
            if outcome.state != "succeeded" or outcome.early:
                _say(f"rank {rank}: {outcome.describe()}")
        return

    log_dir, failures = logs.run_log_dir or "", result.failures
    if not logs.is_kept:  # the error files have gone with the group
        failures = {rank: failure.replace(error_file=NOT_AVAILABLE) for rank, failure in failures.items()}

    @record  # a launcher that is itself a worker passes the root cause on to its own error file
    def fail() -> None:
        raise ChildFailedError(name, failures, outcomes=result.outcomes, log_dir=log_dir)

    try:
        fail()
    except ChildFailedError as error:
        from phalanx.errors import format_report

        style = _style if colour else None
        tell(format_report(name, error.failures, outcomes=error.outcomes, log_dir=log_dir, style=style))


def _style(kind: str, line: str) -> str:
    looks: dict[str, dict[str, Any]] = {
        "rule": {"dim": True},
        "title": {"fg": "red", "bold": True},
        "heading": {"bold": True},
        "error": {"fg": "red"},
    }
    return click.style(line, **looks.get(kind, {}))


def _say(text: str) -> None:
    tell("\n".join(map(printable, f"phalanx: {text}".split("\n"))))


def main(args: Sequence[str] | None = None) -> None:
    """``python -m phalanx.cli.run``: where ``python -m torch.distributed.run`` stood. ``args``: as on a command line.

    Raises SystemExit with the exit code, which is 0 for a success, too.
    """
    run(args, prog_name="phalanx run")


if __name__ == "__main__":
    main()
