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

PEER_TIMES = {2: 3, 16: 3}
"""Of the peer; of more nodes, one."""
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


def _phalanx(nodes: int) -> Sample:
    from benchmarks.agents.ours import HUB
    from phalanx._store.hub.addresses import Place

    figures: dict[str, list[float]] = {}
    port = free_port()
    with Crowd(PHALANX, f"{HUB}127.0.0.1:{port}", nodes) as crowd:
        for number in range(TIMES[nodes]):
            with _store(Place(port, ("127.0.0.1",)), run := f"late-{number}"):
                took, ranks = _job(crowd, run, _all_in)
                _leave(crowd)
            others = [said for said in ranks if not said.more[3]]
            with _store(Place(port, ("127.0.0.1",)), run := f"together-{number}"):
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
                figures.setdefault(name, []).append(value)
    return Sample(figures)


def _store(place: Place, run: str) -> HubServer:
    """Return the store of a job, as the agent at the endpoint has it: in this process, which has nothing else to do."""
    from benchmarks.agents.ours import SECRET, TTL
    from phalanx._store.hub.server import HubServer

    return HubServer(place, run_id=run, secret=SECRET, ttl=TTL, warn=print)


def _floor(nodes: int) -> Sample:
    figures: dict[str, list[float]] = {"last": [], "together": []}
    for number in range(TIMES[nodes]):
        with Hub() as hub, Crowd(FLOOR, hub.endpoint, nodes) as crowd:
            figures["last"].append(_job(crowd, f"late-{number}", _all_in)[0])
            figures["together"].append(_together(crowd, f"together-{number}"))
    return Sample(figures)


def _peer(nodes: int) -> Sample:
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

    jobs: dict[str, Callable[[Crowd, str], float]] = {
        "last": lambda crowd, run: _job(crowd, run, all_in)[0],
        "together": _together,
    }
    figures: dict[str, list[float]] = {}
    for name, measure in jobs.items():
        for number in range(PEER_TIMES.get(nodes, 1)):
            # Processes of their own: what goes on between the nodes of one job would disturb the next.
            with Crowd(TORCH, endpoint, nodes) as crowd:
                figures.setdefault(name, []).append(measure(crowd, f"{name}-{number}"))
    return Sample(figures)


CASE = Case(
    name="rendezvous",
    measures=f"N nodes of a job, threads of at most {PROCESSES} processes, that meet at the store in an agent, with"
    " c10d (the peer: c10d on a TCPStore; the floor: a socket each to a hub that counts): from the coming of the last"
    " node until all know their ranks; and from that of the first, where all come together. A node but the leader: what"
    f" it asks of its store, and is told; {len(os.sched_getaffinity(0))} cores",
    units={**dict.fromkeys(("last", "together"), "ms"), **dict.fromkeys(("asked", "heard", "leader asked"), "each")},
    targets=(
        Target("last", "<=", 0.1, of=TORCH, size=64),
        Target("last", "<", 1000, size=256),
        Target("asked", "<=", 4, worst=True),
    ),
    contenders={PHALANX: _phalanx, TORCH: _peer, FLOOR: _floor},
    sizes=tuple(TIMES),
    rounds=3,
    peer_rounds=1,
    warm_up=False,
    limit=300.0,
)
