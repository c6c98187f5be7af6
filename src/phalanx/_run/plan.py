"""What a run will do: everything that is refused is refused here, and nothing is started, made or reserved.

Owns also where the workers run: `phalanx.multiprocessing.Placement`, and ``OMP_NUM_THREADS``.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from phalanx._base.stderr import say
from phalanx._base.text import how_many, name_ranks
from phalanx._engine.host_signals import SIGNALS_ENV
from phalanx._evidence.error_file import BREAKPOINT_TIMEOUT_ENV, POST_MORTEM_ENV
from phalanx._group.warm import check_preload as check_names
from phalanx._group.warm import shared
from phalanx._placement import devices, topology
from phalanx._placement.placement import divide
from phalanx._rendezvous.rdzv_conf import exposed
from phalanx._run import master_port
from phalanx._run.config import GONE, RunError, colours_of_workers, console_specs, is_here_gone
from phalanx._run.logs import bounds_given, make_logs, umask_notes
from phalanx._run.meeting import meet
from phalanx._run.status import RunStatus
from phalanx._run.stdin import Stdin
from phalanx._run.worker_env import OF_PART, AttemptGroups, scripts_of, worker_env
from phalanx._timers.specs import TimerSpecs
from phalanx.multiprocessing import ConsoleSpecs, PContext, Placement, ScriptContext, Std, to_map

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from contextlib import ExitStack

    from phalanx._group.restart_policy import RestartPolicy
    from phalanx._run.config import RunConfig
    from phalanx._run.debug_ports import DebugPorts
    from phalanx._run.detach import Detached
    from phalanx._run.event_commands import EventCommands
    from phalanx._run.master_port import ReservedPort
    from phalanx._run.node_check import NodeCheck
    from phalanx._run.run_events import Observer, StatusEvents
    from phalanx._run.services import Addresses, Services

PYTHON_EXEC_ENV = "PYTHON_EXEC"
"""The variable that chooses the interpreter of the workers, as for torchrun."""

_ENVIRONMENTS = (".venv", "venv")
_SILENT = ("null", "dynamic_rendezvous")  # destinations of events that lead nowhere
_STREAMS = {Std.OUT: "stdout", Std.ERR: "stderr"}
PORT_ENV = "TORCHELASTIC_HEALTH_CHECK_PORT"  # that of `services`, which is not loaded where nothing asks for it
THREADS = "OMP_NUM_THREADS"
_LOOKED_AT = 1 << 16  # bytes of a file that is asked what it is
_NO_PYTHONS = re.compile(
    r"(ba|da|z|k|mk|c|tc|fi|tcl|wi)?sh|[gmn]?awk|perl|ruby|php|node|deno|bun|lua|Rscript|julia|make|sed|expect"
)
"""What interprets other languages. What interprets Python has any name: ``#!/usr/bin/env -S phalanx run``."""

_STRING = re.compile(r"#!.*\n([ \t\r]*(#.*)?\n)*[ \t]*['\"]")
"""How a script begins for a shell that is Python, too: with a string that the shell obeys. So pip writes it, where the
path is long."""


class RunPlan:
    """What a run will do. ``forwarded``: the signals that are passed on to the workers. Raises ValueError.

    ``notes``: what is to be printed besides. ``makes_folder``: whether the default folder of runs is made, if need be.
    ``detached`` is set by the caller.
    """

    def __init__(
        self, config: RunConfig, policy: RestartPolicy, forwarded: list[signal.Signals], notes: Sequence[str], *,
        makes_folder: bool,
    ) -> None:  # fmt: skip
        nprocs = config.nproc_per_node
        self.config, self.policy, self.forwarded = config, policy, forwarded
        self.detached: Detached | None = None
        self._services: Services | None = None
        # As with torchrun, --run-path goes before these.
        self._run_path = config.start_method if config.run_path else ""
        self._module, self._no_python = (given and not self._run_path for given in (config.module, config.no_python))
        self.python = sys.executable if self._run_path else os.environ.get(PYTHON_EXEC_ENV) or sys.executable
        for script in [config.script] if self._no_python else scripts_of(config.script, nprocs):
            _check_command(script, module=self._module, no_python=self._no_python)
        if config.preload:
            self._check_preload(config.preload)
        local_ranks = None if config.local_ranks_filter is None else set(config.local_ranks_filter)
        redirects, tee = config.redirects, config.tee
        for option, chosen in (("--redirects", redirects), ("--tee", tee), ("--local-ranks-filter", local_ranks)):
            _check_ranks(option, chosen, nprocs, "local rank")
        if redirects is None and tee is None:
            redirects, tee = (Std.ALL, None) if config.detach else (None, Std.ALL)
        streams = redirects or Std.NONE, tee or Std.NONE, local_ranks
        self.meeting = meet(config)
        self.run_id = self.meeting.run_id or time.strftime("%Y%m%d-%H%M%S")
        self.status = RunStatus(self.run_id, policy.max_restarts)
        is_alone = self.meeting.machines is None
        if is_alone and isinstance(config.pty, list):
            _check_ranks("--pty", config.pty, nprocs)
        self.stdin = Stdin(config.stdin, nprocs, machines=not is_alone, terminals=config.pty or ())
        self.debug_ports = _debug_ports(config, self.python)
        self._placement, self._extra, placed = place(config)
        self.console = console_specs(config, drain=config.drain)
        if is_alone:  # of several, nobody knows yet how many workers the others have
            _check_ranks("--ranks", self.console.ranks, nprocs)
        self._filters = {"stdout": config.duplicate_stdout_filters, "stderr": config.duplicate_stderr_filters}
        if config.log_dir == os.devnull:
            self._check_no_logs()
            unheeded = []
        else:
            unheeded = self._check_streams(*streams)
        self.specs = make_logs(config, *streams, makes_folder=makes_folder)
        self.specs.debug_ports = self.debug_ports
        self.events = self._events()
        self.addresses = _addresses(config)
        doubts = [] if self._no_python else _doubts(config.script)
        if self.meeting.machines is not None:
            doubts += exposed(config.rdzv_conf)
        said = [*self.meeting.notes, *notes, *doubts, *placed, *unheeded, *self.stdin.unread()]
        self.specs.notes = [*self.specs.notes, *said, *umask_notes(config.log_mode)]

    def _check_streams(
        self, redirects: Std | Mapping[int, Std], tee: Std | Mapping[int, Std], shown: set[int] | None
    ) -> list[str]:
        """Return lines on options that a stream of the launcher's own does not heed. ``shown``: local ranks."""
        nprocs, notes = self.config.nproc_per_node, []
        redirected, teed = to_map(redirects, nprocs), to_map(tee, nprocs)
        for stream, name in _STREAMS.items():
            bare = [rank for rank in range(nprocs) if not stream & (redirected[rank] | teed[rank])]
            on_console = [rank for rank in bare if shown is None or rank in shown]
            ranks = name_ranks(on_console)
            if self.console.format == "json" and stream is Std.OUT and on_console:
                msg = f"--log-format json: {name} of {ranks} would be among it as it is; add -t 1, or -r 1"
                raise ValueError(msg)
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
                raise ValueError(text)
            notes.append(text)
        return notes

    def _check_no_logs(self) -> None:
        """Refuse options that need the logs, where none are kept."""
        options = _chosen(self.console)
        options += [f"--duplicate-{name}-filters" for name, texts in self._filters.items() if texts]
        if options := [*options, *bounds_given(self.config)]:
            msg = f"--log-dir /dev/null: no logs are kept; {', '.join(options)} would have nothing to be about"
            raise ValueError(msg)

    def _check_preload(self, preload: list[str]) -> None:
        """Refuse modules that cannot be imported for workers to have them."""
        if self._no_python:
            raise ValueError("--preload and --no-python exclude each other: a binary imports nothing")
        if self._run_path not in ("", "forkserver"):
            raise ValueError("--preload: with --run-path, workers are forks with --start-method forkserver only")
        if self.python != sys.executable:
            msg = f"--preload: workers are forks of this interpreter, {sys.executable}; PYTHON_EXEC is {self.python}"
            raise ValueError(msg)
        if "__main__" in preload:
            raise ValueError("--preload: __main__ is the script, which every worker runs; name what it imports")
        try:
            check_names(preload)
        except ValueError as error:
            raise ValueError(f"--{error}") from None

    def _events(self) -> StatusEvents | None:
        """Return what posts the run's events; None: nobody wants them."""
        config, name = self.config, self.config.event_log_handler
        if name in _SILENT:
            return None
        from phalanx._run.run_events import StatusEvents
        from phalanx.events import UnknownDestinationError, get_logging_handler

        try:
            get_logging_handler(name)
        except (UnknownDestinationError, TypeError) as error:
            raise ValueError(f"--event-log-handler: {error}") from None
        except Exception as error:
            raise ValueError(f"--event-log-handler: {name!r}: {type(error).__name__}: {error}") from error
        return StatusEvents(
            name, run_id=self.run_id, role=config.role, backend=config.rdzv_backend, entry_point=config.script,
            is_job=True,
        )  # fmt: skip

    def services(self, until_end: ExitStack) -> Services | None:
        """Start what is asked for beside the workers; None: nothing, and what makes it is not loaded."""
        if not self.addresses and os.environ.keys().isdisjoint({"TORCHELASTIC_ENABLE_FILE_TIMER", "LOGLEVEL"}):
            return None
        from phalanx._run.services import Services, log_shown

        until_end.enter_context(log_shown())
        try:
            self._services = until_end.enter_context(Services(self.addresses, self.status))
        except OSError as error:
            raise RunError(error.strerror or str(error)) from None
        return self._services

    def observers(self) -> dict[str, Observer]:
        """Return who takes the events of the run, beside its record and its status."""
        of_services = {} if self._services is None else self._services.observers
        return of_services | ({} if self.events is None else {"phalanx-status": self.events})

    def event_commands(self, *, has_store: bool | None = True) -> EventCommands | None:
        """Return what runs commands when something happens; None: nothing, and it is not loaded.

        ``has_store``: whether this machine has the store of the job.
        """
        config, machines = self.config, self.meeting.machines
        if not config.on_event:
            return None
        from phalanx._run.event_commands import EventCommands

        return EventCommands(
            config.on_event, run_id=self.run_id, is_job=machines is not None,
            is_first=has_store or (machines is not None and machines.node_rank == 0),
            ends_hangs=config.on_expiry[-1][0] in ("terminate", "kill"),
        )  # fmt: skip

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
        options: dict[str, Any] = {
            "settle": config.settle, "grace": config.grace, "linger": config.linger, "notice": config.notice,
            "orphan_grace": config.orphan_grace, "placement": self._placement, "console": self.console,
            "timers": TimerSpecs(config.on_expiry, config.hang_timeout), "speak": say, "announces": False,
            **{f"duplicate_{stream}_filters": texts for stream, texts in self._filters.items()},
        }  # fmt: skip
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
        own = {SIGNALS_ENV: ",".join(number.name for number in config.signals_to_handle), **variables}
        if config.post_mortem:
            own[POST_MORTEM_ENV] = "1"
        if config.breakpoint_timeout is not None:
            own[BREAKPOINT_TIMEOUT_ENV] = str(config.breakpoint_timeout)

        def shared(rank: int) -> dict[str, str]:
            has_terminal = first + rank in (config.pty or ())  # which needs no colours to be forced
            ports = {} if self.debug_ports is None else self.debug_ports.env(rank)
            return own | ({} if has_terminal else colours) | ports

        return {
            rank: worker_env(
                first + rank, world_size, role=config.role, run_id=self.run_id, local_rank=rank,
                local_world_size=config.nproc_per_node, role_rank=first_in_role + rank,
                max_restarts=self.policy.max_restarts, **place,
            ) | shared(rank) | self._extra[rank] | config.env
            for rank in range(config.nproc_per_node)
        }  # fmt: skip


def _addresses(config: RunConfig) -> Addresses:
    """Return where the run answers how it is. Raises ValueError."""
    if config.metrics_port is None and PORT_ENV not in os.environ:
        return {}
    from phalanx._run.services import METRICS_PORT, address_of_environment

    if config.metrics_port is None:
        return address_of_environment()
    from phalanx._run.run_metrics import INSTALL, is_installed

    if not is_installed():
        raise ValueError(f"{METRICS_PORT} needs prometheus-client, which is not installed here: {INSTALL}")
    return address_of_environment() | {config.metrics_port: METRICS_PORT}


def _debug_ports(config: RunConfig, python: str) -> DebugPorts | None:
    if config.debugpy is None:
        if config.debugpy_wait:
            raise ValueError("--debugpy-wait needs --debugpy PORT")
        return None
    from phalanx._run.debug_ports import DebugPorts

    return DebugPorts(config, python)


def reserve_port() -> ReservedPort:
    """Reserve a port for rank 0, see `master_port.reserve`. Raises RunError."""
    try:
        return master_port.reserve()
    except OSError as error:
        msg = f"no port for MASTER_PORT: {error.strerror}; --master-port takes the number of one"
        raise RunError(msg) from None


def in_our_words(error: Exception, group: PContext | None) -> str:
    """What the library says of the program, said of what the user has given."""
    head, text = "entrypoint: ", str(error)
    if not text.startswith(head):
        return text
    chosen = isinstance(group, ScriptContext) and os.environ.get(PYTHON_EXEC_ENV)
    return f"{PYTHON_EXEC_ENV if chosen else 'SCRIPT'}: {text.removeprefix(head)}"


def _check_command(script: str, *, module: bool, no_python: bool) -> None:
    """Refuse a script, a module or a binary that is not there; and a script that is a program of another language."""
    if no_python and module:
        raise ValueError("--module and --no-python exclude each other")
    if (module or not (os.path.isabs(script) or (no_python and os.sep not in script))) and is_here_gone():
        msg = f"{'--module' if module else 'script'} {script!r}: {GONE}; start it elsewhere, or by an absolute path"
        raise ValueError(msg)
    if no_python:
        return
    if module:
        if not script or os.sep in script or (script.endswith(".py") and os.path.isfile(script)):
            msg = f"--module: {script!r} is no module's name, like package.train; for a file, leave -m out"
            raise ValueError(msg)
        return
    try:
        mode = os.stat(script).st_mode
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        why = f" does not exist{_meant(script)}" if is_missing else f": {error.strerror}"
        raise ValueError(f"script {script!r}{why}") from None
    if stat.S_ISDIR(mode) and not os.path.exists(os.path.join(script, "__main__.py")):
        raise ValueError(f"script {script!r} is a folder without a __main__.py")
    if stat.S_ISREG(mode) and (kind := _other_program(script)):
        msg = f"script {script!r} is {kind}, and no Python: give --no-python to start it as it is"
        raise ValueError(msg)


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


def _check_ranks(option: str, chosen: Std | Iterable[int] | None, count: int, what: str = "rank") -> None:
    """Refuse ranks that there are not, of the ``count`` that there are."""
    wrong = [] if isinstance(chosen, Std) else sorted(rank for rank in chosen or () if not 0 <= rank < count)
    if wrong:
        msg = f"{option}: there is no {what} {', '.join(map(str, wrong))}; ranks are 0 to {count - 1}"
        raise ValueError(msg)


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
    """Return a line on another environment than ours that is active, or beside the script: a tool's has no more."""
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


def place(config: RunConfig) -> tuple[Placement, dict[int, dict[str, str]], list[str]]:
    """Return where workers run, the variables of each rank that follow from it, and lines for the user."""
    nprocs, env = config.nproc_per_node, config.env
    cpu_bind, near, virtual = config.cpu_bind, config.numa_binding, config.virtual_local_rank
    if near and cpu_bind != "none":
        raise ValueError("--numa-binding and --cpu-bind exclude each other: each says on which CPUs workers run")
    placement = Placement(cpu_bind, config.nice, config.rlimit or {}, virtual)
    said = ""
    try:
        if near:
            try:
                shares = topology.bind(near, nprocs, os.sched_getaffinity(0))
            except ValueError as error:
                raise ValueError(f"numa_binding: {error}") from None
        else:
            shares, said = divide(cpu_bind, nprocs)
        if near or cpu_bind != "none":  # as found now: what is said below is what will be
            lists = ";".join(topology.format_list(cpus) for cpus in shares)
            placement = placement.replace(cpu_bind=lists)
        placement.resolve(nprocs)
        placement.environment(dict.fromkeys(range(nprocs), env))
    except ValueError as error:
        raise ValueError(_by_option(str(error))) from None
    present = devices.count_gpus() if virtual and "CUDA_VISIBLE_DEVICES" not in os.environ else 0
    if 0 < present < nprocs:  # where none can be counted, nobody may want any
        msg = f"--virtual-local-rank: rank {present} has no device: there are {present} for {nprocs} ranks"
        raise ValueError(msg)
    lines = [_by_option(said)] if said else []
    if nprocs == 1 or THREADS in os.environ or THREADS in env:
        return placement, {rank: {} for rank in range(nprocs)}, lines
    threads, line = _threads(shares)
    return placement, {rank: {THREADS: str(count)} for rank, count in enumerate(threads)}, [*lines, line]


def _threads(shares: list[tuple[int, ...]]) -> tuple[list[int], str]:
    """How many threads each rank gets, and how that is said."""
    quota = topology.quota()
    threads = topology.threads(shares, quota)
    least, most = min(threads), max(threads)
    cpus = len({cpu for share in shares for cpu in share})
    limited = f", of which the cgroup grants {quota:g}" if quota is not None and quota < cpus else ""
    return threads, (
        f"{THREADS}={least}{f' to {most}' if most > least else ''} for each of {how_many(len(shares), 'worker')} "
        f"({how_many(cpus, 'CPU')}{limited}); set it to choose otherwise"
    )


def _by_option(text: str) -> str:
    """Name an option where the library names a field."""
    field, colon, rest = text.partition(":")
    return f"--{'rlimit' if field == 'rlimits' else field.replace('_', '-')}{colon}{rest}"
