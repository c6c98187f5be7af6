"""What is known of a group's workers: the launcher's copy of what the keeper has said, and what they have returned.

Owns the record of each worker. Decides nothing, and waits for nothing. Written by the group's thread alone, but for
large values, which are read aside; read freely once the group has ended.
"""

from __future__ import annotations

import os
from functools import partial

from phalanx._base import channels
from phalanx._base.exit_status import Exit
from phalanx._base.latch import Latch
from phalanx._engine import worker_messages
from phalanx._engine.pickling.passed_fds import Given

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from phalanx._engine.keeper.children import Report
    from phalanx._engine.keeper.orphans import Entry
    from phalanx._engine.leftovers import Leftover


TURN = 256
"""Packets that are taken in one turn: who sends without end keeps nobody else waiting."""

_STRANGERS = 100_000  # processes of which it is not known yet whether they are workers


class Worker:
    """What is known of one worker."""

    __slots__ = (
        "abandoned", "cpu_seconds", "ended", "exit", "exit_ns", "exiting_early", "exiting_ns", "given", "hang",
        "hung", "max_rss_kib", "oom", "order", "pid", "rank", "result", "signalled", "signalled_ns", "struck", "told",
    )  # fmt: skip

    def __init__(self, rank: int, pid: int) -> None:
        self.rank = rank
        self.pid = pid
        self.ended = Latch()  # its exit is known, or never will be
        self.exit: Exit | None = None
        self.exit_ns = 0
        self.exiting_ns = 0  # when it was seen to be on its way out, by itself, before it had exited; 0: it was not
        self.exiting_early = False  # whether it was when the first failure was seen
        self.order = -1
        self.signalled: int | None = None
        self.signalled_ns = 0
        self.abandoned = ""
        self.struck = 0  # the last signal that it was sent because it hung; 0: none
        self.hung = ""  # what it was sent that for
        self.hang = ""  # what is known of its hangs, and is in no file
        self.oom = ""
        self.max_rss_kib = 0
        self.cpu_seconds = 0.0
        self.result: bytes | Exception | None = None  # pickled; or why it could not be received, or is none
        self.given = Given()  # the descriptors that came with it
        self.told: tuple[str, str, int] | None = None  # evidence that it could not write: message, traceback, moment

    @property
    def failed(self) -> bool:
        """Whether it ended badly, or after it had hung; and by itself as far as its exit tells."""
        return self.exit is not None and (not self.exit.ok or self.struck > 0) and self.signalled is None


class _Said:
    """What a process has said, which may be a worker: the first value, and the first evidence."""

    __slots__ = ("given", "result", "told", "wrong")

    def __init__(self) -> None:
        self.result: bytes | Exception | None = None
        self.given = Given()
        self.told: tuple[str, str, int] | None = None
        self.wrong = ""  # what it has sent that made no sense, at first


class Mirror:
    """The workers of one group, and what they left behind."""

    def __init__(self) -> None:
        self.workers: dict[int, Worker] = {}
        """By local rank."""
        self.state = "STARTING"
        """As the keeper said last, see `lifecycle`."""
        self.began_ns = 0
        """When all workers had been started, in nanoseconds on CLOCK_MONOTONIC; 0: not yet."""
        self.leftovers: list[Leftover] = []
        """What workers left behind, and was ended,"""
        self.leftovers_beyond = 0
        """and how many more there were."""
        self._said: dict[int, _Said] = {}  # by pid
        self._pids: set[int] | None = None  # of all workers, once no other will be added
        self._exits = 0

    @property
    def alive(self) -> dict[int, int]:
        """The pids of the workers that have not exited, by rank."""
        return {rank: worker.pid for rank, worker in self.workers.items() if worker.exit is None}

    @property
    def ended(self) -> dict[int, str]:
        """How those have exited that have, by rank, in words."""
        return {rank: worker.exit.description for rank, worker in self.workers.items() if worker.exit is not None}

    def started(self, pids: list[tuple[int, int]]) -> None:
        """These workers, by rank and pid, have been started."""
        for rank, pid in pids:
            self.workers[rank] = Worker(rank, pid)

    def running(self, moment: int) -> None:
        """All workers have been started, at a ``moment`` on CLOCK_MONOTONIC: nobody else has anything to say."""
        self.state = "RUNNING"
        self.began_ns = moment
        pids = self._pids = {worker.pid for worker in self.workers.values()}
        self._said = {pid: said for pid, said in self._said.items() if pid in pids}

    def take(
        self, inbox: worker_messages.Inbox, answer: Callable[[int], Callable[[], None] | None], most: int = TURN
    ) -> Callable[[], None] | None:
        """Take what workers have returned, and what they tell of their failures; ``most`` packets. Raises Closed.

        ``answer`` is given the socket of each one that asks for the resource tracker, and closes it. Returns what is to
        be called, and takes its time, before more is taken: it reads a large value, is what ``answer`` returns, or
        waits for descriptors to be closed. None when there is nothing more for now.
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
        """Note what a packet says of its sender. Returns what reads its value, if that is not in it."""
        said = self._of(packet.pid)
        if said is None or packet.wrong or packet.letter == worker_messages.TRACKER:
            drop(packet.fds)
            if said is not None:
                said.wrong = said.wrong or packet.wrong
        elif packet.letter == worker_messages.EVIDENCE:
            said.told = said.told or worker_messages.told(packet)
        elif said.result is not None:  # it has returned once
            drop(packet.fds)
        elif packet.cut:
            said.result = channels.Truncated(packet.letter)
        elif packet.letter == worker_messages.LARGE:
            return partial(_read, said, packet.fds, drop)
        else:
            said.result, said.given = packet.content, Given(packet.fds)
        return None

    def _of(self, pid: int) -> _Said | None:
        """What a process has said before; None if it is no worker, as far as one can tell by now."""
        if pid not in self._said and (len(self._said) < _STRANGERS if self._pids is None else pid in self._pids):
            self._said[pid] = _Said()
        return self._said.get(pid)

    def settle_results(self) -> None:
        """All has been taken that there is: give it to those who have exited."""
        for worker in self.workers.values():
            said = self._said.pop(worker.pid, None)
            if worker.exit is not None and said is not None:
                worker.result, worker.given, worker.told = said.result, said.given, said.told
                if said.result is None and said.wrong:
                    worker.result = ValueError(f"rank {worker.rank} sent what is no result: {said.wrong}")
        self._said.clear()

    def exits(self, reports: list[Report]) -> Iterator[Worker]:
        """These workers have exited, in this order."""
        for rank, status, moment, rss, seconds, oom, exiting, early, struck in reports:
            worker = self.workers[rank]
            worker.exit, worker.exit_ns, worker.order = Exit.of_status(status), moment, self._exits
            worker.max_rss_kib, worker.cpu_seconds, worker.oom = rss, seconds, oom
            worker.exiting_ns, worker.exiting_early, worker.struck = exiting, early, struck
            self._exits += 1
            worker.ended.open()
            yield worker

    def signalled(self, number: int, moment: int, ranks: list[int]) -> None:
        """These have been sent a signal, to stop them."""
        for rank in ranks:
            worker = self.workers[rank]
            if worker.signalled is None:
                worker.signalled_ns = moment
            worker.signalled = number

    def remains(self, entries: list[Entry], beyond: int) -> None:
        """These processes have been left behind, and ended."""
        from phalanx._engine import leftovers

        self.leftovers += map(leftovers.of, entries)
        self.leftovers_beyond = beyond

    def abandoned(self, left: list[tuple[int, str, str]], seconds: float) -> None:
        """Who has not exited by now is waited for no more, ``seconds`` after SIGKILL. ``left``: pid, name and state."""
        states = {pid: state for pid, _name, state in left}
        for worker in self.workers.values():
            if worker.exit is None:
                worker.abandoned = f"still there {seconds:g} s after SIGKILL, in state {states.get(worker.pid, '?')}"

    def close(self) -> None:
        """Nothing more will be known: nobody needs to wait for it."""
        self.state = "ENDED"
        for worker in self.workers.values():
            worker.ended.open()


def _read(said: _Said, fds: list[int], drop: Callable[[list[int]], None]) -> None:
    """Read a large value. Its file is one in memory, or is not looked at: another might take its time."""
    file = fds.pop()
    try:
        from phalanx._base import procfs, sealed_memfd

        said.result = sealed_memfd.read(file, procfs.available_memory())
        said.given = Given(fds)
        os.close(file)
    except (OSError, MemoryError, ValueError) as error:
        if isinstance(error, ValueError):
            said.wrong = said.wrong or f"a large value: {error}"
        else:
            said.result = error
        drop([file, *fds])
