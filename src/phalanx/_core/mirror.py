"""What is known of a group's workers: the launcher's copy of what the keeper has said, and what they have returned.

Owns the record of each worker. Decides nothing, and waits for nothing. Written by the group's thread alone, but for
large values, which are read aside; read freely once the group has ended.
"""

from __future__ import annotations

from functools import partial

from phalanx._core import wire
from phalanx._core.evidence import TEXT_LIMIT
from phalanx._core.exit import Exit
from phalanx._core.given import Given
from phalanx._core.latch import Latch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    from phalanx._core.children import Report
    from phalanx._core.leftovers import Leftover
    from phalanx._core.remains import Entry


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
        self.result: bytes | OSError | MemoryError | None = None  # pickled; or why it could not be received
        self.given = Given()  # the descriptors that came with it
        self.told: tuple[str, str, int] | None = None  # evidence that it could not write: message, traceback, moment

    @property
    def failed(self) -> bool:
        """Whether it ended badly, or after it had hung; and by itself as far as its exit tells."""
        return self.exit is not None and (not self.exit.ok or self.struck > 0) and self.signalled is None


class Mirror:
    """The workers of one group, and what they left behind."""

    def __init__(self) -> None:
        self.workers: dict[int, Worker] = {}
        """By local rank."""
        self.state = "STARTING"
        """As the keeper said last, see `lifecycle`."""
        self.leftovers: list[Leftover] = []
        """What workers left behind, and was ended,"""
        self.leftovers_beyond = 0
        """and how many more there were."""
        self._results: dict[tuple[int, int], bytes | OSError | MemoryError] = {}  # by rank and pid
        self._given: dict[tuple[int, int], Given] = {}  # as above
        self._told: dict[tuple[int, int], tuple[str, str, int]] = {}  # as above
        self._exits = 0

    @property
    def alive(self) -> dict[int, int]:
        """The pids of the workers that have not exited, by rank."""
        return {rank: worker.pid for rank, worker in self.workers.items() if worker.exit is None}

    @property
    def ended(self) -> dict[int, str]:
        """How those have exited that have, by rank, in words."""
        return {rank: worker.exit.spoken for rank, worker in self.workers.items() if worker.exit is not None}

    def started(self, pids: list[tuple[int, int]]) -> None:
        """These workers, by rank and pid, have been started."""
        for rank, pid in pids:
            self.workers[rank] = Worker(rank, pid)

    def take_results(self, channel: wire.Channel, answer: Callable[[int], None]) -> Callable[[], None] | None:
        """Take what workers have returned, and what they tell of their failures. Raises wire.Closed.

        ``answer`` is given the socket of each one that asks for the resource tracker, and closes it.
        Returns what reads a value that is too large for a message, which takes its time; the next ones are to be taken
        after that. None when there is nothing more for now.
        """
        while True:
            try:
                received = channel.receive()
            except wire.Truncated as error:  # that one is lost, for want of a descriptor; others may lie behind it
                self._take(error.message, (), error)
                continue
            if received is None:
                return None
            message, fds = received
            match message:
                case ("tracker", *_) if len(fds) == 1:
                    answer(fds[0])
                    continue
                case ("result", _, _, None) if fds:
                    return partial(self._read, message, fds)
            self._take(message, fds)

    def _read(self, message: Any, fds: list[int]) -> None:
        try:
            with open(fds.pop(), "rb") as file:
                file.seek(0)
                self._take(message, fds, file.read())
        except (OSError, MemoryError) as error:
            self._take(message, fds, error)

    def _take(self, message: Any, fds: Sequence[int], beside: bytes | OSError | MemoryError | None = None) -> None:
        """Take a message, and what came ``beside`` it. What is not of the right form is of no worker of ours."""
        given = Given(fds)  # which closes what nobody wants
        match message:
            case ("result", int(rank), int(pid), within):
                value = within if beside is None else beside
                if isinstance(value, (bytes, OSError, MemoryError)):
                    self._results[rank, pid], self._given[rank, pid] = value, given
            case ("evidence", int(rank), int(pid), str(text), str(stack), int(moment)) if 0 <= moment < 1 << 63:
                self._told.setdefault((rank, pid), (text[:TEXT_LIMIT], stack[:TEXT_LIMIT], moment))

    def settle_results(self) -> None:
        """All has been taken that there is: give it to those who have exited."""
        for worker in self.workers.values():
            if worker.exit is not None:
                worker.result = self._results.pop((worker.rank, worker.pid), worker.result)
                worker.given = self._given.pop((worker.rank, worker.pid), worker.given)
                worker.told = self._told.pop((worker.rank, worker.pid), worker.told)
        self._given.clear()

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
        from phalanx._core import leftovers

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
