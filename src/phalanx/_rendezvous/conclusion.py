"""How a job, an attempt and a node have ended, in words and as an exit code. Pure.

It knows no console: `phalanx run` prints these words, and the errors of agents have them.
"""

from __future__ import annotations

import signal
from typing import NamedTuple

from phalanx._base.host_names import is_loopback
from phalanx._base.text import one_line
from phalanx._base.tty import sanitise
from phalanx._group.restart_policy import RestartPolicy, describe_restart
from phalanx._outcomes.report import Earlier, describe_earlier
from phalanx._outcomes.result import RunProcsResult, verdict
from phalanx._rendezvous.evidence import JobEvidence
from phalanx._rendezvous.life import Finish
from phalanx._rendezvous.records import End, Job, Stop, replace


def told(stop: Stop) -> str:
    """Return why a generation ends, in words. Who can write to the store has chosen them: none has any effect.

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


def reason_of(stop: Stop) -> str:
    """Return the ``reason`` of the restart that follows a generation's end, see `RestartDecided`.

    >>> reason_of(Stop(0, "hang", "a", "host0")), reason_of(Stop(0, "lost", "a", "host0"))
    ('hang', 'membership')
    """
    return stop.kind if stop.kind in ("failure", "hang") else "membership"


def unreachable(job: Job) -> str:
    """Return what is wrong with where the workers of a job meet; "": nothing is known to be.

    >>> from phalanx._rendezvous.records import Member
    >>> members = (Member("a", "h1", 1, "default"), Member("b", "h2", 1, "default"))
    >>> unreachable(Job(0, "running", 2, 2, members, "127.0.0.1", 29500))
    'MASTER_ADDR is 127.0.0.1, which is another machine on each of h1, h2: give each its address with --local-addr'
    """
    hosts = list(dict.fromkeys(sanitise(one_line(member.host)) for member in job.members))
    if len(hosts) <= 1 or not job.address or not is_loopback(job.address):
        return ""
    where = ", ".join(hosts[:8])
    what = "which is another machine on each"
    return f"MASTER_ADDR is {job.address}, {what} of {where}: give each its address with --local-addr"


def follows(job: Job, policy: RestartPolicy) -> str:
    """Return what is said of the attempt that follows the one that has ended last: see `describe_restart`.

    A restart is not counted if a machine was lost or has come, or if the policy says so of the exit code.
    """
    last = job.ends[-1]
    counted = last.failed and last.exitcode not in policy.always_on
    return describe_restart(job.generation, job.delay, policy.describe_count(job.restarts, counted=counted))


def earlier_attempts(job: Job, *, has_failed: bool) -> list[str]:
    """Return how the attempts before that of a report have ended, equal ones in a row in one line.

    ``has_failed``: whether the report is about the last one that has ended.
    """
    return describe_earlier([_earlier(end) for end in (job.ends[:-1] if has_failed else job.ends)])


def failed_attempts(job: Job) -> list[str]:
    """Return how the attempts have ended that have failed, likewise: of a job that was stopped."""
    return describe_earlier([_earlier(end) for end in job.ends if end.failed])


def _earlier(end: End) -> Earlier:
    """Return an attempt; the moment of its end is not known: there are as many clocks as machines."""
    from phalanx._outcomes.report import mask  # when a report is made

    masked = told(replace(end, error=mask(end.error)))
    return Earlier(end.generation, told(end), masked, (end.kind, end.failed, end.exitcode), end.step, end.uptime)


UNKNOWN = 69
"""The exit code of a node that cannot learn how its job has ended: EX_UNAVAILABLE of sysexits(3head)."""


class Conclusion(NamedTuple):
    """How a run has ended on a node.

    Attributes:
        state: "succeeded"; "failed"; "stopped": the job was. "left": the job goes on without this node. "unknown": how
            it has ended cannot be learnt here.
        code: The exit code.
        cause: Why, in one line; "": the job has succeeded.
        left: What the workers have left, if there is a report on that; None: there is none.
        result: The same, for a report; None: no failure of a worker is known.
    """

    state: str
    code: int
    cause: str = ""
    left: JobEvidence | None = None
    result: RunProcsResult | None = None


def conclude(finish: Finish, asked: int = 0, why: str = "") -> Conclusion:
    """Return what the end of a node means.

    ``asked``: the signal by which it was to end; 0: none. ``why``: the cause of an end that the job has not decided.

    >>> conclude(Finish("unknown", "its store is gone"), why="it is not known how the job has ended").code
    69
    >>> conclude(Finish("left", "SIGTERM"), signal.SIGTERM).code
    143
    """
    job = finish.job
    stop = None if job is None or job.verdict is None else job.verdict.stop
    if finish.state == "succeeded":
        return Conclusion("succeeded", 0)
    if finish.state == "stopped":
        number = stop.signal if stop is not None else asked or signal.SIGTERM
        return Conclusion("stopped", 128 + number, told(stop) if stop else finish.why or signal.Signals(number).name)
    has_failed = finish.state == "failed" and job is not None
    state = finish.state if has_failed or finish.state in ("left", "unknown") else "failed"
    code = UNKNOWN if state == "unknown" else 128 + asked if state == "left" and asked else 1
    if not has_failed and (job is None or not finish.evidence):
        return Conclusion(state, code, why or finish.why)
    assert job is not None
    left = JobEvidence(finish.evidence, stop, job.members)
    if not left.failures:
        cause = told(stop) if has_failed and stop is not None else why or finish.why
        return Conclusion(state, code, cause, left)
    result = RunProcsResult(failures=dict(left.failures), outcomes=dict(left.outcomes))
    code, cause = verdict(result)
    if stop is not None and left.lost is not None:
        cause = told(stop)
    return Conclusion(state, code, cause, left, result)
