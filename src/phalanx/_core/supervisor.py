"""Carries out the group's table. Owns the group's one thread, and the record of what each worker did.

It alone turns messages of the keeper into events, and actions into messages. It decides nothing (`group` does), touches
no process (`keeper` and `launch` do), and does not know what a rank means to its job.
"""

from __future__ import annotations

import errno
import os
import threading
from functools import partial
from signal import SIGTERM

from phalanx._core import clock, group, linux, wire
from phalanx._core.exit import Exit
from phalanx._core.group import Action, Event, State
from phalanx._core.keeper import KILL_WAIT
from phalanx._core.latch import Latch
from phalanx._core.launch import Launch
from phalanx._core.loop import READ, WRITE, Loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from phalanx._core.deadlines import Deadline
    from phalanx._core.overseer import Overseer
    from phalanx._core.pump import Pump
    from phalanx._core.starting import Spec
    from phalanx._core.zygote import Zygote

SILENCE = 2.0
"""Seconds beyond its own last deadline after which a keeper that says nothing is taken for lost."""


START_WAIT = 300.0
"""Seconds in which the keeper has to get up and start all workers, on however slow a machine or file system."""


class KeeperLostError(RuntimeError):
    """The helper process of a group was killed. Every process of the group has been killed with it."""


class Worker:
    """What is known of one worker. Written by the group's thread alone; read freely once the group has ended."""

    __slots__ = (
        "abandoned", "cpu_seconds", "ended", "exit", "exit_ns", "hang", "max_rss_kib", "oom", "order", "pid", "rank",
        "result", "signalled", "signalled_ns",
    )  # fmt: skip

    def __init__(self, rank: int, pid: int) -> None:
        self.rank = rank
        self.pid = pid
        self.ended = Latch()  # its exit is known, or never will be
        self.exit: Exit | None = None
        self.exit_ns = 0
        self.order = -1
        self.signalled: int | None = None
        self.signalled_ns = 0
        self.abandoned = ""
        self.hang = ""  # why its timer had it ended, if that is in no file
        self.oom = ""
        self.max_rss_kib = 0
        self.cpu_seconds = 0.0
        self.result: bytes | OSError | None = None  # pickled; or why it could not be received

    @property
    def failed(self) -> bool:
        """Whether it ended badly, and by itself as far as its exit tells."""
        return self.exit is not None and not self.exit.ok and self.signalled is None


class Supervisor:
    """A group of workers, from start to end. Every method may be called from any thread.

    Args:
        settle: Seconds between the first failure and the stopping of the others.
        grace: Seconds between SIGTERM and SIGKILL then.
    """

    def __init__(self, *, settle: float, grace: float) -> None:
        self.workers: dict[int, Worker] = {}
        self.ended = Latch()  # the outcome of every worker is known, and no process of theirs is left
        self.done = Latch()  # and nothing of ours: keeper, thread, descriptors
        self.state = State.STARTING
        self.lost: KeeperLostError | None = None
        self.left: list[tuple[int, str, str]] = []
        self._settle = settle
        self._grace = grace
        self._pump: Pump | None = None
        self._overseer: Overseer | None = None
        self._launch = Launch()
        self._loop = Loop()
        self._up = Latch()
        self._start_error: BaseException | None = None
        self._grace_timer: Deadline | None = None
        self._death_signal: int = SIGTERM
        self._said_lost = ""
        self._reports: wire.Channel | None = None
        self._results: dict[tuple[int, int], bytes | OSError] = {}
        self._exits = 0
        self._chores: Iterable[Callable[[], None]] = ()
        self._thread: threading.Thread | None = None

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
            raise OSError(error.errno, f"the group's keeper was not started: {_explain(errno.EAGAIN)}") from error
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
        overseer: Overseer | None = None,
    ) -> None:
        """Have all workers started: `wait_until_up` tells what came of it. Raises OSError, with none left.

        ``fork`` has them forked from the keeper rather than exec'ed. ``fds`` are what the specs refer to, from 1 on.
        ``chores`` are done by the group's thread once the workers run, and when nothing else happens; ``overseer``
        watches their timers there.
        """
        self._pump = pump
        self._overseer = overseer
        self._chores = chores
        try:
            reports, theirs = wire.pair()
            self._reports = wire.Channel(reports)
            oom = linux.find_oom_counter()
            channel = self._launch.channel
            try:
                # The report socket comes first: it is the one descriptor that every function worker needs.
                channel.send(("start", fork, self._launch.environment(), list(specs), oom), [theirs.fileno(), *fds])
                while not channel.flush():  # only a keeper that is not up yet leaves no room
                    _wait_for_room(channel)
            except wire.Closed:  # it has given up: its last word waits to be read
                pass
            finally:
                theirs.close()
            self._loop.watch(channel.fileno(), self._on_message)
            self._loop.watch(reports.fileno(), self._on_report)
            self._loop.after(START_WAIT, self._start_over)
            thread = threading.Thread(target=self._run, name="phalanx", daemon=True)
            thread.start()
            self._thread = thread
        except RuntimeError as error:  # "can't start new thread"
            self.abort()
            if "shutdown" in str(error):  # from an exit handler: since Python 3.12 it is too late for threads then
                raise
            raise OSError(errno.EAGAIN, f"the group's thread was not started: {_explain(errno.EAGAIN)}") from error
        except BaseException:
            self.abort()
            raise

    def wait_until_up(self) -> None:
        """Return when every worker runs, or raise, with none left, what went wrong."""
        self._up.wait()
        if self._start_error is not None:
            self.done.wait()
            raise self._start_error

    def abort(self) -> None:
        """Undo `boot` and `start`, however far they came. Idempotent."""
        if self._thread is None:
            self._release()
            self.done.open()
        else:  # that thread lets go of everything
            self.kill()
            self.done.wait(KILL_WAIT)

    def stop(self, death_signal: int, grace: float) -> None:
        """Send ``death_signal`` to the live workers; SIGKILL follows after ``grace`` seconds. Returns at once."""

        def stop() -> None:
            self._death_signal = death_signal
            self._grace = grace
            self._see(Event.STOP)

        self._loop.call(stop)

    def give(self, grace: float) -> None:
        """Let a failure stop the others within ``grace`` seconds. A grace period that runs can only become shorter."""

        def give() -> None:
            self._grace = grace
            if self._grace_timer is not None:
                self._arm_grace()

        self._loop.call(give)

    def send(self, rank: int, number: int) -> None:
        """Send a signal to one worker, as anybody might: what becomes of it then is its own doing. Returns at once."""
        self._loop.call(lambda: self._tell("send", rank, int(number)))

    def say(self, text: str) -> bool:
        """Show a line of ours among the workers'. Returns whether that is possible: else nobody will see it there."""
        pump = self._pump
        if pump is None or not pump.shows or self.ended:
            return False
        self._loop.call(partial(pump.say, text))
        return True

    def kill(self) -> None:
        """Kill every process of the group. Returns at once."""
        self._loop.call(lambda: self._see(Event.KILL))

    def join(self) -> None:
        """Wait until nothing of the group is left in this process."""
        self.done.wait()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()  # it has nothing left to do

    # --- the group's thread

    def _run(self) -> None:
        try:
            self._loop.run()
        except BaseException as error:  # noqa: BLE001 - a mistake of ours: the group must not outlive its supervisor
            if not self._up:
                self._start_error = error
            self.lost = self.lost or KeeperLostError(f"the group's supervisor failed: {error!r}")
            self.lost.__cause__ = error
            self.state = State.ENDED
        finally:
            self._up.open()
            for worker in self.workers.values():
                worker.ended.open()
            self.ended.open()
            try:
                self._release()
            finally:  # whatever could not be released, nobody must wait for it for ever
                self.done.open()

    def _release(self) -> None:
        """Let go of every descriptor and process."""
        if self._overseer is not None:
            self._overseer.close()
        if self._pump is not None:
            self._pump.close()
        self._launch.close(KILL_WAIT + SILENCE)
        if self._reports is not None:
            self._reports.close()
        self._loop.close()

    def _see(self, event: Event) -> None:
        self.state, actions = group.step(self.state, event)
        for action in actions:
            _DO[action](self)

    def _on_message(self, events: int) -> None:
        channel = self._launch.channel
        try:
            if events & WRITE and channel.flush():
                self._loop.change(channel.fileno(), READ)
            while self.state is not State.ENDED and (received := channel.receive()) is not None:
                (verb, *arguments), _fds = received
                getattr(self, f"_on_{verb}")(*arguments)
        except wire.Closed:
            self._loop.forget(channel.fileno())
            if self.state is not State.ENDED:
                self._see(Event.KEEPER_LOST)

    def _on_report(self, _events: int) -> None:
        """Take results. A worker sends its own before it exits, so it is there when its exit is told."""
        assert self._reports is not None
        try:
            while (received := self._reports.receive()) is not None:
                (_verb, rank, pid, value), fds = received
                for fd in fds:  # one, for a value that is too large for a message
                    with open(fd, "rb") as file:
                        file.seek(0)
                        value = file.read()
                self._results[rank, pid] = value  # type: ignore[index, assignment]  # the worker bootstrap sends these
        except wire.Truncated as error:
            _verb, rank, pid, _value = error.message  # type: ignore[misc]  # as above
            self._results[rank, pid] = error  # type: ignore[index]  # as above
        except wire.Closed:
            self._loop.forget(self._reports.fileno())

    def _on_started(self, pids: list[tuple[int, int]]) -> None:
        for rank, pid in pids:
            self.workers[rank] = Worker(rank, pid)
        if self._pump is not None:
            try:
                self._pump.open(self._loop)
            except OSError as error:
                self._start_error = error
                self._see(Event.KILL)
                return
        self._see(Event.STARTED)
        if self._overseer is not None:
            self._overseer.open(self._loop, self._pids_in_charge, partial(self._tell, "send"))
        self._up.open()
        for chore in self._chores:
            self._loop.when_idle(chore)

    def _pids_in_charge(self) -> dict[int, int]:
        """The live workers that nobody is stopping, by rank."""
        if self.state not in (State.RUNNING, State.SETTLING):
            return {}
        return {rank: worker.pid for rank, worker in self.workers.items() if worker.exit is None}

    def _on_start_failed(self, rank: int, doing: str, number: int, filename: str) -> None:
        what = _explain(number) if number != errno.ENOENT or doing == "starting it" else os.strerror(number)
        name = f": {filename}" if filename else ""
        who = f"worker {rank} was not started; {doing} failed" if rank >= 0 else "the group's keeper was not started"
        self._start_error = OSError(number, f"{who}: {what}{name}")
        self._see(Event.START_FAILED)

    def _on_exits(self, exits: list[tuple[int, int, int, int, float, str]]) -> None:
        self._on_report(READ)
        for rank, status, moment, rss, seconds, oom in exits:
            worker = self.workers[rank]
            worker.exit, worker.exit_ns, worker.order = Exit.of_status(status), moment, self._exits
            worker.max_rss_kib, worker.cpu_seconds, worker.oom = rss, seconds, oom
            worker.result = self._results.pop((rank, worker.pid), None)
            if self._overseer is not None:
                worker.hang = self._overseer.unwritten.get(rank, "")
            self._exits += 1
            worker.ended.open()
            if self._pump is not None and worker.failed:
                self._pump.reveal(rank)
            self._on_exit(worker.exit)

    def _on_exit(self, how: Exit) -> None:
        if self._exits == len(self.workers):
            self._see(Event.ALL_ENDED)
        else:
            self._see(Event.ONE_SUCCEEDED if how.ok else Event.ONE_FAILED)

    def _on_signalled(self, number: int, moment: int, ranks: list[int]) -> None:
        for rank in ranks:
            worker = self.workers[rank]
            if worker.signalled is None:
                worker.signalled_ns = moment
            worker.signalled = number

    def _on_swept(self, left: list[tuple[int, str, str]]) -> None:
        self.left = left
        states = {pid: state for pid, _comm, state in left}
        for worker in self.workers.values():
            if worker.exit is None:
                state = states.get(worker.pid, "?")
                worker.abandoned = f"still there {KILL_WAIT:g} s after SIGKILL, in state {state}"
        self._see(Event.SWEPT)

    def _on_lost(self, who: str, returncode: int) -> None:
        how = f"killed by signal {-returncode}" if returncode < 0 else f"ended with exit code {returncode}"
        self._said_lost = (
            f"the group's {who} process was {how}" if returncode < 0 else f"the group's {who} process {how}"
        )
        self._see(Event.KEEPER_LOST)

    # --- actions

    def _tell(self, *message: object) -> None:
        channel = self._launch.channel
        try:
            if not channel.send(message):
                self._loop.change(channel.fileno(), READ | WRITE)
        except wire.Closed:
            pass  # readable at its end: `_on_message` sees it

    def _start_over(self) -> None:
        if self.state is State.STARTING:
            self._silent()

    def _arm_settle(self) -> None:
        self._loop.after(self._settle, self._settled)

    def _settled(self) -> None:
        if self.state is State.SETTLING:
            self._see(Event.SETTLED)

    def _signal(self) -> None:
        self._tell("signal", int(self._death_signal))

    def _arm_grace(self) -> None:
        until = clock.now() + self._grace
        if self._grace_timer is not None:
            until = min(until, self._grace_timer.at)  # asked twice: the sooner of the two, never later
            self._grace_timer.cancel()
        self._grace_timer = self._loop.at(until, self._grace_over)

    def _grace_over(self) -> None:
        if self.state in (State.STOPPING, State.SWEEPING):
            self._see(Event.GRACE_OVER)

    def _sweep(self) -> None:
        left = 0.0 if self._grace_timer is None else max(0.0, self._grace_timer.at - clock.now())
        self._tell("sweep", left)
        self._loop.after(left + KILL_WAIT + SILENCE, self._silent)

    def _kill(self) -> None:
        self._tell("kill")
        self._loop.after(KILL_WAIT + SILENCE, self._silent)

    def _silent(self) -> None:
        """The keeper has missed its own last deadline: let its guard take over, and after that, do without."""
        if self.state is not State.ENDED:
            self._said_lost = "the group's keeper answered no more, and was killed"
            self._launch.break_silence()
            self._loop.after(KILL_WAIT + SILENCE, self._give_up)

    def _give_up(self) -> None:
        if self.state is not State.ENDED:
            self._see(Event.KEEPER_LOST)

    def _finish(self) -> None:
        # Nobody reads it any more, and at its end it would be readable for as long as the pump drains.
        self._loop.forget(self._launch.channel.fileno())
        if self._pump is None:
            self._loop.stop()
        else:
            self._pump.finish(self._loop.stop)

    def _finish_lost(self) -> None:
        if not self._said_lost:  # guard and keeper at once
            self._said_lost = "the group's keeper and its guard were killed"
            self._launch.kill_marked(KILL_WAIT)
        self.lost = KeeperLostError(f"{self._said_lost}; every process of the group was killed with it")
        if not self._up:
            self._start_error = self.lost
        self._finish()


_DO: dict[Action, Callable[[Supervisor], None]] = {
    Action.ARM_SETTLE: Supervisor._arm_settle,
    Action.SIGNAL: Supervisor._signal,
    Action.ARM_GRACE: Supervisor._arm_grace,
    Action.SWEEP: Supervisor._sweep,
    Action.KILL: Supervisor._kill,
    Action.FINISH: Supervisor._finish,
    Action.FINISH_LOST: Supervisor._finish_lost,
}


def _explain(number: int) -> str:
    """An errno in words, with what to look at."""
    hints = {
        errno.ENOENT: "is it there, and the interpreter that its first line names?",
        errno.EMFILE: "open files: see ulimit -n",
        errno.ENFILE: "open files, of the whole machine: see fs.file-max",
        errno.EAGAIN: "processes or memory have run out: see ulimit -u and the cgroup's pids.max",
        errno.ENOMEM: "processes or memory have run out: see ulimit -u and the cgroup's pids.max",
        errno.ENOEXEC: "a script needs a first line like #!/bin/sh",
    }
    return f"{os.strerror(number)} ({hints[number]})" if number in hints else os.strerror(number)


def _wait_for_room(channel: wire.Channel) -> None:
    import select

    poll = select.poll()
    poll.register(channel.fileno(), select.POLLOUT)
    if not poll.poll(START_WAIT * 1000):
        raise TimeoutError(errno.ETIMEDOUT, f"the group's keeper was not started: nothing heard for {START_WAIT:g} s")
