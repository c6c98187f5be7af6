"""torch's stores and process groups at a port that is reserved, in one attempt and at once again in the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.workers import run_script

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.torch

SCRIPT = """
import os, signal, sys, warnings
warnings.simplefilter("ignore")
from datetime import timedelta
import torch
import torch.distributed as dist
from phalanx._run import master_port

def store(rank, libuv):
    found = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, rank == 0, timedelta(seconds=60),
                          use_libuv=libuv)
    found.set(str(rank), "here")
    found.wait([str(1 - rank)])
    return found

def group(rank, libuv):
    os.environ["USE_LIBUV"] = str(int(libuv))
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))  # env://
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2

def attempt(work, libuv):
    ready = os.pipe()
    ranks = []
    for rank in range(2):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            try:
                os.environ.update(RANK=str(rank), WORLD_SIZE="2")
                kept = work(rank, libuv)
                os.write(ready[1], b".")
                signal.pause()  # with its connections open
            finally:
                sys.stderr.flush()
                os._exit(1)
    os.close(ready[1])
    with open(ready[0], "rb") as file:
        met = len(file.read(1) + file.read(1))
    for rank in ranks:  # the one that listens first: its ends of the connections stay in TIME_WAIT
        os.kill(rank, signal.SIGKILL)
        os.waitpid(rank, 0)
    return met == 2

os.environ["MASTER_ADDR"] = "127.0.0.1"
if sys.argv[1] == "inside":
    master_port.EPHEMERAL = ""  # as where no port is outside the kernel's range
for work in (store, group):
    for libuv in (True, False):
        with master_port.reserve() as port:
            os.environ["MASTER_PORT"] = str(port.number)
            for number in range(2):
                assert attempt(work, libuv), (work.__name__, libuv, number)
                with open("/proc/net/tcp") as v4, open("/proc/net/tcp6") as v6:
                    lines = [line.split() for line in (*v4, *v6)]
                left = [line for line in lines if line[1].endswith(f":{port.number:04X}")]
                assert left, "no connection was open"
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_stores_and_groups_bind_it_in_each_attempt(tmp_path: Path, where: str) -> None:
    done = run_script(tmp_path, SCRIPT, where, timeout=240)
    assert done.stdout == "done\n", done.stderr
