"""The fault injector finds nothing wrong today, and it finds every old fault that is planted back."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.injector import plan
from tests.injector.planted import PLANTED, plant

ROOT = Path(__file__).parents[2]
AT_ONCE = "3"
"""So many runs are made at the same time, because they mostly wait."""
PLANS = "ff066825"


def inject(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.injector", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, errors="replace")


def test_a_seed_makes_the_same_plan_everywhere() -> None:
    """If the plans have changed, the seeds in `planted` may find nothing any more: choose others, and this hash."""
    text = "".join(plan.make(seed).described() for seed in range(200))
    assert hashlib.sha256(text.encode()).hexdigest()[:8] == PLANS


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "seeds", [pytest.param("0-7", marks=pytest.mark.each_python), pytest.param("8-39", marks=pytest.mark.long)]
)
def test_the_guarantees_hold_whatever_happens(seeds: str) -> None:
    with inject("--seeds", seeds, "--jobs", AT_ONCE) as process:
        said, _ = process.communicate()
    assert process.returncode == 0, said


@pytest.mark.long
@pytest.mark.timeout(300)
def test_each_old_fault_is_noticed_when_it_is_planted_back() -> None:
    unnoticed = []
    for name, fault in PLANTED.items():
        with inject("--plant", name, "--jobs", AT_ONCE, "--seeds", ",".join(map(str, fault.seeds))) as process:
            said, _ = process.communicate()
        if process.returncode != 1 or fault.symptom not in said:
            unnoticed.append(f"{name} (exit code {process.returncode}): {said}")
    assert unnoticed == [], "\n".join(unnoticed)


def test_a_fault_that_cannot_be_planted_any_more_is_an_error(tmp_path: Path) -> None:
    source = tmp_path / "src"
    name, fault = next(iter(PLANTED.items()))
    path = source / "phalanx" / fault.file
    path.parent.mkdir(parents=True)
    path.write_text("pass\n")
    with pytest.raises(AssertionError, match="there is no"):
        plant(name, source, tmp_path / "planted")
