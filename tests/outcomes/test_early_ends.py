"""A rank that succeeded long before the rest is no failure, and is noted: in the last lines, and in the record."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING

import pytest

from phalanx._base import clock
from phalanx._outcomes.result import _early
from phalanx.errors import Outcome
from phalanx.multiprocessing import DefaultLogsSpecs, start_processes
from tests.support.command import Launcher
from tests.support.disks import until
from tests.support.helpers import wait_gone
from tests.support.racing_workers import outlives

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.command import Place
    from tests.support.helpers import Gate, Ready

BEGAN = 1000.0
SOON = """
import phalanx._outcomes.result as result
result.EARLY = result.EARLY_SHARE = 1e-9
from phalanx.cli import main
main()
"""
"""`phalanx run`, to which any time is long."""

HOUR = 3600.0


@pytest.mark.parametrize(
    "ends,early",
    [
        ({0: HOUR, 1: HOUR, 2: HOUR, 3: 600.0}, {3: HOUR - 600}),
        ({0: HOUR, 1: 600.0}, {1: HOUR - 600}),
        ({0: HOUR, 1: HOUR, 2: 600.0, 3: 600.0}, {2: HOUR - 600, 3: HOUR - 600}),  # half of them
        ({0: HOUR, 1: 600.0, 2: 600.0, 3: 600.0}, {}),  # they are the rest
        ({0: HOUR, 1: 0.9 * HOUR - 1}, {1: 0.1 * HOUR + 1}),
        ({0: HOUR, 1: 0.9 * HOUR + 1}, {}),  # not long, for such a run
        ({0: 20.0, 1: 10.0}, {1: 10.0}),
        ({0: 20.0, 1: 10.1}, {}),  # not long
        ({0: HOUR}, {}),
        ({}, {}),
    ],
)
def test_which_ranks_are_early(ends: dict[int, float], early: dict[int, float]) -> None:
    outcomes = {
        rank: Outcome(rank, 1, "succeeded", 0, ended_ns=int((BEGAN + end) * clock.NS)) for rank, end in ends.items()
    }
    assert dict(_early(outcomes, int(BEGAN * clock.NS))) == pytest.approx(early)
    assert dict(_early(outcomes, 0)) == {}  # it is not known when they began


@pytest.mark.parametrize("state", ["failed", "stopped", "abandoned"])
def test_who_did_not_succeed_is_not_early(state: str) -> None:
    late = {rank: Outcome(rank, 1, "succeeded", 0, ended_ns=int(HOUR * clock.NS)) for rank in range(3)}
    other = Outcome(3, 1, state, None if state == "abandoned" else 1, ended_ns=None if state == "abandoned" else 1)
    assert dict(_early({**late, 3: other}, 1)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_it_is_said_and_recorded(place: Place, ready: Ready, gate: Gate, fails: bool) -> None:
    script = place.write(f"""
        import os, sys
        if os.environ["RANK"] == "1":
            {ready.python()}
            sys.exit()
        {gate.python()}
        sys.exit({3 * fails} if os.environ["RANK"] == "2" else 0)
        """)
    command = ("run", "--log-dir", place.logs, "--nproc-per-node", 3, "--settle", 60, script)
    with Launcher([sys.executable, "-c", SOON, *map(str, command)], cwd=place.folder, env=place.env) as launcher:
        assert not wait_gone(ready.pids(1))
        gate.open(2)
        done = launcher.end()
    assert done.status == 3 * fails
    assert len(re.findall(r"^(?:phalanx: )?rank 1: succeeded, [\d.]+m?s before the rest$", done.err, re.MULTILINE)) == 1
    (record,) = place.logs.glob("*/run.json")
    ranks = json.loads(record.read_text())["attempts"][0]["ranks"]
    assert ranks[1]["early"] > 0
    first_of_the_rest = min(ranks[0]["ended"], ranks[2]["ended"])
    assert ranks[1]["ended"] + ranks[1]["early"] == pytest.approx(first_of_the_rest, abs=1.0)  # two looks at two clocks
    assert [ranks[0]["early"], ranks[2]["early"]] == [0, 0]


class DistStoreError(Exception):
    """As torch has it."""


SERVES = {"RANK": "0", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "False"}
GONE = r"rank 0 had ended [\d.]+m?s before, and with it what it served \(torch's store, at MASTER_PORT\)"


@pytest.mark.parametrize(
    "error,serves,detail",
    [
        (DistStoreError("wait timeout after 300000ms, keys: /default_pg/0//metric"), SERVES, GONE),
        (RuntimeError("Failed to recv, got 0 bytes. Connection was likely closed."), SERVES, GONE),
        (BrokenPipeError(32, "Broken pipe"), SERVES, GONE),
        (ConnectionRefusedError(111, "Connection refused"), SERVES, GONE),
        (ConnectionRefusedError(111, "Connection refused"), SERVES | {"TORCHELASTIC_USE_AGENT_STORE": "True"}, ""),
        (ConnectionRefusedError(111, "Connection refused"), {"RANK": "0"}, ""),
        (ConnectionRefusedError(111, "Connection refused"), SERVES | {"RANK": "2"}, ""),
        (ValueError("loss is nan"), SERVES, ""),
    ],
)
def test_who_loses_a_connection_when_rank_0_has_ended_is_told(
    gate: Gate, tmp_path: Path, error: Exception, serves: dict[str, str], detail: str
) -> None:
    """The store of torch's programs is in rank 0."""
    args, logs = {rank: (rank, gate.address, error) for rank in (0, 1)}, DefaultLogsSpecs(str(tmp_path))
    envs = {0: serves, 1: serves | {"RANK": "1"}}
    with start_processes("late", outlives, args, envs=envs, logs_specs=logs, start_method="fork") as group:
        until(lambda: set(group.alive) == {1})
        gate.open()
        result = group.wait()
    assert result.failures.keys() == {1}
    assert re.fullmatch(detail, result.failures[1].detail)
