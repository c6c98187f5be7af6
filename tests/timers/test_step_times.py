"""How long the steps of a rank take, as its group shows it: what counts, and what does not."""

from __future__ import annotations

import math
from typing import Any

import pytest

from phalanx import timer
from phalanx.multiprocessing import start_processes
from phalanx.timer import TimerSpecs
from tests.support import hang_workers, step_workers
from tests.support.helpers import Gate, Ready

pytestmark = pytest.mark.usefixtures("own_temporary_folder")  # groups that failed leave their evidence


def carried_out(worker: Any, *args: object) -> tuple[Any, dict[str, float] | None]:
    """Return what a worker has returned, and how long its steps took."""
    with start_processes("s", worker, args, nprocs=1, timers=TimerSpecs()) as group:
        result = group.wait()
        assert result.succeeded, result.failures
        return result.return_values[0], group.status()[0].step_time


@pytest.mark.slow
@pytest.mark.parametrize(
    "worker, count",
    [
        (step_workers.a_step, 1),
        (step_workers.a_jump_of_four, 4),
        (step_workers.a_step_with_beats, 1),
        (step_workers.a_wait, 1),
        (step_workers.waits_in_each_other, 1),
        (step_workers.a_wait_of_another_thread_that_is_not_over, 2),
        (step_workers.a_rest, 1),
        (step_workers.a_wait_in_a_rest, 1),
        (step_workers.a_fork, 1),
        (step_workers.a_child_that_has_ended, 1),
        (step_workers.many_steps, 68),
    ],
)
def test_a_step_takes_what_counts(worker: Any, count: int) -> None:
    (least, most), found = carried_out(worker)
    assert found is not None
    assert found["count"] == count
    assert least <= found["min"] <= found["median"] <= found["max"] <= most
    assert found["min"] <= found["mean"] <= found["max"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "worker", [step_workers.a_rest_that_a_step_ends, step_workers.a_lower_step, step_workers.the_first_step]
)
def test_a_step_whose_beginning_is_not_known_is_not_timed(worker: Any) -> None:
    assert carried_out(worker) == (None, None)


@pytest.mark.slow
def test_a_beat_leaves_the_last_step() -> None:
    with start_processes("s", step_workers.a_step_and_a_beat, (), nprocs=1, timers=TimerSpecs()) as group:
        assert group.wait().succeeded
        assert group.status()[0].step == 41


@pytest.mark.slow
def test_any_number_can_be_a_step() -> None:
    _, found = carried_out(step_workers.odd_numbers)
    assert found is not None
    assert all(math.isfinite(figure) and figure >= 0 for figure in found.values())


@pytest.mark.slow
def test_what_a_worker_writes_into_the_table_harms_nobody(ready: Ready, gate: Gate) -> None:
    args = (ready.address, gate.address)
    with start_processes("s", hang_workers.overwrite, args, nprocs=1, timers=TimerSpecs()) as group:
        assert ready.wait() == ["writes"]
        times = 0
        while times < 20:
            status = group.status()[0]
            times += status.step_time is not None
            assert status.step_age is None or 0 <= status.step_age < 1 << 34
            assert all(0 <= figure < 1 << 62 for figure in (status.step_time or {}).values())
        gate.open()
        assert group.wait().succeeded


def test_outside_of_a_group_to_wait_does_nothing() -> None:
    block = timer.waiting()
    with block, block:
        pass
    block.__exit__()  # left once more than it was entered
    with pytest.raises(ZeroDivisionError), timer.waiting():
        raise ZeroDivisionError
