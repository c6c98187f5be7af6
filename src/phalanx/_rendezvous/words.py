"""What has become of a job, in words: why a generation has ended, and which attempt follows.

It knows no console: `phalanx run` says these words, and the errors of agents have them.
"""

from __future__ import annotations

from phalanx._agent.history import describe_restart
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


def follows(job: Job, policy: RestartPolicy) -> str:
    """Return what is said of the attempt that follows the one that has ended last: see `describe_restart`.

    A restart is not counted if a machine was lost or has come, or if the policy says so of the exit code.
    """
    last = job.ends[-1]
    counted = last.failed and last.exitcode not in policy.always_on
    return describe_restart(job.generation, job.delay, policy.describe_count(job.restarts, counted=counted))


def earlier_attempts(job: Job, *, has_failed: bool) -> list[str]:
    """Return how the attempts have ended before the one that a report is about, a line each.

    ``has_failed``: whether the last one that has ended is that one.
    """
    ends = job.ends[:-1] if has_failed else job.ends
    return [_earlier(end) for end in ends[-MOST_EARLIER:]]


def failed_attempts(job: Job) -> list[str]:
    """Return how the attempts have ended that have failed, a line each: of a job that was stopped."""
    return [_earlier(end) for end in job.ends if end.failed][-MOST_EARLIER:]


def _earlier(end: End) -> str:
    step = "" if end.step is None else f", step {end.step}"
    return f"attempt {end.generation}, after {format_duration(end.uptime)}: {told(end)}{step}"
