"""What has become of a job, in words: why a generation has ended, and which attempt of how many one is.

It knows no console: `phalanx run` says these words, and the errors of agents have them.
"""

from __future__ import annotations

from phalanx._base.clock import format_duration
from phalanx._base.control_chars import sanitise
from phalanx._base.one_line import one_line
from phalanx._rendezvous.records import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx._agent.restart_policy import RestartPolicy
    from phalanx._rendezvous.records import End, Job, Stop

MOST_EARLIER = 20
"""Earlier attempts that a report has."""


def told(stop: Stop | End) -> str:
    """Return why a generation ends, in words. Who can write to the store has chosen them: none has any effect.

    >>> from phalanx._rendezvous.records import Stop
    >>> told(Stop(0, "failure", "a", "host0", "ValueError: bad batch", rank=3))
    'rank 3 on host host0, ValueError: bad batch'
    """
    stop = replace(stop, error=sanitise(one_line(stop.error)), host=sanitise(one_line(stop.host)))
    if stop.kind in ("failure", "hang"):
        who = f"host {stop.host}" if stop.rank is None else f"rank {stop.rank} on host {stop.host}"
        return f"{who}, {stop.error}" if stop.error else f"{who} failed"
    if stop.kind == "signal":
        return f"{stop.error} on host {stop.host}"
    if stop.kind == "left":
        return f"host {stop.host} leaves: {stop.error}"
    return stop.error


def attempts_of(job: Job, policy: RestartPolicy) -> str:
    """Return what is said after "attempt 2", see `RestartPolicy.attempts_of`.

    Restarts that are not counted (a machine was lost or has come) are further attempts: after one, it is nothing.
    """
    all_counted = len(job.ends) == job.generation and all(end.failed for end in job.ends)  # and all are known
    return policy.attempts_of(job.generation, job.generation if all_counted else -1)


def earlier_attempts(job: Job, policy: RestartPolicy, *, has_failed: bool) -> list[str]:
    """Return how the attempts have ended before the one that a report is about, a line each.

    ``has_failed``: whether the last one that has ended is that one.
    """
    of = attempts_of(job, policy)
    ends = job.ends[:-1] if has_failed else job.ends
    return [_earlier(end, of) for end in ends[-MOST_EARLIER:]]


def _earlier(end: End, of: str) -> str:
    step = "" if end.step is None else f", step {end.step}"
    return f"attempt {end.generation + 1}{of}, after {format_duration(end.uptime)}: {told(end)}{step}"
