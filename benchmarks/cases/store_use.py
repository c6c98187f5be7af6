"""What a job asks of its store: requests and bytes for each node, as it comes, at a restart, and as time passes."""

from __future__ import annotations

import os
import socket
import struct
import threading
from typing import TYPE_CHECKING

from benchmarks.agents.crowd import PROCESSES, Crowd
from benchmarks.agents.say import CALLED, FAILED, GONE, RANK
from benchmarks.case import PHALANX, Case, Sample, Target
from benchmarks.etcd import Etcd

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = ((2, 8), (16, 8), (64, 8), (256, 8), (16, 64), (256, 64))
"""Nodes, and workers of each."""

RESTARTS = 3
CAP = 120.0
KIND = "phalanx"

_BYTES = struct.Struct("=120xQQ")  # of tcp_info: bytes_acked and bytes_received, see linux/tcp.h


def _job(
    endpoint: str, run: str, nodes: int, workers: int, use: Callable[[], dict[str, float]]
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Let a job form, and restart `RESTARTS` times. Returns what each node costs, and what is held at the end."""
    found: dict[str, list[float]] = {}

    def note(what: str, before: dict[str, float]) -> None:
        now = use()
        for name in ("requests", "written", "read"):
            found.setdefault(f"{what}: {name}", []).append((now[name] - before[name]) / nodes)

    before = use()
    with Crowd(KIND, endpoint, nodes, workers) as crowd:
        crowd.join(range(nodes), run)
        crowd.hear(CALLED, nodes, CAP)
        crowd.hear(RANK, nodes, CAP)
        note("first", before)
        for number in range(RESTARTS):
            before = use()
            crowd.fail(number * 7 % nodes)
            crowd.hear(FAILED, 1, CAP)
            crowd.hear(RANK, nodes, CAP)
            note("restart", before)
        held = use()
        crowd.end()
        crowd.hear(GONE, nodes, CAP)
    return found, held


def _etcd(nodes: int, workers: int) -> dict[str, list[float]]:
    with Etcd() as etcd:
        found, held = _job(etcd.endpoint, "job", nodes, workers, etcd.use)
    return found | {"keys": [held["keys"] / 1024], "memory": [held["memory"] / 2**20]}


def _hub(nodes: int, workers: int) -> dict[str, list[float]]:
    """The store in an agent: in this process, which has nothing else to do."""
    from benchmarks.agents.ours import HUB, SECRET, TTL
    from phalanx._store.hub.addresses import Place
    from phalanx._store.hub.server import HubServer

    before = _rss()
    with HubServer(Place(0, ("127.0.0.1",)), run_id="job", secret=SECRET, ttl=TTL, warn=print) as server:
        port = server.port
        found, held = _job(f"{HUB}127.0.0.1:{port}", "job", nodes, workers, lambda: _connections(port))
    found = {name: values for name, values in found.items() if not name.endswith("requests")}
    return found | {
        "descriptors": [held["descriptors"]],
        "memory": [held["memory"] / 2**20 - before],
        "threads": [held["threads"]],
    }


def _rss() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _connections(port: int) -> dict[str, float]:
    """Return what has passed the connections of a port of this process, and what this process has."""
    sent = received = 0
    names = os.listdir("/proc/self/fd")
    for name in names:
        if not os.path.exists(f"/proc/self/fd/{name}") or not os.readlink(f"/proc/self/fd/{name}").startswith("socket"):
            continue
        with socket.socket(fileno=os.dup(int(name))) as one:
            if one.family == socket.AF_INET and one.getsockname()[1] == port:
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES.size)
                if len(info) == _BYTES.size and info[0] == 1:  # TCP_ESTABLISHED
                    acked, got = _BYTES.unpack(info)
                    sent, received = sent + acked, received + got
    counted = {"written": received, "read": sent, "requests": 0, "memory": _rss() * 2**20}
    return counted | {"descriptors": len(names), "threads": threading.active_count()}


def _phalanx() -> Sample:
    figures: dict[str, list[float]] = {}
    for nodes, workers in SIZES:
        for store, measure in (("etcd", _etcd), ("static", _hub)):
            for name, values in measure(nodes, workers).items():
                figures[f"{store}, {nodes} x {workers}, {name}"] = values
    return Sample(figures)


_UNITS = {
    "etcd": {"keys": "KiB", "memory": "MB"},
    "static": {"descriptors": "each", "memory": "MB", "threads": "each"},
}

CASE = Case(
    name="store_use",
    measures=f"jobs of so many nodes (threads of at most {PROCESSES} processes) with so many workers each, at an etcd"
    " and at the store of rank 0's agent: for each node, the requests and streams that the store was sent, and the"
    " bytes of messages to it and from it; until all know their ranks as they come, and from the failure of a worker"
    " (with a traceback of 2 KB) until all know them again, what became of every worker included. What the store"
    " holds then: of etcd, its keys and its memory; of rank 0's agent, what it has more than without the store",
    units={
        f"{store}, {nodes} x {workers}, {name}": unit
        for nodes, workers in SIZES
        for store, more in _UNITS.items()
        for name, unit in {
            **{
                f"{what}: {name}": "each" if name == "requests" else "B"
                for what in ("first", "restart")
                for name in ("requests", "written", "read")
                if name != "requests" or store == "etcd"
            },
            **more,
        }.items()
    },
    targets=tuple(
        Target(f"etcd, {nodes} x {workers}, {name}", "<=", most, worst=True)
        for nodes, workers in SIZES
        for name, most in {
            "first: requests": 10,
            "restart: requests": 3,
            "restart: written": 4096 + 110 * workers,
            "restart: read": 2048 + 64 * nodes,
        }.items()
    ),
    contenders={PHALANX: _phalanx},
    rounds=1,
    warm_up=False,
    limit=900.0,
)
