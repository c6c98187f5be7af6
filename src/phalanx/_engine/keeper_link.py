"""The launcher's conversation with the keeper: orders go out, reports come in, and a keeper that is lost is replaced.

Owns the dispatch of what the keeper reports: to the `mirror`, the group's display and the hang report; and how the
group ended, as far as the keeper has reported it. Runs in the group's thread.
"""

from __future__ import annotations

import os
from functools import partial

from phalanx._base import channels, clock
from phalanx._base.loop import READ, WRITE
from phalanx._base.process import Process
from phalanx._base.text import name_ranks
from phalanx._base.threads import Latch
from phalanx._engine import protocol, start_errors
from phalanx._engine.mirror import leftover_of, line_of_waiting, lines_of_ended
from phalanx._engine.protocol import ANSWER_WAIT, DRAIN_WAIT, KILL_WAIT, LOSS_SETTLE, START_WAIT
from phalanx._engine.start_errors import KeeperLostError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from phalanx._base.loop import Deadline, Loop
    from phalanx._engine.group_events import GroupEvents
    from phalanx._engine.group_lines import GroupLines
    from phalanx._engine.keeper_client import KeeperClient
    from phalanx._engine.mirror import Mirror, WorkerRecord
    from phalanx._timers.hang_reporter import HangReporter

LATE = 30.0
"""Seconds from the return of a main function until it is announced that its worker has not exited since."""

_RETURNED = "have returned from their main functions, but have"


class KeeperLink:
    """One group's. ``running`` is called when all workers run; ``loop`` is stopped when all is reported.

    Attributes:
        settle, grace, linger: The policy, in seconds: how long the keeper may send nothing depends on it.
        notice: Seconds from the notice of a planned stop to the death signal.
        hang_report: What writes down hangs; None: no timers are watched.
        lost_connection: Returns whether a worker has failed of a lost connection. It may take a disk, and is called by
            ``on_thread``.
        locate: See `collect.locate`, which takes a while; None: nobody asks.
        failing: Called once, when the settle window after the first failure is over.
        events: Emits what is reported; None: nobody observes it.
        up: Opened when all workers run, or when the group's thread ends.
        ended: Whether the last message has come, or none will.
        keeper_error: Why the group was killed, if a helper process had died.
        start_error: Why the workers never ran.
        log_writer: The pid of the log writer, 0: there is none.
        logs_left: Why rotated log files are not complete; "": they are.
    """

    def __init__(
        self,
        loop: Loop,
        client: KeeperClient,
        mirror: Mirror,
        display: GroupLines,
        running: Callable[[], None],
        policy: tuple[float, float, float],
    ) -> None:
        self.settle, self.grace, self.linger = policy
        self.notice = 0.0
        self.hang_report: HangReporter | None = None
        self.lost_connection: Callable[[WorkerRecord], bool] = lambda _worker: False
        self.on_thread: Callable[[Callable[[], None]], object] = lambda _job: None
        self.locate: Callable[[Callable[[], dict[int, int]]], dict[int, str]] | None = None
        self.failing: Callable[[], object] | None = None
        self.events: GroupEvents | None = None
        self._judged = False
        self.up = Latch()
        self.ended = False
        self.keeper_error: KeeperLostError | None = None
        self.start_error: BaseException | None = None
        self.log_writer = 0
        self.logs_left = ""
        self.watchdog = KeeperWatchdog(loop, client, self._receive_now, self._lose)
        self._loop = loop
        self._client = client
        self._mirror = mirror
        self._display = display
        self._running = running
        self._received = 0  # messages
        self._was_up = False
        self._returned: dict[int, float] = {}  # when workers have left their main function well, by pid
        self._killed_by_loss = False  # a helper was lost before anything else had ended the group

    @property
    def not_started(self) -> BaseException | None:
        """Why the workers never ran; None if they did, or may yet."""
        if self.start_error is None and self.up and not self._was_up:
            self.start_error = RuntimeError("the group was closed while it was starting")
        return self.start_error

    @property
    def result_stands(self) -> bool:
        """Whether every worker had ended by itself, and that was reported, before a helper was lost."""
        return self._was_up and not self._mirror.alive and not self._killed_by_loss

    @property
    def lost(self) -> KeeperLostError | None:
        """`keeper_error`, unless the result stands."""
        return None if self.result_stands else self.keeper_error

    def on_channel(self, events: int) -> None:
        channel = self._client.channel
        try:
            if events & WRITE and self._flushed():
                self._loop.change(channel.fileno(), READ)
            while not self.ended:
                try:
                    received = channel.receive()
                except channels.Truncated:  # the keeper's pidfd: no more may be open here
                    continue
                if received is None:
                    return
                (verb, *fields), fds = received
                self._received += 1
                if verb in protocol.TIMER_VERBS:
                    self._on_timer(str(verb), *fields)
                else:
                    _ON_MESSAGE[str(verb)](self, *fields, *([fds] if verb == "up" else ()))
                if self.events is not None:
                    self.events.heard(str(verb), fields, self._mirror)
        except channels.Closed:
            self._loop.forget(channel.fileno())
            if not self.ended:
                self._lose()

    def _flushed(self) -> bool:
        try:
            return self._client.channel.flush()
        except channels.Closed:  # what the keeper sent before is unread
            return True

    def open(self, order: channels.Message, fds: Sequence[int]) -> None:
        """Send the order to start, and begin to receive. A keeper that takes longer than `START_WAIT` is replaced."""
        channel = self._client.channel
        try:
            sent = channel.send(order, fds)
        except channels.Closed:  # it did not start: its last message waits to be received
            sent = True
        self._loop.watch(channel.fileno(), self.on_channel, READ if sent else READ | WRITE)
        self._loop.after(START_WAIT, lambda: None if self.up else self.watchdog.over(clock.now()))
        if self._client.guard is not None:
            self.watchdog.watch(self._client.guard)

    def _receive_now(self) -> int:
        """Receive what has arrived. Returns how many messages; -1 after the last one."""
        before = self._received
        if not self.ended:
            self.on_channel(READ)
        return -1 if self.ended else self._received - before

    def _on_up(self, pid: int, fds: list[int]) -> None:
        if fds:
            self._client.keeper = Process(pid, fds[0])
            self.watchdog.watch(self._client.keeper)

    def _on_running(self, moment: int, log_writer: int) -> None:
        self._was_up = True
        self.watchdog.expect_nothing()
        self._mirror.running(moment)
        self.log_writer = log_writer
        self._display.show_workers()
        self.up.open()
        self._running()

    def _on_state(self, name: str, moment: int) -> None:  # noqa: ARG002 - as `protocol` has it
        self._mirror.state = name
        bound = {
            "SETTLING": max(self.settle, LOSS_SETTLE),
            "NOTICED": self.notice,
            "STOPPING": self.grace + KILL_WAIT,
            "LINGERING": self.linger,
            "SWEEPING": self.grace + KILL_WAIT,
            "PURGING": self.grace + KILL_WAIT,
            "KILLING": KILL_WAIT,
            "DRAINING": DRAIN_WAIT,
        }[name]
        self.watchdog.expect(bound)
        if name != "SETTLING" and self.failing is not None and any(one.failed for one in self._mirror.workers.values()):
            failing, self.failing = self.failing, None
            failing()
        if name == "STOPPING":
            self._loop.after(min(LATE, self.grace) / 2, self._locate_failing)

    def _on_exits(self, reports: list[tuple[Any, ...]]) -> None:
        for worker in self._mirror.exits(reports):
            if worker.failed:
                self._display.reveal(worker.rank)
                self._judge(worker)

    def _judge(self, worker: WorkerRecord) -> None:
        """Send the keeper what the first failure is: the length of the settle window depends on that."""
        if self._judged:
            return
        self._judged = True

        def judge() -> None:
            lost = not worker.struck and self.lost_connection(worker)
            self._loop.call(lambda: None if self.ended else self.send(protocol.judged(lost)))

        self.on_thread(judge)

    def _on_failing(self, rank: int) -> None:
        self._mirror.leaving(rank)  # its lines are revealed at its exit: it has still to print its traceback
        self._judge(self._mirror.workers[rank])

    def on_leaving(self, pid: int, code: int) -> None:
        """A program has left its main function, to exit with ``code``."""
        if self.ended:
            return
        if code:
            self.send(protocol.leaving(pid))
        else:
            self._returned[pid] = clock.now()
            if len(self._returned) == 1:
                self._loop.after(LATE, self._report_late)

    def _locate_failing(self) -> None:
        """Find out where those are that have failed and do not exit, before they are killed."""

        def keep(found: dict[int, str]) -> None:
            for rank, where in found.items():
                self._mirror.workers[rank].where = where

        self._locate(partial(self._mirror.not_exited, well=False), keep)

    def _report_late(self) -> None:
        """Announce who has left its main function and does not exit, which may be intended."""
        now = clock.now()
        due = {pid for pid, moment in self._returned.items() if moment <= now - 0.9 * LATE}  # one line for all of these
        for pid in due:
            del self._returned[pid]
        if self._returned:
            self._loop.after(min(self._returned.values()) + LATE - now, self._report_late)

        def late() -> dict[int, int]:
            return {rank: pid for rank, pid in self._mirror.not_exited(well=True).items() if pid in due}

        def announce(found: dict[int, str]) -> None:
            ranks = late()
            for where in sorted({found.get(rank, "") for rank in ranks}):
                there = [rank for rank in ranks if found.get(rank, "") == where]
                returned = "has returned from its main function, but has" if len(there) == 1 else _RETURNED
                self._display.announce(f"{name_ranks(there)} {returned} not exited yet{f': in {where}' * bool(where)}")

        if self._mirror.state == "RUNNING":
            self._locate(late, announce)

    def _locate(self, alive: Callable[[], dict[int, int]], then: Callable[[dict[int, str]], None]) -> None:
        locate = self.locate
        if locate is not None and not self.ended and alive():
            self.on_thread(lambda: then(locate(alive)))

    def _on_held(self) -> None:
        self.watchdog.expect_nothing()
        self._display.announce("a worker has failed; the group goes on until no worker stands at a breakpoint")

    def _on_lingering(self, orphans: list[tuple[Any, ...]], count: int) -> None:
        if orphans:
            self._display.announce(line_of_waiting(list(map(leftover_of, orphans)), count, self.linger))

    def _on_orphans(self, entries: list[tuple[Any, ...]], beyond: int) -> None:
        if self._mirror.left_behind(entries, beyond):
            self._killed_by_loss = True

    def _on_logs_refused(self, number: int) -> None:
        what = f"rotated log files cannot be written: {os.strerror(number)}"
        self._display.announce(f"{what}; lines are missing there, and the workers go on")

    def _on_start_failed(self, rank: int, doing: str, number: int, filename: str) -> None:
        if self.start_error is None:
            self.start_error = start_errors.not_started(rank, doing, number, filename)
        self._end()

    def _on_ended(self, left: list[tuple[int, str, str]], logs: str) -> None:
        self.logs_left = logs
        self._mirror.abandoned(left, KILL_WAIT)
        known = {worker.pid for worker in self._mirror.workers.values()} | {one.pid for one in self._mirror.leftovers}
        others = start_errors.of_survivors([one for one in left if one[0] not in known])
        if others:
            self._display.announce(f"still there {KILL_WAIT:g} s after SIGKILL: {others}")
        self._end()

    def _on_ended_by_loss(self, who: str, returncode: int) -> None:
        text = start_errors.of_helper(who, returncode)
        if who == "keeper" and self.watchdog.killed:
            text = "the group's keeper did not answer by its own deadline, and was killed by us"
        self.keeper_error = KeeperLostError(f"{text}; every process of the group was killed with it")
        self._end()

    def _on_helper_lost(self, who: str, returncode: int, decided: bool) -> None:  # noqa: FBT001 - as in the message
        self._killed_by_loss = self._killed_by_loss or not decided
        if decided:
            text = start_errors.of_helper(who, returncode)
            self._display.announce(f"{text}; what was left of the group was killed with it")

    def _on_timer(self, verb: str, *fields: Any) -> None:
        """Pass a message of the timers on to the hang report, which answers "hang" when the stacks are written."""
        if self.hang_report is None:
            return
        evidence_taken = None
        if verb == "hang":
            serial, *fields = fields  # type: ignore[assignment]  # a tuple becomes a list

            def evidence_taken() -> None:
                self._loop.call(partial(self.send, protocol.evidence_taken(serial)))

        self.hang_report.on_message(
            verb, *fields, workers=self._mirror.alive, ended=self._mirror.ended, evidence_taken=evidence_taken
        )

    # --- orders to the keeper

    def send(self, message: channels.Message) -> None:
        channel = self._client.channel
        try:
            if not channel.send(message):
                self._loop.change(channel.fileno(), READ | WRITE)
        except channels.Closed:
            pass  # the socket is readable then, and `on_channel` sees its end

    def send_end(self, order: channels.Message) -> None:
        """Order an end. A keeper that was stopped (SIGSTOP) is woken if the group has not ended soon."""
        if not self.ended:
            self.send(order)
            self._loop.after(ANSWER_WAIT, lambda: None if self.ended else self._client.wake())

    def kill(self) -> None:
        """Order the end of every process."""
        self.send_end(protocol.kill())
        self.watchdog.expect(KILL_WAIT)

    # --- the end

    def _lose(self, why: str = "") -> None:
        """Kill what is left of the group, when guard and keeper have died, or answer no more."""
        if self.ended:
            return
        self._client.kill_helpers()
        if not why:
            code = None if self._received else self._client.exit_code()
            why = start_errors.of_both_helpers(self._client.executable, code)
        self._client.channel.shutdown()
        self._loop.forget(self._client.channel.fileno())
        self._client.channel.close()  # frees a descriptor for the look at /proc
        rest = start_errors.of_the_rest(self._client.marked.kill(KILL_WAIT, self.log_writer))
        self.keeper_error = KeeperLostError(f"{why}; {rest}")
        if self.events is not None:
            self.events.heard("lost", [self.keeper_error], self._mirror)
        self._end()

    def _end(self) -> None:
        """End the loop: nothing more comes from the keeper."""
        self.ended = True
        self.watchdog.end()
        if self.keeper_error is not None and not self.up and self.start_error is None:
            self.start_error = self.keeper_error
        if self.keeper_error is not None and self.result_stands:
            self._display.announce(f"the workers had ended before, but {self.keeper_error}")
        if self.logs_left:
            self._display.announce(f"rotated log files are not complete: {self.logs_left}")
        for line in lines_of_ended(self._mirror.leftovers, self._mirror.leftovers_beyond):
            self._display.announce(line)
        self._loop.stop()


_ON_MESSAGE: dict[str, Callable[..., None]] = {
    "up": KeeperLink._on_up,
    "started": lambda link, pids, _moment: link._mirror.started(pids),
    "running": KeeperLink._on_running,
    "state": KeeperLink._on_state,
    "exits": KeeperLink._on_exits,
    "failing": KeeperLink._on_failing,
    "paused": lambda _link, _is_on: None,  # there is an event of it
    "held": KeeperLink._on_held,
    "signalled": lambda link, number, moment, ranks: link._mirror.signalled(number, moment, ranks),
    "noticed": lambda link, number, moment, ranks: link._mirror.noticed(number, moment, ranks),
    "lingering": KeeperLink._on_lingering,
    "orphans": KeeperLink._on_orphans,
    "logs_refused": KeeperLink._on_logs_refused,
    "helper_lost": KeeperLink._on_helper_lost,
    "start_failed": KeeperLink._on_start_failed,
    "ended": KeeperLink._on_ended,
    "ended_by_loss": KeeperLink._on_ended_by_loss,
}


class KeeperWatchdog:
    """Watches one group's helpers.

    ``receive`` receives what has arrived, and returns how many messages, -1 after the last one. ``lose`` is called,
    with why or without, when there are no helpers any more.
    """

    def __init__(
        self, loop: Loop, client: KeeperClient, receive: Callable[[], int], lose: Callable[[str], None]
    ) -> None:
        self.killed = False
        """Whether the keeper was killed by us."""
        self._loop = loop
        self._keeper = client
        self._receive = receive
        self._lose = lose
        self._taken_over = False
        self._next: Deadline | None = None

    def expect(self, seconds: float) -> None:
        """Expect a message within ``seconds`` and `ANSWER_WAIT`."""
        until = clock.now() + seconds + ANSWER_WAIT
        self._at(until, lambda: self.over(until))

    def expect_nothing(self) -> None:
        """Let the keeper send nothing for as long as it likes: every worker runs."""
        if self._next is not None:
            self._next.cancel()

    def watch(self, process: Process) -> None:
        """Watch the pidfd of guard or keeper: EOF may not come, for a fork of the host may hold their socket."""

        def gone(_events: int) -> None:
            self._loop.forget(process.pidfd)
            known, both = self._keeper.keeper is not None, self._keeper.helpers_gone()
            count = self._receive()
            if count < 0:
                return
            if both and (known or not count):  # a keeper that has only just sent `up` sends more
                self._lose("")
            else:  # the other one ends the group
                self._taken_over = process is self._keeper.keeper
                self._keeper.wake()
                self.expect(KILL_WAIT + DRAIN_WAIT)

        self._loop.watch(process.pidfd, gone)

    def end(self) -> None:
        """Watch no more: the last message has come."""
        self.expect_nothing()
        for process in (self._keeper.guard, self._keeper.keeper):
            if process is not None:
                self._loop.forget(process.pidfd)

    def over(self, until: float) -> None:
        """Wake the keeper, which has sent nothing ``until`` now: it may have been stopped (SIGSTOP)."""
        if self._answers():
            return
        if clock.now() - until > ANSWER_WAIT / 2:  # this process was stopped, and the keeper perhaps as well
            self.expect(0)
            return
        self._keeper.wake()
        self._at(clock.now() + ANSWER_WAIT, self.replace)

    def replace(self) -> None:
        """Kill a keeper that does not answer: the guard takes over. If that does not answer, give up."""
        if self._answers():
            return
        if self._taken_over:  # the guard does not answer either
            self._give_up()
            return
        self.killed = self._keeper.kill_keeper()
        self._at(clock.now() + KILL_WAIT + ANSWER_WAIT, self._give_up)

    def _give_up(self) -> None:
        if not self._answers():
            self._lose("the group's keeper answered no more, and was killed")

    def _at(self, moment: float, action: Callable[[], None]) -> None:
        if self._next is not None:
            self._next.cancel()
        self._next = self._loop.at(moment, action)

    def _answers(self) -> bool:
        """Whether a message was waiting, or the last one has come: then the wait begins again."""
        planned = self._next
        count = self._receive()
        if count > 0 and self._next is planned:
            self.expect(0)
        return count != 0
