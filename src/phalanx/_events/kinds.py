"""The kinds of events: a class each, whose values are frozen. Those of agents are in `agent_kinds`.

Every event has the moment when it happened on CLOCK_MONOTONIC, and the number of its attempt. `Event.to_object` is its
line in ``events.jsonl``, and what an ``on_event`` gets.

There is no event for a heartbeat: a rank may beat a thousand times a second, and its beat is a write to shared memory
that nobody hears. The first beat of a process arms its timer (``timer.armed``, of the scope ``heartbeat``), one that is
late is ``timer.expired``, and one that comes after all ``timer.left``.
"""

from __future__ import annotations

from typing import Any, ClassVar

from phalanx._base import clock
from phalanx._base.frozen import Value

_COMMON = 3  # fields of all events


class Event(Value):
    """What all events have.

    Args:
        attempt: The attempt, from 0 on; -1: none has begun.
        moment: When it happened, in nanoseconds on CLOCK_MONOTONIC.
        fields: Those of the kind, by name.

    >>> WorkerStarted(0, 10**9, rank=3, pid=4242).rank
    3
    >>> WorkerStarted(0, 10**9, rank=3)
    Traceback (most recent call last):
    TypeError: WorkerStarted: expected the fields rank, pid, got rank
    """

    name: ClassVar[str] = ""
    """What it is called in ``events.jsonl``."""
    KEPT: ClassVar[tuple[str, ...]] = ()
    """Fields that are objects of this process, and in no file."""

    attempt: int
    moment: int
    time: float
    """When it happened, in seconds of Unix time, by the wall clock at the time of the emission."""

    def __init__(self, attempt: int, moment: int, **fields: Any) -> None:
        expected = self.__match_args__[_COMMON:]
        if tuple(fields) != expected and set(fields) != set(expected):
            msg = f"{type(self).__name__}: expected the fields {', '.join(expected)}, got {', '.join(fields)}"
            raise TypeError(msg)
        self._store(attempt=attempt, moment=moment, time=clock.to_wall(moment / clock.NS), **fields)

    def date(self, offset: float) -> None:
        """Set the time: the wall clock was ``offset`` seconds ahead of CLOCK_MONOTONIC. The stream calls it, once."""
        self._store(time=self.moment / clock.NS + offset)

    def to_object(self) -> dict[str, Any]:
        """Return it as an object of JSON.

        >>> list(GroupState(0, 10**9, state="STOPPING").to_object())
        ['name', 'timestamp', 'monotonic_ns', 'attempt', 'state']
        """
        facts = {"name": self.name, "timestamp": self.time, "monotonic_ns": self.moment, "attempt": self.attempt}
        return facts | {name: getattr(self, name) for name in self.__match_args__[_COMMON:] if name not in self.KEPT}


class GroupStarting(Event):
    """A group of ``nprocs`` workers is going to be started. ``folder`` is the run's, "" if no logs are kept."""

    name = "group.starting"
    nprocs: int
    folder: str


class WorkerStarted(Event):
    """A worker has been started."""

    name = "worker.started"
    rank: int
    pid: int


class GroupRunning(Event):
    """All workers run."""

    name = "group.running"


class GroupState(Event):
    """The group has entered a state of `lifecycle` after RUNNING: SETTLING, STOPPING, KILLING and their like."""

    name = "group.state"
    state: str


class GroupPaused(Event):
    """All processes of the group are stopped until further notice, and its timers are held; or it goes on."""

    name = "group.paused"
    paused: bool


class WorkerExited(Event):
    """A worker has exited.

    Attributes:
        rank, pid: Whose exit it is.
        state: "succeeded", "failed" by itself, or "stopped" by us.
        how: Its exit in words.
        exitcode: Negative for a signal.
        signal_sent: The last signal that we sent it before; None: none.
        notice: The signal of the notice of a planned stop that it was given; None: none.
        timer_signal: The last signal that it was sent for an expired timer; 0: none.
        oom: What the kernel's count of OOM kills has to do with it; "": nothing.
        max_rss_kib: Its peak memory in KiB.
        cpu_seconds: User and system time.
    """

    name = "worker.exited"
    rank: int
    pid: int
    state: str
    how: str
    exitcode: int
    signal_sent: int | None
    notice: int | None
    timer_signal: int
    oom: str
    max_rss_kib: int
    cpu_seconds: float


class WorkerSignalled(Event):
    """A worker was sent ``signal``, to stop it."""

    name = "worker.signalled"
    rank: int
    pid: int
    signal: int


class WorkerNoticed(WorkerSignalled):
    """A worker was given notice of a planned stop, by ``signal`` if it handles that."""

    name = "worker.noticed"


class Swept(Event):
    """A process that a worker left behind was ended, or was tried to be.

    Attributes:
        rank: Its worker; None: not known.
        pid, command, age: The process, its command line, and its age in seconds when it was first signalled.
        signal: The last signal that it was sent.
        exitcode: None: it has outlived SIGKILL.
    """

    name = "group.swept"
    rank: int | None
    pid: int
    command: str
    age: float
    signal: int
    exitcode: int | None


class SweptMore(Event):
    """So many more processes were ended that workers had left behind."""

    name = "group.swept_more"
    count: int


class GroupLost(Event):
    """A helper process of the group has died, and with it what was left of the group."""

    name = "group.lost"
    error: str


class GroupNotStarted(Event):
    """The group could not be started, and none of it is left."""

    name = "group.not_started"
    error: str


class GroupGone(Event):
    """No process of the group is left, but for ``survivors``: the ranks that have outlived SIGKILL.

    ``lost``: why what is known of its workers is not complete; "": it is.
    """

    name = "group.gone"
    survivors: list[int]
    lost: str


class GroupEnded(Event):
    """Somebody has asked what became of the group.

    Attributes:
        state: "succeeded", "failed", "stopped" or "abandoned".
        exitcode: That of a program that has run this group.
        cause: Why that is not 0; "".
        lost: Whether what is known of its workers is not complete, see `GroupGone`.
        result: The group's `RunProcsResult`.
    """

    name = "group.ended"
    KEPT = ("result",)
    state: str
    exitcode: int
    cause: str
    lost: bool
    result: Any


class TimerEvent(Event):
    """What timers have in common: ``scope``, or its place in the code; and how many seconds it is ``overdue``.

    ``what``: what was not done in time, in words.
    """

    KEPT = ("what",)
    rank: int
    pid: int
    scope: str
    place: str
    overdue: float
    what: str


class TimerArmed(TimerEvent):
    """A rank has set a timer."""

    name = "timer.armed"


class TimerBreakpoint(TimerEvent):
    """A process of a rank stands at a breakpoint."""

    name = "timer.breakpoint"


class TimerExpired(TimerEvent):
    """It has expired, and is still set."""

    name = "timer.expired"


class TimerLeft(TimerEvent):
    """The rank has left the block after all."""

    name = "timer.left"


class WorkerReaped(TimerEvent):
    """The rank was sent ``signal`` because of it."""

    name = "worker.reaped"
    signal: int


class RequestRefused(Event):
    """A process that is not in the group has set a timer, which is not watched."""

    name = "request.refused"
    pid: int
    scope: str
    place: str


class TimersUnwatched(Event):
    """No timer of the group is watched any more."""

    name = "timer.unwatched"
    why: str


class ConsoleClosed(Event):
    """Nobody reads the launcher's ``stream`` ("stdout", "stderr") any more: lines are in the log files alone."""

    name = "console.closed"
    stream: str


class EventsDropped(Event):
    """``count`` batches of events found no room with this observer, which is too slow."""

    name = "events.dropped"
    count: int
