"""A process with some agents: ``python -m benchmarks.agents KIND ENDPOINT WORKERS``. Commands are lines of stdin."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from benchmarks.agents.say import IN, say
from benchmarks.case import FLOOR, PHALANX, TORCH

if TYPE_CHECKING:
    from benchmarks.agents.say import Agents


def _agents(kind: str, endpoint: str, workers: int) -> Agents:
    if kind == PHALANX:
        from benchmarks.agents import ours

        return ours.OurAgents(endpoint, workers)
    if kind == TORCH:
        from benchmarks.agents import theirs

        return theirs.TheirAgents(endpoint)
    if kind != FLOOR:
        raise ValueError(f"expected {PHALANX}, {TORCH} or {FLOOR}, found {kind!r}")
    from benchmarks.agents import bare

    return bare.BareAgents(endpoint)


def main(kind: str, endpoint: str, workers: str) -> None:
    """Carry out what is asked, until nobody asks any more."""
    agents = _agents(kind, endpoint, int(workers))
    say(IN, -1)
    for line in sys.stdin:
        command, *args = line.split()
        if command == "join":
            agents.join(int(args[0]), args[1], int(args[2]))
        elif command == "fail":
            agents.fail(int(args[0]))
        else:
            agents.end()
    os._exit(0)  # whatever the agents' threads wait for


if __name__ == "__main__":
    main(*sys.argv[1:])
