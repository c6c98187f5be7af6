"""Workers that are connected with each other, as those of torch are: what is said, and counted, when a host is lost.

They fail of their lost connections at once, and that the host is gone is known when its lease has run out.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
from typing import TYPE_CHECKING

import pytest

if importlib.util.find_spec("grpc") is None:
    pytest.skip("the extra `etcd` is not installed", allow_module_level=True)

from tests.support.jobs import Agent, Job, everyone

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.long

WORKER = """
import os, socket
rank, size, attempt = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if rank == 0:
    with socket.create_server(where) as door:
        peers = [door.accept()[0] for _ in range(size - 1)]
else:
    while True:
        try:
            peers = [socket.create_connection(where)]
            break
        except ConnectionRefusedError:
            pass
print("worker", rank, size, os.environ["GROUP_RANK"], where[0], "attempt", attempt, flush=True)
import select
ready, _, _ = select.select(peers, (), ())
raise ConnectionResetError("connection closed by peer")
"""


def test_a_lost_host_is_the_cause_of_lost_connections(job: Callable[..., Job]) -> None:
    one = job("2:3")
    (one.folder / "train.py").write_text(WORKER)
    agents = one.start(1, 2, 3)
    everyone(agents, 0, 6)
    what = kill_last(agents, 0, 6)[1]
    everyone(agents, 1, 4)  # it has cost no restart, of which there is none
    for agent in agents:
        assert re.search(r"rank \d on host h\d, .*; stopping the workers\n", agent.said)
        assert re.search(rf"attempt 0 ended after \S+: {what}; attempt 1 follows", agent.said), agent.said
    host, what = kill_last(agents, 1, 4)
    assert [agent.end() for agent in agents] == [1], agents[0].said
    said = agents[0].said
    assert f"Root Cause:\n  host      : {host}\n  error     : {what}\n" in said, said
    assert re.search(
        r"Other Failures:\nranks? 0(-1)?:\n(  .*\n)+ +error +: ConnectionResetError: connection closed", said
    )


def kill_last(agents: list[Agent], attempt: int, size: int) -> tuple[str, str]:
    """Kill the agent of the last node: rank 0, and so who loses connections, is on another. Returns who is lost."""
    (lost,) = (agent for agent in agents if str(size - 1) in agent.workers(attempt, size))
    os.kill(lost.launcher(), signal.SIGKILL)
    lost.process.wait()
    agents.remove(lost)
    return f"h{lost.number}", f"node {size // 2 - 1} is lost: its agent on host h{lost.number} is gone, or cut off"
