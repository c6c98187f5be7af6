"""``--on-event``: commands that run when something has happened to the run, with a report on it as their stdin.

Owns what counts as such an event, which machine of a job runs the commands, their order, and the bounds of their time.
`EventCommands` observes the run's events on the thread of these; the commands run on another, one at a time.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from phalanx._base import clock
from phalanx._base.clock import format_duration
from phalanx._base.stderr import say
from phalanx._base.text import format_size, how_many, one_line
from phalanx._base.threads import Latch, SerialExecutor
from phalanx._base.tty import printable, sanitise
from phalanx._events import agent_kinds, kinds
from phalanx._events.kinds import Event
from phalanx._run.shell_command import GRACE, ShellCommand, append_output, entry
from phalanx._runs import catalog, record
from phalanx._runs.run_report import describe_run

LONGEST = 60.0
"""Seconds that a command may take."""

MOST = 16
"""How many may wait for those before them."""

FILE = "on-event.log"
"""What commands have written, in the run's folder."""

FILE_SIZE = 1 << 20
"""Bytes of that, from which on nothing is added."""

_LATE = 30.0  # seconds beyond those of the commands, for which the end waits for their processes to be gone


class Happened(NamedTuple):
    """Something that has happened.

    Attributes:
        event: Which of `phalanx._run.config.EVENTS`.
        attempt: In which attempt; -1: none has begun.
        cause: Why, in one line; "": there is nothing to be said.
        host: The machine that it is about.
        rank: The global rank; None: it is about no single one.
        when: Unix time, in seconds.
    """

    event: str
    attempt: int
    cause: str = ""
    host: str = ""
    rank: int | None = None
    when: float = 0.0


class EventCommands:
    """The commands of one run. An observer of its events.

    Args:
        commands: Commands, each with the events after which it runs.
        run_id: The run's id.
        is_job: Whether other machines take part: see `_speaks_for_job`.
        is_first: Whether this machine speaks for a job that never begins.
        ends_hangs: Whether a worker whose timer has expired is ended.
        longest: Seconds that a command may take, with all that it starts.
        grace: Seconds after that, between SIGTERM and SIGKILL.
        last: Seconds that those before the end's have in all when the run has ended.

    Attributes:
        report: What the run's report says, set before its end is emitted; "": nothing more than the cause.
        warn: Prints a line, by any thread.
    """

    NAME = "phalanx-on-event"
    """The thread that learns what happens."""

    def __init__(
        self, commands: Sequence[tuple[Sequence[str], str]], *, run_id: str, is_job: bool, is_first: bool,
        ends_hangs: bool, longest: float = LONGEST, grace: float = GRACE, last: float = LONGEST,
    ) -> None:  # fmt: skip
        self._commands = commands
        self._run_id = run_id
        self._is_job, self._is_first, self._ends_hangs = is_job, is_first, ends_hangs
        self._longest, self._grace, self._last = longest, grace, last
        self.report = ""
        self.warn: Callable[[str], object] = say
        self._folder = ""  # of the run
        self._here = os.uname().nodename
        # Of the present attempt:
        self._group_rank: int | None = None
        self._ranks: Mapping[int, int] = {}  # global ranks, by local rank
        self._hung: set[tuple[int, int, str]] = set()  # timers that have expired, and are still set
        self._stop: agent_kinds.JobStopping | None = None
        self._restart = ""  # why the next one follows
        self._end: Happened | None = None
        self._executor = SerialExecutor("phalanx-command", MOST + len(commands))
        self._bell = Latch()  # wakes the thread of the command that runs
        self._until: float | None = None  # when commands that are not about the end have to have ended
        self._is_hurried = False  # whether nobody waits for any command
        self._dropped = 0

    # --- the thread of the events

    def __call__(self, events: Sequence[Event]) -> None:
        """Have the commands run of those of these events that they are about."""
        for event in events:
            self._note(event)

    def _note(self, event: Event) -> None:
        match event:
            case kinds.GroupStarting():
                self._folder = event.folder
            case kinds.GroupRunning(attempt=0):
                self._happen("started", event)
            case kinds.TimerExpired():
                self._note_hang(event)
            case kinds.TimerLeft():
                self._hung.discard((event.rank, event.pid, event.scope))
            case agent_kinds.AgentStatus():
                self._note_status(event)
            case agent_kinds.JobStopping():
                self._note_stop(event)
            case agent_kinds.RankSlow():
                cause = f"{event.ratio:.1f} x the median step for {format_duration(event.seconds)}"
                self._happen("straggler", event, cause, event.rank, event.host, is_here=True)
            case agent_kinds.RestartDecided():
                self._restart = event.cause
            case agent_kinds.RunEnded():
                self._end = Happened(event.state, event.attempt, event.cause, self._here, None, event.time)

    def _note_status(self, event: agent_kinds.AgentStatus) -> None:
        if event.status == "START":
            self._ranks = {worker.local_rank: worker.global_rank for worker in event.workers}
        elif event.status == "RENDEZVOUS":  # an attempt begins
            self._group_rank, self._stop = event.group_rank, None
            self._hung.clear()
            if event.attempt > 0:
                self._happen("restarted", event, self._restart)
            self._restart = ""

    def _note_hang(self, event: kinds.TimerExpired) -> None:
        """Note an expiry. A hang is one until no expired timer is set any more, however many expire, and again."""
        is_new = not self._hung
        self._hung.add((event.rank, event.pid, event.scope))
        if is_new and not (self._is_job and self._ends_hangs):  # else the job says which of the ranks it is
            self._happen("hung", event, event.what, self._ranks.get(event.rank, event.rank), is_here=True)

    def _note_stop(self, event: agent_kinds.JobStopping) -> None:
        self._stop = event
        is_here = event.group_rank is not None and event.group_rank == self._group_rank
        if event.reason == "hang" and is_here and self._ends_hangs:
            self._happen("hung", event, event.cause, event.rank, is_here=True)

    def _happen(
        self, name: str, event: Event, cause: str = "", rank: int | None = None, host: str = "", *,
        is_here: bool = False,
    ) -> None:  # fmt: skip
        """Queue the commands of an event. ``is_here``: this machine alone knows of it."""
        if not (is_here or self._speaks_for_job()):
            return
        happened = Happened(name, event.attempt, one_line(sanitise(cause)), host or self._here, rank, event.time)
        for names, command in self._commands:
            if name in names:
                has_room = self._executor.pending < MOST and self._until is None
                if not (has_room and self._executor.submit(partial(self._run, happened, command))):
                    self._drop()

    def _speaks_for_job(self) -> bool:
        """Whether this machine runs the commands of what the whole job knows: one page, and not one from each.

        It is the one of group rank 0. Where that is lost, it is the next; and where nothing is known of why the job has
        ended, since the machine may have been lost that has the store, the next one does it, too.
        """
        if not self._is_job:
            return True
        if self._group_rank is None:  # it has had no part
            return self._is_first
        stop = self._stop
        if stop is None or (stop.reason == "left" and stop.group_rank == self._group_rank):  # the others have not said
            is_first_lost = self._end is not None and self._end.event == "failed"
        else:
            is_first_lost = stop.reason == "lost" and stop.group_rank == 0
        return self._group_rank <= int(is_first_lost)

    # --- the end of the run, by the main thread

    @property
    def is_ending(self) -> bool:
        """Whether the commands of the end are queued, if there are any."""
        return self._until is not None

    def begin_end(self) -> None:
        """Queue the commands of the end: the report is printed. Once."""
        end = self._end if self._speaks_for_job() else None
        self._until = clock.now() + self._last
        self._bell.open()
        for names, command in self._commands:
            if end is not None and end.event in names and not self._executor.submit(partial(self._run, end, command)):
                self._drop()

    def close(self, seconds: float) -> None:
        """Wait until all have ended, within the bounds of each. ``seconds``: 0: they are killed, and it is soon."""
        if seconds <= 0:
            self._is_hurried = True
            self._bell.open()
        most = self._last + (self._longest + self._grace) * len(self._commands) + _LATE
        if not self._executor.drain(most if seconds > 0 else _LATE):
            self.warn("--on-event: a command is left, and cannot be ended")
        dropped, self._dropped = self._dropped, 0
        if dropped > 1:  # of one it was said
            self.warn(f"--on-event: {how_many(dropped, 'command')} in all were not run")

    def _drop(self) -> None:
        self._dropped += 1
        if self._dropped == 1:
            why = self._why_ended() if self._until is not None else f"{MOST} wait already"
            self.warn(f"--on-event: a command is not run: {why}")

    # --- the thread of the commands

    def _too_late(self, happened: Happened) -> bool:
        is_of_end = happened is self._end
        return self._is_hurried or (self._until is not None and not is_of_end and clock.now() >= self._until)

    def _why_ended(self) -> str:
        return "a signal has come" if self._is_hurried else f"the run has ended {format_duration(self._last)} ago"

    def _run(self, happened: Happened, command: str) -> None:
        if self._too_late(happened):
            self._drop()
            return
        why, output, lines = "", "", list[str]()  # lines on what the command leaves behind, as `mail` does
        try:
            with open(_descriptor_of(self._report_on(happened)), "rb") as report:
                run = ShellCommand(
                    "on-event", command, self._longest, env=self._env(happened), stdin=report.fileno(),
                    grace=self._grace, linger=self._longest, can_be_mute=True, speak=lines.append,
                )  # fmt: skip
                try:
                    why = self._wait(run, happened)
                finally:
                    run.close()
                output = run.output
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
            why = f"it cannot be started: {getattr(error, 'strerror', None) or error}"
        output += "".join(f"phalanx: {line}\n" for line in lines)
        where = self._keep(entry(f"{happened.event}: {one_line(command)}", why, output))
        if why:
            self.warn(f"--on-event {happened.event}: {one_line(sanitise(why))}{where}")

    def _wait(self, run: ShellCommand, happened: Happened) -> str:
        self._bell = Latch()
        run.start(lambda: self._bell.open())  # noqa: PLW0108 - the latch is another one then
        while True:
            bell = self._bell = Latch()  # before the questions: what changes after them opens it
            why = run.verdict()
            if why is not None:
                return why
            left = run.seconds_left
            if left is not None and self._too_late(happened):
                run.stop(f"it was killed: {self._why_ended()}", signal.SIGKILL, 0.0)
            elif left is not None:
                if self._until is not None and happened is not self._end:
                    left = min(left, max(0.0, self._until - clock.now()))
                bell.wait(left)
            else:
                bell.wait()

    def _keep(self, text: str) -> str:
        """Add to the file in the run's folder. Returns where that is, to be added to a line; "": it is not there."""
        if not self._folder:
            return ""
        path = os.path.join(self._folder, FILE)
        try:
            if os.path.lexists(path) and os.lstat(path).st_size >= FILE_SIZE:
                return f"; its output is not kept: {path} has {format_size(FILE_SIZE)}"
            append_output(self._folder, FILE, text)
        except OSError as error:
            return f"; its output is lost: {path}: {error.strerror}"
        return f"; its output is in {path}"

    def _env(self, happened: Happened) -> dict[str, str]:
        return {
            "PHALANX_EVENT": happened.event,
            "PHALANX_EVENT_ATTEMPT": str(happened.attempt) if happened.attempt >= 0 else "",
            "PHALANX_EVENT_CAUSE": one_line(sanitise(happened.cause)).replace("\0", ""),
            "PHALANX_EVENT_HOST": happened.host,
            "PHALANX_EVENT_RANK": "" if happened.rank is None else str(happened.rank),
            "PHALANX_EVENT_RUN_DIR": self._folder,
            "PHALANX_EVENT_RUN_ID": self._run_id,
        }

    def _report_on(self, happened: Happened) -> str:
        """Return what the command reads: of the end, what ``phalanx report`` prints; of others, what is known."""
        lines = self._of_end(happened) if happened is self._end else self._of_event(happened)
        return "".join(f"{printable(line)}\n" for line in lines)

    def _of_end(self, happened: Happened) -> list[str]:
        found = catalog.look(self._folder) if self._folder else None
        if found is not None and found.run is not None and found.run.state == happened.event:
            text, lines = self.report or describe_run(record.to_object(found.run), self._folder), found.heading()
        else:  # no logs are kept, or nothing could be written
            text, lines = self.report, self._of_event(happened)
        return lines + text.rstrip("\n").split("\n") * bool(text)

    def _of_event(self, happened: Happened) -> list[str]:
        name = os.path.basename(self._folder) or self._run_id
        about = {
            "straggler": "slow", "restarted": f"attempt {happened.attempt} begins", "hung": "hangs",
        }.get(happened.event, happened.event)  # fmt: skip
        about = about if happened.rank is None else f"rank {happened.rank} (host {happened.host}): {about}"
        fields = {
            "cause": happened.cause,
            "attempt": "" if happened.attempt < 0 else str(happened.attempt),
            "host": happened.host,
            "time": time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(happened.when)),
            "logs": self._folder,
        }
        return [f"{name}: {about}", *(f"  {key:10}: {value}" for key, value in fields.items() if value)]


def _descriptor_of(text: str) -> int:
    """Return a descriptor to read a text from. It is in memory: the disk may be full, and that what is reported."""
    fd = os.memfd_create("phalanx-report", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(text.encode("utf-8", "backslashreplace"))
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
