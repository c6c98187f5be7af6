"""The processes that hold the agents: starts them, tells them what to do, and hears what they say."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.agents.say import ERROR, IN

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self

PROCESSES = len(os.sched_getaffinity(0))
"""How many there are, at most: an interpreter runs one thread at a time."""


class Said(NamedTuple):
    """What an agent has said: see `say`. ``moment``: CLOCK_MONOTONIC, ns."""

    what: str
    agent: int
    moment: int
    more: tuple[int, ...] = ()


class Crowd:
    """So many agents of a kind, in at most `PROCESSES` processes. A context manager.

    Args:
        kind: Whose they are: a contender.
        endpoint: Where they meet.
        nodes: How many.
        workers: How many each has that tell what became of them, for Phalanx; 0: one, which does not.
    """

    def __init__(self, kind: str, endpoint: str, nodes: int, workers: int = 0) -> None:
        self._command = [sys.executable, "-m", "benchmarks.agents", kind, endpoint, str(workers)]
        self._count = min(PROCESSES, nodes)
        self.nodes = nodes
        self._heard: deque[Said] = deque()
        self._rest = b""

    def __enter__(self) -> Self:
        """Start them; return when they have imported what they need."""
        self._pipe, out = os.pipe()
        self._processes = [
            subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=out, text=True) for _ in range(self._count)
        ]
        os.close(out)
        try:
            self.hear(IN, self._count, 60.0)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_exception: object) -> None:
        """End them."""
        for process in self._processes:
            process.kill()
            process.communicate()
        os.close(self._pipe)

    def join(self, agents: Iterable[int], run: str) -> None:
        """Have agents join a job."""
        for agent in agents:
            self._tell(agent, f"join {agent} {run} {self.nodes}")

    def fail(self, agent: int) -> None:
        """Have the worker of an agent fail."""
        self._tell(agent, f"fail {agent}")

    def end(self) -> None:
        """Have all workers succeed."""
        for number in range(self._count):
            self._tell(number, "end")

    def hear(self, what: str, count: int, seconds: float) -> list[Said]:
        """Wait until so many agents have said something. Raises TimeoutError; RuntimeError: one cannot go on."""
        until = monotonic() + seconds
        found: list[Said] = []
        while True:
            for _ in range(len(self._heard)):
                said = self._heard.popleft()
                if said.what == what and len(found) < count:
                    found.append(said)
                else:
                    self._heard.append(said)
            if len(found) == count:
                return found
            self._read(until, f"{what!r}: heard of {len(found)} of {count} within {seconds:g} s")

    def forget(self) -> None:
        """Forget what has been said and not been asked for."""
        self._heard.clear()

    def _read(self, until: float, missing: str) -> None:
        if not select.select([self._pipe], [], [], max(0.0, until - monotonic()))[0]:
            raise TimeoutError(missing)
        data = os.read(self._pipe, 1 << 16)
        if not data:
            raise RuntimeError("the processes of the agents have ended")
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            what, agent, moment, *more = line.decode().split()
            if what == ERROR:
                raise RuntimeError(f"agent {agent} cannot go on; stderr says why")
            self._heard.append(Said(what, int(agent), int(moment), tuple(map(int, more))))

    def _tell(self, agent: int, line: str) -> None:
        stdin = self._processes[agent % self._count].stdin
        assert stdin is not None
        stdin.write(f"{line}\n")
        stdin.flush()
