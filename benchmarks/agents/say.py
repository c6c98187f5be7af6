"""What an agent says to the benchmark: a line of its process's stdout, written at once."""

from __future__ import annotations

import os
from time import monotonic_ns
from typing import Protocol

CALLED, IN, RANK, FAILED, TOLD, GONE, ERROR = "called", "in", "rank", "failed", "told", "gone", "error"
"""Begins to join; has joined; knows its rank; its worker has failed; is told to end its workers; has left; cannot."""


def say(what: str, agent: int, *more: int, moment: int = 0) -> None:
    """Write what has happened to an agent, and when: now, or at ``moment`` (CLOCK_MONOTONIC, ns)."""
    line = " ".join(map(str, (what, agent, moment or monotonic_ns(), *more)))
    os.write(1, f"{line}\n".encode())  # one write, of less than PIPE_BUF bytes: all processes share the pipe


class Agents(Protocol):
    """The agents of a process."""

    def join(self, agent: int, run: str, nodes: int) -> None:
        """Have an agent join a job of so many. Does not wait."""

    def fail(self, agent: int) -> None:
        """Have its worker fail."""

    def end(self) -> None:
        """Have the workers of all agents here succeed."""
