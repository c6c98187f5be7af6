"""Plans: a seed becomes the plan of one run, which is a frozen value. All chance is here. Nothing is started."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass, replace

KINDS = ("binary", "spawn", "forkserver", "fork")
"""A worker is a binary, or a function under one of the start methods."""

HELPERS = ("guard", "keeper", "log writer", "fork server")
"""The processes of Phalanx beside the launcher."""

PHASES = ("launched", "booting", "guard", "keeper", "up", "started", "acting", "ending", "ended")
"""A fault comes some time after one of these moments. The launcher was told to begin ("launched"); it is about to call
`start_processes` ("booting"); the guard or the keeper was seen for the first time; the first worker runs ("up");
`start_processes` has returned ("started"); the first worker has done its work and is about to end ("acting"); the group
is about to end, because a worker fails, the last one returns, or the launcher closes it ("ending"); `wait` has returned
("ended")."""

PATIENCE = 3.0
"""The launcher closes a group that still runs so many seconds after its start."""

HANG = 0.15
"""Seconds that a worker which hangs sets its timer to."""

SORTS = {"exception": "told", "exit": "told", "SIGSEGV": "struck", "SIGABRT": "struck", "SIGKILL": "killed"}
"""What tells the moment at which a function worker fails, by the way in which it does: the worker itself ("told"), its
fault handler ("struck"), or the exit alone, of a SIGKILL ("killed") or (not listed) of something else."""


@dataclass(frozen=True, slots=True)
class Child:
    """A process that a worker starts and leaves alone."""

    way: str  # "plain", "session" (setsid), "daemon" (setsid, and forked twice), "chain" (forks, and exits, on and on)
    deaf: bool  # whether it ignores SIGTERM
    seconds: float  # that it lives; 0: until it is ended


@dataclass(frozen=True, slots=True)
class Work:
    """What one worker does: it writes, starts children, and then ends or waits."""

    lines: int  # at the beginning
    width: int  # bytes of a line
    pause: float  # seconds between these lines
    chatter: float  # seconds between lines while it waits; 0: none
    burst: int  # lines just before it ends
    children: tuple[Child, ...]
    on_term: str  # "die", "ignore", "fail" (exit code 7), "leave" (exit code 0)
    end: str  # "succeed", "fail", "hang" (in a timer), "wait" (for ever), "follow" (fail once the leader has)
    way: str  # how it fails: "exception", "exit", "_exit", or a signal
    after: float  # seconds from its start until then; of a follower: from the leader's end
    value: int  # bytes that a function returns


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to a run from outside."""

    what: str  # "SIGKILL", "SIGTERM", "SIGSTOP"; or what runs out: "descriptors", "processes", "inotify", "disk"
    target: str  # "launcher", a helper, "worker", "child"
    which: int  # of several workers or children; modulo their number
    phase: str
    delay: float  # seconds from the phase
    lasting: float  # seconds until SIGCONT, or until there is enough again; 0: for ever
    amount: int  # how much is left: descriptors, processes, pages

    @property
    def signal(self) -> int:
        """The signal that it is; 0 if it is none."""
        return int(signal.Signals[self.what]) if self.what.startswith("SIG") else 0

    def __str__(self) -> str:
        at = f"{self.phase} + {1000 * self.delay:.1f} ms"
        if not self.signal:
            left = f"{self.amount} left of {self.what} ({self.target})"
            return f"{left} at {at}" + (f" for {self.lasting:.2f} s" if self.lasting else "")
        target = f"{self.target} {self.which}" if self.target in ("worker", "child") else self.target
        return f"{self.what} to {target} at {at}" + (f" for {self.lasting:.2f} s" if self.lasting else "")


@dataclass(frozen=True, slots=True)
class Reader:
    """Who reads what the launcher writes."""

    way: str  # "prompt", "slow", "late" (after a while), "never", "leaves" (closes its end after a while)
    after: float  # seconds from the start of the launcher
    terminal: bool  # a terminal instead of a pipe
    both: bool  # stderr goes there, too; else to a file


@dataclass(frozen=True, slots=True)
class Plan:
    """One run."""

    seed: int
    kind: str
    preload: bool  # a fork server of its own imports something first
    works: tuple[Work, ...]  # by rank
    leader: int  # the rank that is to fail first; -1: none is
    logs: str  # "none", "redirect", "tee"
    max_size: int  # bytes at which log files are rotated; 0: never
    file_size: int  # RLIMIT_FSIZE of all; 0: none
    settle: float
    grace: float
    linger: float
    drain: float
    on_expiry: str
    late_logs: float  # seconds that making the log folders takes the launcher
    close_after: float  # seconds after which the launcher closes the group; 0: when its patience is over
    reader: Reader
    faults: tuple[Fault, ...]

    def described(self) -> str:
        """The plan in lines."""
        head = (
            f"seed {self.seed}: {self.kind}{', preloaded' * self.preload}, logs {self.logs} (max {self.max_size}, "
            f"RLIMIT_FSIZE {self.file_size}), settle {self.settle}, grace {self.grace}, linger {self.linger}, drain "
            f"{self.drain}, late logs {self.late_logs:.3f}, close after {self.close_after:.2f}, {self.reader}"
        )
        works = [f"  rank {rank}{' (leader)' * (rank == self.leader)}: {work}" for rank, work in enumerate(self.works)]
        return "\n".join([head, *works, *(f"  fault: {fault}" for fault in self.faults)])


def make(seed: int) -> Plan:
    """The plan of a seed."""
    draw = random.Random(f"phalanx {seed}")  # noqa: S311 - it is to be repeatable, not secret
    scenario = draw.choices(("success", "failure", "hang", "closed"), (30, 45, 8, 17))[0]
    kind = draw.choice(KINDS[scenario == "hang" :])  # a binary knows no timers
    count = draw.choices((1, 2, 3, 4), (1, 4, 4, 2))[0]
    leader = draw.randrange(count) if scenario in ("failure", "hang") else -1
    families = draw.random() < 0.6
    works = tuple(_work(draw, kind, scenario, rank, leader, families=families) for rank in range(count))
    if leader >= 0:
        works = tuple(_adapted(draw, work, works[leader], kind) for work in works)
    logs = draw.choices(("none", "redirect", "tee"), (2, 3, 5))[0]
    max_size = draw.choice((5000, 50_000)) if logs != "none" and draw.random() < 0.4 else 0
    preload = kind == "forkserver" and draw.random() < 0.5
    return Plan(
        seed=seed,
        kind=kind,
        preload=preload,
        works=works,
        leader=leader,
        logs=logs,
        max_size=max_size,
        file_size=draw.choice((20_000, 200_000)) if logs != "none" and draw.random() < 0.04 else 0,
        settle=draw.choice((0.0, 0.05, 0.1, 0.3)),
        grace=draw.choice((0.0, 0.1, 0.3, 0.3, 0.6, 1.0)),
        linger=draw.choice((0.0, 0.0, 0.2, 0.5)),
        drain=draw.choice((0.2, 1.0)),
        on_expiry=draw.choice(("kill", "report,kill:0.1", "dump,terminate:0.1,kill:0.2")) if scenario == "hang" else "",
        late_logs=draw.uniform(0.02, 0.15) if draw.random() < 0.25 else 0.0,
        close_after=draw.uniform(0.0, 0.8) if scenario == "closed" or draw.random() < 0.05 else 0.0,
        reader=_reader(draw),
        faults=_faults(draw, logs=logs, rotates=max_size > 0, preload=preload, families=families),
    )


def _work(draw: random.Random, kind: str, scenario: str, rank: int, leader: int, *, families: bool) -> Work:
    way = draw.choice(("exception", "exit", "_exit", "SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM", "SIGUSR1"))
    if rank == leader:
        end = "hang" if scenario == "hang" else "fail"
    elif scenario == "failure":
        end = draw.choices(("wait", "follow", "succeed"), (5, 4, 2))[0]
    else:
        end = {"success": "succeed", "closed": "wait"}.get(scenario) or draw.choice(("wait", "succeed"))
    flood = draw.random() < 0.12
    lines = 6000 if flood else draw.choice((0, 3, 50, 400))
    pause = 0.0 if flood else draw.choice((0.0, 0.0005, 0.01))
    return Work(
        lines=min(lines, int(0.5 / pause)) if pause else lines,
        width=draw.choice((1000,) if flood else (60, 200, 2000)),
        pause=pause,
        chatter=draw.choice((0.0, 0.002, 0.02)),
        burst=draw.choice((0, 20, 300)),
        children=tuple(_child(draw) for _ in range(draw.choice((0, 1, 2)))) if families else (),
        on_term=draw.choices(("die", "ignore", "fail", "leave"), (60, 12, 14, 14) if end != "hang" else (80, 20, 0, 0))[
            0
        ],
        end=end,
        way=way,
        after=draw.uniform(0, 0.7) if end != "follow" else 0.0,
        value=0 if kind == "binary" else draw.choice((8, 1000, 100_000, 1_000_000)),
    )


def _adapted(draw: random.Random, work: Work, leader: Work, kind: str) -> Work:
    """A follower with a way and a delay such that the order of the failures can be told afterwards.

    A failure with evidence has the moment of its evidence. The fault handler's is the time of a file, which is exact to
    4 ms. A failure without evidence has the moment at which the keeper saw the exit, less 5 ms, or less 100 ms for a
    SIGKILL. So if two failures are of different sorts, one has to come well after the other.
    """
    if work.end != "follow":
        return work
    way = work.way if work.way != "SIGKILL" else "SIGUSR1"
    same = sort(way, kind) == sort(leader.way, kind) != "struck"
    return replace(work, way=way, after=draw.choice((0.0, 0.0, 0.3)) if same else 0.3)


def sort(way: str, kind: str) -> str:
    """What tells the moment of a failure, see `SORTS`."""
    return SORTS.get(way, "") if kind != "binary" or way == "SIGKILL" else ""


def _child(draw: random.Random) -> Child:
    return Child(
        draw.choices(("plain", "session", "daemon", "chain"), (3, 3, 3, 1))[0],
        draw.random() < 0.3,
        draw.uniform(0.1, 0.6) if draw.random() < 0.3 else 0.0,
    )


def _reader(draw: random.Random) -> Reader:
    way = draw.choices(("prompt", "slow", "late", "never", "leaves"), (60, 12, 10, 8, 10))[0]
    return Reader(way, draw.uniform(0, 1.5), draw.random() < 0.2, draw.random() < 0.3)


# --- faults

_EARLY, _MIDDLE, _LATE = PHASES[:4], PHASES[4:8], PHASES[8:]
_TARGETS = {
    "launcher": (20, (*_EARLY, *_MIDDLE, *_LATE)),
    "guard": (18, ("guard", "keeper", *_MIDDLE, *_LATE)),
    "keeper": (22, ("keeper", *_MIDDLE)),
    "log writer": (14, ("started", "acting", "ending")),
    "fork server": (12, ("guard", "keeper", *_MIDDLE)),
    "worker": (24, _MIDDLE),
    "child": (6, _MIDDLE),
}
"""The weight with which each target is drawn, and the phases in which it may be there."""


def _faults(draw: random.Random, *, logs: str, rotates: bool, preload: bool, families: bool) -> tuple[Fault, ...]:
    absent = {"log writer": rotates, "fork server": preload, "child": families}
    targets = [target for target in _TARGETS if absent.get(target, True)]
    faults: list[Fault] = []
    for _ in range(draw.choices((0, 1, 2, 3), (8, 32, 38, 22))[0]):
        before = faults[-1] if faults and draw.random() < 0.6 else None
        faults.append(_fault(draw, targets, before, disk=logs != "none"))
    return tuple(faults)


def _pick(draw: random.Random, targets: list[str]) -> str:
    return draw.choices(targets, [_TARGETS[target][0] for target in targets])[0]


def _fault(draw: random.Random, targets: list[str], before: Fault | None, *, disk: bool) -> Fault:
    what = draw.choices(
        ("SIGKILL", "SIGSTOP", "SIGTERM", "descriptors", "processes", "inotify", "disk"),
        (40, 28, 12, 7, 5, 3, 5 if disk else 0),
    )[0]
    target = _pick(draw, targets)
    phase = draw.choice(_TARGETS[target][1])
    delay = draw.choice((0.0, draw.uniform(0, 0.01), draw.uniform(0, 0.1), draw.uniform(0, 0.6)))
    if phase == "ended":
        delay /= 20  # the launcher has little left to do then
    if before is not None:  # a pair: at the same time, or almost
        phase = before.phase
        delay = before.delay + draw.choice((0.0, draw.uniform(0, 0.005), draw.uniform(0, 0.2)))
        target = _pick(draw, [target for target in targets if phase in _TARGETS[target][1]])
    lasting, amount = 0.0, 0
    if what == "SIGSTOP":
        lasting = draw.choice((draw.uniform(0.05, 0.3), draw.uniform(0.3, 1.2), draw.uniform(2.2, 3.0)))
    elif not what.startswith("SIG"):
        lasting = draw.choice((0.0, draw.uniform(0.1, 1.0)))
    if what == "descriptors":
        target = draw.choice([one for one in ("launcher", "guard", "keeper", "worker") if phase in _TARGETS[one][1]])
        amount = draw.choice((0, 1, 2, 3, 5, 8, 12))
    elif what == "processes":
        target, amount = "all", draw.choice((0, 1, 2, 3, 5))
    elif what == "inotify":
        target, phase, delay, lasting = "launcher", "launched", 0.0, 0.0
    elif what == "disk":
        target, amount = "logs", draw.choice((0, 1, 8))
    return Fault(what, target, draw.randrange(8), phase, delay, lasting, amount)
