"""The store of an agent, and torch's, where the other one is expected: each machine says what it has found."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed in this environment", allow_module_level=True)

from tests.support.etcd import free_port

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.torch

SERVES = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
COMES = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
try:
    TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=timedelta(seconds=1))
except Exception as error:
    print(type(error).__name__)
"""


def agent(folder: Path, port: int, conf: str) -> subprocess.Popen[str]:
    """Start an agent that waits for another one there. Its console is its stderr."""
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", conf]
    command = [sys.executable, "-m", "phalanx", "run", "--nnodes", "2", *where, "--no-python", "true"]
    env = {**os.environ, "XDG_STATE_HOME": str(folder), "PHALANX_JOB_SECRET": "0123456789abcdef"}
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)


def test_an_agent_finds_torchs_store(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", SERVES], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as torchs:
        assert torchs.stdout is not None
        port = int(torchs.stdout.readline())
        with agent(tmp_path, port, "is_host=no,join_timeout=5,lease_ttl=2") as one:
            said = one.communicate(timeout=60)[1]
        torchs.communicate()
    assert one.returncode == 1, said
    assert re.search(r"does not answer \(what listens there .*: another service, torchrun's store perhaps, or ", said)


def test_torchs_agent_finds_the_store_of_an_agent(tmp_path: Path) -> None:
    port = free_port()
    with agent(tmp_path, port, "join_timeout=60") as one:
        assert one.stderr is not None
        assert f"the store listens at 127.0.0.1:{port}" in one.stderr.readline()
        done = subprocess.run([sys.executable, "-c", COMES, str(port)], check=True, capture_output=True, text=True)
        one.send_signal(signal.SIGINT)
        said = one.communicate(timeout=60)[1]
    assert done.stdout.startswith("Dist"), done
    spoken = "it speaks the protocol of torch's store"
    assert f"phalanx: what has come from 127.0.0.1 is no agent, and is turned away: {spoken}\n" in said
