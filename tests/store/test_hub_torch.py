"""The store of an agent, and torch's, where the other one is expected: each machine says what it has found."""

from __future__ import annotations

import importlib.util
import queue
import re
import subprocess
import sys

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed in this environment", allow_module_level=True)

from phalanx._store.hub.hub_store import HubStore
from phalanx._store.hub.listening import Place
from phalanx._store.hub.server import HubServer
from phalanx._store.hub.settings import HubSettings
from phalanx._store.store import Away
from tests.support.stores import SOON, Client

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


def test_an_agent_that_finds_torchs_store() -> None:
    with subprocess.Popen([sys.executable, "-c", SERVES], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as torchs:
        assert torchs.stdout is not None
        port = int(torchs.stdout.readline())
        one = Client(HubStore(HubSettings("127.0.0.1", port, "run", b"secret", 2)))
        try:
            why = one.next(Away).why
        finally:
            one.store.close(1.0)
            torchs.communicate()
    assert re.match("what listens there .*: another service, torchrun's store perhaps, or ", why)


def test_torchs_agent_that_finds_the_store_of_ours() -> None:
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    with HubServer(Place(0, ("127.0.0.1",)), run_id="run", secret=b"secret", ttl=2, warn=told.put) as server:
        done = subprocess.run(
            [sys.executable, "-c", COMES, str(server.port)], check=True, capture_output=True, text=True
        )
        assert done.stdout.startswith("Dist"), done
        line = told.get(timeout=SOON)
    spoken = "it speaks the protocol of torch's store"
    assert line == f"what has come from 127.0.0.1 is no agent, and is turned away: {spoken}"
