"""A started group as its owner holds it: wait, pids, close, and the result.

`_engine` starts and stops the processes; `_outcomes` derives the result from how they ended.
"""

from __future__ import annotations

import os
import signal
import warnings
from abc import abstractmethod
from contextlib import nullcontext, suppress

from phalanx._base.rank_ranges import how_many
from phalanx._engine import host_signals
from phalanx._group.arguments import GRACE, check_signal, check_timeout
from phalanx._group.end_fd import EndFd
from phalanx._group.start import GroupStart
from phalanx._outcomes.result import collect, failures_of, verdict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any, Literal, NoReturn, Self, overload

    from phalanx._base.latch import Latch
    from phalanx._engine.mirror import WorkerRecord
    from phalanx._engine.supervisor import Supervisor
    from phalanx._outcomes.result import RunProcsResult
    from phalanx._timers.hang_reporter import HangReporter


class PContext(GroupStart):
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
        duplicate_stdout_filters: Strings; lines of stdout that hold one are also written to a file of all ranks.
        duplicate_stderr_filters: The same for stderr.
        settle: Seconds after the first failure before the others are stopped (default 0.03; at least 1 after a lost
            connection, unless it is 0).
        grace: Seconds between SIGTERM and SIGKILL when a failure stops the others (default 30).
        linger: Seconds for which processes that workers left behind may go on when every worker has succeeded
            (default 0). After that they are ended, and it is said which, and whose they were.
        orphan_grace: When this process is killed, or exits without closing the group: seconds between the SIGTERM that
            every worker gets then and SIGKILL (default 0: SIGKILL at once).
        notice: A signal's number and seconds (> 0), with which a planned stop begins: the workers that handle the
            signal get it, `phalanx.should_stop` turns true in all of them, and they have so long before the death
            signal. Default: none. See `close`.
        console: How the console shows what is teed.
        placement: Where the workers run, and within which bounds; default: as the caller.
        timers: How timers and heartbeats of the workers are watched; default: not at all.
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
        import asyncio

        loop = asyncio.get_running_loop()
        over = asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(over.set)

        ended = self._started().ended
        ended.then(wake)
        try:
            await over.wait()
        finally:
            ended.forget(wake)
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
            msg = f"the group {self.name!r} has been closed"
            raise RuntimeError(msg)
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
        if supervisor.not_started is not None:
            msg = f"the group {self.name!r} was not started: {supervisor.not_started}"
            raise RuntimeError(msg) from supervisor.not_started
        with host_signals.delivering():
            result = self._result or self._judge(supervisor)
        if supervisor.keeper_error is not None and not supervisor.result_stands:
            supervisor.keeper_error.failures = result.failures
            raise supervisor.keeper_error
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
        return self._supervisor is not None and self._supervisor.say(text)

    def say_before(self, text: str) -> bool:
        """Show the line ``text`` before those of the workers: for `when_shown` of the group that this one follows.

        Return whether that is possible.
        """
        return self._supervisor is not None and self._supervisor.say_before(text)

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
            if supervisor.not_started is None:
                if self._events is not None:
                    self._events.close(supervisor.announce)
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
        supervisor = self._supervisor
        if supervisor is None or supervisor.gone or supervisor.owner != os.getpid():
            return
        if death == signal.SIGKILL or (timeout <= 0 and self.notice is None):
            supervisor.kill()
        else:
            supervisor.stop(death, max(0.0, timeout))

    def expect(self, seconds: float) -> None:
        """Have the group stopped, as by `order_close`, unless this is called again within so many seconds.

        The keeper does it, though this process is stopped (SIGSTOP) by then. A group that is not open is left as it is.
        """
        supervisor = self._supervisor
        if supervisor is not None and not supervisor.gone and supervisor.owner == os.getpid():
            supervisor.expect(seconds)

    def signal(self, number: signal.Signals | int) -> None:
        """Send a signal to every worker that runs. It is no stop: how a worker ends then is its own end.

        Returns at once. A group that is not open is left as it is. Raises ValueError if ``number`` is no signal.
        """
        number = check_signal("number", number)
        supervisor = self._supervisor
        if supervisor is not None and not supervisor.gone and supervisor.owner == os.getpid():
            for rank in self.envs:  # the keeper knows who runs; here, who has just started is not known yet
                supervisor.send(rank, number)

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
        self._started().shown.then(action)

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
        msg = "a group of processes cannot be copied, nor pickled: there would be two to close it"
        raise TypeError(msg)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def _value(self, worker: WorkerRecord) -> Any:
        """Return the value of a worker that succeeded. Raises if it cannot be read."""

    def _judge(self, supervisor: Supervisor) -> RunProcsResult:
        """Collect the result, once for all threads that wait. If a signal interrupts this, the next one goes on."""
        # In a fork of the launcher no other thread exists that could release the lock.
        with self._judging if supervisor.owner == os.getpid() else nullcontext():
            result = self._result
            if result is None:
                workers, leftovers = supervisor.mirror.workers.values(), supervisor.mirror.leftovers
                began = supervisor.mirror.began_ns
                first, is_ours = self._first_failure, supervisor.owner == os.getpid()
                assert first is not None  # as of the start
                # In a fork, the lock of the failures may be taken for ever.
                found = first.found() if is_ours else failures_of(workers, self.logs, self.envs)
                result = collect(
                    workers, self.logs, found, self._value_once, leftovers, began,
                    name=self.name, log_dir=first.folder,
                )  # fmt: skip
                result = self._result = self._result or result
                if self._events is not None:
                    lost = None if supervisor.result_stands else supervisor.keeper_error
                    self._events.ended(result.state, *verdict(result), result, lost)
                for worker in workers:
                    worker.received_fds.close()  # of workers that failed after they had returned
                if is_ours:
                    first.note(result)
            return result

    def _value_once(self, worker: WorkerRecord) -> Any:
        if worker.rank not in self._values:
            self._values[worker.rank] = self._value(worker)
        return self._values[worker.rank]

    def _started(self) -> Supervisor:
        if self._supervisor is None:
            msg = f"the group {self.name!r} has not been started"
            raise RuntimeError(msg)
        return self._supervisor
