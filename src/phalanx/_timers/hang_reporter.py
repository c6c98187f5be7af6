"""Reports on the timers of one group: takes the stacks of all ranks, writes error files and lines.

Runs in the launcher. Which timers have expired, and what follows, is decided in the keeper (`escalation`), which waits
for the stacks, though not for long. All of this takes disks and other processes, so it has a thread of its own. The
words are in `hang_report`, the events in `_engine.group_events`. `watch` sets it up for a group, with the table.
"""

from __future__ import annotations

import os
import signal

from phalanx._base import clock, procfs
from phalanx._base.clock import format_duration
from phalanx._base.text import name_ranks
from phalanx._base.threads import SerialExecutor
from phalanx._base.tty import sanitise
from phalanx._evidence.error_file import DEBUG_SUFFIX, is_of_run, remove_timer_evidence
from phalanx._stacks.snapshot import Snapshot
from phalanx._timers import hang_report
from phalanx._timers.hang import Hang
from phalanx._timers.layout import NEVER, TIMERS_ENV
from phalanx._timers.table import TimerTable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from typing import Any

    from phalanx._logs.layout import LogsDest
    from phalanx._stacks.dump import Location
    from phalanx._timers.hang import RankSigns
    from phalanx._timers.specs import TimerSpecs

    Packed = tuple[Any, ...]  # see `Hang.to_tuple`

_SEATS = 64  # for each rank: itself, and processes below it. The file is sparse: a free seat takes no memory
_LEAST_SEATS, _MOST_SEATS = 1024, 16384

FINISH = 5.0
"""Seconds that the end of a group waits for the reports."""

_WRITING = 1.0
"""Seconds that it waits for a `HangReporter.look`, after those that the ranks have,"""

_HURRIED = 0.5
"""and those for which it waits if nobody wants to know any more."""


class HangReporter:
    """Reports on one group's timers. Methods may be called from any thread, and return at once, but for `finish`.

    Args:
        table: The group's table; closed with this.
        steps: What follows an expiry, in order: name and delay in seconds.
        error_files: Each rank's. Its folder takes the rank's stacks, if they are to be kept.
        show: Shows a line.
        stacks: Whether the stacks are kept.
        numbers: Each rank's number in the job, if that is another one.

    Attributes:
        unwritten: By rank, what is known of its hangs and is not in its error file.
        hung: By rank, the message about the hang for which it was or is to be sent a signal, even if it has gone on.
        whereabouts: By rank, where it was when the hang was found that has ended the group, or that of another machine:
            see `Snapshot.whereabouts`. Empty: there was none, or nothing is known.
        summaries: By rank that hung, the line of its error file that says where all ranks of the group were.
    """

    def __init__(
        self,
        table: TimerTable,
        steps: Sequence[tuple[str, float]],
        error_files: Mapping[int, str],
        show: Callable[[str], None],
        *,
        stacks: bool = True,
        numbers: Mapping[int, int] | None = None,
    ) -> None:
        self.table = table
        self._numbers = numbers or {}
        self.steps = steps
        self.unwritten: dict[int, str] = {}
        self.hung: dict[int, str] = {}
        self.whereabouts: dict[int, tuple[Location, bool]] = {}
        self.summaries: dict[int, str] = {}
        self._error_files = error_files
        self._show = show
        self._snapshot = Snapshot(error_files, keep=stacks)
        self._workers: dict[int, int] = {}
        self._signalled: dict[tuple[int, int, int, int], Hang] = {}  # those that have not gone on since
        self._background = SerialExecutor("phalanx-hangs")
        self._look_by: float | None = None  # while a `look` is under way: when it is waited for no longer

    def on_message(
        self,
        verb: str,
        *arguments: Any,
        workers: dict[int, int],
        ended: Mapping[int, str],
        evidence_taken: Callable[[], None] | None = None,
    ) -> None:
        """Report on a message of the keeper about timers, soon.

        Args:
            verb: Its verb: "armed", "expired", "stands" (at a breakpoint), "hang" (a step is to be taken), "struck"
                (signalled), "left", "refused" or "unwatched".
            *arguments: Its arguments, see `escalation`.
            workers: The pids of the live workers, by rank.
            ended: How the others have ended, by rank.
            evidence_taken: For "hang". Called on this object's thread once the evidence of the step is taken.
        """

        def report() -> None:
            self._workers |= workers
            if evidence_taken is not None:
                self._step(*arguments, workers=workers, ended=ended, evidence_taken=evidence_taken)
            elif verb == "armed":  # a slot that was not in use before
                self._snapshot.preload()
            elif verb != "expired":  # a step follows
                _REPORT[verb](self, *arguments)

        if not self._background.submit(report) and evidence_taken is not None:
            evidence_taken()

    def look(self, workers: dict[int, int], ended: Mapping[int, str], seconds: float, then: Callable[[], None]) -> None:
        """Take the stacks of all ranks, and write them, because a rank of another machine hangs; then call ``then``.

        Args:
            workers: As for `on_message`.
            ended: As for `on_message`.
            seconds: How long the ranks have for that, at the most.
            then: Called once, on this object's thread, or here if there is none.
        """
        then = _once(then)
        self._look_by = clock.now() + seconds + _WRITING

        def look() -> None:
            try:
                if self.whereabouts:  # a rank of this group hangs as well, and is being ended
                    return
                self._snapshot.take(workers, (), doomed=False, ended=ended, seconds=seconds)
                self._snapshot.write()
                self.whereabouts = self._snapshot.whereabouts()
            finally:
                self._look_by = None
                then()

        if not self._background.submit(look):
            self._look_by = None
            then()

    @property
    def hang_timeout(self) -> float | None:
        """Seconds after a rank's last heartbeat when it counts as hung; None: heartbeats are not watched."""
        span = self.table.size[1]
        return None if span == NEVER else span / clock.NS

    def show_unwatched(self) -> None:
        """Show that no heartbeat has come, if none has: the first one arms the watch over its rank."""
        if not self.table.has_beaten():
            ranks = self._error_files  # of this machine, and of this group: each worker may have one of its own
            have, them = ("has", "it") if len(ranks) == 1 else ("have", "them")
            self._show(
                f"local {name_ranks(ranks)} {have} not called phalanx.timer.beat() in "
                f"{format_duration(self.hang_timeout or 0.0)}: the hang timeout does not watch {them}"
            )

    def hurry(self) -> None:
        """Have `finish` wait for no `look`, or hardly: somebody wants the end now."""
        by = self._look_by
        if by is not None:
            self._look_by = min(by, clock.now() + _HURRIED)

    def finish(self) -> None:
        """Wait until all is written and shown, for at most `FINISH`; for a `look`, no longer than it may take."""
        by = self._look_by
        if not self._background.drain(FINISH if by is None else max(0.0, by - clock.now())):
            self._show("evidence of timers is not complete: that takes too long")

    def signs(self) -> dict[int, RankSigns]:
        """Return the signs of life of each rank that has sent any; none once this is closed."""
        try:
            return self.table.signs()
        except (OSError, ValueError, IndexError):  # another thread closes it; a lock would block in a signal handler
            return {}

    def close(self) -> None:
        """Close the table. Idempotent."""
        self.table.close()

    # --- on the thread of its own

    def _step(
        self,
        name: str,
        number: int,
        moment: int,
        packed: list[Packed],
        *,
        workers: dict[int, int],
        ended: Mapping[int, str],
        evidence_taken: Callable[[], None],
    ) -> None:
        """Take the evidence that a step wants, then call ``evidence_taken``, once, also after an exception.

        The step was due at ``moment``, for the hangs in ``packed``, and will send the signal ``number`` (0: none).
        """
        answer = _once(evidence_taken)
        hangs = list(map(Hang.from_tuple, packed))
        try:
            if name == "report":
                self._show_lines(hangs, name, number, moment)
                return
            doomed = number == signal.SIGKILL
            self._snapshot.take(workers, hangs, doomed=doomed, ended=ended)
            if not number:
                self._snapshot.write()
                self._show_lines(hangs, name, number, moment)
            elif number != signal.SIGKILL:  # before what the worker raises on that signal can be recorded
                self._record_all(hangs, moment)
            # Those that have ended within their block before the kill: of the look at their threads, or by themselves.
            elif dead := [h for h in hangs if procfs.has_exited(h.pid) and self.table.is_still_set(h.timer)]:
                self._record_all(dead, moment)
        finally:
            answer()

    def _struck(self, number: int, moment: int, packed: list[Packed]) -> None:
        """Processes that hang were sent a signal."""
        hangs = list(map(Hang.from_tuple, packed))
        # Lines are for the first signal to a group: its report will name the hangs that follow.
        quiet = bool(self._signalled) and not any(hang.key in self._signalled for hang in hangs)
        self._record_all(hangs, moment)
        self._snapshot.write()
        # What was seen first holds: since then, ranks have been ended.
        self.whereabouts = self._snapshot.whereabouts() | self.whereabouts
        if not quiet:
            self._show_lines(hangs, "", number, moment)

    def _left(self, _moment: int, packed: list[Packed]) -> None:
        """Workers have left the blocks in which they hung."""
        hangs = list(map(Hang.from_tuple, packed))
        for hang in hangs:
            if self._signalled.pop(hang.key, None) is not None:
                # It survived the signal. If it fails later, it records that itself, or the report has this text.
                remove_timer_evidence(self._error_files[hang.rank])
                self.unwritten[hang.rank] = f"it had hung before: {hang.description}; and had gone on since"
                self.whereabouts = {}
        for description, those in hang_report.by_description(hangs).items():
            has = "they have" if len({hang.rank for hang in those}) > 1 else "it has"
            self._show(f"{name_ranks(hang.rank for hang in those)}: {description}; {has} gone on since")

    def _stands(self, _moment: int, packed: list[Packed]) -> None:
        """Processes stand at breakpoints. At one without a location, a person has the worker's terminal."""
        for hang in (each for each in map(Hang.from_tuple, packed) if each.timer.location):
            path, rank = self._error_files[hang.rank], self._numbers.get(hang.rank, hang.rank)
            if not is_of_run(path):  # the worker itself has written where it is reached
                continue
            if os.path.exists(f"{path}{DEBUG_SUFFIX}{hang.pid}"):
                command = f"phalanx debug {_run_argument(path)}--rank {rank}"
                self._show(f"rank {rank} stopped at {hang.timer.location}: {command}")
            elif os.path.exists(f"/proc/{hang.pid}"):  # of a group of the rank's own; else it has ended since
                self._show(f"process {hang.pid}, below rank {rank}, stopped at {hang.timer.location}")

    def _refused(self, pid: int, _scope: str, _location: str) -> None:
        self._show(f"process {pid} is not in the group: its timers are not watched")

    def _unwatched(self, why: str) -> None:
        self._show(f"timers are not watched: {why}")

    def _record_all(self, hangs: list[Hang], moment: int) -> None:
        self._signalled.update((hang.key, hang) for hang in hangs)
        ranks: dict[int, list[Hang]] = {}
        for hang in sorted(hangs, key=lambda hang: hang.timer.deadline):
            ranks.setdefault(hang.rank, []).append(hang)
        for rank, those in ranks.items():
            self.hung[rank] = those[0].message
            self._record(those, moment)

    def _record(self, hangs: list[Hang], moment: int) -> None:
        """Write a rank's error file, unless the rank has recorded a failure itself.

        A rank that waits for another hangs as well, and its timer may expire sooner. The rank that is elsewhere than
        most is dated before all others, whoever is recorded first, so that it counts as the first failure.
        """
        first = hangs[0]
        if hang_report.is_recorded(self._error_files[first.rank], self._workers.values()):
            return  # before the stacks are written: the signal waits for what is done here
        outliers = self._snapshot.outliers()
        if first.rank in outliers:
            began = min(hang.timer.deadline for hang in (first, *self._signalled.values())) - 1
        else:
            before = (hang.timer.deadline for hang in self._signalled.values() if hang.rank in outliers)
            began = max([first.timer.deadline, *before])
        self._snapshot.write()
        where = self._snapshot.sum_up(first)
        self.summaries[first.rank] = where.partition("\n")[0]
        try:
            hang_report.write_error_file(
                self._error_files[first.rank],
                hangs,
                moment,
                [where],
                self._snapshot.texts.get(first.pid, ""),
                worker=self._workers[first.rank],
                writers=self._workers.values(),
                began=began,
                stacks_file=os.path.basename(self._snapshot.files.get(first.rank, "")),
            )
        except hang_report.NotWrittenError as error:
            self.unwritten[first.rank] = error.text

    def _show_lines(self, hangs: list[Hang], step: str, number: int, moment: int) -> None:
        """Show one line for all ranks whose hangs have the same description."""
        for those in hang_report.by_description(hangs).values():
            first = those[0]
            where = [] if step == "report" else list(filter(None, [self._snapshot.sum_up(first)]))
            if step == "dump":
                none = "none" if self._snapshot.keep else "not kept, for no logs are"
                where.append(f"stacks: {self._snapshot.files.get(first.rank) or none}")
            self._show(hang_report.line(name_ranks(hang.rank for hang in those), those, moment, where, number))


def _once(call: Callable[[], None]) -> Callable[[], None]:
    """Return a function that makes a call the first time, and none after that."""
    calls = [call]

    def make() -> None:
        if calls:
            calls.pop()()

    return make


_REPORT: dict[str, Callable[..., None]] = {
    "stands": HangReporter._stands,
    "struck": HangReporter._struck,
    "left": HangReporter._left,
    "refused": HangReporter._refused,
    "unwatched": HangReporter._unwatched,
}


def watch(
    specs: TimerSpecs,
    logs: LogsDest,
    ranks: Collection[int],
    say: Callable[[str], bool],
    *,
    stacks: bool = True,
    speak: Callable[[str], None] | None = None,
    numbers: Mapping[int, int] | None = None,
) -> tuple[HangReporter | None, dict[int, dict[str, str]]]:
    """Make a group's table and its reporter. Returns the reporter, and each rank's environment variables for the table.

    If there is no memory or no descriptor for the table, that is logged, and the group runs without timers: no reporter
    and no variables are returned. If the ``specs`` are not the default ones, OSError is raised instead.

    Args:
        specs: What follows an expiry.
        logs: The group's log files.
        ranks: Its local ranks.
        say: Shows a line on the group's consoles, and returns whether that was possible.
        stacks: Whether stacks are written to files beside the error files.
        speak: Shows a line if ``say`` cannot. Default: it is logged.
        numbers: See `HangReporter`.
    """
    try:
        seats = min(max(_LEAST_SEATS, _SEATS * len(ranks)), max(_MOST_SEATS, len(ranks)))
        table = TimerTable(seats, specs.hang_timeout)
    except OSError as error:
        if specs != type(specs)():
            raise OSError(error.errno, f"timers cannot be watched: {error.strerror}") from error
        _log(f"timers are not watched: {error.strerror}")
        return None, {}

    def show(text: str) -> None:
        if not say(f"phalanx: {text}"):
            (speak or _log)(sanitise(text))

    reporter = HangReporter(table, specs.on_expiry, logs.error_files, show, stacks=stacks, numbers=numbers)
    return reporter, {rank: {TIMERS_ENV: f"{table.address}:{rank}"} for rank in ranks}


def _run_argument(error_file: str) -> str:
    """The folder of a run, as an argument and a space; "" in a default place, where the latest run is found without."""
    folder = os.path.dirname(os.path.dirname(os.path.dirname(error_file)))
    place = os.path.dirname(folder)
    if place.endswith("/phalanx/runs") or os.path.basename(place).startswith("phalanx-"):
        return ""
    import shlex

    return f"{shlex.quote(folder)} "


def _log(text: str) -> None:
    from logging import getLogger

    getLogger("phalanx.timer").warning("%s", text)
