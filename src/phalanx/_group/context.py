"""A started group as its owner sees it: wait, pids, close, and the result.

Owns the group's face. How processes are started and stopped is the engine's business; what their ends mean, that of
`_result`.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import warnings
import weakref
from _thread import RLock, allocate_lock
from abc import ABC, abstractmethod
from contextlib import ExitStack, nullcontext

from phalanx._base import interpreter, interrupts, linux, stderr
from phalanx._engine import host_signals, main_module
from phalanx._engine.supervisor import Supervisor
from phalanx._engine.worker import script as script_module
from phalanx._engine.worker.mp_child import Family
from phalanx._evidence import evidence
from phalanx._group.warm import Warm, choose, path_of, shared
from phalanx._logs import console
from phalanx._logs.console import ConsoleSpecs
from phalanx._logs.prefixes import template_of
from phalanx._logs.specs import LogsDest, checked, missing_folders
from phalanx._outcomes.result import collect

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType
    from typing import Any, Literal, Self, overload

    from phalanx._engine.forkserver import Zygote
    from phalanx._engine.keeper.start_process import Spec
    from phalanx._engine.mirror import Worker
    from phalanx._logs.specs import LogsSpecs
    from phalanx._outcomes.result import RunProcsResult
    from phalanx._placement.placement import Placement, WorkerBounds
    from phalanx._runs.recorder import Diary
    from phalanx._timers.hang_report import HangReport
    from phalanx._timers.specs import TimerSpecs

SETTLE = 0.1
"""Seconds after the first failure in which peers may leave evidence of their own before they are stopped."""

GRACE = 30.0
"""Seconds between the death signal and SIGKILL."""


IMPORT, VALUE = "import", "value"
"""How what the main module defines comes to the workers: they run it again; or it is sent."""

TIDY = 5.0
"""Seconds that a `close` waits for what it removes: the disk may not answer."""

_OF_FORKS = [
    "phalanx._engine.worker.function",
    *(f"phalanx._engine.pickling.{name}" for name in ("payload", "picklers", "results")),
]
_BY_VALUE = [*_OF_FORKS, "phalanx._engine.pickling.by_value", "cloudpickle"]
"""What every function worker of a fork server needs, and what those need whose function goes by value."""

_CLOSED_EARLY = "the group %r was closed while it was starting"


class _Plan:
    """How a group's workers are started: by which keeper, and what each of them executes and inherits."""

    def __init__(
        self,
        commands: dict[int, tuple[str, list[bytes], list[int]]],
        *,
        flags: Sequence[str] = ("-I", "-S"),
        call: Callable[[int, list[int]], None] | None = None,
        fork: bool = False,
        modules: Sequence[str] = (),
        fds: Sequence[int] = (),
        warm: Warm | None = None,
    ) -> None:
        self.commands = commands  # rank → file, argv, and the indices of the descriptors that it inherits
        self.flags = flags
        self.call = call
        self.fork = fork
        self.modules = modules  # that a keeper loads before it forks
        self.fds = fds
        self.warm = warm


class PContext(ABC):
    """A group of processes that is started, waited for and closed as one. Use `start_processes` to get a started one.

    A context manager: leaving it closes the group. Each method may be called from any thread. A group whose last
    reference goes while it runs is killed, with a ResourceWarning.

    Args:
        name: What the group is called, in reports.
        entrypoint: A callable, or the name or path of a binary.
        args: The positional arguments of each local rank.
        envs: The environment variables of each local rank, on top of the caller's.
        logs_specs: Where output goes.
        log_line_prefixes: What stands before each teed line of a rank; default ``[rank] ``.
        duplicate_stdout_filters: Strings; lines of stdout that hold one are also written to a file of all ranks.
        duplicate_stderr_filters: The same for stderr.
        settle: Seconds after the first failure before the others are stopped (default 0.1).
        grace: Seconds between SIGTERM and SIGKILL when a failure stops the others (default 30).
        linger: Seconds for which processes that workers left behind may go on when every worker has succeeded
            (default 0). After that they are ended, and it is said which, and whose they were.
        console: How the console shows what is teed.
        placement: Where the workers run, and within which bounds; default: as the caller.
        timers: How timers and heartbeats of the workers are watched; default: not at all.
        record: Whether ``run.json`` in the run's folder says what becomes of the group, for ``phalanx runs``, ``logs``
            and ``stack``. The logs specs are `DefaultLogsSpecs` with a folder then.
        signals: Whether signals to this process raise `SignalException` while the group is open. Else they do what
            they did before; only a SIGINT that arrives during the start has to wait until the group can be closed.
    """

    _begins_slowly = True
    """Whether a worker is an interpreter first, and writes no error file before its folder can be there."""

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
        console: ConsoleSpecs | None = None,
        placement: Placement | None = None,
        timers: TimerSpecs | None = None,
        record: bool = False,
        signals: bool = True,
        speak: Callable[[str], None] | None = None,
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
        self._settle = settle
        self._grace = grace
        self._linger = linger
        self._speak = speak
        self._record = record
        self._diary: Diary | None = None
        self._signals = signals
        self._own_warm: Warm | None = None
        self._supervisor: Supervisor | None = None
        self._result: RunProcsResult | None = None
        self._values: dict[int, Any] = {}
        self._starting = self._closed = False
        self._one = allocate_lock()
        self._judging = RLock()  # what is unpickled, or a signal's handler, may call `wait` once more

    def start(self) -> None:
        """Start every worker, or none.

        Raises OSError when a worker or the keeper cannot be started (what had started is gone then), TypeError for what
        cannot be pickled, ValueError for a placement that this machine does not allow, RuntimeError when another thread
        closes the group meanwhile, and whatever the logs specs raise. On the main thread, a SIGTERM, SIGINT, SIGHUP or
        SIGQUIT (see ``TORCHELASTIC_SIGNALS_TO_HANDLE``) from now on raises `SignalException`, until the group is
        closed. One that arrives while the workers start leaves a group that is open: `is_open` tells, and `close` is as
        ever.
        """
        main_module.check_guard()
        if self._signals:
            with host_signals.delivering():  # one that has been swallowed
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

    def _start(self) -> None:
        template_of(self.console)  # what is wrong with it is said before anything is made
        if self._placement is not None:
            self._placed, said = self._placement.resolve(self.nprocs)
            self._devices = self._placement.environment(self.envs)
            if said:
                warnings.warn(said, RuntimeWarning, stacklevel=4)  # that of who called start_processes
        with ExitStack() as held, ExitStack() as undo:
            for fd in linux.occupy_standard_descriptors():
                held.callback(os.close, fd)
            hold = interrupts.whole if self._signals else host_signals.postpone
            with hold():
                plan = self._plan(held)
                supervisor = Supervisor(
                    settle=self._settle, grace=self._grace, linger=self._linger, speak=self._speak or _log
                )
                undo.callback(lambda: _tidy(supervisor, self.logs, self._logs_specs))
                undo.callback(supervisor.abort)
                if self._signals:
                    host_signals.acquire(supervisor)
                if plan.warm is None:
                    supervisor.boot(plan.flags, plan.call)  # it gets up while we go on
                else:
                    plan.warm.begin()  # it imports while we go on
                    if self._own_warm is not None:
                        undo.callback(self._own_warm.close)
            self._logs_specs.folders_can_wait = self._begins_slowly
            self.logs = checked(self._logs_specs.reify(self.envs), self.envs, self._logs_specs)
            evidence.remove_old(self.logs.error_files.values())
            self._diary = self._begin_diary(supervisor, undo)
            report = self._watch(supervisor, undo)
            specs = [self._spec(rank, *command) for rank, command in plan.commands.items()]
            zygote = self._warmed(plan.warm)
            with hold():  # not between the start of a process and the noting of it
                if zygote is not None:
                    supervisor.boot(zygote=zygote)
                undo.callback(self._can_be_closed(supervisor))
                pump = console.pump(self.logs, self.envs, self.log_line_prefixes, self.console, self._filters)
                supervisor.start(
                    specs,
                    plan.fds,
                    pump,
                    missing_folders(self.logs),
                    fork=plan.fork,
                    modules=plan.modules,
                    report=report,
                )
                # At `close`, or when the last reference goes: not in `wait`, whose caller waits for the result alone.
                self._tidy = weakref.finalize(self, _tidy, supervisor, self.logs, self._logs_specs, self._own_warm)
                undo.pop_all()
        self._wait_until_up(supervisor, self._diary)

    def _wait_until_up(self, supervisor: Supervisor, diary: Diary | None) -> None:
        try:
            supervisor.wait_until_up()  # a signal ends this wait at once, and the group is open
        except BaseException as error:
            if error is supervisor.not_started:
                if diary is not None:
                    diary.not_started(type(error), error)
                    diary = None
                self._tidy()
                self._supervisor = None
            raise
        finally:
            if diary is not None:
                diary.started()

    def _begin_diary(self, supervisor: Supervisor, undo: ExitStack) -> Diary | None:
        if not self._record:
            return None
        from phalanx._runs.recorder import Diary

        run_id = getattr(self._logs_specs, "run_id", "")
        diary = Diary(self.name, self.envs, self.logs, supervisor, run_id or self.name)
        undo.push(diary.not_started)
        return diary

    def _warmed(self, warm: Warm | None) -> Zygote | None:
        """Wait until all is imported. Raises PreloadError; RuntimeError if the group is closed meanwhile."""
        try:
            return None if warm is None else warm.wait()
        finally:
            if self._closed:
                raise RuntimeError(_CLOSED_EARLY % self.name) from None

    def _can_be_closed(self, supervisor: Supervisor) -> Callable[[], None]:
        """From now on there is something to be closed. Returns what takes that back. Raises RuntimeError if it was."""

        def take_back() -> None:
            self._supervisor = None

        with self._one:
            if self._closed:
                raise RuntimeError(_CLOSED_EARLY % self.name)
            self._supervisor = supervisor
        return take_back

    if TYPE_CHECKING:

        @overload
        def wait(self, timeout: Literal[-1] | None = -1, period: float = 1) -> RunProcsResult: ...
        @overload
        def wait(self, timeout: float | None, period: float = 1) -> RunProcsResult | None: ...

    def wait(self, timeout: float | None = -1, period: float = 1) -> RunProcsResult | None:  # noqa: ARG002 - `period` is historical
        """Wait for the group to end: all succeeded, or one failed and the rest are down.

        Args:
            timeout: Seconds; 0 asks without blocking; negative or None waits for ever.
            period: Accepted and without effect: nothing polls, the wait ends with the event that decides.

        Returns:
            The result, or None when the time is over. The same result again when called again.

        Raises:
            KeeperLostError: The group's helper process was killed, and with it workers that had not ended.
            RuntimeError: It was not started; or by another process, of which this is a fork.
        """
        supervisor = self._started()
        _check_time(timeout)
        if supervisor.owner != os.getpid() and not supervisor.ended:
            msg = f"the group {self.name!r} is not this process's: a fork of the one that started it hears nothing"
            raise RuntimeError(msg)
        with host_signals.delivering():
            if not supervisor.ended.wait(-1 if timeout is None or timeout < 0 else timeout):
                return None
        host_signals.release(supervisor)
        if supervisor.not_started is not None:
            msg = f"the group {self.name!r} was not started: {supervisor.not_started}"
            raise RuntimeError(msg)
        with host_signals.delivering():
            result = self._result or self._judge(supervisor)
        if supervisor.lost is not None and not supervisor.result_stands:
            supervisor.lost.failures = result.failures
            raise supervisor.lost
        return result

    @property
    def stdouts(self) -> dict[int, str]:
        """The file of each local rank's stdout; ``""``: the launcher's own stream. Nothing before the start."""
        return self.logs.stdouts

    @property
    def stderrs(self) -> dict[int, str]:
        """The file of each local rank's stderr, likewise."""
        return self.logs.stderrs

    @property
    def error_files(self) -> dict[int, str]:
        """Where each local rank leaves its evidence. The file is there only if it has failed."""
        return self.logs.error_files

    def say(self, text: str) -> bool:
        """Show a line on the console, among those of the workers and not into one. Returns whether that is possible."""
        return self._supervisor is not None and self._supervisor.say(text)

    @property
    def is_open(self) -> bool:
        """Whether the group has been started, and has not ended."""
        return self._supervisor is not None and not self._supervisor.ended

    def pids(self) -> dict[int, int]:
        """The process id of each local rank."""
        return {rank: worker.pid for rank, worker in sorted(self._started().mirror.workers.items())}

    def close(self, death_sig: signal.Signals | int | None = None, timeout: float = GRACE) -> None:
        """End the group: ``death_sig`` (default SIGTERM), ``timeout`` seconds of grace, SIGKILL. Bounded, idempotent.

        Returns when no process of the group is left, grandchildren and daemons included; a process that
        outlives SIGKILL (uninterruptible sleep) is abandoned after 10 s and its rank's outcome says so. Called while
        another close is under way, it sends its signal too and can only shorten the grace. Called while another thread
        is in `start`, that raises RuntimeError, or the group ends as soon as it has started. In a fork of the process
        that has started the group, it does nothing: the group is not the fork's. Raises ValueError for what is no
        signal, and for a ``timeout`` that is not a number.
        """
        _check_time(timeout)
        with self._one:
            supervisor = self._supervisor
            if supervisor is None:
                self._closed = self._starting
        if supervisor is None:
            if self._closed and self._own_warm is not None:
                self._own_warm.close()
            return
        if supervisor.owner != os.getpid():
            return
        if not supervisor.ended:
            death = signal.SIGTERM if death_sig is None else signal.Signals(death_sig)
            if death == signal.SIGKILL or timeout <= 0:
                supervisor.kill()
            else:
                supervisor.stop(death, timeout)
        supervisor.join()
        try:
            if supervisor.not_started is None:
                if self._diary is not None:
                    self._diary.finish()
                self._tidy()
        finally:  # once more: another thread was the first to close, or a signal has interrupted it
            host_signals.release(supervisor)

    def __repr__(self) -> str:
        supervisor = self._supervisor
        state = "not started" if supervisor is None else supervisor.mirror.state.lower()
        return f"<{type(self).__name__} {self.name!r}, {state}, {self.nprocs} ranks>"

    def __del__(self) -> None:
        supervisor = getattr(self, "_supervisor", None)  # the constructor may have raised
        # Not a word to `os` for one that has ended: at the interpreter's end, modules are empty.
        if supervisor is not None and not supervisor.ended and supervisor.owner == os.getpid():
            supervisor.kill()  # first of all: what a signal handler raises here is lost, and ends this
            text = f"{self!r} was dropped, and is killed; close it"
            warnings.warn(text, ResourceWarning, source=self, stacklevel=1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def _plan(self, held: ExitStack) -> _Plan:
        """How to start the workers; refuses what cannot work. What is put into ``held`` is closed once they run."""

    @abstractmethod
    def _value(self, worker: Worker) -> Any:
        """What a worker that succeeded returned; raises when that cannot be known."""

    def _environment(self, rank: int) -> dict[bytes, bytes]:
        envs = self.envs[rank] | self._devices.get(rank, {}) | self._watched.get(rank, {})
        env = {os.fsencode(name): os.fsencode(value) for name, value in envs.items()}
        env[evidence.ERROR_FILE_ENV.encode()] = os.fsencode(self.logs.error_files[rank])
        return env

    def _spec(self, rank: int, path: str, argv: list[bytes], fds: list[int]) -> Spec:
        logs = self.logs
        env = self._environment(rank)
        if logs.stderrs[rank] and not isinstance(self.entrypoint, str):
            env[b"PHALANX_STDERR_LOGGED"] = b"1"
        streams = (logs.stdouts[rank] or None, logs.stderrs[rank] or None)
        bounds = (logs.max_size, logs.keep, logs.compress)
        return (rank, os.fsencode(path), argv, env, *streams, fds, bounds, self._placed.get(rank))

    def _watch(self, supervisor: Supervisor, undo: ExitStack) -> HangReport | None:
        """Make what reports on the workers' timers, if they are to be watched."""
        if self._timers is None:
            return None
        from phalanx._timers import group_timers

        # Events are kept where the log folder is the caller's, and not a temporary one.
        keep = getattr(self._logs_specs, "root_log_dir", None) is not None
        report, self._watched = group_timers.watch(
            self._timers, self.logs, self.envs, supervisor.say,
            keep=keep, stacks=getattr(self._logs_specs, "is_kept", True), speak=self._speak,
        )  # fmt: skip
        if report is not None:
            undo.callback(report.close)
        return report

    def _judge(self, supervisor: Supervisor) -> RunProcsResult:
        """Judge, for all threads that wait. If a signal interrupts this, the next thread goes on with what is there."""
        # A fork of the launcher has one thread, and none that would release the lock.
        with self._judging if supervisor.owner == os.getpid() else nullcontext():
            result = self._result
            if result is None:
                workers, leftovers = supervisor.mirror.workers.values(), supervisor.mirror.leftovers
                began = supervisor.mirror.began_ns
                result = collect(workers, self.logs, self.envs, self._value_once, leftovers, began)
                result = self._result = self._result or result
                if self._diary is not None:
                    self._diary.judged(result)
                for worker in workers:
                    worker.given.close()  # of those who failed after they had returned
            return result

    def _value_once(self, worker: Worker) -> Any:
        if worker.rank not in self._values:
            self._values[worker.rank] = self._value(worker)
        return self._values[worker.rank]

    def _started(self) -> Supervisor:
        if self._supervisor is None:
            msg = f"the group {self.name!r} has not been started"
            raise RuntimeError(msg)
        return self._supervisor


class MultiprocessContext(PContext):
    """A group whose workers run a function. ``start_method``: "spawn", "forkserver" or "fork".

    One that is ``numbered`` takes its local rank before its arguments, and what it returns is not kept. A ``daemon``
    may have no children by `multiprocessing`.
    """

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any],
        args: Mapping[int, tuple[Any, ...]],
        envs: Mapping[int, Mapping[str, str]],
        start_method: str,
        logs_specs: LogsSpecs,
        log_line_prefixes: Mapping[int, str] | None = None,
        *,
        numbered: bool = False,
        daemon: bool = False,
        preload: Sequence[str] | None = None,
        warm: Warm | None = None,
        writable: bool = False,
        main: str = IMPORT,
        **options: Any,
    ) -> None:
        super().__init__(name, entrypoint, args, envs, logs_specs, log_line_prefixes, **options)
        self.start_method = start_method
        self.daemon = daemon
        self._main = main
        self._family: Family | None = None
        self._sent: list[object] = []
        self._preload = preload
        self._warm = warm
        self._writable = writable
        self._numbered = numbered

    def _plan(self, held: ExitStack) -> _Plan:
        function, args = self.entrypoint, self.args
        assert callable(function)
        family = self._family = Family(self.start_method, self.nprocs, daemon=self.daemon)
        if self.start_method == "fork":
            from phalanx._engine.worker import function as function_worker

            collects = gc.isenabled()  # its guard and keeper have it off

            def call(rank: int, fds: list[int]) -> None:
                if collects:
                    gc.enable()
                function_worker.call(function, args[rank], rank, fds, family.member(rank), numbered=self._numbered)

            return _Plan({rank: ("", [], [0]) for rank in args}, call=call, fork=True)
        from phalanx._engine.pickling import payload

        main = main_module.source() if self._main == IMPORT else None
        packed = payload.pack(
            function, args, writable=self._writable, numbered=self._numbered, main=main, family=family,
            envs={rank: {**env, **self._devices.get(rank, {})} for rank, env in self.envs.items()},
        )  # fmt: skip
        held.callback(packed.close)
        self._sent = packed.sent
        given = [packed.memfd, *packed.fds]
        # The report socket is 0, the payload 1, what multiprocessing objects hold follows.
        fds = {rank: [0, 1, *(2 + index for index in packed.wanted[rank])] for rank in args}
        if self.start_method == "forkserver":
            forks: dict[int, tuple[str, list[bytes], list[int]]] = {rank: ("", [], fds[rank]) for rank in args}
            warm, own = choose(self._preload, self._warm, self.envs)
            self._own_warm = warm if own else None
            modules = _BY_VALUE if packed.by_value else _OF_FORKS
            return _Plan(forks, flags=interpreter_flags(), fork=True, modules=modules, fds=given, warm=warm)
        commands = {rank: (interpreter.executable(), self._argv(rank), fds[rank]) for rank in args}
        return _Plan(commands, fds=given)

    def process_name(self, rank: int) -> str:
        """What a worker is called, like ``"SpawnProcess-1"``. The group has been started."""
        assert self._family is not None
        return self._family.name(rank)

    def _argv(self, rank: int) -> list[bytes]:
        command = interpreter.command(
            interpreter_flags(), f"from phalanx._engine.worker.function import main;main({rank})"
        )
        return [os.fsencode(part) for part in command]

    def _value(self, worker: Worker) -> Any:
        if worker.result is None or self._numbered:  # it left by exit code 0 without returning; nobody wants a value
            return None
        if isinstance(worker.result, Exception):
            raise worker.result
        from phalanx._engine.pickling import results

        return results.load(worker.result, worker.given, self._sent)


class SubprocessContext(PContext):
    """A group whose workers are copies of a binary."""

    _begins_slowly = False

    def __init__(
        self,
        name: str,
        entrypoint: str,
        args: Mapping[int, tuple[Any, ...]],
        envs: Mapping[int, Mapping[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: Mapping[int, str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(name, entrypoint, args, envs, logs_specs, log_line_prefixes, **options)

    def _plan(self, held: ExitStack) -> _Plan:  # noqa: ARG002 - a binary needs nothing held
        name = str(self.entrypoint)
        commands: dict[int, tuple[str, list[bytes], list[int]]] = {}
        found: dict[str | None, str] = {}  # by PATH
        for rank, values in self.args.items():
            argv = [os.fsencode(value if isinstance(value, (str, bytes)) else str(value)) for value in (name, *values)]
            if any(b"\0" in value for value in argv):
                msg = f"args: rank {rank}: an argument of a binary cannot hold a null character"
                raise ValueError(msg)
            path = self.envs[rank].get("PATH")
            if path not in found:
                found[path] = _find_binary(name, rank, self.envs[rank])
            commands[rank] = (found[path], argv, [])
        return _Plan(commands)

    def _value(self, worker: Worker) -> Any:  # noqa: ARG002 - a binary returns nothing
        return None


class ScriptContext(SubprocessContext):
    """A group whose workers run a Python script, or a module, as an interpreter of their own would.

    Args:
        script: The script's path, or the module's name.
        module: Which of the two.
        python: The interpreter; default: this one.
        preload: Modules that are imported once, before: the workers are forks then, and ``python`` is this interpreter.
    """

    _begins_slowly = True

    def __init__(
        self,
        name: str,
        script: str,
        args: Mapping[int, tuple[Any, ...]],
        envs: Mapping[int, Mapping[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: Mapping[int, str] | None = None,
        *,
        module: bool = False,
        python: str | None = None,
        preload: Sequence[str] = (),
        warm: Warm | None = None,
        **options: Any,
    ) -> None:
        head: tuple[str, ...] = ("-m", script) if module else (script,)
        if not preload and warm is None:
            head = ("-u", script_module.__file__, *head)
        argv = {rank: (*head, *values) for rank, values in args.items()}
        super().__init__(name, python or interpreter.executable(), argv, envs, logs_specs, log_line_prefixes, **options)
        self._warm = warm
        if preload and warm is None:
            path = path_of(script, module=module)
            self._warm = self._own_warm = Warm(preload, path=path, flags=("-u",), env=shared(envs))

    def _plan(self, held: ExitStack) -> _Plan:
        if self._warm is None:
            return super()._plan(held)
        forks: dict[int, tuple[str, list[bytes], list[int]]] = {
            rank: ("", [os.fsencode(str(value)) for value in values], []) for rank, values in self.args.items()
        }
        return _Plan(forks, fork=True, warm=self._warm)


def _tidy(supervisor: Supervisor, logs: LogsDest, specs: LogsSpecs, warm: Warm | None = None) -> None:
    """Let go of what a closed, or dropped, group has in this process, and of files that nobody will look for."""
    if supervisor.owner != os.getpid():  # a fork of it, at its exit
        return
    try:
        host_signals.release(supervisor)
    finally:  # a signal may come in the midst of that
        if warm is not None:
            warm.close()
    if supervisor.done:
        supervisor.last_chore(lambda: _remove(logs, specs), TIDY)
    stderr.finish()


def _remove(logs: LogsDest, specs: LogsSpecs) -> None:
    for path in logs.error_files.values():
        evidence.remove_empty(path)
    specs.tidy(logs)


def _check_time(timeout: float | None) -> None:
    if timeout != timeout:  # noqa: PLR0124 - NaN, which would wait for ever
        msg = f"timeout: expected seconds, got {timeout!r}"
        raise ValueError(msg)


def _log(text: str) -> None:
    """Warn. Where nobody has set up logging, say it so that a stderr that nobody reads holds up no end of a program."""
    if "logging" in sys.modules:
        from logging import WARNING, getLogger

        logger = getLogger("phalanx")
        if logger.hasHandlers() or not logger.isEnabledFor(WARNING):
            logger.warning("%s", text)
            return
    from phalanx._base.stderr import tell

    tell(f"phalanx: {text}")


def interpreter_flags() -> list[str]:
    """The options (-O, -W, -X …) with which this interpreter runs, for another that should run alike."""
    return subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined, no-any-return]  # noqa: SLF001 - the standard library's own multiprocessing relies on it


def _find_binary(name: str, rank: int, env: Mapping[str, str]) -> str:
    """The file that a shell would run for ``name`` in the worker's environment."""
    if not name:
        raise ValueError("entrypoint: an empty string is not the name of a binary")
    search = env.get("PATH", os.environ.get("PATH", os.defpath))
    candidates = [name] if "/" in name else [os.path.join(part or ".", name) for part in search.split(os.pathsep)]
    found = [path for path in candidates if os.path.exists(path)]
    for path in found:
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    if not found:
        where = ""
        if "/" not in name:
            here = f"./{name} is here; " if os.path.isfile(name) else ""
            where = f"; {here}PATH of rank {rank}: {search}"
        msg = f"entrypoint: no such binary: {name!r}{where}"
        raise FileNotFoundError(msg)
    if os.path.isdir(found[0]):
        msg = f"entrypoint: {found[0]!r} is a folder, not a binary"
        raise IsADirectoryError(msg)
    msg = f"entrypoint: {found[0]!r} is not executable (chmod +x?)"
    raise PermissionError(msg)
