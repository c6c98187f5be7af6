"""The kinds of events that an agent emits: what becomes of its attempts, and what it decides."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from phalanx._events.kinds import Event


class AgentState(Event):
    """The agent has entered a state of `phalanx._run.attempts`."""

    name = "agent.state"
    state: str


class AgentStep(Event):
    """A method of an agent has returned, or ``failed``: has raised. ``step``: its name. It took so many ``seconds``."""

    name = "agent.step"
    step: str
    seconds: float
    failed: bool


class AgentStatus(Event):
    """How far an agent has come with an attempt.

    Attributes:
        status: "RENDEZVOUS", "ASSIGN_WORKER_RANKS" or "START": that is done.
        seconds: How long it took; of START, 0.
        restarts: How many there were before this attempt.
        group_rank, group_world_size: Which agent this is, of how many.
        workers: Its workers, with their ranks; of START alone.
    """

    name = "agent.status"
    KEPT = ("workers",)
    status: str
    seconds: float
    restarts: int
    group_rank: int | None
    group_world_size: int | None
    workers: tuple[Any, ...]


class AgentEnded(Event):
    """An agent's `run` ends.

    Attributes:
        state: What has become of the workers, a `phalanx.agent.WorkerState`; "RAISED": that is not known, for it was
            stopped, or could not start them, as ``error`` says.
        restarts: How many there were.
        error: What has ended it, with its traceback if there is one; "".
        failures: The workers that have failed, by global rank.
        terminated: The global ranks of those that were ended because others have.
    """

    name = "agent.ended"
    KEPT = ("failures", "terminated")
    state: str
    restarts: int
    error: str
    failures: Mapping[int, Any]
    terminated: Collection[int]


class AttemptEnded(Event):
    """An attempt is over, and none of it is left.

    Attributes:
        state: "succeeded", "failed", "stopped", or "not started".
        rank, exitcode, error: The root cause, if one failed: its global rank, exit code, and the error in one line.
        step: The highest step that a rank had reported; None: none had.
        survivors: How many workers have outlived SIGKILL.
        seconds: From the beginning of its start to its end.
    """

    name = "attempt.ended"
    state: str
    rank: int | None
    exitcode: int | None
    error: str
    step: int | None
    survivors: int
    seconds: float


class RankSlow(Event):
    """A rank is slow: its steps have taken much longer than those of the other ranks for a while.

    It is emitted once for each rank of an attempt, by the agent that has found it.

    Attributes:
        rank, host: The global rank, and the machine on which it runs.
        ratio: How long its step takes, compared with the median of all ranks.
        seconds: For how long, so far.
    """

    name = "rank.slow"
    rank: int
    host: str
    ratio: float
    seconds: float


class RestartDecided(Event):
    """After this attempt another follows, ``delay`` seconds later.

    Attributes:
        delay: Seconds.
        counted: Whether it counts as a restart.
        cause: Why the attempt failed, in one line.
        step: The highest step that a rank had reported; None: none had.
        why: Why the delay is what it is, or why it does not count; "".
        reason: "failure" of a worker, or a start that has failed; "hang"; "membership": machines have come or gone;
            "request": somebody asked for it.
    """

    name = "restart.decided"
    delay: float
    counted: bool
    cause: str
    step: int | None
    why: str
    reason: str


class JobStopping(Event):
    """A job of many machines ends the workers of an attempt.

    Attributes:
        reason: "failure", "hang", "lost", "left", "grow" or "signal", see `phalanx._rendezvous.records.Stop`.
        host: The machine that it is about.
        group_rank: Which agent that is; None: it has no part in the attempt.
        rank: The worker that failed; None: none did, or it is not known.
        cause: Why, in one line.
    """

    name = "job.stopping"
    reason: str
    host: str
    group_rank: int | None
    rank: int | None
    cause: str


class MachineExcluded(Event):
    """A machine is left out of the next attempts of a job: ``host``, and the ``cause``, in one line."""

    name = "machine.excluded"
    host: str
    cause: str


class GaveUp(Event):
    """After this attempt no other follows. ``why``: "" if none was allowed in the first place."""

    name = "agent.gave_up"
    why: str


class RunEnded(Event):
    """The run has ended: "succeeded", "failed" or "stopped", with the launcher's ``exitcode``, and the ``cause``."""

    name = "run.ended"
    state: str
    exitcode: int
    cause: str
