"""The launcher's side of its group. Owns the group's thread: it hears the keeper, and passes wishes on to it.

The keeper decides, and says what happened, in order; `mirror` keeps that for those who ask. This touches no process
(`keeper` and `launch` do), and does not know what a rank means to its job. What may take any time is not done in its
thread: lines are shown by the `display`, hangs are written down, and the caller's own functions called, `aside`.
"""

from __future__ import annotations

import errno
import os
import threading
from contextlib import suppress
from functools import partial

from phalanx._base import channels, clock, interpreter, procfs
from phalanx._base.background import SerialExecutor
from phalanx._base.latch import Latch
from phalanx._base.loop import READ, WRITE, Loop
from phalanx._base.process import Process
from phalanx._engine import start_errors, worker_messages
from phalanx._engine.keeper_client import Launch
from phalanx._engine.lifecycle import DRAIN_WAIT, KILL_WAIT
from phalanx._engine.mirror import Mirror
from phalanx._engine.silent_keeper import SILENCE, Silence
from phalanx._engine.start_errors import KeeperLostError
from phalanx._engine.worker import mp_child

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

    from phalanx._engine.forkserver import Zygote
    from phalanx._engine.keeper.children import Report
    from phalanx._engine.keeper.orphans import Entry
    from phalanx._engine.keeper.start_process import Spec
    from phalanx._logs.display import Shown
    from phalanx._logs.pump import Pump
    from phalanx._timers.hang_reporter import HangReporter

START_WAIT = 300.0
"""Seconds in which the keeper has to get up and start all workers, on however slow a machine or file system."""


_ASKING = 32  # workers that wait for the resource tracker, each with a descriptor of ours
_LAST = 1 << 20  # packets that are taken at the end, when workers are gone: a socket holds far fewer
_SOON = 0.1  # seconds after which a group is one that goes on for a while


class Supervisor:
    """A group of workers, from start to end. Every method may be called from any thread.

    Args:
        settle: Seconds between the first failure and the stopping of the others.
        grace: Seconds between SIGTERM and SIGKILL then.
        linger: Seconds for what workers left behind that have all succeeded.
        together: Whether a failure stops the others.
        speak: Takes lines of ours that the display cannot take, on a thread of its own.
    """

    def __init__(
        self,
        *,
        settle: float,
        grace: float,
        linger: float = 0.0,
        together: bool = True,
        speak: Callable[[str], None] | None = None,
    ) -> None:
        self.owner = os.getpid()  # a fork of it has no business with the group
        self.mirror = Mirror()
        self.ended = Latch()  # the outcome of every worker is known, and no process of theirs is left
        self.done = Latch()  # and nothing of ours: keeper, thread, descriptors
        self.lost: KeeperLostError | None = None
        # Plain numbers: the wire takes no subclass, and a NumPy float would arrive as bytes.
        self._settle, self._grace, self._linger, self._together = float(settle), float(grace), float(linger), together
        self._speak = speak
        self._spoken = SerialExecutor("phalanx-lines")
        self._pump: Pump | None = None
        self._shown: Shown | None = None
        self._report: HangReporter | None = None
        self._launch = Launch()
        self._loop = Loop()
        self._up = Latch()
        self._ordered = False
        self._heard = 0
        self._was_up = self._kept = False
        self._start_error: BaseException | None = None
        self._silence = Silence(self._loop, self._launch, self._listen, self._lose)
        self._last_word = ""
        self._log_writer = 0
        self._logs_left = ""
        self._reports: worker_messages.Inbox | None = None
        self._chores: Iterable[Callable[[], None]] = ()
        self._chored = SerialExecutor("phalanx-chores")
        self._returned = SerialExecutor("phalanx-results")
        self._asked = SerialExecutor("phalanx-tracker")
        self._dropped = SerialExecutor("phalanx-dropped")
        self._closes = True  # what is dropped, sooner or later
        self._thread: threading.Thread | None = None
        self._charge = [True]

    # --- any thread

    def boot(
        self,
        flags: Sequence[str] = ("-I", "-S"),
        call: Callable[[int, list[int]], None] | None = None,
        zygote: Zygote | None = None,
    ) -> None:
        """Start the keeper. It takes 10 ms to get up: time to prepare what `start` needs. Then `start` it, or `abort`.

        ``flags`` are those of the keeper's interpreter; with ``call``, the keeper is a fork of this process instead;
        with ``zygote``, of that one.
        """
        try:
            if zygote is not None:
                self._launch.fork_warm(zygote)
            elif call is not None:
                self._launch.fork(call, self._loop.close)
            else:
                self._launch.exec(flags)
        except BlockingIOError as error:  # EAGAIN, which says too little
            self.abort()
            raise OSError(
                error.errno, f"the group's keeper was not started: {start_errors.explain(errno.EAGAIN)}"
            ) from error
        except BaseException:
            self.abort()
            raise

    def start(
        self,
        specs: Sequence[Spec],
        fds: Sequence[int] = (),
        pump: Pump | None = None,
        chores: Iterable[Callable[[], None]] = (),
        *,
        fork: bool = False,
        modules: Sequence[str] = (),
        report: HangReporter | None = None,
    ) -> None:
        """Have all workers started: `wait_until_up` tells what came of it. Raises OSError, with none left.

        ``fork`` has them forked from the keeper rather than exec'ed, which loads ``modules`` before that. ``fds`` are
        what the specs refer to, from 1 on.
        ``chores`` are done once the workers run, for as long as they do; ``report`` writes down what becomes of their
        timers.
        """
        self._pump = pump
        self._report = report
        self._chores = chores
        try:
            if pump is not None:
                from phalanx._logs.display import show

                self._shown = show(pump)
            self._order(specs, fds, fork=fork, modules=modules)
            self._loop.watch(self._launch.channel.fileno(), self._on_message, READ if self._ordered else READ | WRITE)
            self._loop.after(START_WAIT, self._start_over)
            if self._launch.guard is not None:
                self._silence.watch(self._launch.guard)
            self._thread = threading.Thread(target=self._run, name="phalanx", daemon=True)
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

    def _order(self, specs: Sequence[Spec], fds: Sequence[int], *, fork: bool, modules: Sequence[str]) -> None:
        """Send the order to start."""
        ours, theirs = channels.pair()
        self._reports = worker_messages.Inbox(ours, self._drop)
        self._loop.watch(ours.fileno(), self._on_report)
        policy = (self._settle, self._grace, self._linger, self._together)
        timers: tuple[Any, ...] | None = None
        # The report socket comes first: it is the one descriptor that every function worker needs.
        given = [theirs.fileno(), *fds]
        if self._report is not None:
            table = self._report.table
            timers = (
                len(given),
                len(given) + 1,
                *table.size,
                [(name, float(wait)) for name, wait in self._report.steps],
            )
            given += table.descriptors
        base, oom = self._launch.marked.environment(), procfs.find_oom_counter()
        order = (
            fork,
            [(name, interpreter.folder_of(name)) for name in modules],
            base,
            list(specs),
            oom,
            policy,
            timers,
        )
        try:
            self._ordered = self._launch.channel.send(("start", *order), given)
        except channels.Closed:  # it has given up: its last word waits to be read
            self._ordered = True
        finally:
            theirs.close()

    def wait_until_up(self) -> None:
        """Return when every worker runs, or raise, with none left, what went wrong: `not_started`."""
        self._up.wait()
        error = self.not_started
        if error is not None:
            self.done.wait()
            raise error

    @property
    def not_started(self) -> BaseException | None:
        """Why the workers do not run, and never did; None if they did, or may yet."""
        if self._start_error is None and self._up and not self._was_up:
            self._start_error = RuntimeError("the group was closed while it was starting")
        return self._start_error

    def abort(self, why: BaseException | None = None) -> None:
        """Undo `boot` and `start`, however far they came. Idempotent. Who waits for the start is told ``why``."""
        if self._start_error is None:
            self._start_error = why
        if self._take_charge():
            self._thread = None
            self._release()
            for latch in (self._up, self.ended, self.done):
                latch.open()
        else:  # that thread lets go of everything
            self.kill()
            self.done.wait(KILL_WAIT)

    def _take_charge(self) -> bool:
        """Whether it is the caller who lets go of everything in the end: the group's thread, unless `abort` was first.

        A signal handler of the host's may raise while that thread is being started, whether it runs by then or not.
        """
        try:
            self._charge.pop()
        except IndexError:
            return False
        return True

    def stop(self, death_signal: int, grace: float) -> None:
        """Send ``death_signal`` to the live workers; SIGKILL follows after ``grace`` seconds. Returns at once."""
        number, seconds = int(death_signal), float(grace)

        def stop() -> None:
            self._grace = seconds
            self._wish("stop", number, seconds)
            self._silence.expect(seconds + KILL_WAIT)

        self._loop.call(stop)

    def give(self, grace: float) -> None:
        """Let a failure stop the others within ``grace`` seconds. A grace period that runs can only become shorter."""
        seconds = float(grace)

        def give() -> None:
            self._grace = seconds
            self._tell("grace", seconds)

        self._loop.call(give)

    def send(self, rank: int, number: int) -> None:
        """Send a signal to one worker, as anybody might: what becomes of it then is its own doing. Returns at once."""
        self._loop.call(partial(self._tell, "signal", int(rank), int(number)))

    def say(self, text: str) -> bool:
        """Show a line of ours among the workers'. Returns whether that is possible: else nobody will see it there."""
        shown = self._shown
        return shown is not None and not self.ended and shown.say(text)

    def kill(self) -> None:
        """Kill every process of the group. Returns at once."""

        def kill() -> None:
            self._wish("kill")
            self._silence.expect(KILL_WAIT)

        self._loop.call(kill)

    def join(self) -> None:
        """Wait until nothing of the group is left in this process; not in the group's own thread."""
        if self._thread is threading.current_thread():  # a `__del__` of the host's that the collector has run in it
            return
        self.done.wait()
        if self._thread is not None:
            self._thread.join()  # it has nothing left to do

    def last_chore(self, chore: Callable[[], None], seconds: float) -> None:
        """Have ``chore`` done after those of `start`, one of which a disk may have held up. Waits that long at most."""
        if not self._chored.submit(chore):  # no thread is to be had, at the interpreter's end
            chore()
        self._chored.drain(seconds)

    # --- the group's thread

    def _run(self) -> None:
        if not self._take_charge():
            return
        try:
            self._loop.run()
        except BaseException as error:  # noqa: BLE001 - a mistake of ours: the group must not outlive its supervisor
            if not self._up:
                self._start_error = error
            self.lost = self.lost or KeeperLostError(f"the group's supervisor failed: {error!r}")
            self.lost.__cause__ = error
            self._guarded(self._close_launch)  # before anybody is let through
        finally:
            self._guarded(self._finish_aside)
            self._up.open()
            self.mirror.close()
            self.ended.open()
            try:
                self._release()
            finally:  # whatever could not be released, nobody must wait for it for ever
                self.done.open()

    def _release(self) -> None:
        """Let go of every descriptor and process: the keeper first, for then the workers are gone, whatever follows."""
        steps: list[Callable[[], object]] = [self._close_launch]
        if self._report is not None:
            steps.append(self._report.close)
        if self._shown is not None:
            steps.append(self._shown.close)
        elif self._pump is not None:
            steps.append(self._pump.close)
        if self._reports is not None:
            steps.append(self._reports.close)
        steps.append(self._loop.close)
        for step in steps:
            self._guarded(step)

    def _close_launch(self) -> None:
        self._launch.close(KILL_WAIT + DRAIN_WAIT + SILENCE, self._log_writer)

    def _guarded(self, step: Callable[[], object]) -> None:
        """Do one of several things, each of which must be tried though another fails."""
        try:
            step()
        except Exception as error:  # noqa: BLE001 - see above
            from phalanx._base.stderr import mention

            mention(f"phalanx: at the end of a group: {error!r}")

    # --- what the keeper says

    def _on_message(self, events: int) -> None:
        channel = self._launch.channel
        if events & WRITE:
            self._flush()
        try:
            while not self._last_word:
                try:
                    received = channel.receive()
                except channels.Truncated:  # a pidfd that there was no place for
                    continue
                if received is None:
                    return
                message, fds = received
                verb, *arguments = message
                self._heard += 1
                if verb in _HEAR:
                    _HEAR[str(verb)](self, *arguments, *([fds] if verb == "up" else ()))
                else:
                    self._on_timer(str(verb), *arguments)
        except channels.Closed:
            self._loop.forget(channel.fileno())
            if not self._last_word:
                self._lose()

    def _start_over(self) -> None:
        if not self._up:
            self._silence.over(clock.now())

    def _listen(self) -> int:
        """Take what has been said and not been heard yet. Returns how many messages; -1 after the last word."""
        heard = self._heard
        if not self._last_word:
            self._on_message(READ)
        return -1 if self._last_word else self._heard - heard

    def _flush(self) -> None:
        channel = self._launch.channel
        try:
            sent = channel.flush()
        except channels.Closed:  # what it has said before lies unread
            sent = True
        if sent:
            self._loop.change(channel.fileno(), READ)

    def _on_report(self, _events: int) -> None:
        """Workers have said something. What is large is read aside, and meanwhile nobody listens here."""
        inbox = self._reports
        assert inbox is not None
        try:
            read = self.mirror.take(inbox, self._give_tracker)
        except channels.Closed:
            self._loop.forget(inbox.fileno())
            return
        if read is None:
            return
        self._loop.forget(inbox.fileno())

        def go_on() -> None:
            try:
                read()
            finally:
                self._loop.call(lambda: self._loop.watch(inbox.fileno(), self._on_report))

        if not self._returned.submit(go_on):  # no thread is to be had
            go_on()

    def _give_tracker(self, asks: int) -> Callable[[], None] | None:
        """A worker asks for this process's resource tracker, which may have to be started: the results do not wait.

        Unless so many have asked that it is better not to hear of more: each has sent a descriptor.
        """
        if not self._asked.submit(
            lambda: mp_child.give_tracker(asks)
        ):  # no thread is to be had, at the interpreter's end
            mp_child.give_tracker(asks)
        if self._asked.pending < _ASKING:
            return None
        return lambda: bool(self._asked.drain(SILENCE))  # type: ignore[return-value]  # nobody looks at it

    def _drop(self, fds: list[int]) -> Callable[[], None] | None:
        """Close what nobody wants: of whatever kind it is, the group does not wait for it.

        Results do, for a while: a worker sends descriptors faster than they are closed, until we have none left. Not
        once a file has taken so long that its sender must have meant it to.
        """

        def close() -> None:
            for fd in fds:
                with suppress(OSError):
                    os.close(fd)

        if not self._dropped.submit(close):
            close()

        def wait() -> None:
            self._closes = self._dropped.drain(SILENCE)

        return wait if self._closes and self._dropped.pending else None

    def _on_up(self, pid: int, fds: list[int]) -> None:
        if fds:
            self._launch.keeper = Process(pid, fds[0])
            self._silence.watch(self._launch.keeper)

    def _on_started(self, pids: list[tuple[int, int]]) -> None:
        self.mirror.started(pids)

    def _on_running(self, moment: int, log_writer: int) -> None:
        self._was_up = True
        self.mirror.running(moment)
        self._log_writer = log_writer
        if self._shown is not None:
            self._shown.open()
        self._up.open()
        self._chored.submit(self._do_chores)  # on a thread of its own: they may take a disk
        self._loop.after(_SOON, self._load)

    def _load(self) -> None:
        self._chored.submit(_load)

    def _do_chores(self) -> None:
        for chore in self._chores:
            if self._last_word:
                return
            chore()

    def _on_start_failed(self, rank: int, doing: str, number: int, filename: str) -> None:
        what = start_errors.explain(number) if number != errno.ENOENT or doing == "starting it" else os.strerror(number)
        name = f": {filename}" if filename else ""
        who = f"worker {rank} was not started; {doing} failed" if rank >= 0 else "the group's keeper was not started"
        if rank < 0 and doing:
            who = f"the group was not started; {doing} failed"
        if self._start_error is None:
            self._start_error = OSError(number, f"{who}: {what}{name}")
        self._end("start_failed")

    def _on_state(self, state: str, _moment: int) -> None:
        self.mirror.state = state
        bound = {
            "SETTLING": self._settle,
            "STOPPING": self._grace + KILL_WAIT,
            "LINGERING": self._linger,
            "SWEEPING": self._grace + KILL_WAIT,
            "PURGING": self._grace + KILL_WAIT,
            "KILLING": KILL_WAIT,
            "DRAINING": DRAIN_WAIT,
        }[state]
        self._silence.expect(bound)

    def _on_exits(self, reports: list[Report]) -> None:
        for worker in self.mirror.exits(reports):
            if self._shown is not None and worker.failed:
                self._shown.reveal(worker.rank)

    def _on_signalled(self, number: int, moment: int, ranks: list[int]) -> None:
        self.mirror.signalled(number, moment, ranks)

    def _on_lingering(self, entries: list[Entry], count: int) -> None:
        if entries:
            from phalanx._engine import leftovers

            self.announce(leftovers.line_of_waiting(list(map(leftovers.of, entries)), count, self._linger))

    def _on_remains(self, entries: list[Entry], beyond: int) -> None:
        self.mirror.remains(entries, beyond)

    def announce(self, text: str) -> None:
        """Say a line, among the workers' if that is possible."""
        speak = self._speak
        if not self.say(f"phalanx: {text}") and speak is not None:
            self._spoken.submit(lambda: speak(text))

    def _on_ended(self, left: list[tuple[int, str, str]], logs: str) -> None:
        self._logs_left = logs
        self.mirror.abandoned(left, KILL_WAIT)
        known = {worker.pid for worker in self.mirror.workers.values()} | {one.pid for one in self.mirror.leftovers}
        others = [
            f"pid {pid} ({name}, state {state})"
            if pid
            else "perhaps some that could not be found, for /proc does not show them"
            for pid, name, state in left
            if pid not in known
        ]
        if others:
            self.announce(f"still there {KILL_WAIT:g} s after SIGKILL: {', '.join(others)}")
        self._end("ended")

    def _on_lost(self, who: str, returncode: int) -> None:
        text = start_errors.of_helper(who, returncode)
        if who == "keeper" and self._silence.killed:
            text = "the group's keeper did not answer by its own deadline, and was killed by us"
        self.lost = KeeperLostError(f"{text}; every process of the group was killed with it")
        self._end("lost")

    def _on_loss(self, who: str, returncode: int, decided: bool) -> None:  # noqa: FBT001 - as the keeper says it
        """A helper is gone, and all are killed. ``decided``: there was a failure or a stop before, or all had ended."""
        if decided:
            self.announce(f"{start_errors.of_helper(who, returncode)}; what was left of the group was killed with it")
        else:
            self._kept = True

    def _on_timer(self, verb: str, *arguments: Any) -> None:
        """Something is to be reported of a timer. A step waits for its evidence: then the keeper is told."""
        if self._report is None:
            return
        testified = None
        if verb == "hang":
            serial, *arguments = arguments  # type: ignore[assignment]  # a tuple becomes a list

            def testified() -> None:
                self._loop.call(partial(self._tell, "testified", serial))

        self._report.on_message(
            verb, *arguments, workers=self.mirror.alive, ended=self.mirror.ended, evidence_taken=testified
        )

    # --- wishes, and what is expected then

    def _tell(self, *message: object) -> None:
        channel = self._launch.channel
        try:
            if not channel.send(message):
                self._loop.change(channel.fileno(), READ | WRITE)
        except channels.Closed:
            pass  # readable at its end: `_on_message` sees it

    def _wish(self, *message: object) -> None:
        """Ask the keeper for an end. A keeper that somebody has stopped is woken, if the wish is not fulfilled soon."""
        if not self._last_word:
            self._tell(*message)
            self._loop.after(SILENCE, self._wake)

    def _wake(self) -> None:
        if not self._last_word:
            self._launch.wake()

    # --- the end

    def _lose(self, why: str = "") -> None:
        """Guard and keeper are gone, or answer no more, without a last word: remove what is left of the group."""
        if self._last_word:
            return
        self._launch.kill_helpers()
        if not why:
            why = "the group's keeper and its guard were killed" if self._heard else self._not_up()
        self._launch.channel.shutdown()
        self._loop.forget(self._launch.channel.fileno())
        self._launch.channel.close()  # a place for a look at /proc, should descriptors be scarce
        self.lost = KeeperLostError(
            f"{why}; {start_errors.of_the_rest(self._launch.marked.kill(KILL_WAIT, self._log_writer))}"
        )
        self._end("lost")

    def _not_up(self) -> str:
        """Why there is no keeper, as far as its end tells."""
        code = self._launch.exit_code()
        if not self._launch.executable or code is None:
            return "the group's keeper and its guard were killed"
        if code < 0:
            return f"the group's guard process was killed by signal {-code} before its keeper was up"
        return (
            f"the group's keeper did not get up: {self._launch.executable} ended with exit code {code}; "
            f"if that is no Python interpreter, {interpreter.HINT}"
        )

    def _end(self, word: str) -> None:
        """The last word has been said."""
        self._last_word = word
        self._silence.end()
        # Nobody reads it any more, and at its end it would be readable for as long as the display drains.
        self._loop.forget(self._launch.channel.fileno())
        if self.lost is not None and not self._up and self._start_error is None:
            self._start_error = self.lost
        self._announce_end()
        shown = self._shown
        if shown is None:
            self._loop.stop()
            return
        from phalanx._logs import display

        def look() -> None:
            if shown.answers():
                self._loop.after(display.PATIENCE, look)
            else:
                self._loop.stop()

        shown.finish(lambda: self._loop.call(self._loop.stop))
        look()
        self._loop.after(shown.longest, self._loop.stop)

    def _announce_end(self) -> None:
        if self.lost is not None and self.result_stands:
            self.announce(f"the workers had ended before, but {self.lost}")
        if self._logs_left:
            self.announce(f"rotated log files are not complete: {self._logs_left}")
        if self.mirror.leftovers:
            from phalanx._engine.leftovers import lines_of_ended

            for line in lines_of_ended(self.mirror.leftovers, self.mirror.leftovers_beyond):
                self.announce(line)

    @property
    def result_stands(self) -> bool:
        """Whether every worker had ended by itself, and that was said, when a helper was lost."""
        return self._was_up and not self.mirror.alive and not self._kept

    def _finish_aside(self) -> None:
        """What workers have returned is read; what was to be written down of hangs is, or takes too long."""
        self._returned.drain(-1)
        with suppress(channels.Closed):
            inbox, left = self._reports, _LAST
            while inbox is not None and left and (read := self.mirror.take(inbox, self._give_tracker, _LAST)):
                left -= 1
                read()
        self.mirror.settle_results()
        self._spoken.drain(SILENCE)
        self._chored.drain(SILENCE)
        self._asked.drain(SILENCE)
        self._dropped.drain(SILENCE)
        if self._report is not None:
            from phalanx._timers import hang_reporter

            # What it has to say goes through the host's logging, which may not take it.
            aside = SerialExecutor("phalanx-report")
            if not aside.submit(self._report.finish):
                self._report.finish()
            aside.drain(2 * hang_reporter.FINISH + SILENCE)
            for rank, why in self._report.unwritten.items():
                self.mirror.workers[rank].hang = why
            for rank, what in self._report.hung.items():
                self.mirror.workers[rank].hung = what


def _load() -> None:
    """Import what the end needs: it is on a disk, which may not answer then."""
    from phalanx._base import stderr  # noqa: F401 - see above
    from phalanx._engine import leftovers  # noqa: F401 - see above


_HEAR: dict[str, Callable[..., None]] = {
    "up": Supervisor._on_up,
    "started": Supervisor._on_started,
    "running": Supervisor._on_running,
    "start_failed": Supervisor._on_start_failed,
    "state": Supervisor._on_state,
    "exits": Supervisor._on_exits,
    "signalled": Supervisor._on_signalled,
    "lingering": Supervisor._on_lingering,
    "remains": Supervisor._on_remains,
    "ended": Supervisor._on_ended,
    "lost": Supervisor._on_lost,
    "loss": Supervisor._on_loss,
}
