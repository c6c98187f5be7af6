"""What the launcher knows of a group's workers: a copy of what the keeper reported, and what workers have returned.

Owns the record of each worker. Decides nothing, and waits for nothing. Written by the group's thread alone, but for
large values, which another thread reads. Any thread may read it once the group has ended.
"""

from __future__ import annotations

import os
import signal
from functools import partial

from phalanx._base import channels, clock
from phalanx._base.clock import format_duration
from phalanx._base.frozen import Value
from phalanx._base.linux import SIGKILL
from phalanx._base.process import Exit
from phalanx._base.secrets import shown_text
from phalanx._base.text import name_ranks
from phalanx._base.threads import Latch
from phalanx._engine import worker_messages
from phalanx._engine.pickling.payload import ReceivedFds
from phalanx._engine.protocol import ExitReport, Orphan
from phalanx._evidence.sent import Sent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import Any

    from phalanx._timers.hang import RankSigns

TURN = 256
"""Packets that are taken in one turn: a worker that sends without end must not delay the others."""

_STRANGERS = 100_000  # processes of which it is not known yet whether they are workers


class WorkerRecord:
    """What is known of one worker."""

    def __init__(self, rank: int, pid: int) -> None:
        self.rank = rank
        self.pid = pid
        self.ended = Latch()  # its exit is known, or never will be
        self.exit: Exit | None = None
        self.exit_ns = 0
        self.exiting_ns = 0  # when it was seen exiting, by itself; 0: it was not
        self.exiting_early = False  # whether that was when the first failure was seen
        self.order = -1
        self.noticed: int | None = None  # the signal of the notice that it was given of a planned stop
        self.noticed_ns = 0
        self.signalled: int | None = None
        self.signalled_ns = 0
        self.abandoned = ""
        self.struck = 0  # the last signal that it was sent for an expired timer; 0: none
        self.hung = ""  # why it was sent that signal
        self.leaving = False  # whether it counted as failed before its exit: its failure had left its main function
        self.where = ""  # where it was found when it had left its main function and did not exit
        self.hang = ""  # what is known of its hangs, and is in no file
        self.oom = ""
        self.max_rss_kib = 0
        self.cpu_seconds = 0.0
        self.result: bytes | Exception | None = None  # pickled; or why it could not be received, or is none
        self.received_fds = ReceivedFds()  # the descriptors that came with it
        self.sent_evidence: Sent | None = None  # evidence that it could not write

    @property
    def ended_well(self) -> bool:
        """Whether its exit was seen, with code 0, and it had neither hung nor failed before."""
        return self.exit is not None and self.exit.ok and not self.struck and not self.leaving

    @property
    def state(self) -> str:
        """What has become of it in one word, see `RankStatus`."""
        if self.exit is None:
            return "abandoned" if self.abandoned or self.ended else "running"
        return "failed" if self.failed else "stopped" if self.asked is not None else "succeeded"

    @property
    def failed(self) -> bool:
        """Whether it ended badly, or after it had hung; and by itself as far as its exit tells."""
        return self.leaving or (self.exit is not None and (not self.exit.ok or self.struck > 0) and self.asked is None)

    @property
    def asked(self) -> tuple[int, int] | None:
        """The signal by which we asked it to end, and since when (ns); None: its end is its own.

        After a notice alone, only an end with code 0, or by the notice's signal, answers it.
        """
        if self.signalled is not None:
            return self.signalled, self.signalled_ns
        if self.noticed is None or self.exit is None or not (self.exit.ok or self.exit.signal == self.noticed):
            return None
        return self.noticed, self.noticed_ns


class _Said:
    """What a process has sent, which may be a worker: its first value, and its first evidence."""

    def __init__(self) -> None:
        self.result: bytes | Exception | None = None
        self.received_fds = ReceivedFds()
        self.sent_evidence: Sent | None = None
        self.wrong = ""  # why its first malformed packet is one
        self.code: int | None = None  # with what it is to exit, once its program has left its main function


class Mirror:
    """The workers of one group, and what they left behind."""

    def __init__(self) -> None:
        self.workers: dict[int, WorkerRecord] = {}
        """By local rank."""
        self.state = "STARTING"
        """The group's state as the keeper reported it last, see `lifecycle`."""
        self.pause_ordered = False
        """Whether the last order was to pause the group, and not to continue it."""
        self.began_ns = 0
        """When all workers had been started, in nanoseconds on CLOCK_MONOTONIC; 0: not yet."""
        self.leftovers: list[Leftover] = []
        """The processes that workers left behind and the keeper ended,"""
        self.leftovers_beyond = 0
        """and how many more there were."""
        self.on_leaving: Callable[[int, int], None] = lambda _pid, _code: None
        """Called when the program of a process has left its main function: its pid, and the code it is to exit with."""
        self._said: dict[int, _Said] = {}  # by pid
        self._pids: set[int] | None = None  # of all workers, once no other will be added
        self._exits = 0

    @property
    def is_paused(self) -> bool:
        """Whether the group is paused, or about to be: once one has failed, or a stop was ordered, it is continued."""
        return self.pause_ordered and self.state in ("STARTING", "RUNNING")

    def status(self, signs: Mapping[int, RankSigns]) -> dict[int, RankStatus]:
        """Return what is known of each worker just now, by rank; ``signs`` has the signs of life of some."""
        now, found = clock.now_ns(), {}
        for rank, worker in sorted(self.workers.copy().items()):
            exitcode = None if worker.exit is None else worker.exit.returncode
            sign = signs.get(rank)
            facts: dict[str, Any] = {}
            if sign is not None:
                age = None if sign.beat is None else max(0, now - sign.beat) / clock.NS
                facts = {"beat_age": age, "step": sign.step, "breakpoint": sign.breakpoint}
                if (steps := sign.steps) is not None:
                    facts |= {"step_age": max(0, now - steps.at) / clock.NS, "step_time": steps.summary()}
            found[rank] = RankStatus(rank, worker.pid, worker.state, exitcode, **facts)
        return found

    @property
    def alive(self) -> dict[int, int]:
        """The pids of the workers that have not exited, by rank."""
        workers = self.workers.copy()  # at once: another thread adds those that start
        return {rank: worker.pid for rank, worker in workers.items() if worker.exit is None}

    @property
    def ended(self) -> dict[int, str]:
        """How those have exited that have, by rank, in words."""
        return {
            rank: worker.exit.description for rank, worker in self.workers.copy().items() if worker.exit is not None
        }

    def started(self, pids: list[tuple[int, int]]) -> None:
        """Note that workers have been started: rank and pid of each."""
        for rank, pid in pids:
            self.workers[rank] = WorkerRecord(rank, pid)

    def running(self, moment: int) -> None:
        """Note that all workers run since ``moment``. From now on packets of other processes are dropped."""
        self.state = "RUNNING"
        self.began_ns = moment
        pids = self._pids = {worker.pid for worker in self.workers.values()}
        self._said = {pid: said for pid, said in self._said.items() if pid in pids}

    def take(
        self, inbox: worker_messages.Inbox, answer: Callable[[int], Callable[[], None] | None], most: int = TURN
    ) -> Callable[[], None] | None:
        """Take up to ``most`` packets: values and evidence of failures. Raises `channels.Closed`.

        ``answer`` is called with the socket of each worker that asks for the resource tracker, and closes it. Returns a
        function that is to be called before more is taken, and may block: it reads a large value, waits for descriptors
        to be closed, or was returned by ``answer``. None when there is no packet for now.
        """
        for _ in range(most):
            packet = inbox.receive()
            if packet is None:
                return None
            if packet.letter == worker_messages.TRACKER and packet.fds:
                job = answer(packet.fds[0])
            else:
                job = self._hear(packet, inbox.drop) or inbox.behind()
            if job is not None:
                return job
        return None

    def _hear(self, packet: worker_messages.Packet, drop: Callable[[list[int]], None]) -> Callable[[], None] | None:
        """Note what a packet holds. Returns a function that reads its value, if that is in a file."""
        said = self._of(packet.pid)
        if said is None or packet.wrong or packet.letter == worker_messages.TRACKER:
            drop(packet.fds)
            if said is not None:
                said.wrong = said.wrong or packet.wrong
        elif packet.letter == worker_messages.EVIDENCE:
            said.sent_evidence = said.sent_evidence or Sent(packet.content)
        elif packet.letter == worker_messages.LEAVING:
            if said.code is None:
                said.code = packet.content[0]
                self.on_leaving(packet.pid, said.code)
        elif said.result is not None:  # it has returned once
            drop(packet.fds)
        elif packet.cut:
            said.result = channels.Truncated(packet.letter)
        elif packet.letter == worker_messages.LARGE:
            return partial(_read, said, packet.fds, drop)
        else:
            said.result, said.received_fds = packet.content, ReceivedFds(packet.fds)
        return None

    def _of(self, pid: int) -> _Said | None:
        """What a process has sent so far; None if it is no worker, or too many processes are not known to be."""
        if pid not in self._said and (len(self._said) < _STRANGERS if self._pids is None else pid in self._pids):
            self._said[pid] = _Said()
        return self._said.get(pid)

    def settle_results(self) -> None:
        """Move what was received to the records of the workers that have exited. No packet is left."""
        for worker in self.workers.values():
            said = self._said.pop(worker.pid, None)
            if worker.exit is not None and said is not None:
                worker.leaving = worker.leaving or bool(said.code and worker.asked is None)
                worker.result, worker.received_fds = said.result, said.received_fds
                worker.sent_evidence = said.sent_evidence
                if said.result is None and said.wrong:
                    worker.result = ValueError(f"rank {worker.rank} sent what is no result: {said.wrong}")
        self._said.clear()

    def exits(self, reports: list[tuple[Any, ...]]) -> Iterator[WorkerRecord]:
        """Note that workers have exited, in this order: packed `ExitReport`. Yields their records."""
        for packed in reports:
            report = ExitReport(*packed)
            worker = self.workers[report.rank]
            worker.exit, worker.exit_ns, worker.order = Exit.of_status(report.status), report.moment, self._exits
            worker.max_rss_kib, worker.cpu_seconds, worker.oom = report.max_rss, report.cpu_seconds, report.oom
            worker.exiting_ns, worker.exiting_early = report.exiting, report.exiting_early
            worker.struck = report.struck
            self._exits += 1
            worker.ended.open()
            yield worker

    def signalled(self, number: int, moment: int, ranks: list[int]) -> None:
        """Note that workers were sent a signal, to stop them."""
        for rank in ranks:
            worker = self.workers[rank]
            if worker.signalled is None:
                worker.signalled_ns = moment
            worker.signalled = number

    def leaving(self, rank: int) -> None:
        """Keep that a worker has failed: its failure has left its main function. It may not have exited."""
        worker = self.workers[rank]
        worker.leaving, said = True, self._said.get(worker.pid)
        worker.sent_evidence = None if said is None else said.sent_evidence

    def not_exited(self, *, well: bool) -> dict[int, int]:
        """The pids, by rank, of workers that have left their main function, ``well`` or not, and have not exited."""
        codes = {pid: said.code for pid, said in self._said.copy().items() if said.code is not None}
        alive = self.alive.items()
        return {rank: pid for rank, pid in alive if pid in codes and (codes[pid] == 0) == well}

    def noticed(self, number: int, moment: int, ranks: list[int]) -> None:
        """Note that workers were given notice of a planned stop."""
        for rank in ranks:
            self.workers[rank].noticed, self.workers[rank].noticed_ns = number, moment

    def left_behind(self, entries: list[tuple[Any, ...]], beyond: int) -> bool:
        """Keep the processes that workers left behind and the keeper ended.

        To a guard, which has taken a keeper's place, workers are such processes, too: what is reported of one is its
        exit. Returns whether there were any.
        """
        unknown = {worker.pid: worker for worker in self.workers.values() if worker.exit is None}
        count = len(unknown)
        for one in map(leftover_of, entries):
            worker = unknown.pop(one.pid, None)
            if worker is None and one.signal_sent:
                self.leftovers.append(one)
            elif worker is not None and one.exitcode is not None:
                worker.exit, worker.exit_ns, worker.order = Exit(one.exitcode), clock.now_ns(), self._exits
                if one.exitcode == -SIGKILL:  # by the guard, or by the kernel with the keeper; else it ended by itself
                    worker.signalled, worker.signalled_ns = SIGKILL, worker.exit_ns
                self._exits += 1
                worker.ended.open()
        is_guards = len(unknown) < count
        self.leftovers_beyond = max(0, beyond - len(unknown)) if is_guards else beyond
        return is_guards

    def abandoned(self, left: list[tuple[int, str, str]], seconds: float) -> None:
        """Note that the keeper waits no more for workers that have not exited ``seconds`` after SIGKILL.

        ``left``: pid, name and state of processes that are left.
        """
        states = {pid: state for pid, _name, state in left}
        for worker in self.workers.values():
            if worker.exit is None:
                worker.abandoned = f"still there {seconds:g} s after SIGKILL, in state {states.get(worker.pid, '?')}"

    def note_hangs(self, unwritten: Mapping[int, str], hung: Mapping[int, str]) -> None:
        """Note what is known of ranks' hangs and is in no file, and what ranks were sent a signal for."""
        for rank, why in unwritten.items():
            self.workers[rank].hang = why
        for rank, what in hung.items():
            self.workers[rank].hung = what

    def close(self) -> None:
        """Wake all that wait for a worker's end: no report comes any more."""
        self.state = "ENDED"
        for worker in self.workers.values():
            worker.ended.open()


def _read(said: _Said, fds: list[int], drop: Callable[[list[int]], None]) -> None:
    """Read a large value from its file, which must be in memory: a read from any other may block."""
    file = fds.pop()
    try:
        from phalanx._base import linux, procfs

        said.result = linux.read_sealed(file, procfs.available_memory())
        said.received_fds = ReceivedFds(fds)
        os.close(file)
    except (OSError, MemoryError, ValueError) as error:
        if isinstance(error, ValueError):
            said.wrong = said.wrong or f"a large value: {error}"
        else:
            said.result = error
        drop([file, *fds])


class RankStatus(Value):
    """What a worker does just now, or how it has ended: see `PContext.status`.

    Attributes:
        local_rank: Its rank in its group.
        pid: Its process.
        state: ``"running"``; or how it has ended: ``"succeeded"``, ``"failed"`` by itself, ``"stopped"`` by us, or
            ``"abandoned"``, if no exit was seen.
        exitcode: As `subprocess` gives it, negative for a signal; None while it runs, or if no exit was seen.
        beat_age: Seconds since its last heartbeat; None: none has come, or heartbeats are not watched.
        step: The highest step that it has reported; None: none.
        breakpoint: The line at which it stands in a debugger, as ``FILE:LINE``; None: it does not.
        step_age: Seconds since it has reported its last step; None: it has reported none.
        step_time: How long its latest steps took, 32 of each process that reports them: ``min``, ``median``, ``max``
            and ``mean`` in seconds, and ``count``, how many were timed so far; None: none was.
    """

    local_rank: int
    pid: int
    state: str
    exitcode: int | None = None
    beat_age: float | None = None
    step: int | None = None
    breakpoint: str | None = None
    step_age: float | None = None
    step_time: dict[str, float] | None = None


_NAMED = 4  # processes that get a line each
_COMMAND = 80  # characters of a command in a line


class Leftover(Value):
    """A process that a worker left behind, and that was ended when no worker was left.

    Attributes:
        pid: The process.
        command: Its command line, up to 200 characters, without secrets (see `secrets`); or its name.
        local_rank: The worker's rank in its group; None when that is not known.
        age: Its age in seconds when it was first signalled.
        signal_sent: The last signal that it was sent.
        exitcode: As `subprocess` gives it, negative for a signal; None when it outlived even SIGKILL.

    >>> Leftover(4711, "python upload.py", 2, 12.34, 15, -15).describe()
    'pid 4711 (python upload.py) of rank 2, 12.3s old: SIGTERM'
    """

    pid: int
    command: str
    local_rank: int | None
    age: float
    signal_sent: int
    exitcode: int | None

    def __init__(
        self, pid: int, command: str, local_rank: int | None, age: float, signal_sent: int, exitcode: int | None
    ) -> None:
        self._store(
            pid=pid, command=command, local_rank=local_rank, age=age, signal_sent=signal_sent, exitcode=exitcode
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.describe()}>"

    def describe(self) -> str:
        """The process, and how it was ended, in one line."""
        sent = signal.Signals(self.signal_sent).name
        still = "" if self.exitcode is not None else ", and it is still there"
        return f"{_who(self)}: {sent}{still}"


def leftover_of(entry: tuple[Any, ...]) -> Leftover:
    """The process that a packed `protocol.Orphan` describes; its command goes to files and pages, without secrets."""
    orphan = Orphan(*entry)
    exitcode = None if orphan.status is None else os.waitstatus_to_exitcode(orphan.status)
    rank = None if orphan.rank < 0 else orphan.rank
    return Leftover(orphan.pid, shown_text(orphan.command), rank, orphan.age, orphan.signal, exitcode)


def lines_of_ended(ended: list[Leftover], beyond: int) -> Iterator[str]:
    """Yield lines on the processes that were ended. ``beyond`` counts those that are not described."""
    for one in ended[:_NAMED]:
        yield f"ended what was left behind: {one.describe()}"
    more = len(ended) - _NAMED + beyond
    if more > 0:
        yield f"ended what was left behind: {more} more process{'es' * (more > 1)}{_whose(ended[_NAMED:])}"


def line_of_waiting(waiting: list[Leftover], count: int, seconds: float) -> str:
    """One line on ``count`` processes that are waited for, of which the first ones are described."""
    those = ", ".join(map(_who, waiting[:_NAMED]))
    more = f" and {count - _NAMED} more{_whose(waiting[_NAMED:])}" if count > _NAMED else ""
    return f"waiting at most {seconds:g} s for what is left behind: {those}{more}"


def _who(one: Leftover) -> str:
    rank = "a worker" if one.local_rank is None else f"rank {one.local_rank}"
    command = one.command if len(one.command) <= _COMMAND else f"{one.command[: _COMMAND - 1]}…"
    command = "".join(char if char.isprintable() else "?" for char in command)
    return f"pid {one.pid} ({command}) of {rank}, {format_duration(one.age)} old"


def _whose(those: Iterable[Leftover]) -> str:
    ranks = {one.local_rank for one in those if one.local_rank is not None}
    return f" of {name_ranks(ranks)}" if ranks else ""
