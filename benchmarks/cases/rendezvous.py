"""How soon every node of a job knows its rank, once the last has come; and what that asks of the store."""

from __future__ import annotations

import os
import pickle
from time import monotonic, sleep
from typing import TYPE_CHECKING

from benchmarks.agents.bare import Hub
from benchmarks.agents.crowd import PROCESSES, Crowd
from benchmarks.agents.say import CALLED, GONE, IN, RANK
from benchmarks.case import FLOOR, PHALANX, TORCH, Case, Sample, Target
from benchmarks.etcd import free_port

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.agents.crowd import Said
    from phalanx._store.hub.addresses import Place
    from phalanx._store.hub.server import HubServer

TIMES = {2: 5, 16: 5, 64: 3, 256: 2}
"""Number of nodes -> how many jobs of so many."""

PEER_TIMES = {2: 3, 16: 3, 64: 1}
"""Of the peer, whose 256 nodes do not meet within 60 s on two cores."""
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
    from benchmarks.agents.ours import HUB
    from phalanx._store.hub.addresses import Place

    figures: dict[str, list[float]] = {}
    port = free_port()
    for nodes, times in TIMES.items():
        with Crowd(PHALANX, f"{HUB}127.0.0.1:{port}", nodes) as crowd:
            for number in range(times):
                with _store(Place(port, ("127.0.0.1",)), run := f"late-{nodes}-{number}"):
                    took, ranks = _job(crowd, run, _all_in)
                    _leave(crowd)
                others = [said for said in ranks if not said.more[3]]
                with _store(Place(port, ("127.0.0.1",)), run := f"together-{nodes}-{number}"):
                    together = _together(crowd, run)
                    _leave(crowd)
                found = {
                    "last": took,
                    "together": together,
                    "asked": max(said.more[1] for said in others),
                    "heard": max(said.more[2] for said in others),
                    "leader asked": max(said.more[1] for said in ranks),
                }
                for name, value in found.items():
                    figures.setdefault(f"{name}, {nodes}", []).append(value)
    return Sample(figures)


def _store(place: Place, run: str) -> HubServer:
    """Return the store of a job, as the agent at the endpoint has it: in this process, which has nothing else to do."""
    from benchmarks.agents.ours import SECRET, TTL
    from phalanx._store.hub.server import HubServer

    return HubServer(place, run_id=run, secret=SECRET, ttl=TTL, warn=print)


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
                with Crowd(TORCH, endpoint, nodes) as crowd:
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
    measures=f"a job of {', '.join(map(str, SIZES))} nodes, threads of at most {PROCESSES} processes, that meet at the"
    " store in an agent, with c10d (the peer: c10d on a TCPStore; the floor: a socket each to a hub that counts): from"
    " the coming of the last node until all know their ranks; and from that of the first, where all come together. A"
    f" node but the leader: what it asks of its store, and is told; {len(os.sched_getaffinity(0))} cores",
    units={
        **{f"{name}, {nodes}": "ms" for name in ("last", "together") for nodes in SIZES},
        **{f"{name}, {nodes}": "each" for name in ("asked", "heard", "leader asked") for nodes in SIZES},
    },
    targets=(
        *(Target(f"last, {nodes}", "<=", 0.1, of=TORCH) for nodes in SIZES[:3]),
        Target("last, 256", "<", 1000),
        *(Target(f"asked, {nodes}", "<=", 4, worst=True) for nodes in SIZES),
    ),
    contenders={PHALANX: _phalanx, TORCH: _peer, FLOOR: _floor},
    rounds=3,
    peer_rounds=1,
    warm_up=False,
    limit=900.0,
)
