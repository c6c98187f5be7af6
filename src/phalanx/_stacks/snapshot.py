"""Takes the stacks of all ranks of a group at the moment when one of them hangs, and tells where each rank is.

Owns which processes are looked at, how long that may last, and the files that the stacks are written to. How a process
is looked at is the business of `collect`. Nothing that goes wrong here keeps the process that hangs from being ended:
no method raises. Used by one thread, which waits.
"""

from __future__ import annotations

import contextlib
import os
import re

from phalanx._base import clock, files, procfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Protocol

    from phalanx._stacks.dump import Location

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
"""Seconds in which the ranks have to give their stacks: as `collect.BOUND`, whose import may fail."""

KEPT = 20
"""How many files of stacks are kept in a folder, the newest ones."""

_FRESH = 1.0  # seconds for which stacks serve for what hangs next, too
_NATIVE = 8  # processes that hang of which frames of C code are read: that takes some 50 ms each
_BELOW = 8  # processes below each one that hangs that are looked at,
_BELOW_ALL = 64  # and in all
_SHOWN = 3  # of them, in words
_NAME = re.compile(r"stacks-([0-9]+)\.txt")


class Snapshot:
    """The stacks of a group's processes.

    Attributes:
        keep: Whether the folder of each rank's error file takes the rank's stacks.
        texts: The last stacks of each process, by pid. Those of a process that has been killed since are kept for a
            while: the report of what hangs next is not to show only the ends that this has led to.
        files: The file in which each rank's have been written; "" where they could not be.
    """

    def __init__(self, error_files: Mapping[int, str], *, keep: bool = True) -> None:
        self.keep = keep
        self.texts: dict[int, str] = {}
        self.files: dict[int, str] = {}
        self._error_files = error_files
        self._main: dict[int, int] = {}  # each rank's process that stands for it: the one that hangs, or the worker
        self._below: dict[int, list[int]] = {}  # each rank's other processes that were looked at
        self._recent: dict[int, tuple[float, str]] = {}  # the stacks of a moment ago, by pid, and when that was
        self._threads: dict[int, tuple[float, int]] = {}  # of processes that hang, the thread that does, and likewise
        self._ended: dict[int, str] = {}
        self._known: dict[int, Location] = {}  # by rank: each text is parsed once, however many hang
        self._outliers: set[int] | None = None
        self._taken = -_FRESH

    def preload(self) -> None:
        """Import what `take` needs: once something hangs, there is no time."""
        with contextlib.suppress(Exception):  # no descriptor is left, perhaps; see the top
            from phalanx._stacks import collect, dump, py_spy

            py_spy.preload()
            del collect, dump

    def take(
        self,
        alive: Mapping[int, int],
        hangs: Sequence[Hang],
        *,
        doomed: bool,
        ended: Mapping[int, str] | None = None,
        seconds: float = WAIT,
    ) -> None:
        """Take the stacks of all ranks that are ``alive``, in at most so many ``seconds``.

        Those that were taken a moment ago serve again, if they were taken of all that hang, which had begun before. Of
        the ranks that hang, the processes that do are looked at (the worker, or some below it), and those below them.
        ``hangs`` is empty if a rank of another machine hangs. ``doomed``: whether what hangs is about to be killed:
        then it writes all its threads on a signal. ``ended``: how ranks have ended.
        """
        hangs = sorted(hangs, key=lambda hang: hang.timer.deadline)
        self._note_threads(hangs)
        since = max((hang.timer.deadline - hang.timer.span for hang in hangs), default=0) / clock.NS
        if self._taken >= max(since, clock.now() - _FRESH) and all(hang.pid in self.texts for hang in hangs):
            return
        main, texts = dict(alive), {}
        below = _others(alive, hangs)
        try:
            from phalanx._stacks import collect, request

            main = {rank: request.working_process(pid) for rank, pid in alive.items()}
            main |= {hang.rank: hang.pid for hang in reversed(hangs)}  # the first one stands for its rank
            struck = {hang.pid for hang in hangs} | {alive.get(hang.rank, 0) for hang in hangs} if doomed else set()
            native = [hang.pid for hang in hangs][:_NATIVE]
            ranks = {pid: rank for rank, pids in below.items() for pid in pids}
            ranks |= {pid: rank for rank, pid in main.items()}
            targets = [
                request.Target(pid, pid, self._error_files[ranks[pid]], doomed=pid in struck, native=pid in native)
                for pid in sorted(ranks, key=lambda pid: pid not in main.values())
            ]
            with collect.Collection(targets, seconds) as collection:
                collection.begin()
                collection.wait()
                texts = collection.finish()
        except Exception:  # noqa: BLE001, S110 - no descriptor is left, perhaps; see the top
            pass
        self._taken = now = clock.now()
        self._recent |= {pid: (now, text) for pid, text in texts.items() if _has_stack(text)}
        self._recent = {pid: recent for pid, recent in self._recent.items() if recent[0] > now - _FRESH}
        self.texts = texts | {pid: text for pid, (_, text) in self._recent.items()}
        self.files, self._known, self._outliers = {}, {}, None
        self._main, self._below, self._ended = main, below, dict(ended or {})

    def write(self) -> None:
        """Write each rank's stacks into its folder, as ``stacks-<n>.txt``, once. What cannot be written is left out."""
        if not self.keep:
            return
        for rank, main in self._main.items():
            if rank not in self.files and main in self.texts:
                self.files[rank] = ""
                parts = [self.texts[main]]
                for pid in self._below.get(rank, ()):
                    text = self.texts.get(pid, "")
                    if _has_stack(text):
                        parts.append(f"# process {pid} of the same rank\n{text}")
                with contextlib.suppress(Exception):  # the disk is full, perhaps, or no descriptor is left
                    self.files[rank] = write_stacks(os.path.dirname(self._error_files[rank]), "\n".join(parts))

    def sum_up(self, hang: Hang) -> str:
        """Describe where what hangs stands, where the other ranks do, and where the processes below it."""
        try:
            from phalanx._stacks import dump

            locations = dict(self._locations())
            if hang.pid in self.texts:
                locations[hang.rank] = dump.location(self.texts[hang.pid], hang.timer.thread)
            elif self.texts:  # else that of another process of its rank would stand there
                locations[hang.rank] = "it was not looked at"
            text = dump.sum_up_locations(locations, hang.rank)
            if hang.timer.thread and dump.is_of_unnamed_thread(self.texts.get(hang.pid, "")):
                text += f"; of rank {hang.rank} it is the main thread, which need not be the one that hangs"
            return "\n".join([text, *self._sum_up_below(hang)])
        except Exception as error:  # noqa: BLE001 - see the top
            return f"its stacks make no sense: {error!r}"

    def outliers(self) -> set[int]:
        """The ranks that are elsewhere than most, or are not waiting for others: see `dump.outliers`."""
        if self._outliers is None:
            self._outliers = set()
            with contextlib.suppress(Exception):  # see the top
                from phalanx._stacks import dump

                self._outliers = dump.outliers(self._locations(), self._waits)
        return self._outliers

    def whereabouts(self) -> dict[int, tuple[Location, bool]]:
        """Where each rank is, as of the last look, and whether it waits for others there: `dump.waits_for_peers`."""
        try:
            return {
                rank: (where, self._main.get(rank) in self.texts and self._waits(rank))
                for rank, where in self._locations().items()
            }
        except Exception:  # noqa: BLE001 - see the top
            return {}

    def _note_threads(self, hangs: Sequence[Hang]) -> None:
        """Note which thread hangs of each process: it tells where its rank is. ``hangs``: the first one first."""
        now = clock.now()
        self._threads = {pid: noted for pid, noted in self._threads.items() if noted[0] > now - _FRESH}
        for hang in reversed(hangs):
            self._threads[hang.pid] = now, hang.timer.thread
            self._known.pop(hang.rank, None)
        self._outliers = None

    def _waits(self, rank: int) -> bool:
        from phalanx._stacks import dump

        pid = self._main[rank]
        return dump.waits_for_peers(self.texts[pid], self._thread(pid))

    def _locations(self) -> dict[int, Location]:
        from phalanx._stacks import dump

        for rank, pid in self._main.items():
            if rank not in self._known and pid in self.texts:
                self._known[rank] = dump.location(self.texts[pid], self._thread(pid))
        self._known |= {rank: dump.Ended(how) for rank, how in self._ended.items() if rank not in self._known}
        return self._known

    def _thread(self, pid: int) -> int:
        """The thread of a process that hangs; 0: none is known."""
        return self._threads.get(pid, (0.0, 0))[1]

    def _sum_up_below(self, hang: Hang) -> list[str]:
        """Describe where the other processes of the rank are: a worker may wait for one of them."""
        from phalanx._stacks import dump

        others = [pid for pid in self._below.get(hang.rank, ()) if pid != hang.pid]
        pids = [pid for pid in others if _has_stack(self.texts.get(pid, ""))]
        lines = [f"process {pid} of the same rank is in {dump.location(self.texts[pid])}" for pid in pids[:_SHOWN]]
        more = len(pids) - _SHOWN
        return [*lines, f"and {more} more of its processes: see its stacks"] if more > 0 else lines


def _others(alive: Mapping[int, int], hangs: Sequence[Hang]) -> dict[int, list[int]]:
    """Find, by rank that hangs, its processes that do not stand for it: the worker, others that hang, those below."""
    found: dict[int, list[int]] = {}
    first: dict[int, int] = {}
    room = _BELOW_ALL
    for hang in hangs:
        main = first.setdefault(hang.rank, hang.pid)
        pids = found.setdefault(hang.rank, [])
        worker = alive.get(hang.rank, hang.pid)
        below = list(procfs.descendants([hang.pid], _BELOW))[: min(_BELOW, room)]
        room -= len(below)
        pids += [pid for pid in (worker, hang.pid, *below) if pid != main and pid not in pids]
    return found


def _has_stack(text: str) -> bool:
    from phalanx._stacks.dump import NO_STACK

    return bool(text) and not text.startswith(NO_STACK)


def write_stacks(folder: str, text: str) -> str:
    """Write to ``stacks-<n>.txt`` in a folder, n being one more than the highest there. Returns the path.

    Of such files the newest `KEPT` are kept. Raises OSError.
    """
    numbers = sorted(int(found[1]) for found in map(_NAME.fullmatch, os.listdir(folder)) if found)
    number = numbers[-1] + 1 if numbers else 1
    path = os.path.join(folder, f"stacks-{number}.txt")
    fd = files.opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        files.write_all(fd, text.encode("utf-8", "backslashreplace"))
    finally:
        os.close(fd)
    for old in numbers[: len(numbers) + 1 - KEPT] if len(numbers) >= KEPT else ():
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(folder, f"stacks-{old}.txt"))
    return path
