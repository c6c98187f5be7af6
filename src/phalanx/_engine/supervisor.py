"""The launcher's side of its group: start, stop, kill, and the group's thread, from its start to its end.

The keeper decides, and reports what happened, in order; `keeper_link` sends and receives, and `mirror` keeps it for
those who ask. This signals no process (`keeper` and `keeper_client` do), and does not know what a rank means to its
job. What may take long runs in other threads: the display, results (`result_receiver`), hang reports, and the caller's
own functions.
"""

from __future__ import annotations

import errno
import os
from functools import partial

from phalanx._base import interpreter, procfs, unpatched
from phalanx._base.loop import Loop
from phalanx._base.threads import Latch, SerialExecutor
from phalanx._engine import protocol, start_errors
from phalanx._engine.group_lines import GroupLines
from phalanx._engine.keeper_client import KeeperClient
from phalanx._engine.keeper_link import KeeperLink
from phalanx._engine.mirror import Mirror
from phalanx._engine.protocol import ANSWER_WAIT, DRAIN_WAIT, KILL_WAIT
from phalanx._engine.result_receiver import ResultReceiver
from phalanx._engine.start_errors import KeeperLostError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

    from phalanx._engine.forkserver import ForkServer
    from phalanx._engine.group_events import GroupEvents
    from phalanx._engine.mirror import RankStatus, WorkerRecord
    from phalanx._engine.stop_flag import StopFlag
    from phalanx._logs.pump import Pump
    from phalanx._timers.hang import RankSigns
    from phalanx._timers.hang_reporter import HangReporter

_SOON = 0.1  # seconds after which a group is one that goes on for a while

SOON = 1.0
"""Seconds for which the end of a group, or of its lines, is waited for before its failure is reported."""


class Supervisor:
    """A group of workers, from start to end. Every method may be called from any thread.

    ``settle``, ``grace``, ``linger`` and ``orphan_grace`` are seconds, see `PContext`; ``write_line`` takes lines of
    ours that the display cannot take, on a thread of its own.
    """

    def __init__(
        self,
        *,
        settle: float,
        grace: float,
        linger: float = 0.0,
        orphan_grace: float = 0.0,
        write_line: Callable[[str], None] | None = None,
    ) -> None:
        self.owner = os.getpid()  # a fork of it has no business with the group
        self.mirror = Mirror()
        self.gone = Latch()  # the outcome of every worker is known, and no process of theirs is left
        self.ended = Latch()  # and all that they wrote is shown, or what shows it was left alone
        self.done = Latch()  # and nothing of ours is left: keeper, thread, descriptors
        self.has_reported = False
        """Whether what `start` was given as ``failed`` has been called, or will be."""
        self.last_step: int | None = None
        """The highest step that a worker had reported, once all are gone; None: none had."""
        self._last_signs: dict[int, RankSigns] = {}  # once all are gone
        self.lines = GroupLines(write_line)
        self.hang_report: HangReporter | None = None
        """What writes down hangs; None: no timers are watched."""
        self._notice: StopFlag | None = None
        self._keeper = KeeperClient()
        self._loop = Loop()
        self._results = ResultReceiver(self._loop, self.mirror)
        # Plain numbers: `marshal` takes no subclass, and a NumPy float would arrive as bytes.
        policy = (float(settle), float(grace), float(linger))
        self._policy = (*policy, float(orphan_grace))
        self.link = KeeperLink(self._loop, self._keeper, self.mirror, self.lines, self._on_running, policy)
        self.mirror.on_leaving = self.link.on_leaving
        self._chores: Iterable[Callable[[], None]] = ()
        self._chored = SerialExecutor("phalanx-chores")
        self._thread: threading.Thread | None = None
        self._charge = [True]
        self._failed: Callable[[], None] | None = None

    # --- any thread

    def boot(
        self,
        flags: Sequence[str] = ("-I", "-S"),
        call: Callable[[int, list[int]], None] | None = None,
        fork_server: ForkServer | None = None,
    ) -> None:
        """Start the keeper. It is up in 10 ms: time to prepare what `start` needs. Then call `start`, or `abort`.

        ``flags`` are those of the keeper's interpreter; with ``call``, the keeper is a fork of this process instead;
        with ``fork_server``, of that one.
        """
        try:
            if fork_server is not None:
                self._keeper.fork_warm(fork_server)
            elif call is not None:
                self._keeper.fork(call, self._loop.close)
            else:
                self._keeper.exec(flags)
        except BlockingIOError as error:  # EAGAIN, whose text names no limit
            self.abort()
            raise OSError(
                error.errno, f"the group's keeper was not started: {start_errors.explain(errno.EAGAIN)}"
            ) from error
        except BaseException:
            self.abort()
            raise

    def start(
        self,
        specs: Sequence[protocol.Spec],
        fds: Sequence[int] = (),
        pump: Pump | None = None,
        chores: Iterable[Callable[[], None]] = (),
        *,
        fork: bool = False,
        modules: Sequence[str] = (),
        report: HangReporter | None = None,
        after: Latch | None = None,
        notice: StopFlag | None = None,
        lost_connection: Callable[[WorkerRecord], bool] | None = None,
        locate: Callable[[Callable[[], dict[int, int]]], dict[int, str]] | None = None,
        events: GroupEvents | None = None,
        failed: Callable[[], None] | None = None,
    ) -> None:
        """Order the start of all workers, and return: `wait_until_up` waits for it. Raises OSError, with none left.

        ``specs`` refer to ``fds`` by index, from 1 on. ``chores`` are called one after the other once the workers run,
        for as long as they do. ``modules`` are imported by the keeper before it forks, with ``fork``. Nothing is shown
        before ``after`` opens. ``notice`` is closed with the group. For ``lost_connection`` and ``locate`` see
        `KeeperLink`. ``failed`` is called once, on another thread, when a worker has failed, or the group's helpers
        were lost: when no process of the group is left, or before that if it takes long.
        """
        self.link.lost_connection, self.link.locate = lost_connection or self.link.lost_connection, locate
        self.link.on_thread = self._chored.submit
        self.link.events = events
        self._failed, self.link.failing = failed, partial(self._loop.after, SOON, self._report_failure)
        self._notice = notice
        self.link.notice = 0.0 if notice is None else notice.seconds
        self.hang_report = self.link.hang_report = report
        self._chores = chores
        try:
            self.lines.open(pump, after)
            self._send_order(specs, fds, fork=fork, modules=modules)
            self._thread = unpatched.thread(target=self._run, name="phalanx")
            self._thread.start()
        except RuntimeError as error:  # "can't start new thread"
            self.abort()
            if "shutdown" in str(error):  # from an exit handler: since Python 3.12 it is too late for threads then
                raise
            raise OSError(
                errno.EAGAIN, f"the group's thread was not started: {start_errors.explain(errno.EAGAIN)}"
            ) from error
        except BaseException:
            self.abort()
            raise

    def _send_order(
        self, specs: Sequence[protocol.Spec], fds: Sequence[int], *, fork: bool, modules: Sequence[str]
    ) -> None:
        theirs = self._results.open()
        try:
            # The report socket comes first: it is the one descriptor that every function worker needs.
            given = [theirs.fileno(), *fds]
            timers: tuple[Any, ...] | None = None
            if self.hang_report is not None:
                table = self.hang_report.table
                steps = [(name, float(wait)) for name, wait in self.hang_report.steps]
                timers = (len(given), len(given) + 1, *table.size, steps)
                given += table.descriptors
            notice = None
            if self._notice is not None:
                notice = int(self._notice.number), float(self._notice.seconds), len(given)
                given.append(self._notice.fd)
            order = protocol.start(
                fork,
                [(name, interpreter.folder_of(name)) for name in modules],
                self._keeper.marked.environment(),
                [spec.pack() for spec in specs],
                procfs.find_oom_counter(),
                self._policy,
                timers,
                notice,
            )
            self.link.open(order, given)
        finally:
            theirs.close()

    def wait_until_up(self) -> None:
        """Return when every worker runs, or raise, with none left, what went wrong: `not_started`."""
        self.link.up.wait()
        error = self.link.not_started
        if error is not None:
            self.done.wait()
            raise error

    def abort(self, why: BaseException | None = None) -> None:
        """Undo `boot` and `start`, however far they came. `wait_until_up` raises ``why``. Idempotent."""
        if self.link.start_error is None:
            self.link.start_error = why
        if self._take_charge():
            self._thread = None
            self._release()
            for latch in (self.link.up, self.gone, self.lines.shown, self.ended, self.done):
                latch.open()
        else:  # the group's thread releases everything
            self.kill()
            self.done.wait(KILL_WAIT)

    def _take_charge(self) -> bool:
        """Whether the caller has to release everything: the group's thread, unless `abort` was first.

        A signal handler of the host may raise while that thread is being started, whether it runs by then or not.
        """
        try:
            self._charge.pop()
        except IndexError:
            return False
        return True

    def stop(self, death_signal: int, grace: float) -> None:
        """Send ``death_signal`` to the live workers; SIGKILL follows after ``grace`` seconds. Returns at once.

        If the group gives notice, and none has been given yet, that comes before, with its own time.
        """
        number, seconds = int(death_signal), float(grace)

        def stop() -> None:
            self.link.grace = seconds
            self.link.send_end(protocol.stop(number, seconds))
            self.link.watchdog.expect(seconds + KILL_WAIT)

        self._loop.call(stop)

    def set_grace(self, grace: float) -> None:
        """Let a failure stop the others within ``grace`` seconds. A grace period that runs can only become shorter."""
        seconds = float(grace)

        def set_grace() -> None:
            self.link.grace = seconds
            self.link.send(protocol.set_grace(seconds))

        self._loop.call(set_grace)

    def expect(self, seconds: float) -> None:
        """Have the keeper stop the group, unless this is called again within so many seconds. Returns at once."""
        self._loop.call(partial(self.link.send, protocol.expect(float(seconds))))

    def send(self, rank: int, number: int) -> None:
        """Send a signal to one worker. It is no stop: how the worker ends then is its own end. Returns at once."""
        self._loop.call(partial(self.link.send, protocol.signal_worker(int(rank), int(number))))

    def pause(self, *, is_on: bool) -> None:
        """Have the keeper pause the group, or continue it. Returns at once."""
        self.mirror.pause_ordered = is_on
        self._loop.call(partial(self.link.send, protocol.pause(is_on)))

    def status(self) -> dict[int, RankStatus]:
        """Return what each worker does just now, by rank, as far as it is known here."""
        report = self.hang_report if self.owner == os.getpid() else None
        return self.mirror.status(self._last_signs if report is None or self.gone else report.signs())

    def kill(self) -> None:
        """Kill every process of the group. Returns at once."""
        self._loop.call(self.link.kill)

    def join(self) -> None:
        """Wait until nothing of the group is left in this process; not in the group's own thread."""
        if unpatched.is_current(self._thread):  # the garbage collector has run a `__del__` of the host in it
            return
        self.done.wait()
        if self._thread is not None:
            self._thread.join()  # it has nothing left to do

    def last_chore(self, chore: Callable[[], None], seconds: float) -> None:
        """Call ``chore`` after those of `start`, one of which a disk may hold up. Waits ``seconds`` at most."""
        if not self._chored.submit(chore):  # no thread can be started, at the interpreter's end
            chore()
        self._chored.drain(seconds)

    # --- the group's thread

    def _run(self) -> None:
        if not self._take_charge():
            return
        try:
            self._loop.run()
        except BaseException as error:  # noqa: BLE001 - an error of ours: the group must not outlive its supervisor
            if not self.link.up:
                self.link.start_error = error
            self.link.keeper_error = error_of = self.link.keeper_error or KeeperLostError(
                f"the group's supervisor failed: {error!r}"
            )
            error_of.__cause__ = error
            guarded(self._close_keeper)  # before any latch opens
        finally:
            guarded(self._finish_threads)
            self.link.up.open()
            self.mirror.close()
            events = self.link.events
            if events is not None:
                events.gone(self.mirror, self.link.not_started, self.link.lost)
            if self.link.not_started is None:
                guarded(partial(self._report_failure, is_over=True))
            self.gone.open()
            guarded(self.lines.finish)
            if events is not None:
                events.wait_for_users(self.lines.announce)
            self.lines.shown.open()
            self.ended.open()
            try:
                self._release()
            finally:  # whatever could not be released, no `wait` may last for ever
                self.done.open()

    def _on_running(self) -> None:
        self._submit(self._do_chores)  # on a thread of its own: they may take a disk
        self._loop.after(_SOON, partial(self._submit, load_for_end))
        report = self.hang_report
        if report is not None and report.hang_timeout is not None:
            self._loop.after(report.hang_timeout, partial(self._submit, report.show_unwatched))

    def _report_failure(self, *, is_over: bool = False) -> None:
        """Call what was given as ``failed``, unless it has been called, or all is well."""
        failed = self._failed
        if is_over:  # a worker that we had stopped may have failed before
            self._failed = None
            due = self.link.keeper_error is not None or any(not one.ended_well for one in self.mirror.workers.values())
        else:
            due = any(worker.failed for worker in self.mirror.workers.values())
        if failed is not None and due and not self.has_reported:
            self.has_reported = True
            self.lines.call_after_lines(failed, SOON if is_over else 0.0)

    def _submit(self, chore: Callable[[], None]) -> None:
        self._chored.submit(chore)

    def _do_chores(self) -> None:
        for chore in self._chores:
            if self.link.ended:
                return
            chore()

    def _release(self) -> None:
        """Release every descriptor and process: the keeper first, for its end ends the workers."""
        steps = [self._close_keeper, self.lines.close, self._results.close, self._loop.close]
        steps[1:1] = [part.close for part in (self._notice, self.hang_report) if part is not None]
        for step in steps:
            guarded(step)

    def _close_keeper(self) -> None:
        self._keeper.close(KILL_WAIT + DRAIN_WAIT + ANSWER_WAIT, self.link.log_writer)

    def _finish_threads(self) -> None:
        """Take the last results, and wait for what other threads write down, unless it takes too long."""
        self._results.finish()
        self._chored.drain(ANSWER_WAIT)
        self._results.finish_threads()
        if self.hang_report is not None:
            from phalanx._timers import hang_reporter

            # On a thread: it writes to the host's logging, which may block.
            executor = SerialExecutor("phalanx-report")
            if not executor.submit(self.hang_report.finish):
                self.hang_report.finish()
            executor.drain(2 * hang_reporter.FINISH + ANSWER_WAIT)
            self.last_step, self._last_signs = self.hang_report.table.last_step(), self.hang_report.signs()
            self.mirror.note_hangs(self.hang_report.unwritten, self.hang_report.hung)


def guarded(step: Callable[[], object]) -> None:
    """Do one of several steps: a failed one must not keep the others from being tried."""
    try:
        step()
    except Exception as error:  # noqa: BLE001 - see above
        from phalanx._base.stderr import mention

        mention(f"phalanx: at the end of a group: {error!r}")


def load_for_end() -> None:
    """Import what the end needs: a disk may not answer then."""
    from phalanx._base import stderr  # noqa: F401 - see above
