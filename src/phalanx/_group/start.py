"""Starts a group: its keeper, its folders and files, its workers. Undoes all of it when a step fails.

`_engine` starts the processes; this module has the order of the steps, and holds signals back during them.
"""

from __future__ import annotations

import os
import warnings
import weakref
from _thread import RLock, allocate_lock
from abc import ABC, abstractmethod
from contextlib import ExitStack
from functools import partial

from phalanx._base import interpreter, interrupts, linux, unpatched
from phalanx._base.interpreter import FOLLOW_ENV
from phalanx._base.stderr import warn
from phalanx._engine import host_signals, main_module, protocol
from phalanx._engine.supervisor import Supervisor
from phalanx._evidence.cleanup import remove_old
from phalanx._evidence.error_file import ERROR_FILE_ENV
from phalanx._group.arguments import GRACE, SETTLE, checked_listener, checked_notice
from phalanx._group.closing import release
from phalanx._group.first_failure import FirstFailure
from phalanx._logs.console import ConsoleSpecs
from phalanx._logs.layout import LogsDest, checked_dest, missing_folders
from phalanx._logs.prefixes import template_or_default
from phalanx._outcomes.result import stands_alone

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from phalanx._base.latch import Latch
    from phalanx._engine.forkserver import ForkServer
    from phalanx._engine.group_events import GroupEvents
    from phalanx._engine.stop_flag import StopFlag
    from phalanx._events.stream import EventStream
    from phalanx._group.end_fd import EndFd
    from phalanx._group.plan import Plan
    from phalanx._group.warm import Warm
    from phalanx._logs.pump import Pump
    from phalanx._logs.specs import LogsSpecs
    from phalanx._outcomes.result import RunProcsResult
    from phalanx._placement.placement import Placement, WorkerBounds
    from phalanx._timers.hang_reporter import HangReporter
    from phalanx._timers.specs import TimerSpecs

_CLOSED_EARLY = "the group %r was closed while it was starting"


class GroupStart(ABC):
    """What a group is made of, and its start. `PContext` has the rest of its life, and the documentation of both.

    Args: See `PContext`.
    """

    _begins_slowly = True
    """Whether a worker starts with an interpreter, so that its folder is made before it can write an error file."""

    _prints_failures = True
    """Whether a worker prints the traceback of its failure where its stderr is the launcher's."""

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any] | str,
        args: Mapping[int, tuple[Any, ...]],
        envs: Mapping[int, Mapping[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: Mapping[int, str] | None = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
        *,
        settle: float = SETTLE,
        grace: float = GRACE,
        linger: float = 0.0,
        orphan_grace: float = 0.0,
        notice: tuple[int, float] | None = None,
        console: ConsoleSpecs | None = None,
        placement: Placement | None = None,
        timers: TimerSpecs | None = None,
        stdin: Mapping[int, int] | None = None,
        record: bool = False,
        signals: bool = True,
        announces: bool = True,
        speak: Callable[[str], None] | None = None,
        on_reader_gone: Callable[[str], None] | None = None,
        follows: GroupStart | None = None,
        on_event: Callable[[dict[str, Any]], object] | None = None,
        events: EventStream | None = None,
    ) -> None:
        self.name = name
        self.entrypoint = entrypoint
        self.args = dict(args)
        self.envs = {rank: dict(env) for rank, env in envs.items()}
        self.nprocs = len(self.args)
        self.log_line_prefixes = log_line_prefixes
        self.logs = LogsDest()
        self.console = console or ConsoleSpecs()
        self._filters = {"stdout": duplicate_stdout_filters, "stderr": duplicate_stderr_filters}
        self._logs_specs = logs_specs
        self._placement = placement
        self._timers = timers
        self._watched: dict[int, dict[str, str]] = {}
        self._placed: dict[int, WorkerBounds | None] = {}
        self._devices: dict[int, dict[str, str]] = {}
        self._stdin = dict(stdin or {})
        self._settle = settle
        self._grace = grace
        self._linger = linger
        self._orphan_grace = orphan_grace
        self.notice = checked_notice(notice)
        self._stop_page: dict[str, str] = {}
        self._speak = speak
        self._on_reader_gone = on_reader_gone
        before = None if follows is None else follows._supervisor  # noqa: SLF001 - of the same class
        self._after: Latch | None = None  # opens when this one's lines may be shown
        if follows is not None:  # one that was not started has no lines, and may follow another
            self._after = follows._after if before is None else before.shown  # noqa: SLF001 - as above
        self._end_fd: EndFd | None = None  # once `_is_closed`, there will be none any more
        self._record = record
        self._on_event = checked_listener(on_event)
        self._stream = events
        self._events: GroupEvents | None = None
        self._signals = signals
        self._announces = announces
        self._first_failure: FirstFailure | None = None
        self._own_warm: Warm | None = None
        self._supervisor: Supervisor | None = None
        self._result: RunProcsResult | None = None
        self._values: dict[int, Any] = {}
        self._starting = self._closed = self._is_closed = False
        self._one = allocate_lock()
        self._judging = RLock()  # an object that is unpickled, or a signal handler, may call `wait` again

    def start(self) -> None:
        """Start every worker, or none.

        If it is called in the main thread, a SIGTERM, SIGINT, SIGHUP or SIGQUIT (see
        ``TORCHELASTIC_SIGNALS_TO_HANDLE``) raises `SignalException` from now on, until the group is closed. If one
        arrives while the workers start, the group is open afterwards (see `is_open`) and has to be closed.

        Raises:
            OSError: A worker or the keeper cannot be started; those that had been are gone.
            TypeError: Something cannot be pickled.
            ValueError: A placement that this machine does not allow.
            RuntimeError: The group has been started before, or another thread closes it meanwhile.
            Exception: What the logs specs raise.
        """
        main_module.check_guard()
        if self._signals:
            with host_signals.delivering():  # raises for a signal that came earlier and was not raised
                pass
        with self._one:
            if self._supervisor is not None or self._starting:
                msg = f"the group {self.name!r} has been started before"
                raise RuntimeError(msg)
            self._starting, self._closed = True, False
        try:
            self._start()
        finally:
            self._starting = False
        self._wait_until_up()

    def _start(self) -> None:
        unpatched.check()
        template_or_default(self.console.template)  # refuses a bad template before anything is made
        if self._placement is not None:
            placed, warning = self._placement.resolve(self.nprocs)
            self._placed = dict(zip(sorted(self.envs), placed.values(), strict=True))
            self._devices = self._placement.environment(self.envs)
            if warning:
                warnings.warn(warning, RuntimeWarning, stacklevel=4)  # the frame that called start_processes
        with ExitStack() as held, ExitStack() as undo:
            hold = interrupts.deferred if self._signals else host_signals.postpone
            with hold():
                for fd in linux.occupy_standard_descriptors():
                    held.callback(os.close, fd)
                plan = self._plan(held)
                supervisor = Supervisor(
                    settle=self._settle, grace=self._grace, linger=self._linger, orphan_grace=self._orphan_grace,
                    write_line=self._speak or warn,
                )  # fmt: skip
                undo.callback(lambda: release(supervisor, self.logs, self._logs_specs))
                undo.callback(supervisor.abort)
                if self._signals:
                    host_signals.acquire(supervisor)
                if plan.warm is None:
                    supervisor.boot(plan.flags, plan.call)  # it starts while this goes on
                else:
                    plan.warm.begin()  # it imports while this goes on
                    if self._own_warm is not None:
                        undo.callback(self._own_warm.close)
            self._logs_specs.folders_can_wait = self._begins_slowly
            with hold():  # else there would be a folder of a run without a record
                self.logs = checked_dest(self._logs_specs.reify(self.envs), self.envs, self._logs_specs)
                remove_old(self.logs.error_files.values())
                events = self._events = self._begin_events(supervisor, undo)
            first = self._first_failure = FirstFailure(
                self.name, supervisor, self.logs, self._logs_specs, self.envs, announces=self._announces
            )
            report = self._watch(supervisor, undo)
            stop_flag = self._make_stop_flag(undo)
            specs, files = self._specs(plan)
            fork_server = self._warmed(plan.warm)
            with hold():  # no signal handler runs between the start of a process and its recording
                if fork_server is not None:
                    supervisor.boot(fork_server=fork_server)
                undo.callback(self._can_be_closed(supervisor))
                pump = self._make_pump()
                supervisor.start(
                    specs,
                    [*plan.fds, *files],
                    pump,
                    missing_folders(self.logs),
                    fork=plan.fork,
                    modules=plan.modules,
                    report=report,
                    after=self._after,
                    notice=stop_flag,
                    stands_alone=partial(stands_alone, logs=self.logs, sends_evidence=callable(self.entrypoint)),
                    locate=partial(_locate, self.logs.error_files),
                    events=events,
                    failed=first.announce if first.announces else None,
                )
                # Called by `close`, or when the last reference goes; not by `wait`, which needs the result alone.
                self._tidy = weakref.finalize(
                    self, release, supervisor, self.logs, self._logs_specs, self._own_warm, events, first
                )
                undo.pop_all()

    def _preview_placement(self) -> tuple[dict[int, WorkerBounds | None], dict[int, dict[str, str]]]:
        """Return where each worker would run, and the variables that follow from that. Raises ValueError."""
        placement = self._placement
        return ({}, {}) if placement is None else (placement.resolve(self.nprocs)[0], placement.environment(self.envs))

    def _make_pump(self) -> Pump | None:
        """Make what follows the log files; None, and nothing is loaded for it, if no stream goes to a file."""
        if not any((*self.logs.stdouts.values(), *self.logs.stderrs.values())):
            return None
        from phalanx._logs.group_pump import make_pump

        return make_pump(
            self.logs, self.envs, self.log_line_prefixes, self.console, self._filters, self._on_reader_gone
        )

    def _wait_until_up(self) -> None:
        supervisor = self._supervisor
        assert supervisor is not None
        try:
            supervisor.wait_until_up()  # a signal ends this wait at once, and the group is open
        except BaseException as error:
            if error is supervisor.not_started:
                self._tidy()
                self._supervisor = None
            raise

    def _begin_events(self, supervisor: Supervisor, undo: ExitStack) -> GroupEvents | None:
        """Begin to emit events, if anybody observes them."""
        if self._stream is None and not self._record and self._timers is None and self._on_event is None:
            return None
        from phalanx._group import observers

        events = observers.begin(
            self.name, self.envs, self.logs, self._logs_specs, supervisor,
            stream=self._stream, record=self._record, timers=self._timers, on_event=self._on_event,
        )  # fmt: skip
        if events is not None:
            undo.callback(events.end)
            undo.push(events.not_started)
        return events

    def _warmed(self, warm: Warm | None) -> ForkServer | None:
        """Wait until all is imported. Raises PreloadError; RuntimeError if the group is closed meanwhile."""
        try:
            return None if warm is None else warm.wait()
        finally:
            if self._closed:
                raise RuntimeError(_CLOSED_EARLY % self.name) from None

    def _can_be_closed(self, supervisor: Supervisor) -> Callable[[], None]:
        """Let `close` close the group from now on. Returns a function that undoes this.

        Raises RuntimeError if the group was closed before.
        """

        def take_back() -> None:
            self._supervisor = None

        with self._one:
            if self._closed:
                raise RuntimeError(_CLOSED_EARLY % self.name)
            self._supervisor = supervisor
        return take_back

    @abstractmethod
    def _plan(self, held: ExitStack) -> Plan:
        """Plan the start of the workers; refuse what cannot work. ``held`` is closed once the workers run."""

    def _environment(self, rank: int) -> dict[bytes, bytes]:
        envs = self.envs[rank] | self._devices.get(rank, {}) | self._watched.get(rank, {}) | self._stop_page
        env = {os.fsencode(name): os.fsencode(value) for name, value in envs.items()}
        env[ERROR_FILE_ENV.encode()] = os.fsencode(self.logs.error_files[rank])
        return env

    def _specs(self, plan: Plan) -> tuple[list[protocol.Spec], list[int]]:
        """What to start for each rank, and the descriptors of what is read."""
        files = {rank: fd for rank, fd in self._stdin.items() if rank in plan.commands}
        places = {rank: number for number, rank in enumerate(files, 1 + len(plan.fds))}
        specs = [self._spec(rank, *command, places) for rank, command in plan.commands.items()]
        follow = os.fsencode(interpreter.follow_fork()) if plan.fork else b""
        for spec in specs:
            if follow:
                spec.env[os.fsencode(FOLLOW_ENV)] = follow
            elif not plan.fork:
                spec.argv = interpreter.followed(spec.argv)
        return specs, [*files.values()]

    def _spec(
        self, rank: int, path: str, argv: list[bytes], fds: list[int], places: Mapping[int, int]
    ) -> protocol.Spec:
        """What to start for a rank. ``places``: the index of its stdin, by its rank."""
        logs = self.logs
        env = self._environment(rank)
        if not isinstance(self.entrypoint, str):
            whose = f"rank {self.envs[rank].get('RANK') or rank}" if self._prints_failures else "none"
            env[b"PHALANX_TRACEBACKS"] = os.fsencode("all" if logs.stderrs[rank] else whose)
        stdout, stderr = logs.stdouts[rank] or None, logs.stderrs[rank] or None
        bounds = (logs.max_size, logs.keep, logs.compress)
        stdin, placed = places.get(rank), self._placed.get(rank)
        return protocol.Spec(rank, os.fsencode(path), argv, env, stdin, stdout, stderr, fds, bounds, placed)

    def _watch(self, supervisor: Supervisor, undo: ExitStack) -> HangReporter | None:
        """Make the report of hangs and the table of timers, if timers are to be watched."""
        if self._timers is None:
            return None
        from phalanx._timers import hang_reporter

        report, self._watched = hang_reporter.watch(
            self._timers, self.logs, self.envs, supervisor.say,
            stacks=getattr(self._logs_specs, "is_kept", True), speak=self._speak,
        )  # fmt: skip
        if report is not None:
            undo.callback(report.close)
        return report

    def _make_stop_flag(self, undo: ExitStack) -> StopFlag | None:
        """Make the page with the stop flag, if a planned stop begins with a notice."""
        if self.notice is None:
            return None
        from phalanx._engine.stop_flag import StopFlag

        flag = StopFlag(*self.notice)
        undo.callback(flag.close)
        self._stop_page = flag.environment()
        return flag


def _locate(error_files: Mapping[int, str], alive: Callable[[], dict[int, int]]) -> dict[int, str]:
    from phalanx._stacks import live  # most groups never need it

    return live.locate(alive, error_files)
