"""How the attempts of a job have ended, in words."""

from __future__ import annotations

from phalanx._rendezvous.conclusion import earlier_attempts, failed_attempts, follows
from phalanx._rendezvous.records import End, Job, replace
from phalanx.agent import RestartPolicy


def job(*failed: bool, before: int = 0) -> Job:
    """A job whose generations have ended so, ``before`` of which nothing more is known."""
    kinds = {True: "failure", False: "lost"}
    ends = tuple(
        End(before + number, kinds[each], "a", "host0", "gone", failed=each, uptime=60.0)  # type: ignore[arg-type] # they are
        for number, each in enumerate(failed)
    )
    return Job(before + len(ends), "running", 2, 2, ends=ends)


def test_attempts_are_numbered_and_restarts_counted() -> None:
    policy = RestartPolicy(3)
    assert follows(replace(job(True), restarts=(0.0,)), policy) == "attempt 1 follows (restart 1 of at most 3)"
    assert follows(job(True, False), policy) == "attempt 2 follows (not counted as a restart)"  # a machine was lost
    later = replace(job(False, True, before=100), restarts=(70.0, 0.0), delay=90.0)
    assert follows(later, policy) == "attempt 102 follows in 1m30s (restart 2 of at most 3)"
    assert follows(later, RestartPolicy(3, window=60)) == (
        "attempt 102 follows in 1m30s (restart 1 of at most 3 within 1m00s)"
    )
    code = replace(job(True), ends=(replace(job(True).ends[0], exitcode=75),))
    assert follows(code, RestartPolicy(3, always_on=[75])) == "attempt 1 follows (not counted as a restart)"


def test_earlier_attempts_are_numbered_from_0() -> None:
    assert earlier_attempts(job(True, True), has_failed=True) == ["attempt 0, after 1m00s: host host0, gone"]
    assert earlier_attempts(job(False, True), has_failed=True) == ["attempt 0, after 1m00s: gone"]
    assert failed_attempts(job(False, True)) == ["attempt 1, after 1m00s: host host0, gone"]


def test_earlier_attempts_that_have_ended_alike_have_one_line() -> None:
    many = job(*[True] * 30)
    assert failed_attempts(many) == ["attempts 0 to 29, after 1m00s: host host0, gone"]
    assert earlier_attempts(many, has_failed=True) == ["attempts 0 to 28, after 1m00s: host host0, gone"]
    ends = [replace(end, error=f"pid {40 + end.generation} is gone", step=7, rank=3) for end in many.ends[:5]]
    ends[2] = replace(ends[2], rank=2)
    ends[4] = replace(ends[4], uptime=2.0, step=9)
    assert earlier_attempts(replace(many, ends=tuple(ends)), has_failed=False) == [
        "attempts 0 to 1, after 1m00s: rank 3 on host host0, pid … is gone, step 7",
        "attempt 2, after 1m00s: rank 2 on host host0, pid 42 is gone, step 7",
        "attempts 3 to 4, after 2.0s to 1m00s: rank 3 on host host0, pid … is gone, steps 7, 9",
    ]
    unlike = [replace(end, error="bad"[: end.generation % 3 + 1]) for end in many.ends]
    assert len(failed_attempts(replace(many, ends=tuple(unlike)))) == 21  # those in the middle are left out
