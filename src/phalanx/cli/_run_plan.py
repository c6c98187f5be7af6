"""What a run will do: everything that is refused is refused here, and nothing is started, made or reserved."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import click

from phalanx._base.stderr import say
from phalanx._base.text import name_ranks
from phalanx._engine.host_signals import SIGNALS_ENV
from phalanx._group.warm import check_preload as check_names
from phalanx._group.warm import shared
from phalanx._rendezvous.rdzv_conf import exposed
from phalanx._run import master_port
from phalanx._run.attempt_groups import AttemptGroups, scripts_of
from phalanx._run.worker_env import OF_PART, worker_env
from phalanx._timers.specs import TimerSpecs
from phalanx.cli._meet import meet
from phalanx.cli._options import GONE, colours_of_workers, console_specs, is_here_gone
from phalanx.cli._placement import place
from phalanx.cli._restarts import check_heeded, forwarded, restart_policy
from phalanx.cli._run_logs import BOUNDS, run_logs, umask_notes
from phalanx.cli._stdin import Stdin
from phalanx.multiprocessing import ConsoleSpecs, PContext, ScriptContext, Std, to_map

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx._run.master_port import ReservedPort
    from phalanx._run.node_check import NodeCheck
    from phalanx._run.run_events import Observer, StatusEvents
    from phalanx._run.services import Services
    from phalanx.cli._run_config import RunConfig

PYTHON_EXEC_ENV = "PYTHON_EXEC"
"""The variable that chooses the interpreter of the workers, as for torchrun."""

_ENVIRONMENTS = (".venv", "venv")
_SILENT = ("null", "dynamic_rendezvous")  # destinations of events that lead nowhere
_STREAMS = {Std.OUT: "stdout", Std.ERR: "stderr"}
_LOOKED_AT = 1 << 16  # bytes of a file that is asked what it is
_NO_PYTHONS = re.compile(
    r"(ba|da|z|k|mk|c|tc|fi|tcl|wi)?sh|[gmn]?awk|perl|ruby|php|node|deno|bun|lua|Rscript|julia|make|sed|expect"
)
"""What interprets other languages. What interprets Python has any name: ``#!/usr/bin/env -S phalanx run``."""

_STRING = re.compile(r"#!.*\n([ \t\r]*(#.*)?\n)*[ \t]*['\"]")
"""How a script begins for a shell that is Python, too: with a string that the shell obeys. So pip writes it, where the
path is long."""


class RunPlan:
    """What a run will do.

    Args:
        config: What was asked for.
        makes_folder: Whether the default folder of runs is made, if it is not there yet.
        typed: The names of the options that stand on the command line itself.

    Raises click.UsageError: what cannot be.
    """

    def __init__(self, config: RunConfig, *, makes_folder: bool, typed: Collection[str] = ()) -> None:
        nprocs = config.nproc_per_node
        self.config = config
        # As with torchrun, --run-path goes before these.
        self._run_path = config.start_method if config.run_path else ""
        self._module, self._no_python = (given and not self._run_path for given in (config.module, config.no_python))
        self.python = sys.executable if self._run_path else os.environ.get(PYTHON_EXEC_ENV) or sys.executable
        for script in [config.script] if self._no_python else scripts_of(config.script, nprocs):
            _check_command(script, module=self._module, no_python=self._no_python)
        _check_preload(config.preload, no_python=self._no_python, python=self.python, run_path=self._run_path)
        local_ranks = None if config.local_ranks_filter is None else set(config.local_ranks_filter)
        redirects, tee = config.redirects, config.tee
        for option, chosen in (("--redirects", redirects), ("--tee", tee), ("--local-ranks-filter", local_ranks)):
            _check_ranks(option, chosen, nprocs, "local rank")
        self._timers = _timer_specs(config.on_expiry, config.hang_timeout)
        if redirects is None and tee is None:
            tee = Std.ALL
        redirects, tee = redirects or Std.NONE, tee or Std.NONE
        self.meeting = meet(config, config.run_id)
        self.run_id = self.meeting.run_id or time.strftime("%Y%m%d-%H%M%S")
        self.stdin = Stdin(config.stdin, nprocs, machines=self.meeting.machines is not None)
        self.policy = restart_policy(config)
        self.forwarded = forwarded(config.signals_forward, config.signals_to_handle)
        self._placement, self._extra, said = place(config, nprocs, config.env)
        self.console = console_specs(config, drain=config.drain)
        if self.meeting.machines is None:  # of several, nobody knows yet how many workers the others have
            _check_ranks("--ranks", self.console.ranks, nprocs)
        self._filters = {"stdout": config.duplicate_stdout_filters, "stderr": config.duplicate_stderr_filters}
        bounds = {
            "max_size": config.log_max_size, "keep": config.log_keep, "compress": config.log_compress,
            "mode": config.log_mode, "keep_attempts": config.keep_attempts,
        }  # fmt: skip
        all_bounds = {**bounds, "keep_runs": config.keep_runs}
        if config.log_dir == os.devnull:
            self._check_no_logs(all_bounds)
            notes = []
        else:
            notes = self._check_streams(redirects, tee, local_ranks)
        _check_rotation(config.log_max_size, keep=config.log_keep, compress=config.log_compress)
        streams = redirects, tee, local_ranks
        if config.logs_specs is None:
            self.specs = run_logs(config.log_dir, *streams, bounds, makes_folder=makes_folder)
        else:
            from phalanx.cli._run_logs import own_logs

            self.specs = own_logs(config.logs_specs, config.log_dir, *streams, all_bounds)
        self.specs.keeps_few = self.specs.keeps_few or config.keep_runs is not None
        self.events = self._events(config)
        self.health_address = _health_address()
        doubts = [] if self._no_python else _doubts(config.script)
        if self.meeting.machines is not None:
            doubts = [*doubts, *exposed(config.rdzv_conf)]
        said = [*self.meeting.notes, *check_heeded(config, self.policy, typed), *doubts, *said]
        unread = self.stdin.unread()
        self.specs.notes = [*self.specs.notes, *said, *notes, *unread, *umask_notes(config.log_mode)]

    def _check_streams(
        self, redirects: Std | Mapping[int, Std], tee: Std | Mapping[int, Std], shown: set[int] | None
    ) -> list[str]:
        """What is to be said of options that a stream does not heed, because it is the launcher's own and in no file.

        ``shown`` are the local ranks that the console shows (None: all). Raises UsageError where an option would have
        no effect at all, or where lines of JSON would be mixed with others.
        """
        nprocs, notes = self.config.nproc_per_node, []
        redirected, teed = to_map(redirects, nprocs), to_map(tee, nprocs)
        for stream, name in _STREAMS.items():
            bare = [rank for rank in range(nprocs) if not stream & (redirected[rank] | teed[rank])]
            on_console = [rank for rank in bare if shown is None or rank in shown]
            ranks = name_ranks(on_console)
            if self.console.format == "json" and stream is Std.OUT and on_console:
                msg = f"--log-format json: {name} of {ranks} would be among it as it is; add -t 1, or -r 1"
                raise click.UsageError(msg)
            unheeded = _chosen(self.console) if on_console else []
            if unheeded:
                notes.append(
                    f"{name} of {ranks} is the console's own and does not heed {', '.join(unheeded)}; "
                    f"with -t {stream.value} it would"
                )
            if not self._filters[name] or not bare:
                continue
            text = f"{name} of {name_ranks(bare)} goes to no file; add -t {stream.value}, or -r {stream.value}"
            text = f"--duplicate-{name}-filters: {text}"
            if len(bare) == nprocs:
                raise click.UsageError(text)
            notes.append(text)
        return notes

    def _check_no_logs(self, bounds: Mapping[str, object]) -> None:
        """Refuse options that need the logs, where none are kept. Raises UsageError."""
        options = _chosen(self.console)
        options += [f"--duplicate-{name}-filters" for name, texts in self._filters.items() if texts]
        options += [BOUNDS[name] for name, value in bounds.items() if value]
        if options:
            msg = f"--log-dir /dev/null: no logs are kept; {', '.join(options)} would have nothing to be about"
            raise click.UsageError(msg)

    def _events(self, config: RunConfig) -> StatusEvents | None:
        """Return what posts the run's events; None: nobody wants them."""
        if config.event_log_handler in _SILENT:
            return None
        from phalanx._run.run_events import StatusEvents

        _check_destination(config.event_log_handler)
        return StatusEvents(
            config.event_log_handler, run_id=self.run_id, role=config.role, backend=config.rdzv_backend,
            entry_point=config.script, is_job=True,
        )  # fmt: skip

    def observers(self, services: Services | None) -> dict[str, Observer]:
        """Return who takes the events of the run, beside its record."""
        observers: dict[str, Observer] = {}
        if services is not None and self.health_address is not None:
            observers["phalanx-health"] = services.observe
        if self.events is not None:
            observers["phalanx-status"] = self.events
        return observers

    def node_check(self) -> NodeCheck | None:
        """Return what this machine has to pass before each attempt; None: nothing."""
        if not self.config.node_check:
            return None
        from phalanx._run.node_check import NodeCheck

        return NodeCheck(self.config.node_check)

    def groups(self, port: ReservedPort | None, variables: Mapping[str, str]) -> AttemptGroups:
        """Return what makes the groups of all attempts.

        Args:
            port: What is reserved; None: the user has given one.
            variables: What all workers find besides.
        """
        config = self.config
        options: dict[str, Any] = {"settle": config.settle, "grace": config.grace, "linger": config.linger}
        options |= {"orphan_grace": config.orphan_grace, "notice": config.notice, "placement": self._placement}
        options |= {"timers": self._timers, "speak": say, "announces": False}
        options["console"] = self.console
        options |= {f"duplicate_{stream}_filters": texts for stream, texts in self._filters.items()}
        number = self.meeting.master_port if port is None else port.number
        envs = self.envs(0, config.nproc_per_node, variables, master_addr=self.meeting.master_addr, master_port=number)
        # What preloads finds what is the same for all workers: those of one attempt, or of any part in a job of many.
        unknown = () if self.meeting.machines is None else OF_PART
        preload_env = {name: value for name, value in shared(envs).items() if name not in unknown}
        return AttemptGroups(
            config.script, config.args, envs, self.specs, module=self._module, no_python=self._no_python,
            python=self.python, preload=config.preload, preload_env=preload_env, run_path=self._run_path, port=port,
            stdin=self.stdin.of, options=options,
        )  # fmt: skip

    def envs(
        self, first: int, world_size: int, variables: Mapping[str, str], **place: Any
    ) -> dict[int, dict[str, str]]:
        """Return the environments of the workers of this machine, by local rank.

        Args:
            first: The rank of local rank 0; ``first_in_role``: among the workers of its role.
            world_size: How many workers there are on all machines.
            variables: What all workers find besides.
            place: See `worker_env`.
        """
        config = self.config
        first_in_role = place.pop("first_in_role", first)
        shows = config.tee or (config.tee is None and config.redirects is None)
        colours = colours_of_workers(self.console, config.env) if shows and not config.no_force_color else {}
        same = {SIGNALS_ENV: ",".join(number.name for number in config.signals_to_handle), **colours, **variables}
        return {
            rank: worker_env(
                first + rank, world_size, role=config.role, run_id=self.run_id, local_rank=rank,
                local_world_size=config.nproc_per_node, role_rank=first_in_role + rank,
                max_restarts=self.policy.max_restarts, **place,
            ) | same | self._extra[rank] | config.env
            for rank in range(config.nproc_per_node)
        }  # fmt: skip


def reserve_port() -> ReservedPort:
    """Reserve a port for rank 0, see `master_port.reserve`. Raises ClickException."""
    try:
        return master_port.reserve()
    except OSError as error:
        msg = f"no port for MASTER_PORT: {error.strerror}; --master-port takes the number of one"
        raise click.ClickException(msg) from None


def in_our_words(error: Exception, group: PContext | None) -> str:
    """What the library says of the program, said of what the user has given."""
    head, text = "entrypoint: ", str(error)
    if not text.startswith(head):
        return text
    chosen = isinstance(group, ScriptContext) and os.environ.get(PYTHON_EXEC_ENV)
    return f"{PYTHON_EXEC_ENV if chosen else 'SCRIPT'}: {text.removeprefix(head)}"


def _check_preload(preload: list[str] | None, *, no_python: bool, python: str, run_path: str) -> None:
    """Refuse modules that cannot be imported for workers to have them."""
    if not preload:
        return
    if no_python:
        raise click.UsageError("--preload and --no-python exclude each other: a binary imports nothing")
    if run_path not in ("", "forkserver"):
        raise click.UsageError("--preload: with --run-path, workers are forks with --start-method forkserver only")
    if python != sys.executable:
        msg = f"--preload: workers are forks of this interpreter, {sys.executable}; PYTHON_EXEC is {python}"
        raise click.UsageError(msg)
    if "__main__" in preload:
        raise click.UsageError("--preload: __main__ is the script, which every worker runs; name what it imports")
    try:
        check_names(preload)
    except ValueError as error:
        raise click.UsageError(f"--{error}") from None


def _check_command(script: str, *, module: bool, no_python: bool) -> None:
    """Refuse a script, a module or a binary that is not there; and a script that is a program of another language."""
    if no_python and module:
        raise click.UsageError("--module and --no-python exclude each other")
    if (module or not (os.path.isabs(script) or (no_python and os.sep not in script))) and is_here_gone():
        msg = f"{'--module' if module else 'script'} {script!r}: {GONE}; start it elsewhere, or by an absolute path"
        raise click.UsageError(msg)
    if no_python:
        return
    if module:
        if not script or os.sep in script or (script.endswith(".py") and os.path.isfile(script)):
            msg = f"--module: {script!r} is no module's name, like package.train; for a file, leave -m out"
            raise click.UsageError(msg)
        return
    try:
        mode = os.stat(script).st_mode
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            raise click.UsageError(f"script {script!r}: {error.strerror}") from None
        raise click.UsageError(f"script {script!r} does not exist{_meant(script)}") from None
    if stat.S_ISDIR(mode) and not os.path.exists(os.path.join(script, "__main__.py")):
        raise click.UsageError(f"script {script!r} is a folder without a __main__.py")
    if stat.S_ISREG(mode) and (kind := _other_program(script)):
        msg = f"script {script!r} is {kind}, and no Python: give --no-python to start it as it is"
        raise click.UsageError(msg)


def _other_program(script: str) -> str:
    """Return what a file is that is a program, and none in Python; "": nothing says so."""
    start = b""
    with contextlib.suppress(OSError), open(script, "rb") as file:  # not for us to read: its interpreter says so
        start = file.read(_LOOKED_AT)
    text = start.decode("utf-8", "replace")
    line = text.partition("\n")[0]
    words = line[2:].split() if line.startswith("#!") and not script.endswith(".py") else []
    is_binary = start.startswith(b"\x7fELF")
    is_other = any(_NO_PYTHONS.fullmatch(os.path.basename(word)) for word in words) and not _STRING.match(text)
    if not (is_binary or is_other):
        return ""
    import zipfile

    if zipfile.is_zipfile(script):  # which Python runs, whatever stands before it: a .pex can begin with #!/bin/sh
        return ""
    return "a binary (ELF)" if is_binary else f"a program for {line[2:].strip()!r}"


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


def _check_destination(name: str) -> None:
    """Refuse what is no destination of events, in ``--event-log-handler``."""
    from phalanx.events import UnknownDestinationError, get_logging_handler

    try:
        get_logging_handler(name)
    except (UnknownDestinationError, TypeError) as error:
        raise click.UsageError(f"--event-log-handler: {error}") from None
    except Exception as error:
        raise click.UsageError(f"--event-log-handler: {name!r}: {type(error).__name__}: {error}") from error


def _check_ranks(option: str, chosen: Std | Iterable[int] | None, count: int, what: str = "rank") -> None:
    """Refuse ranks that there are not, of the ``count`` that there are."""
    wrong = [] if isinstance(chosen, Std) else sorted(rank for rank in chosen or () if not 0 <= rank < count)
    if wrong:
        msg = f"{option}: there is no {what} {', '.join(map(str, wrong))}; ranks are 0 to {count - 1}"
        raise click.UsageError(msg)


def _health_address() -> tuple[str, int] | None:
    """Return where the run is to answer how it is, by the environment; None: nowhere."""
    if "TORCHELASTIC_HEALTH_CHECK_PORT" not in os.environ:
        return None
    from phalanx._run.services import address_of_environment

    try:
        return address_of_environment()
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _check_rotation(max_size: int | None, *, keep: int | None, compress: bool) -> None:
    """Refuse what is said of files that are set aside, where none are."""
    for name, is_given in (("--log-keep", keep is not None), ("--log-compress", compress)):
        if is_given and max_size is None:
            msg = f"{name}: files are set aside only with --log-max-size; give that, too, like --log-max-size 100MB"
            raise click.UsageError(msg)


def _timer_specs(on_expiry: tuple[tuple[str, float], ...], hang_timeout: float | None) -> TimerSpecs:
    """How the group watches timers and heartbeats."""
    try:
        return TimerSpecs(on_expiry, hang_timeout)
    except ValueError as error:
        raise click.BadParameter(str(error).removeprefix("hang_timeout: "), param_hint="--hang-timeout") from None


def _chosen(console: ConsoleSpecs) -> list[str]:
    """The options of lines that have been given."""
    given = {
        "--ranks": console.ranks is not None, "--grep": console.grep, "--exclude": console.exclude,
        "--fold": console.fold,
        "--timestamps": console.timestamps == "iso", "--elapsed": console.timestamps == "elapsed",
        "--log-format json": console.format == "json", "--log-line-prefix-template": console.template is not None,
    }  # fmt: skip
    return [option for option, is_given in given.items() if is_given]


def _doubts(script: str) -> list[str]:
    """What is to be said when another environment than ours is active, or stands beside the script.

    A tool install (``pipx``, ``uv tool``) has an environment of its own, without what the script imports.
    """
    if os.environ.get(PYTHON_EXEC_ENV):
        return []
    ours = os.path.realpath(sys.prefix)
    for where, folder in _others(script):
        python = os.path.join(folder, "bin", "python")
        if os.path.realpath(folder) != ours and os.access(python, os.X_OK):
            choice = f"set {PYTHON_EXEC_ENV}={python}, or install phalanx there"
            return [f"workers run {sys.executable}, and {where} {folder}: if they are to run that, {choice}"]
    return []


def _others(script: str) -> Iterator[tuple[str, str]]:
    active = os.environ.get("VIRTUAL_ENV")
    if active:
        yield "VIRTUAL_ENV is", active
        return  # the one that was activated is the one that is meant
    conda = os.environ.get("CONDA_PREFIX")  # of the base, mostly, and nobody's choice; but if it is ours, it is meant
    if conda and os.path.realpath(conda) == os.path.realpath(sys.prefix):
        return
    folder = os.path.dirname(os.path.abspath(script))  # of a module, the working directory
    for name in _ENVIRONMENTS:
        path = os.path.join(folder, name)
        if os.path.exists(os.path.join(path, "pyvenv.cfg")):
            yield "beside the script is", path
