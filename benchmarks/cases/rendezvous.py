"""How soon every node of a job knows its rank, once the last has come; and what that asks of the store."""

from __future__ import annotations

import os
import pickle
from time import monotonic, sleep
from typing import TYPE_CHECKING

from benchmarks.agents.bare import Hub
from benchmarks.agents.crowd import PROCESSES, Crowd
from benchmarks.agents.say import CALLED, GONE, IN, RANK
from benchmarks.case import FLOOR, PEER, PHALANX, Case, Sample, Target
from benchmarks.etcd import Etcd

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.agents.crowd import Said

TIMES = {2: 5, 16: 5, 64: 3, 256: 2}
"""Number of nodes -> how many jobs of so many."""

PEER_TIMES = {2: 3, 16: 3, 64: 1, 256: 1}
CAP = 60.0
"""Seconds that the nodes of one job may take to come, and as long again until they know their ranks."""

LOOKS = 0.1
"""Seconds between looks at how many of the peer's nodes have come."""


def _all_in(crowd: Crowd, _run: str) -> None:
    crowd.hear(IN, crowd.nodes - 1, CAP)


def _job(crowd: Crowd, run: str, all_in: Callable[[Crowd, str], None]) -> tuple[float, list[Said]]:
    """Let all nodes but one come, then the last. Returns the ms until all know their ranks, and what they said."""
    crowd.join(range(1, crowd.nodes), run)
    crowd.hear(CALLED, crowd.nodes - 1, CAP)
    all_in(crowd, run)
    crowd.join([0], run)
    (last,) = crowd.hear(CALLED, 1, CAP)
    ranks = crowd.hear(RANK, crowd.nodes, CAP)
    if sorted(said.more[0] for said in ranks) != list(range(crowd.nodes)):
        raise RuntimeError(f"the ranks of {crowd.nodes} nodes: {sorted(said.more[0] for said in ranks)}")
    return (max(said.moment for said in ranks) - last.moment) / 1e6, ranks


def _together(crowd: Crowd, run: str) -> float:
    """Let all nodes come at once. Returns the ms from the first's coming until all know their ranks."""
    crowd.join(range(crowd.nodes), run)
    first = min(said.moment for said in crowd.hear(CALLED, crowd.nodes, CAP))
    return (max(said.moment for said in crowd.hear(RANK, crowd.nodes, CAP)) - first) / 1e6


def _leave(crowd: Crowd) -> None:
    crowd.end()
    crowd.hear(GONE, crowd.nodes, CAP)
    crowd.forget()


def _phalanx() -> Sample:
    figures: dict[str, list[float]] = {}
    with Etcd() as etcd:
        for nodes, times in TIMES.items():
            with Crowd(PHALANX, etcd.endpoint, nodes) as crowd:
                for number in range(times):
                    before = etcd.requests()
                    took, ranks = _job(crowd, f"late-{nodes}-{number}", _all_in)
                    asked = sum(etcd.requests().values()) - sum(before.values())
                    _leave(crowd)
                    others = [said for said in ranks if not said.more[3]]
                    found = {
                        "last": took,
                        "together": _together(crowd, f"together-{nodes}-{number}"),
                        "asked": max(said.more[1] for said in others),
                        "heard": max(said.more[2] for said in others),
                        "leader asked": max(said.more[1] for said in ranks),
                        "requests each": asked / nodes,
                    }
                    _leave(crowd)
                    for name, value in found.items():
                        figures.setdefault(f"{name}, {nodes}", []).append(value)
    return Sample(figures)


def _floor() -> Sample:
    figures: dict[str, list[float]] = {}
    for nodes, times in TIMES.items():
        for number in range(times):
            with Hub() as hub, Crowd(FLOOR, hub.endpoint, nodes) as crowd:
                figures.setdefault(f"last, {nodes}", []).append(_job(crowd, f"late-{number}", _all_in)[0])
                figures.setdefault(f"together, {nodes}", []).append(_together(crowd, f"together-{number}"))
    return Sample(figures)


def _peer() -> Sample:
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    endpoint = f"127.0.0.1:{store.port}"

    def all_in(crowd: Crowd, run: str) -> None:
        backend, until = C10dRendezvousBackend(store, run), monotonic() + CAP
        while True:
            held = backend.get_state()
            if held is not None and len(pickle.loads(held[0]).participants) >= crowd.nodes - 1:
                return
            if monotonic() > until:
                raise TimeoutError(f"{crowd.nodes - 1} nodes have not come within {CAP:g} s")
            sleep(LOOKS)

    figures: dict[str, list[float]] = {}
    notes: list[str] = []
    for nodes, times in PEER_TIMES.items():
        jobs: dict[str, Callable[[Crowd, str], float]] = {
            "last": lambda crowd, run: _job(crowd, run, all_in)[0],
            "together": _together,
        }
        for name, measure in jobs.items():
            for number in range(times):
                # Processes of their own: what goes on between the nodes of one job would disturb the next.
                with Crowd(PEER, endpoint, nodes) as crowd:
                    try:
                        took = measure(crowd, f"{name}-{nodes}-{number}")
                    except (TimeoutError, RuntimeError) as error:
                        notes.append(f"{name}, {nodes}: {error}")
                        break
                    figures.setdefault(f"{name}, {nodes}", []).append(took)
    return Sample(figures, tuple(notes))


SIZES = tuple(TIMES)

CASE = Case(
    name="rendezvous",
    measures=f"a job of {', '.join(map(str, SIZES))} nodes, threads of at most {PROCESSES} processes, that meet at one"
    " etcd in memory (the peer: c10d on a TCPStore; the floor: a socket each to a hub that counts): from the coming of"
    " the last node until all know their ranks; and from that of the first, where all come together. A node but the"
    f" leader: what it asks of its store, and is told; requests and streams that etcd was sent, by nodes;"
    f" {len(os.sched_getaffinity(0))} cores",
    units={
        **{f"{name}, {nodes}": "ms" for name in ("last", "together") for nodes in SIZES},
        **{
            f"{name}, {nodes}": "each"
            for name in ("asked", "heard", "leader asked", "requests each")
            for nodes in SIZES
        },
    },
    targets=(
        *(Target(f"last, {nodes}", "<=", 0.1, of=PEER) for nodes in SIZES[:3]),
        Target("last, 256", "<", 1000),
        *(Target(f"asked, {nodes}", "<=", 4, worst=True) for nodes in SIZES),
    ),
    contenders={PHALANX: _phalanx, PEER: _peer, FLOOR: _floor},
    rounds=3,
    peer_rounds=1,
    warm_up=False,
    limit=900.0,
)
