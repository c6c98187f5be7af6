"""The peer's: torch's c10d rendezvous, a handler with a connection of its own on a thread for each agent."""

from __future__ import annotations

import traceback
from threading import Thread

from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from benchmarks.agents.say import CALLED, ERROR, RANK, say


class TheirAgents:
    """The agents of this process."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._handlers: list[object] = []  # kept, with what they have open

    def join(self, agent: int, run: str, nodes: int) -> None:
        """See `Agents`."""
        Thread(target=self._run, args=(agent, run, nodes), daemon=True).start()

    def _run(self, agent: int, run: str, nodes: int) -> None:
        try:
            say(CALLED, agent)
            parameters = RendezvousParameters(
                "c10d", self._endpoint, run, nodes, nodes, local_addr="127.0.0.1", is_host="false"
            )
            handler = get_rendezvous_handler(parameters)
            self._handlers.append(handler)
            info = handler.next_rendezvous()
            say(RANK, agent, info.rank)
        except BaseException:
            say(ERROR, agent)
            traceback.print_exc()
            raise

    def fail(self, agent: int) -> None:
        """Nothing is measured by that: see `two_launchers`."""

    def end(self) -> None:
        """Nothing: the process ends."""
