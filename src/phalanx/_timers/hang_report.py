"""What is written down and said of workers that hang: the stacks of all ranks, error files, lines, events.

Owns the evidence and the words. Which timers have expired, and what is done about it, the keeper decides
(`escalation`); it waits for the stacks, though not for long. All of this takes disks and other processes, so it has
a thread of its own; what listens to events is the caller's code, and has another.
"""

from __future__ import annotations

import os
import signal
from functools import partial

from phalanx._base import clock, procfs
from phalanx._base.background import SerialExecutor
from phalanx._base.rank_ranges import name_ranks
from phalanx._evidence.describe import without_own_frames
from phalanx._evidence.error_file import (
    handled_at,
    message_of,
    read_error_file,
    remove_timer_evidence,
    write_error_file,
    written_by,
)
from phalanx._stacks.snapshot import Snapshot
from phalanx._timers.hang import Hang

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from typing import Any

    from phalanx._timers.timetable import Timetable

    Event = dict[str, Any]
    Told = tuple[Any, ...]

FINISH = 5.0
"""Seconds that the end of a group waits for what is to be written down, and for a listener that does not return."""


def words(hang: Hang, moment: int, where: Sequence[str]) -> tuple[str, str]:
    """What is said of a hang wherever it is told: the message of the failure, and what else is known, in lines."""
    late = f"{clock.format_seconds(hang.late(moment))} over its deadline"
    return f"Hang: {hang.what}", "\n".join([late, *filter(None, where)])


def stands(data: dict[str, Any] | None, pids: Collection[int]) -> bool:
    """Whether error file data are of one of these processes, and no exception that it has handled, and gone on."""
    return written_by(data) in pids and handled_at(data) is None


def handled(data: dict[str, Any] | None) -> list[str]:
    """What is said of evidence that a hang replaces, in lines."""
    if handled_at(data) is None:
        return []
    return [f"it had recorded {(message_of(data) or '').partition(chr(10))[0]} before, and gone on"]


def write_down(
    path: str, hang: Hang, moment: int, where: Sequence[str], stack: str, *, worker: int, dated: int = 0
) -> None:
    """Write the error file of a process that hangs, in its place. Raises OSError.

    Args:
        path: The error file.
        hang: What hangs.
        moment: Now (CLOCK_MONOTONIC, nanoseconds).
        where: Lines on where it is, and the others.
        stack: Its stacks.
        worker: The pid that the failure will be known by.
        dated: When it began to fail; 0: at its deadline.
    """
    message, detail = words(hang, moment, where)
    write_error_file(
        path,
        message,
        without_own_frames(stack),
        monotonic_ns=dated or hang.timer.deadline,
        pid=worker,
        observer="timer",
        scope=hang.timer.scope or hang.timer.place,
        detail=detail,
    )


class HangReport:
    """Reports on one group's timers. Methods may be called from any thread, and return at once, but for `finish`.

    Args:
        table: The group's; closed with this.
        steps: What follows an expiry, in order: name and delay in seconds.
        error_files: Each rank's. Its folder takes the rank's stacks, if they are to be kept.
        emit: Called with events, in their order: it writes them somewhere.
        listener: Called with each event, one after the other, on a thread of its own; or None.
        say: Shows a line.
        stacks: Whether the stacks are kept.

    Attributes:
        unwritten: What is known of hangs of a rank, and is not in its error file.
        hung: What each rank was sent a signal for, or is about to be; also of those that have gone on since.
    """

    def __init__(
        self,
        table: Timetable,
        steps: Sequence[tuple[str, float]],
        error_files: Mapping[int, str],
        emit: Callable[[list[Event]], None],
        listener: Callable[[Event], None] | None,
        say: Callable[[str], None],
        *,
        stacks: bool = True,
    ) -> None:
        self.table = table
        self.steps = steps
        self.unwritten: dict[int, str] = {}
        self.hung: dict[int, str] = {}
        self._error_files = error_files
        self._emit = emit
        self._listener = listener
        self._say = say
        self._snapshot = Snapshot(error_files, keep=stacks)
        self._workers: dict[int, int] = {}
        self._ended: dict[tuple[int, int, int, int], Hang] = {}  # those that were signalled, and have not gone on
        self._events: list[Event] = []
        self._raised = False  # whether the listener has
        self._aside = SerialExecutor("phalanx-hangs")
        self._observer = SerialExecutor("phalanx-observer")

    def hear(
        self,
        verb: str,
        *arguments: Any,
        workers: dict[int, int],
        ended: Mapping[int, str],
        testified: Callable[[], None] | None = None,
    ) -> None:
        """Take what the keeper says of timers, and report on it soon.

        Args:
            verb: What it is: "armed", "expired", "hang" (a step is to be taken), "struck", "left", "refused" or
                "unwatched".
            *arguments: What the keeper says with it, see `escalation`.
            workers: The pids of the live workers, by rank.
            ended: How the others have ended, by rank.
            testified: Called, on this one's thread, when the evidence of a step is there.
        """

        def report() -> None:
            self._workers |= workers
            if testified is None:
                _REPORT[verb](self, *arguments)
            else:
                self._step(*arguments, workers=workers, ended=ended, testified=testified)

        if not self._do(report) and testified is not None:
            testified()

    def finish(self) -> None:
        """Return when all is written down and told, or takes too long."""
        late = [
            what for what, aside in (("evidence", self._aside), ("on_event", self._observer)) if not aside.drain(FINISH)
        ]
        for what in late:
            self._say(f"{what} of timers is not complete: that takes too long")

    def close(self) -> None:
        """Let go of the table. Idempotent."""
        self.table.close()

    # --- on the thread of its own

    def _do(self, action: Callable[[], None]) -> bool:
        def do() -> None:
            try:
                action()
            finally:
                if not self._aside.pending:  # else what waits comes first: it may be what a kill waits for
                    self._flush()

        return self._aside.submit(do)

    def _armed(self, moment: int, told: list[Told]) -> None:
        """Timers are in use that were not before (and do not hang)."""
        for hang in map(Hang.of, told):
            self._note_of("timer.armed", hang, moment, overdue=0.0)
        self._snapshot.preload()

    def _expired(self, moment: int, told: list[Told]) -> None:
        for hang in map(Hang.of, told):
            self._note_of("timer.expired", hang, moment)

    def _step(
        self,
        name: str,
        number: int,
        moment: int,
        told: list[Told],
        *,
        workers: dict[int, int],
        ended: Mapping[int, str],
        testified: Callable[[], None],
    ) -> None:
        """Take the evidence that a step wants, and say so: once, whatever happens. ``number``: the signal, or 0."""
        answers = [testified]

        def answer() -> None:
            if answers:
                answers.pop()()

        hangs = list(map(Hang.of, told))
        try:
            if name == "report":
                self._say_all(hangs, name, number, moment)
                return
            doomed = number == signal.SIGKILL
            with self._snapshot.take(workers, hangs, doomed=doomed, ended=ended) as afterwards:
                if not number:
                    self._snapshot.write()
                    self._say_all(hangs, name, number, moment)
                elif number != signal.SIGKILL:  # what a worker raises because of it must not be found first
                    self._record_all(hangs, moment)
                elif dead := [hang for hang in hangs if self._died_of_it(hang)]:
                    self._record_all(dead, moment)
                afterwards.callback(answer)  # before what takes its time is closed
        finally:
            answer()

    def _died_of_it(self, hang: Hang) -> bool:
        """Whether a process has ended before the kill, within its block: of the look at its threads, or on its own."""
        return procfs.has_exited(hang.pid) and self.table.still(hang.timer)

    def _struck(self, number: int, moment: int, told: list[Told]) -> None:
        """What hangs has been sent a signal."""
        hangs = list(map(Hang.of, told))
        # Once the group is about to end, the report will tell of the others.
        quiet = bool(self._ended) and not any(hang.key in self._ended for hang in hangs)
        self._record_all(hangs, moment)
        self._snapshot.write()
        for hang in hangs:
            self._note_of("worker.reaped", hang, moment, signal=number)
        if not quiet:
            self._say_all(hangs, "", number, moment)

    def _left(self, moment: int, told: list[Told]) -> None:
        """Workers have left the blocks in which they hung."""
        hangs = list(map(Hang.of, told))
        for hang in hangs:
            if self._ended.pop(hang.key, None) is not None:
                # By a signal that it has survived: what it fails of one day, it is to tell itself. It may not.
                remove_timer_evidence(self._error_files[hang.rank])
                self.unwritten[hang.rank] = f"it had hung before: {hang.what}; and had gone on since"
            self._note_of("timer.left", hang, moment)
        for what, those in _by_what(hangs).items():
            has = "they have" if len({hang.rank for hang in those}) > 1 else "it has"
            self._say(f"{name_ranks(hang.rank for hang in those)}: {what}; {has} gone on since")

    def _refused(self, pid: int, scope: str, place: str) -> None:
        self._say(f"process {pid} is not in the group: its timers are not watched")
        self._note("request.refused", clock.now_ns(), pid=pid, scope=scope, place=place)

    def _unwatched(self, why: str) -> None:
        self._say(f"timers are not watched: {why}")

    def _record_all(self, hangs: list[Hang], moment: int) -> None:
        self._ended.update((hang.key, hang) for hang in hangs)
        ranks: dict[int, list[Hang]] = {}
        for hang in sorted(hangs, key=lambda hang: hang.timer.deadline):
            ranks.setdefault(hang.rank, []).append(hang)
        for rank, those in ranks.items():
            self.hung[rank] = words(those[0], moment, ())[0]
            self._record(those, moment)

    def _record(self, hangs: list[Hang], moment: int) -> None:
        """Leave evidence where the worker would have left its own: what came first stays.

        Who waits for another hangs as well, and perhaps sooner: the one that is elsewhere than most hung first.
        """
        first, *others = hangs
        dated = first.timer.deadline
        if first.rank in self._snapshot.outliers():
            dated = min(other.timer.deadline for other in (first, *self._ended.values())) - 1
        path = self._error_files[first.rank]
        known = read_error_file(path)[0]
        if stands(known, self._workers.values()):
            return
        self._snapshot.write()
        where = [self._snapshot.sum_up(first), *handled(known)]
        where += [f"also: {hang.what}; {clock.format_seconds(hang.late(moment))} over its deadline" for hang in others]
        if file := self._snapshot.files.get(first.rank):
            where.append(f"stacks of all ranks: {os.path.basename(file)} in each rank's folder")
        stack = self._snapshot.texts.get(first.pid, "")
        try:
            write_down(path, first, moment, where, stack, worker=self._workers[first.rank], dated=dated)
        except Exception:  # noqa: BLE001 - the disk is full, or no descriptor is left: that is no reason to go
            self.unwritten[first.rank] = "\n".join(words(first, moment, where))

    def _say_all(self, hangs: list[Hang], step: str, number: int, moment: int) -> None:
        """One line for all ranks of which the same is to be said."""
        for what, those in _by_what(hangs).items():
            over = clock.format_seconds(max(hang.late(moment) for hang in those))
            text = f"{name_ranks(hang.rank for hang in those)}: {what}; {over} over"
            first = those[0]
            if step != "report" and (where := self._snapshot.sum_up(first)):
                text += "; " + "; ".join(where.split("\n"))
            if step == "dump":
                none = "none" if self._snapshot.keep else "not kept, for no logs are"
                text += f"; stacks: {self._snapshot.files.get(first.rank) or none}"
            if number:
                text += f"; {signal.Signals(number).name}"
            self._say(text)

    def _note_of(self, name: str, hang: Hang, moment: int, **facts: Any) -> None:
        timer = hang.timer
        told = {"rank": hang.rank, "pid": hang.pid, "scope": timer.scope or timer.place, "place": timer.place}
        self._note(name, moment, **{**told, "overdue": hang.late(moment), **facts})

    def _note(self, name: str, moment: int, **facts: Any) -> None:
        timestamp = clock.to_wall(moment / clock.NS)
        self._events.append({"name": name, "timestamp": timestamp, "monotonic_ns": moment, **facts})

    def _flush(self) -> None:
        events, self._events = self._events, []
        if events:
            self._emit(events)
        if self._listener is not None:
            for event in events:
                self._observer.submit(partial(self._call, self._listener, event))

    def _call(self, listener: Callable[[Event], None], event: Event) -> None:
        """Tell the listener. It is the caller's: what it raises is logged once, and it hears of the next event, too."""
        try:
            listener(event)
        except BaseException:  # this thread is there for it alone
            if not self._raised:
                self._raised = True
                from logging import getLogger

                getLogger("phalanx.timer").exception("on_event raised at %s", event["name"])


_REPORT: dict[str, Callable[..., None]] = {
    "armed": HangReport._armed,
    "expired": HangReport._expired,
    "struck": HangReport._struck,
    "left": HangReport._left,
    "refused": HangReport._refused,
    "unwatched": HangReport._unwatched,
}


def _by_what(hangs: list[Hang]) -> dict[str, list[Hang]]:
    """Those of which the same is to be said, together."""
    same: dict[str, list[Hang]] = {}
    for hang in hangs:
        same.setdefault(hang.what, []).append(hang)
    return same
