"""The stacks of all ranks of a group, taken at the moment when one of them hangs.

Owns which processes are looked at, how long that may last, and the files that it goes to. How a process is looked at
is the business of `stacks`. Nothing that goes wrong here keeps what hangs from being ended. Used by one thread, which
waits.
"""

from __future__ import annotations

import contextlib
import os

from phalanx._base import clock, linux

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Protocol

    from phalanx._stacks.dump import Ended, Frame, Halted

    Where = Frame | Halted | Ended | str

    class Late(Protocol):
        """A timer that has expired. Moments are nanoseconds of CLOCK_MONOTONIC."""

        deadline: int
        span: int
        thread: int
        """The id of the thread that set it; 0: it is not known."""

    class Hang(Protocol):
        """What hangs: the local rank, the process that set the timer, and the timer."""

        rank: int
        pid: int

        @property
        def timer(self) -> Late: ...


WAIT = 0.3
"""Seconds in which the ranks have to give their stacks: as `stacks.BOUND`, whose import may fail."""

_FRESH = 1.0  # seconds for which they serve for what hangs next, too
_NATIVE = 8  # processes that hang of which frames of C code are read: that takes some 50 ms each
_BELOW = 8  # processes below each one that hangs that are looked at,
_BELOW_ALL = 64  # and in all
_TOLD = 3  # of them, in words


class Witnesses:
    """Takes stacks.

    Args:
        error_files: Each rank's. Its folder takes the rank's stacks.
        keep: Whether it does.

    Attributes:
        keep: As above.
        texts: What each process had to say last, by pid. One that has been killed since still says it, for a while: who
            hangs next is not to find nothing but the ends that this has led to.
        files: Where each rank's have been written, as far as they could be.
    """

    def __init__(self, error_files: Mapping[int, str], *, keep: bool = True) -> None:
        self.keep = keep
        self.texts: dict[int, str] = {}
        self.files: dict[int, str] = {}
        self._error_files = error_files
        self._speakers: dict[int, int] = {}  # each rank's process that stands for it: the one that hangs, or the worker
        self._below: dict[int, list[int]] = {}  # each rank's other processes that were looked at
        self._seen: dict[int, tuple[float, str]] = {}  # the stacks of a moment ago, by pid, and when that was
        self._threads: dict[int, tuple[float, int]] = {}  # of processes that hang, the thread that does, and likewise
        self._ended: dict[int, str] = {}
        self._places: dict[int, Where] = {}  # of the speakers, by rank: each text is read once, however many hang
        self._apart: set[int] | None = None
        self._taken = -_FRESH

    def get_ready(self) -> None:
        """Import what is needed once something hangs: then there is no time."""
        with contextlib.suppress(Exception):  # no descriptor is left, say; see the top
            from phalanx._stacks import collect, dump

            collect.get_ready()
            del dump

    def hear(
        self,
        alive: Mapping[int, int],
        hangs: Sequence[Hang],
        *,
        doomed: bool,
        ended: Mapping[int, str] | None = None,
    ) -> contextlib.ExitStack:
        """Take the stacks of all ranks that are ``alive``; at the latest after `WAIT` seconds it is over.

        Those that were taken a moment ago will do, if they were taken of all that hang, which had begun before. Of the
        ranks that hang, the processes that do are looked at (the worker, or some below it), and those below them.

        Args:
            alive: The pids of the live workers, by rank.
            hangs: What hangs.
            doomed: Whether the processes that hang are about to be killed: then all their threads are had by signal.
            ended: The ranks that have ended, and how.

        Returns what is to be closed once nobody waits any more: it takes its time.
        """
        afterwards = contextlib.ExitStack()
        hangs = sorted(hangs, key=lambda hang: hang.timer.deadline)
        self._note_threads(hangs)
        since = max(hang.timer.deadline - hang.timer.span for hang in hangs) / clock.NS
        if self._taken >= max(since, clock.now() - _FRESH) and all(hang.pid in self.texts for hang in hangs):
            return afterwards
        speakers, texts = dict(alive), {}
        below = _others(alive, hangs)
        try:
            from phalanx._stacks import collect

            speakers = {rank: collect.speaker(pid) for rank, pid in alive.items()}
            speakers |= {hang.rank: hang.pid for hang in reversed(hangs)}  # the first one stands for its rank
            struck = {hang.pid for hang in hangs} | {alive.get(hang.rank, 0) for hang in hangs} if doomed else set()
            native = [hang.pid for hang in hangs][:_NATIVE]
            ranks = {pid: rank for rank, pids in below.items() for pid in pids}
            ranks |= {pid: rank for rank, pid in speakers.items()}
            collection = collect.Collection(
                (
                    collect.Target(pid, pid, self._error_files[ranks[pid]], doomed=pid in struck, native=pid in native)
                    for pid in sorted(ranks, key=lambda pid: pid not in speakers.values())
                ),
                WAIT,
            )
            afterwards.callback(collection.close)
            collection.begin()
            collection.wait()
            texts = collection.finish()
        except Exception:  # noqa: BLE001, S110 - no descriptor is left, say; see the top
            pass
        self._taken = now = clock.now()
        self._seen |= {pid: (now, text) for pid, text in texts.items() if _has_stack(text)}
        self._seen = {pid: seen for pid, seen in self._seen.items() if seen[0] > now - _FRESH}
        self.texts = texts | {pid: text for pid, (_, text) in self._seen.items()}
        self.files, self._places, self._apart = {}, {}, None
        self._speakers, self._below, self._ended = speakers, below, dict(ended or {})
        return afterwards

    def _note_threads(self, hangs: Sequence[Hang]) -> None:
        """Which thread hangs of each process: where that is, is where its rank is. ``hangs``: the first one first."""
        now = clock.now()
        self._threads = {pid: noted for pid, noted in self._threads.items() if noted[0] > now - _FRESH}
        for hang in reversed(hangs):
            self._threads[hang.pid] = now, hang.timer.thread
            self._places.pop(hang.rank, None)
        self._apart = None

    def write(self) -> None:
        """Put each rank's stacks into its folder, as ``stacks-<n>.txt``. Once; what cannot be written is left out."""
        if not self.keep:
            return
        for rank, speaker in self._speakers.items():
            if rank not in self.files and speaker in self.texts:
                self.files[rank] = ""
                parts = [self.texts[speaker]]
                for pid in self._below.get(rank, ()):
                    text = self.texts.get(pid, "")
                    if _has_stack(text):
                        parts.append(f"# process {pid} of the same rank\n{text}")
                with contextlib.suppress(Exception):  # the disk is full, say, or no descriptor is left
                    from phalanx._stacks import collect

                    self.files[rank] = collect.write(os.path.dirname(self._error_files[rank]), "\n".join(parts))

    def sum_up(self, hang: Hang) -> str:
        """Where what hangs stands, where the other ranks do, and where the processes below it."""
        try:
            from phalanx._stacks import dump

            places = dict(self._all_places())
            if hang.pid in self.texts:
                places[hang.rank] = dump.place(self.texts[hang.pid], hang.timer.thread)
            elif self.texts:  # else of another process of its rank it would be said
                places[hang.rank] = "it was not looked at"
            text = dump.put_together(places, hang.rank)
            if hang.timer.thread and dump.is_of_some_thread(self.texts.get(hang.pid, "")):
                text += f"; of rank {hang.rank} it is the main thread, which need not be the one that hangs"
            return "\n".join([text, *self._of_below(hang)])
        except Exception as error:  # noqa: BLE001 - see the top
            return f"its stacks make no sense: {error!r}"

    def apart(self) -> set[int]:
        """The ranks that are elsewhere than most, or are not waiting for others: see `frames.apart`."""
        if self._apart is None:
            self._apart = set()
            with contextlib.suppress(Exception):  # see the top
                from phalanx._stacks import dump

                self._apart = dump.apart(self._all_places(), self._waits)
        return self._apart

    def _waits(self, rank: int) -> bool:
        from phalanx._stacks import dump

        pid = self._speakers[rank]
        return dump.waits(self.texts[pid], self._threads.get(pid, (0.0, 0))[1])

    def _all_places(self) -> dict[int, Where]:
        from phalanx._stacks import dump

        for rank, pid in self._speakers.items():
            if rank not in self._places and pid in self.texts:
                self._places[rank] = dump.place(self.texts[pid], self._threads.get(pid, (0.0, 0))[1])
        self._places |= {rank: dump.Ended(how) for rank, how in self._ended.items() if rank not in self._places}
        return self._places

    def _of_below(self, hang: Hang) -> list[str]:
        """Where the other processes of the rank are: a worker may wait for one of them."""
        from phalanx._stacks import dump

        others = [pid for pid in self._below.get(hang.rank, ()) if pid != hang.pid]
        pids = [pid for pid in others if _has_stack(self.texts.get(pid, ""))]
        lines = [f"process {pid} of the same rank is in {dump.place(self.texts[pid])}" for pid in pids[:_TOLD]]
        more = len(pids) - _TOLD
        return [*lines, f"and {more} more of its processes: see its stacks"] if more > 0 else lines


def _others(alive: Mapping[int, int], hangs: Sequence[Hang]) -> dict[int, list[int]]:
    """By rank, the processes of those that hang which do not stand for it: the worker, who else hangs, those below."""
    found: dict[int, list[int]] = {}
    first: dict[int, int] = {}
    room = _BELOW_ALL
    for hang in hangs:
        speaker = first.setdefault(hang.rank, hang.pid)
        pids = found.setdefault(hang.rank, [])
        worker = alive.get(hang.rank, hang.pid)
        below = list(linux.below([hang.pid], _BELOW))[: min(_BELOW, room)]
        room -= len(below)
        pids += [pid for pid in (worker, hang.pid, *below) if pid != speaker and pid not in pids]
    return found


def _has_stack(text: str) -> bool:
    from phalanx._stacks.dump import NO_STACK

    return bool(text) and not text.startswith(NO_STACK)
