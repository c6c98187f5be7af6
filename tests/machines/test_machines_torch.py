"""A job of torch on three hosts that meet at an etcd: DistributedDataParallel over gloo, and a rank that is killed."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
from typing import TYPE_CHECKING

import pytest

if importlib.util.find_spec("grpc") is None:
    pytest.skip("the extra `etcd` is not installed", allow_module_level=True)

from tests.support.helpers import descendants

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.jobs import Job

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(500)]

EXAMPLE = os.path.abspath("examples/digits_ddp.py")
LONG = 150.0
"""Seconds in which six ranks have imported torch, on a machine that is busy."""
PRELOAD = "torch,torch._dynamo,sklearn.datasets"


def test_digits_ddp_trains_on_three_hosts_after_a_kill(tmp_path: Path, job: Callable[..., Job]) -> None:
    one = job("3")
    one.env = {"GLOO_SOCKET_IFNAME": "eth0", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    one.command = [EXAMPLE, "--checkpoint", str(tmp_path / "digits.pt")]
    agents = one.start(1, 2, 3, options=["--max-restarts", "1", "--preload", PRELOAD])
    agents[0].wait_for("step 1 loss", seconds=LONG)
    below = descendants(agents[1].process.pid)
    (victim,) = (pid for pid in below if writes_to(pid).endswith("attempt_0/1/stdout.log"))
    os.kill(victim, signal.SIGKILL)
    assert [agent.end(LONG) for agent in agents] == [0, 0, 0], [agent.said for agent in agents]
    weights = {found for agent in agents for found in re.findall(r"rank \d of 6 done, weights (\w+)", agent.said)}
    assert len(weights) == 1
    for agent in agents:
        assert re.search(r"rank \d on host h2, signal 9; stopping the workers", agent.said), agent.said
        assert "attempt 1 has succeeded" in agent.said


def writes_to(pid: int) -> str:
    """The file that is the stdout of a process; empty: it has ended."""
    try:
        return os.readlink(f"/proc/{pid}/fd/1")
    except OSError:
        return ""
