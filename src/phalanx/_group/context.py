"""A group of processes as its owner holds it: it starts, is waited for and closed as one, and has a result.

Owns the order of the steps of a start, which signals do not interrupt at the wrong moment, and the undoing of all of
them when one fails. `_engine` starts and stops the processes; `_outcomes` derives the result from how they ended.
"""

from __future__ import annotations

import os
import signal
import warnings
import weakref
from _thread import allocate_lock
from abc import ABC, abstractmethod
from contextlib import ExitStack
from functools import partial

from phalanx._base import interrupts, linux, unpatched
from phalanx._base.stderr import warn
from phalanx._base.text import how_many
from phalanx._engine import host_signals, main_module
from phalanx._engine.supervisor import Supervisor
from phalanx._evidence.cleanup import remove_old
from phalanx._group import observers
from phalanx._group.arguments import (
    GRACE,
    SETTLE,
    check_ranks,
    check_signal,
    check_timeout,
    checked_listener,
    checked_notice,
)
from phalanx._group.ending import EndFd, FirstFailure, opened, release
from phalanx._group.plan import GroupOptions, Places, Plan, worker_specs
from phalanx._logs.console import ConsoleSpecs
from phalanx._logs.layout import LogsDest, checked_dest, missing_folders
from phalanx._logs.prefixes import template_or_default
from phalanx._outcomes.result import lost_connection

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any, Literal, NoReturn, Self, overload

    from phalanx._base.threads import Latch
    from phalanx._engine.forkserver import ForkServer
    from phalanx._engine.group_events import GroupEvents
    from phalanx._engine.mirror import RankStatus, WorkerRecord
    from phalanx._events.stream import EventStream
    from phalanx._group.warm import Warm
    from phalanx._logs.specs import LogsSpecs
    from phalanx._outcomes.result import RunProcsResult
    from phalanx._placement.placement import Placement
    from phalanx._timers.hang_reporter import HangReporter
    from phalanx._timers.specs import TimerSpecs

_CLOSED_EARLY = "the group %r was closed while it was starting"


class PContext(ABC):
    """A group of processes that is started, waited for and closed as one. `start_processes` returns a started one.

    It is a context manager: leaving it closes the group. Each method may be called from any thread. If the last
    reference to a running group goes, the group is killed, with a ResourceWarning.

    Args:
        name: What the group is called, in reports.
        entrypoint: A callable, or the name or path of a binary.
        args: The positional arguments of each local rank.
        envs: The environment variables of each local rank, on top of the caller's.
        logs_specs: Where output goes.
        log_line_prefixes: What stands before each teed line of a rank; default ``[rank] ``.
        duplicate_stdout_filters: See `start_processes`.
        duplicate_stderr_filters: The same for stderr.
        settle: Seconds after the first failure before the others are stopped: see `start_processes`, as below.
        grace: Seconds between SIGTERM and SIGKILL when a failure stops the others.
        linger: Seconds for which processes that workers left behind may go on when every worker has succeeded.
        orphan_grace: Seconds between SIGTERM and SIGKILL when this process dies without closing the group.
        notice: A signal's number and seconds (> 0), with which a planned stop begins, see `close`.
        console: How the console shows what is teed.
        placement: Where the workers run, and within which bounds.
        timers: How timers and heartbeats of the workers are watched.
        stdin: Local rank → the descriptor that becomes the stdin of its worker; default: each worker's is /dev/null. A
            terminal has no job control in a worker, whose session is another one: it reads as if in the foreground.
        record: Whether ``run.json`` in the run's folder says what becomes of the group, for ``phalanx runs``, ``logs``
            and ``stack``. The logs specs are `DefaultLogsSpecs` with a folder then.
        signals: Whether signals to this process raise `SignalException` while the group is open. Else they do what
            they did before; only a SIGINT that arrives during the start has to wait until the group can be closed.
        follows: A group whose lines are shown before this one's: the attempt before. It need not have ended.
        announces: Whether a failure is logged, as one ERROR of the logger ``phalanx``, when the first one is known.
        speak: Called with each line that the group has to say, for which it has no other place; default: the logger
            ``phalanx``.
        on_reader_gone: Called with "stdout" or "stderr" when nobody reads that any more (``| head``), which ends
            nothing: on the thread that shows lines, once for each.
        on_event: See `start_processes`.
        events: The stream of a run of which this group is an attempt: it gets the group's events. ``record``,
            ``on_event`` and that of ``timers`` have no effect then. Default: a stream of its own, if one of these is
            given.

    Attributes:
        nprocs: How many workers the group has.
        logs: Where output goes, as of `start`.
        notice: The notice of a planned stop; None: there is none.
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
        follows: PContext | None = None,
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
        self.notice = checked_notice(notice)
        self._options = GroupOptions(
            announces=announces, events=events, grace=grace, linger=linger, logs_specs=logs_specs,
            filters={"stdout": duplicate_stdout_filters, "stderr": duplicate_stderr_filters},
            on_event=checked_listener(on_event), on_reader_gone=on_reader_gone, orphan_grace=orphan_grace,
            placement=placement, record=record, settle=settle, signals=signals, speak=speak, stdin=dict(stdin or {}),
            timers=timers,
        )  # fmt: skip
        self._places = Places()
        before = None if follows is None else follows._supervisor  # noqa: SLF001 - of the same class
        self._after: Latch | None = None  # opens when this one's lines may be shown
        if follows is not None:  # one that was not started has no lines, and may follow another
            self._after = follows._after if before is None else before.lines.shown  # noqa: SLF001 - as above
        self._end_fd: EndFd | None = None  # once `_is_closed`, there will be none any more
        self._events: GroupEvents | None = None
        self._first_failure: FirstFailure | None = None
        self._own_warm: Warm | None = None
        self._supervisor: Supervisor | None = None
        self._starting = self._closed = self._is_closed = False
        self._one = allocate_lock()

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
        if self._options.signals:
            with host_signals.delivering():  # raises for a signal that came earlier and was not raised
                pass
        with self._one:
            if self._supervisor is not None or self._starting:
                raise RuntimeError(f"the group {self.name!r} has been started before")
            self._starting, self._closed = True, False
        try:
            self._start()
        finally:
            self._starting = False
        supervisor = self._started()
        try:
            supervisor.wait_until_up()  # a signal ends this wait at once, and the group is open
        except BaseException as error:
            if error is supervisor.link.not_started:
                self._tidy()
                self._supervisor = None
            raise

    def _start(self) -> None:
        options, envs = self._options, self.envs
        unpatched.check()
        template_or_default(self.console.template)  # refuses a bad template before anything is made
        self._places = Places(options.placement, envs)
        if self._places.warning:
            warnings.warn(self._places.warning, RuntimeWarning, stacklevel=4)  # the frame that called start_processes
        with ExitStack() as held, ExitStack() as undo:
            hold = interrupts.deferred if options.signals else host_signals.postpone
            with hold():
                for fd in linux.occupy_standard_descriptors():
                    held.callback(os.close, fd)
                plan = self._plan(held)
                supervisor = Supervisor(
                    settle=options.settle, grace=options.grace, linger=options.linger,
                    orphan_grace=options.orphan_grace, write_line=options.speak or warn,
                )  # fmt: skip
                undo.callback(lambda: release(supervisor, self.logs, options.logs_specs))
                undo.callback(supervisor.abort)
                if options.signals:
                    host_signals.acquire(supervisor)
                if plan.warm is None:
                    supervisor.boot(plan.flags, plan.call)  # it starts while this goes on
                else:
                    plan.warm.begin()  # it imports while this goes on
                    if self._own_warm is not None:
                        undo.callback(self._own_warm.close)
            options.logs_specs.folders_can_wait = self._begins_slowly
            with hold():  # else there would be a folder of a run without a record
                logs = self.logs = checked_dest(options.logs_specs.reify(envs), envs, options.logs_specs)
                remove_old(logs.error_files.values())
                events = self._events = observers.begin_events(self.name, envs, logs, options, supervisor, undo)
            first = self._first_failure = FirstFailure(self.name, supervisor, logs, envs, options)
            report, watched = observers.watch_timers(envs, logs, options, supervisor, undo)
            stop_flag, stop_page = observers.make_stop_flag(self.notice, undo)
            more = {rank: watched.get(rank, {}) | stop_page for rank in envs}
            specs, files = worker_specs(
                plan, logs, self._places, envs, more, options.stdin, is_function=not isinstance(self.entrypoint, str),
                prints_failures=self._prints_failures,
            )  # fmt: skip
            fork_server = self._warmed(plan.warm)
            with hold():  # no signal handler runs between the start of a process and its recording
                if fork_server is not None:
                    supervisor.boot(fork_server=fork_server)
                undo.callback(setattr, self, "_supervisor", None)
                with self._one:
                    if self._closed:
                        raise RuntimeError(_CLOSED_EARLY % self.name)
                    self._supervisor = supervisor  # from now on, `close` closes it
                supervisor.start(
                    specs, [*plan.fds, *files],
                    observers.make_pump(logs, envs, self.log_line_prefixes, self.console, options),
                    missing_folders(logs), fork=plan.fork, modules=plan.modules, report=report, after=self._after,
                    notice=stop_flag, events=events, failed=first.announce if first.announces else None,
                    lost_connection=partial(lost_connection, logs=logs),
                    locate=partial(observers.locate, logs.error_files),
                )  # fmt: skip
                # Called by `close`, or when the last reference goes; not by `wait`, which needs the result alone.
                self._tidy = weakref.finalize(
                    self, release, supervisor, logs, options.logs_specs, self._own_warm, events, first
                )
                undo.pop_all()

    def _warmed(self, warm: Warm | None) -> ForkServer | None:
        """Wait until all is imported. Raises PreloadError; RuntimeError if the group is closed meanwhile."""
        try:
            return None if warm is None else warm.wait()
        finally:
            if self._closed:
                raise RuntimeError(_CLOSED_EARLY % self.name) from None

    @abstractmethod
    def _plan(self, held: ExitStack) -> Plan:
        """Plan the start of the workers; refuse what cannot work. ``held`` is closed once the workers run."""

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
        check_timeout(timeout)
        return self._wait(self._started().ended, timeout)

    def wait_gone(self, timeout: float | None = -1) -> RunProcsResult | None:
        """Wait as `wait` does, but only until no process of the group is left: its last lines may not be shown yet.

        A slow terminal can keep `wait` for 10 s longer. Returns and raises what `wait` does.

        Args:
            timeout: Seconds; 0 asks without blocking; negative or None waits for ever.
        """
        check_timeout(timeout)
        return self._wait(self._started().gone, timeout)

    async def wait_async(self) -> RunProcsResult:
        """Wait as `wait` does, in a task of `asyncio`: the event loop goes on meanwhile.

        A task that is cancelled waits no more; the group goes on. Raises as `wait`.

        SIGINT: if the group was started before ``asyncio.run``, SignalException leaves that. A group that is started
        inside is better given ``signals=False``: asyncio cancels its main task then, and raises KeyboardInterrupt.

        >>> import asyncio
        >>> from phalanx.multiprocessing import start_processes
        >>> async def main():
        ...     with start_processes("double", lambda x: 2 * x, {0: (1,), 1: (2,)}, {0: {}, 1: {}}) as group:
        ...         return await group.wait_async()
        >>> asyncio.run(main()).return_values
        {0: 2, 1: 4}
        """
        await opened(self._started().ended)
        return self.wait()

    def fileno(self) -> int:
        """Return a descriptor that is readable once the group has ended, for `select` and other event loops.

        It belongs to the group: nothing should be read from it, and `close` closes it. A SignalException out of another
        loop's wait is raised once more by the next `wait`: it may have been swallowed meanwhile. Raises RuntimeError if
        the group has not been started or has been closed, OSError if no descriptor is left.
        """
        supervisor = self._started()
        with self._one:
            if self._end_fd is None and not self._is_closed:
                self._end_fd = EndFd()
                supervisor.ended.then(self._end_fd.ring)
        if self._end_fd is None or self._end_fd.fileno() < 0:
            raise RuntimeError(f"the group {self.name!r} has been closed")
        return self._end_fd.fileno()

    def _wait(self, end: Latch, timeout: float | None) -> RunProcsResult | None:
        supervisor = self._started()
        if supervisor.owner != os.getpid() and not end:
            msg = f"the group {self.name!r} is not this process's: a fork of the one that started it hears nothing"
            raise RuntimeError(msg)
        with host_signals.delivering():
            if not end.wait(-1 if timeout is None or timeout < 0 else timeout):
                return None
        if supervisor.ended:
            host_signals.release(supervisor)
        if supervisor.link.not_started is not None:
            msg = f"the group {self.name!r} was not started: {supervisor.link.not_started}"
            raise RuntimeError(msg) from supervisor.link.not_started
        with host_signals.delivering():
            assert self._first_failure is not None  # as of the start
            result = self._first_failure.judge(self._value, self._events)
        if (lost := supervisor.link.lost) is not None:
            lost.failures = result.failures
            raise lost
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
        """Show the line ``text`` on the console, between lines of the workers. Return whether that is possible."""
        return self._supervisor is not None and self._supervisor.lines.say(text)

    def say_before(self, text: str) -> bool:
        """Show the line ``text`` before those of the workers: for `when_shown` of the group that this one follows.

        Return whether that is possible.
        """
        return self._supervisor is not None and self._supervisor.lines.say_before(text)

    @property
    def is_open(self) -> bool:
        """Whether the group has been started, and has not ended."""
        return self._supervisor is not None and not self._supervisor.ended

    def pids(self) -> dict[int, int]:
        """The process id of each local rank."""
        return {rank: worker.pid for rank, worker in sorted(self._started().mirror.workers.items())}

    def close(self, death_sig: signal.Signals | int | None = None, timeout: float = GRACE) -> None:
        """End the group: send ``death_sig``, wait for the grace period, send SIGKILL to what is left.

        With the option ``notice``, that precedes it, unless a worker has failed by itself before, ``death_sig`` is
        SIGKILL, or this is called again meanwhile.

        Returns when no process of the group is left, grandchildren and daemons included. A process that outlives
        SIGKILL (uninterruptible sleep) is abandoned after 10 s, and its rank's outcome says so.

        It may be called again. While another call is under way, it sends its signal too, and can only shorten the
        grace. While another thread is in `start`, that raises RuntimeError, or the group ends as soon as it has
        started. In a fork of the process that started the group, it does nothing.

        Args:
            death_sig: The first signal; default: SIGTERM.
            timeout: The grace period in seconds; 0 or less: SIGKILL at once, or after the notice.

        Raises:
            ValueError: ``death_sig`` is no signal, or ``timeout`` is not a number.
        """
        check_timeout(timeout)
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
        self.order_close(death_sig, timeout)
        supervisor.join()
        try:
            if supervisor.link.not_started is None:
                if self._events is not None:
                    self._events.close(supervisor.lines.announce)
                self._tidy()
        finally:  # again: another thread closed first, or a signal handler has raised
            host_signals.release(supervisor)
            with self._one:
                self._is_closed, end_fd = True, self._end_fd
            if end_fd is not None:
                end_fd.close()

    def order_close(self, death_sig: signal.Signals | int | None = None, timeout: float = GRACE) -> None:
        """Order the end of the group, as `close` does, and return at once. `wait` tells when it has ended.

        A group that is not open is left as it is.

        Args:
            death_sig: See `close`.
            timeout: See `close`.

        Raises:
            ValueError: As `close`.
        """
        check_timeout(timeout)
        death = signal.SIGTERM if death_sig is None else check_signal("death_sig", death_sig)
        supervisor = self._open()
        if supervisor is None:
            return
        if death == signal.SIGKILL or (timeout <= 0 and self.notice is None):
            supervisor.kill()
        else:
            supervisor.stop(death, max(0.0, timeout))

    def expect(self, seconds: float) -> None:
        """Have the group stopped, as by `order_close`, unless this is called again within so many seconds.

        The keeper does it, though this process is stopped (SIGSTOP) by then. A group that is not open is left as it is.
        """
        if (supervisor := self._open()) is not None:
            supervisor.expect(seconds)

    def status(self) -> dict[int, RankStatus]:
        """Return what each worker does just now, by local rank: see `RankStatus`; nothing before the start."""
        return {} if self._supervisor is None else self._supervisor.status()

    def signal(self, number: signal.Signals | int, ranks: Iterable[int] | None = None) -> None:
        """Send a signal to workers that run. It is no stop: how a worker ends then is its own end.

        Returns at once. A group that is not open is left as it is.

        Args:
            number: The signal.
            ranks: The local ranks of those that get it; None: all.

        Raises:
            ValueError: ``number`` is no signal, or the group has no such rank.
        """
        number = check_signal("number", number)
        chosen = check_ranks(self.envs if ranks is None else ranks, self.envs)
        supervisor = self._open()
        if supervisor is not None:
            for rank in chosen:  # the keeper knows who runs; here, who has just started is not known yet
                supervisor.send(rank, number)

    def pause(self) -> None:
        """Stop all processes of the group (SIGSTOP) until `resume`, or until the group is ended.

        All deadlines of timers and heartbeats are later by the length of the pause. What a worker has started is
        stopped as far as ``/proc`` shows it. Returns at once; the event ``group.paused`` comes when the keeper has
        done it. A group that does not run is left as it is.
        """
        if (supervisor := self._open()) is not None:
            supervisor.pause(is_on=True)

    def resume(self) -> None:
        """Continue all processes of a paused group (SIGCONT). Returns at once. Another group is left as it is."""
        if (supervisor := self._open()) is not None:
            supervisor.pause(is_on=False)

    @property
    def is_paused(self) -> bool:
        """Whether the group is paused, or about to be."""
        return self._supervisor is not None and self._supervisor.mirror.is_paused

    def take_stacks(self, seconds: float, then: Callable[[], None]) -> None:
        """Have the stacks of all workers written, as when one hangs, in ``seconds`` at most; then call ``then``, once.

        Returns at once; ``then`` is called on another thread, or here if timers are not watched or the group is gone.
        """
        supervisor = self._supervisor
        report = None if supervisor is None or supervisor.gone else supervisor.hang_report
        if supervisor is None or report is None:
            then()
        else:
            report.look(supervisor.mirror.alive, supervisor.mirror.ended, seconds, then)

    @property
    def alive(self) -> dict[int, int]:
        """The pids of the workers that run, by local rank; none before the start."""
        return {} if self._supervisor is None else self._supervisor.mirror.alive

    @property
    def hang_report(self) -> HangReporter | None:
        """What reports on the timers of the group; None: they are not watched, or it was not started."""
        return None if self._supervisor is None else self._supervisor.hang_report

    def when_gone(self, action: Callable[[], None]) -> None:
        """Call ``action`` once no process of the group is left, on another thread; at once, here, if that is so.

        It must not raise, and not take long. Raises RuntimeError if the group has not been started.
        """
        self._started().gone.then(action)

    def when_shown(self, action: Callable[[], None]) -> None:
        """Call ``action`` likewise, once all lines of the workers are shown, or what shows them was left alone."""
        self._started().lines.shown.then(action)

    @property
    def last_step(self) -> int | None:
        """The highest step that a rank had reported by `phalanx.timer.progress` when the group was gone; None: none."""
        return None if self._supervisor is None else self._supervisor.last_step

    def __repr__(self) -> str:
        supervisor = self._supervisor
        state = "not started" if supervisor is None else supervisor.mirror.state.lower()
        return f"<{type(self).__name__} {self.name!r}, {state}, {how_many(self.nprocs, 'rank')}>"

    def __del__(self) -> None:
        supervisor = getattr(self, "_supervisor", None)  # the constructor may have raised
        # `os` is not used for a group that has ended: at the interpreter's end, modules are empty.
        if supervisor is not None and not supervisor.gone and supervisor.owner == os.getpid():
            try:
                text = f"{self!r} was dropped, and is killed; close it"  # as it is before the kill
            finally:  # an exception of a signal handler ends this method, and is lost
                supervisor.kill()
            warnings.warn(text, ResourceWarning, source=self, stacklevel=1)

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        raise TypeError("a group of processes cannot be copied, nor pickled: there would be two to close it")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _value(self, worker: WorkerRecord) -> Any:  # noqa: ARG002 - a program returns nothing
        """Return the value of a worker that succeeded. Raises if it cannot be read."""
        return None

    def _open(self) -> Supervisor | None:
        """Return what supervises the workers; None: none is left, none was started, or another process's are they."""
        supervisor = self._supervisor
        is_open = supervisor is not None and not supervisor.gone and supervisor.owner == os.getpid()
        return supervisor if is_open else None

    def _started(self) -> Supervisor:
        if self._supervisor is None:
            raise RuntimeError(f"the group {self.name!r} has not been started")
        return self._supervisor
