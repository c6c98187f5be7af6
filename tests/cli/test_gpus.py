"""What ranks use of GPUs, in `phalanx status`: by NVIDIA's own library for Python.

No test machine has a GPU. The driver is a library of C with two of them, which a plan says the use of.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import Place
from tests.support.disks import until
from tests.support.helpers import Gate, Ready

SOURCE = Path(__file__).parents[1] / "support" / "nvml.c"
GIB = 1 << 30

CODE = """\
import subprocess, sys
child = subprocess.Popen(["sleep", "1000"])
print(child.pid, flush=True)
{ready}
{gate}
child.kill()
"""

pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed in this environment")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc here, which makes the driver"),
]


@pytest.fixture
def driver(place: Place) -> Path:
    """The file with the plan of a driver, which launchers here find."""
    folder = place.folder / "driver"
    folder.mkdir()
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", SOURCE], check=True)
    plan = folder / "plan"
    plan.write_text("")
    place.env |= {"LD_LIBRARY_PATH": str(folder), "NVML_PLAN": str(plan)}
    return plan


def ranks(place: Place) -> list[dict[str, Any]]:
    done = place.program(sys.executable, "-m", "phalanx", "status", "--json", "--log-dir", place.logs)
    assert not done.status, done
    (node,) = json.loads(done.out)["nodes"]
    return list(node["ranks"])


def use(plan: Path, *lines: tuple[int, int, int, int]) -> None:
    """Plan what is used: GPU, pid, bytes, percent."""
    new = plan.with_suffix(".new")
    new.write_text("".join(f"{' '.join(map(str, line))}\n" for line in lines))
    os.replace(new, plan)


def test_each_rank_has_what_its_processes_use(place: Place, driver: Path, ready: Ready, gate: Gate) -> None:
    script = place.write(CODE.format(ready=ready.python(), gate=gate.python()))
    with place.start("--nproc-per-node", 3, script) as launcher:
        ready.pids(3)
        pid, child = ranks(place)[0]["pid"], int(place.log(1))
        use(driver, (0, pid, 3 * GIB, 60), (1, pid, GIB, 20), (1, child, GIB // 2, 7), (0, os.getpid(), 1, 1))
        until(lambda: any(rank["gpu_memory"] for rank in ranks(place)))  # nobody waits for the driver
        found = ranks(place)
        assert [rank["gpu_memory"] for rank in found] == [4 * GIB, GIB // 2, None]
        assert [rank["gpu"] for rank in found] == [80, 7, None]
        table = place.program(sys.executable, "-m", "phalanx", "status", "--log-dir", place.logs).out
        heads, *rows = (line.split() for line in table.splitlines() if line and (line.split()[0] in "RANK012"))
        at = heads.index("GPU%")
        assert heads[at : at + 2] == ["GPU%", "GPUMEM"]
        assert [row[at : at + 2] for row in rows] == [["80", "4.0G"], ["7", "512.0M"], ["-", "-"]]
        gate.open(3)
        done = launcher.end()
    assert done.status == 0, done


def test_a_driver_that_does_not_answer_holds_up_nobody(place: Place, driver: Path, ready: Ready, gate: Gate) -> None:
    driver.write_text("stuck\n")
    script = place.write(CODE.format(ready=ready.python(), gate=gate.python()))
    with place.start("--nproc-per-node", 1, "--sample", "0.2s", script) as launcher:
        ready.pids(1)
        until((place.folder / "stuck").exists)
        assert [rank["gpu"] for rank in ranks(place)] == [None]
        gate.open()
        done = launcher.end()
    assert done.status == 0, done
