"""What is said of the attempts of a job."""

from __future__ import annotations

from phalanx._agent.restart_policy import RestartPolicy
from phalanx._rendezvous.records import End, Job
from phalanx._rendezvous.words import attempts_of, earlier_attempts


def job(*failed: bool, before: int = 0) -> Job:
    """A job whose generations have ended so, ``before`` of which nothing more is known."""
    kinds = {True: "failure", False: "lost"}
    ends = tuple(
        End(before + number, kinds[each], "a", "host0", "gone", failed=each, uptime=60.0)  # type: ignore[arg-type] # they are
        for number, each in enumerate(failed)
    )
    return Job(before + len(ends), "running", 2, 2, ends=ends)


def test_attempts_are_of_so_many_while_all_restarts_have_been_counted() -> None:
    policy = RestartPolicy(3)
    assert [attempts_of(job(*failed), policy) for failed in [(), (True,), (True, True, True)]] == [" of 4"] * 3
    assert [attempts_of(job(*failed), policy) for failed in [(False,), (True, False), (False, True)]] == [""] * 3
    assert attempts_of(job(True, before=100), policy) == ""  # what the first ones were is not known
    assert attempts_of(job(True), RestartPolicy(3, window=60)) == ""


def test_earlier_attempts_say_of_how_many_likewise() -> None:
    assert earlier_attempts(job(True, True), RestartPolicy(1), has_failed=True) == [
        "attempt 1 of 2, after 1m00s: host host0, gone"
    ]
    assert earlier_attempts(job(False, True), RestartPolicy(0), has_failed=True) == ["attempt 1, after 1m00s: gone"]
    assert len(earlier_attempts(job(*[True] * 30), RestartPolicy(50), has_failed=False)) == 20
