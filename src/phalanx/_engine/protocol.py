"""What launcher, keeper and guard send each other: verbs, fields, directions, and the waits between them.

A message is a tuple: the verb, then its fields. Each function below builds the message of its own name, and its
parameters are the fields, in order. Descriptors travel beside a message (SCM_RIGHTS, unix(7)); the docstring names
them. `channels` carries messages by `marshal`, which takes plain values only: a `Record` travels as a tuple.

A receiver has a table of methods by verb, whose parameters have the same names. A verb that is not in the table is an
error. Moments are CLOCK_MONOTONIC in nanoseconds, durations are seconds, and ranks are local ranks.

Imports nothing: the keeper loads it on its way up.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, ClassVar, dataclass_transform

    from phalanx._logs.rotated import Bounds
    from phalanx._placement.placement import WorkerBounds

    Message = tuple[object, ...]
    from phalanx._engine.main_module import Source
else:

    def dataclass_transform() -> Any:
        """For type checkers: what they take for a dataclass, which imports too much for a keeper."""
        return lambda kind: kind

# --- the waits

START_WAIT = 300.0
"""Seconds that the keeper has to get up and to start all workers, on however slow a machine or file system."""

LOSS_SETTLE = 1.0
"""Seconds of a settle window, at the least, if the first failure is a lost connection, or while that is not known: the
worker that closed the connection may be on its way to its exit, and have recorded nothing yet."""

ANSWER_WAIT = 2.0
"""Seconds beyond its own last deadline after which a keeper that has sent nothing is taken for stopped and is woken
(SIGCONT); once more, and it is killed. Also the seconds from the order to end the group until the keeper is woken."""

KILL_WAIT = 10.0
"""Seconds that a SIGKILL is given. A process that outlives it sits in uninterruptible sleep, and is abandoned."""

DRAIN_WAIT = 10.0
"""Seconds that the log writer is given for what is still in its pipes when no worker is left. After that it goes on by
itself: a disk that does not answer holds up nobody else."""

GUARD_WAIT = 2.0
"""Seconds after a SIGKILL in which the launcher waits for the guard, before it leaves the waiting to a thread."""


# --- the records


@dataclass_transform()
class Record:
    """Named values that travel as a tuple, in this order: ``Class(*tuple)`` reads what `pack` wrote."""

    FIELDS: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        cls.FIELDS = (*cls.FIELDS, *cls.__annotations__)

    if not TYPE_CHECKING:  # type checkers derive it

        def __init__(self, *values: Any) -> None:
            self.__dict__.update(zip(self.FIELDS, values, strict=True))

    def pack(self) -> tuple[Any, ...]:
        """The values, as `marshal` takes them."""
        return tuple([getattr(self, name) for name in self.FIELDS])


class Spec(Record):
    """What to start for one rank."""

    rank: int
    """The local rank."""
    path: bytes
    """The file to execute. Forks do not use it."""
    argv: list[bytes]
    """Its arguments. Where ``fds`` is not empty, the numbers of the inherited descriptors follow them."""
    env: dict[bytes, bytes]
    """Environment variables on top of the group's."""
    stdin: int | None
    """What it reads, by index among the descriptors beside `start`; None: /dev/null."""
    stdout: str | None
    stderr: str | None
    """The paths of its log files; None: the launcher's stream."""
    fds: list[int]
    """Which of the descriptors beside `start` it inherits, by index."""
    bounds: Bounds
    """How its log files are rotated."""
    placement: WorkerBounds | None
    """Its CPUs, nice value and limits; None: the launcher's."""
    terminal: bool
    """Whether a pseudo-terminal is its stdin, stdout and stderr. What it shows is in the log file ``stdout``."""


class ExitReport(Record):
    """How one worker ended."""

    rank: int
    """The local rank."""
    status: int
    """The wait status (wait4(2))."""
    moment: int
    """When it exited."""
    max_rss: int
    """Its peak memory in KiB."""
    cpu_seconds: float
    """User and system time."""
    oom: str
    """What the kernel's count of OOM kills has to do with it; "": nothing."""
    exiting: int
    """When it was first seen on its way out, by itself; 0: it was not."""
    exiting_early: bool
    """Whether that was when the first failure was seen."""
    struck: int
    """The last signal that it was sent for an expired timer; 0: none."""


class Orphan(Record):
    """A process that a worker left behind."""

    pid: int
    """The process."""
    rank: int
    """The local rank of its worker; -1: not known."""
    command: str
    """Its command line."""
    age: float
    """Its age in seconds when it was first signalled."""
    signal: int
    """The last signal that it was sent; 0: none."""
    status: int | None
    """Its wait status; None: it has not ended."""


# --- launcher to keeper


def start(
    forked: bool,  # noqa: FBT001 - as a message has it
    modules: list[tuple[str, str]],
    environment: dict[bytes, bytes],
    specs: list[tuple[Any, ...]],
    oom_counter: tuple[str, int],
    policy: tuple[float, float, float, float],
    timers: tuple[Any, ...] | None,
    notice: tuple[int, float, int] | None,
) -> Message:
    """Start these workers. Beside it: the descriptors that the specs and the timers refer to by index.

    ``forked``: forks of the keeper, which loads ``modules`` (name, folder) first; ``specs``: packed `Spec`;
    ``oom_counter``: see `procfs.find_oom_counter`; ``policy``: settle window, grace period, linger and
    orphan grace in seconds; ``timers``: two indexes of descriptors, seats,
    heartbeat, steps; None: no timers; ``notice``: what precedes a planned stop: a signal, seconds, and the index of the
    descriptor of the page with the stop flag; None: nothing does.
    """
    return "start", forked, modules, environment, specs, oom_counter, policy, timers, notice


def stop(number: int, grace: float) -> Message:
    """End the group: send signal ``number`` to the workers, and SIGKILL ``grace`` seconds later."""
    return "stop", number, grace


def kill() -> Message:
    """Kill every process of the group."""
    return ("kill",)


def set_grace(grace: float) -> Message:
    """Let a failure stop the others within ``grace`` seconds. A grace period that runs can only become shorter."""
    return "set_grace", grace


def expect(seconds: float) -> Message:
    """Stop the group, unless this arrives again within so many seconds: the launcher may be stopped itself."""
    return "expect", seconds


def signal_worker(rank: int, number: int) -> Message:
    """Send signal ``number`` to one worker. It is no stop: what follows is the worker's own end."""
    return "signal_worker", rank, number


def pause(is_on: bool) -> Message:  # noqa: FBT001 - the field of a message
    """Stop (SIGSTOP) all that the workers have started, and hold their timers; or continue all that."""
    return "pause", is_on


def evidence_taken(serial: int) -> Message:
    """The stacks that `hang` number ``serial`` asked for are written: its step may be taken."""
    return "evidence_taken", serial


def judged(is_lost_connection: bool) -> Message:  # noqa: FBT001 - the field of a message
    """Whether the first failure is a lost connection: if it is none, the settle window is as long as was asked for."""
    return "judged", is_lost_connection


def leaving(pid: int) -> Message:
    """This process, if it is a worker, has failed: its program has left its main function. It may not exit soon."""
    return "leaving", pid


TO_KEEPER = (start, stop, kill, set_grace, expect, signal_worker, pause, evidence_taken, judged, leaving)

# --- keeper to launcher; from the guard, where it has taken over


def up(pid: int) -> Message:
    """The keeper is up. Beside it: the keeper's pidfd, if a descriptor was left for it."""
    return "up", pid


def started(pids: list[tuple[int, int]], moment: int) -> Message:
    """These workers have been started: rank and pid. Comes before any other message that names their ranks."""
    return "started", pids, moment


def running(moment: int, log_writer: int) -> Message:
    """All workers run, since ``moment``. ``log_writer`` is the pid of the log writer; 0: there is none."""
    return "running", moment, log_writer


def state(name: str, moment: int) -> Message:
    """The group has entered a state of `lifecycle` after RUNNING."""
    return "state", name, moment


def exits(reports: list[tuple[Any, ...]]) -> Message:
    """Workers have exited, in this order: packed `ExitReport`."""
    return "exits", reports


def failing(rank: int) -> Message:
    """This worker counts as failed, though it has not exited: see `leaving`."""
    return "failing", rank


def paused(is_on: bool) -> Message:  # noqa: FBT001 - the field of a message
    """The group is paused; or it goes on, by an order or for its end."""
    return "paused", is_on


def held() -> Message:
    """The settle window is over, but a worker stands at a breakpoint: the group is stopped once none does."""
    return ("held",)


def signalled(number: int, moment: int, ranks: list[int]) -> Message:
    """These workers were sent signal ``number``, to stop them."""
    return "signalled", number, moment, ranks


def noticed(number: int, moment: int, ranks: list[int]) -> Message:
    """These workers were given notice of a planned stop, by signal ``number`` as far as they handle it."""
    return "noticed", number, moment, ranks


def lingering(orphans: list[tuple[Any, ...]], count: int) -> Message:
    """``count`` processes that workers left behind may go on for a while: packed `Orphan` of the first ones."""
    return "lingering", orphans, count


def orphans(entries: list[tuple[Any, ...]], beyond: int) -> Message:
    """Processes that workers left behind were ended: packed `Orphan`, and how many more in all."""
    return "orphans", entries, beyond


def helper_lost(who: str, returncode: int, decided: bool) -> Message:  # noqa: FBT001 - as a message has it
    """A helper process (guard, keeper, log writer) has died, and all are killed.

    ``decided``: a failure or a stop came before, or no worker was left: so this is not how the group ended.
    """
    return "helper_lost", who, returncode, decided


def logs_refused(number: int) -> Message:
    """A rotated log file did not take a line, with this errno, for the first time: such lines are lost."""
    return "logs_refused", number


def start_failed(rank: int, doing: str, number: int, filename: str) -> Message:
    """The last message of a group that did not start: what failed, its errno, and the file concerned.

    ``rank`` -1: it concerned no single worker.
    """
    return "start_failed", rank, doing, number, filename


def ended(left: list[tuple[int, str, str]], logs: str) -> Message:
    """The last message: no process is left but ``left`` (pid, name, state), which outlive SIGKILL.

    ``logs``: why rotated log files are not complete; "": they are.
    """
    return "ended", left, logs


def ended_by_loss(who: str, returncode: int) -> Message:
    """The last message of a group that was killed because a helper process had died."""
    return "ended_by_loss", who, returncode


TO_LAUNCHER = (
    *(up, started, running, state, exits, failing, paused, held, signalled, noticed, lingering, orphans),
    *(logs_refused, helper_lost, start_failed, ended, ended_by_loss),
)

TIMER_VERBS = ("armed", "expired", "stands", "hang", "struck", "left", "refused", "unwatched")
"""What the keeper's `escalation` sends of timers. The launcher passes these on to its `hang_report`, which knows their
fields; of each it answers ``hang`` alone, with `evidence_taken`."""

# --- keeper to guard: notes in a pipe, which the guard reads only when it takes over

_CRASH = b"!"
_ORPHAN_GRACE = b"+"


def log_writer_note(pid: int) -> bytes:
    """The log writer's pid, which it writes itself as it starts; 0: it has ended."""
    return b"%d " % pid


def orphan_grace_note(seconds: float) -> bytes:
    """For how long the keeper lets the workers go on when the launcher has died."""
    return b"%s%r " % (_ORPHAN_GRACE, seconds)


def crash_note(story: bytes) -> bytes:
    """The traceback of the error by which the keeper ends."""
    return _CRASH + story


def read_notes(notes: bytes) -> tuple[int, float, bytes]:
    """Return the log writer's pid as noted last (0: there is none), the orphan grace, and the story of a crash.

    >>> read_notes(orphan_grace_note(2.5) + log_writer_note(7) + log_writer_note(0) + crash_note(b"KeyError"))
    (0, 2.5, b'KeyError')
    """
    words, _, story = notes.partition(_CRASH)
    graces = [word[1:] for word in words.split() if word.startswith(_ORPHAN_GRACE)]
    pids = [word for word in words.split() if not word.startswith(_ORPHAN_GRACE)]
    return int(pids[-1]) if pids else 0, float(graces[-1]) if graces else 0.0, story


# --- the page with the stop flag, which workers read and the keeper writes

STOP_PAGE_ENV = "PHALANX_STOP_FLAG"
"""The environment variable by which workers find the page: ``PID:DESCRIPTOR`` of the launcher."""

STOP_PAGE, STOP_FLAG = b"phxstop1", 8
"""The first bytes of the page, and the offset of the flag, a byte that is 1 as soon as a stop is planned."""

# --- what a forked worker shows of itself


def worker_page(keeper: int, rank: int) -> str:
    """The name of the page that a forked worker maps. Its own forks show it in /proc/PID/maps until they exec."""
    return f"phalanx-{keeper}-{rank}-"


FORK_WAIT = 60.0
"""Seconds that the fork server has to fork a guard: the launcher postpones signals meanwhile."""

# --- launcher to fork server


def preload(path: list[str], modules: list[str], main: Source | None, arguments: list[str]) -> Message:
    """Import ``modules`` with ``path`` in front of `sys.path`; "__main__" is ``main``, with ``arguments``."""
    return "preload", path, modules, main, arguments


def fork(serial: int, page: str, umask: int) -> Message:
    """Fork a guard. Beside it: the guard's end of its socket, its working directory, its stdout and stderr.

    ``page`` is the name of a page that is mapped in it and its forks, see `marked_processes`.
    """
    return "fork", serial, page, umask


TO_FORK_SERVER = (preload, fork)

# --- fork server to launcher


def importing(module: str) -> Message:
    """The import of a module begins."""
    return "importing", module


def failed(module: str, why: str, traceback: str) -> Message:
    """A module could not be imported, or must not be preloaded. The fork server is of no use."""
    return "failed", module, why, traceback


def ready() -> Message:
    """All modules are imported."""
    return ("ready",)


def forked(serial: int, pid: int) -> Message:
    """The answer to `fork`: the guard's pid. Beside it: its pidfd, unless it has gone already."""
    return "forked", serial, pid


def not_forked(serial: int, number: int) -> Message:
    """The answer to `fork`: the errno of fork(2)."""
    return "not_forked", serial, number


FROM_FORK_SERVER = (importing, failed, ready, forked, not_forked)
