"""How soon all other nodes of a job hear that a worker of one has failed; and whole launchers, two side by side."""

from __future__ import annotations

import os
import sys
import tempfile
import uuid

from benchmarks import two_launchers
from benchmarks.agents.bare import Hub
from benchmarks.agents.crowd import PROCESSES, Crowd
from benchmarks.agents.say import CALLED, FAILED, GONE, RANK, TOLD
from benchmarks.case import FLOOR, PHALANX, TORCH, Case, Sample, Target
from benchmarks.etcd import Etcd, free_port

NODES = 64
FAILURES = 10
"""Of one job: each is followed by a restart."""

STRIDE = 7
"""The nodes that fail are so far apart, the leader's among them."""

CAP = 60.0
TIMES = {PHALANX: 2, TORCH: 2}
"""How often two launchers are run, for each of `FATES`."""

LOOKS, PARTS = 0.1, 2
"""Seconds between the looks of a launcher that polls: failures are spread over them."""

FATES = {"a restart left": (1, 1), "none left": (0, 1), "none left, first host": (0, 0)}
"""Figure -> how many restarts there may be, and on which of the two hosts a worker fails: the peer's store is on the
first."""


def _crowd(contender: str, endpoint: str) -> dict[str, list[float]]:
    """Let workers fail, one after another. Returns the ms until each other node is told, the last, and all go on."""
    figures: dict[str, list[float]] = {"told": [], "told, last": [], "regrouped": []}
    with Crowd(contender, endpoint, NODES) as crowd:
        crowd.join(range(NODES), uuid.uuid4().hex)
        crowd.hear(CALLED, NODES, CAP)
        crowd.hear(RANK, NODES, CAP)
        for number in range(FAILURES):
            crowd.fail(number * STRIDE % NODES)
            (failed,) = crowd.hear(FAILED, 1, CAP)
            delays = [(said.moment - failed.moment) / 1e6 for said in crowd.hear(TOLD, NODES - 1, CAP)]
            again = max(said.moment for said in crowd.hear(RANK, NODES, CAP))
            figures["told"] += delays
            figures["told, last"].append(max(delays))
            figures["regrouped"].append((again - failed.moment) / 1e6)
        if contender == PHALANX:
            crowd.end()
            crowd.hear(GONE, NODES, CAP)
    return figures


def _ours(endpoint: str, restarts: int) -> list[list[str]]:
    command = [
        sys.executable, "-m", "phalanx", "run", "--nnodes", "2", "--rdzv-backend", "etcd", "--rdzv-endpoint", endpoint,
        "--run-id", uuid.uuid4().hex, "--local-addr", "127.0.0.1", "--max-restarts", str(restarts),
        "--log-dir", tempfile.mkdtemp(),
    ]  # fmt: skip
    return [command, command]


def _theirs(restarts: int) -> list[list[str]]:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--rdzv-backend", "c10d",
        "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", uuid.uuid4().hex, "--local-addr", "127.0.0.1",
        "--max-restarts", str(restarts), "--log-dir", tempfile.mkdtemp(),
    ]  # fmt: skip
    return [[*command, "--rdzv-conf", f"is_host={int(first)}"] for first in (True, False)]


def _launchers(contender: str, endpoint: str = "") -> tuple[dict[str, list[float]], tuple[str, ...]]:
    figures: dict[str, list[float]] = {}
    notes = []
    for fate, (restarts, which) in FATES.items():
        for number in range(TIMES[contender]):
            commands = _ours(endpoint, restarts) if contender == PHALANX else _theirs(restarts)
            took, ended = two_launchers.fail(commands, which, LOOKS * number / PARTS)
            figures.setdefault(f"launchers, {fate}", []).append(took)
            if not ended:
                notes.append(f"launchers, {fate}: the other host's worker ran on for {two_launchers.CAP:g} s, and more")
                break
    return figures, tuple(notes)


def _phalanx() -> Sample:
    with Etcd() as etcd:
        figures = _crowd(PHALANX, etcd.endpoint)
        pairs, notes = _launchers(PHALANX, etcd.endpoint)
    return Sample(figures | pairs, notes)


def _peer() -> Sample:
    return Sample(*_launchers(TORCH))


def _floor() -> Sample:
    with Hub() as hub:
        return Sample(_crowd(FLOOR, hub.endpoint))


CASE = Case(
    name="broadcast",
    measures=f"{NODES} nodes, threads of at most {PROCESSES} processes, meet at one etcd in memory (the floor: a socket"
    " each to a hub); the worker of one fails: until each other one is told to end its workers, until the last is, and"
    " until all know their ranks in the next attempt. Launchers: two with one worker each, as on two hosts: from the"
    " failure of the worker on one until that on the other is sent SIGTERM, or is dead (the peer: torchrun with c10d),"
    f" at most {two_launchers.CAP:g} s; {len(os.sched_getaffinity(0))} cores",
    units=dict.fromkeys(("told", "told, last", "regrouped", *(f"launchers, {fate}" for fate in FATES)), "ms"),
    targets=(
        Target("told", "<", 20),
        *(Target(f"launchers, {fate}", "<=", 0.2, of=TORCH) for fate in FATES),
    ),
    contenders={PHALANX: _phalanx, TORCH: _peer, FLOOR: _floor},
    rounds=3,
    peer_rounds=1,
    warm_up=False,
    limit=300.0,
)
