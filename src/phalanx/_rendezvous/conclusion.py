"""What the end of a node means for its user: how the job has ended, as far as is known here; the exit code. Pure."""

from __future__ import annotations

import signal
from typing import NamedTuple

from phalanx._outcomes.result import RunProcsResult, verdict
from phalanx._rendezvous.effects import Finish
from phalanx._rendezvous.evidence import JobEvidence
from phalanx._rendezvous.words import told

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

    Args:
        finish: How the node has ended.
        asked: The signal by which this node was to end; 0: none.
        why: What is said of an end of which the job has not decided.

    >>> from phalanx._rendezvous.effects import Finish
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
        return Conclusion("stopped", 128 + number, signal.Signals(number).name if stop is None else told(stop))
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
