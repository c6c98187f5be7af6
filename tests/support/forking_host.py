"""A program that forks while it takes part in a job: ``python -m tests.support.forking_host ENDPOINT RUN``.

It has two agents, which meet at an etcd. Its children leave in each of the ways that there are, and must not wait for
threads that they do not have; what the agents hold in the store must be theirs still.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from phalanx.rendezvous import ManyMachinesRendezvous, RendezvousConnectionError, RendezvousParameters

SECONDS = 30.0


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Return what these return. Each has a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [done.result(SECONDS) for done in [threads.submit(call) for call in calls]]


def say(*what: object) -> None:
    sys.stdout.write(f"{' '.join(map(str, what))}\n")


def double(number: int) -> int:
    return 2 * number


def drop(handlers: list[ManyMachinesRendezvous]) -> None:
    """Let go of all that a child has of them."""
    handlers.clear()
    gc.collect()


def fork_and_leave(handlers: list[ManyMachinesRendezvous], how: str) -> int:
    """Fork; the child leaves as an interpreter does. Returns its exit code."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if how == "shuts down":
        sys.exit(0 if all(handler.shutdown() and handler.is_closed() for handler in handlers) else 1)
    if how == "drops":
        drop(handlers)
    if how == "meets":
        sys.exit(0 if "is a fork of one that has used an etcd" in refusal(handlers[0]) else 1)
    sys.exit(0)


def refusal(handler: ManyMachinesRendezvous) -> str:
    """Return why another handler like this one does not meet anybody here."""
    params = RendezvousParameters("etcd", sys.argv[1], handler.get_run_id(), 2, 2)
    try:
        ManyMachinesRendezvous(params).next_rendezvous()
    except RendezvousConnectionError as error:
        return str(error)
    return ""


def main(endpoint: str, run: str) -> None:
    """Meet, fork, meet again, and succeed."""
    settings: dict[str, Any] = {"last_call_timeout": 0, "rejoin_delay": 0}
    handlers = [ManyMachinesRendezvous(RendezvousParameters("etcd", endpoint, run, 2, 2, **settings)) for _ in range(2)]
    at_once(*(handler.next_rendezvous for handler in handlers))
    for how in ("only leaves", "drops", "meets", "shuts down"):
        say(how, fork_and_leave(handlers, how))
    forks = multiprocessing.get_context("fork")
    process = forks.Process(target=drop, args=(handlers,))
    process.start()
    process.join()
    with forks.Pool(2) as pool:
        say("of multiprocessing", process.exitcode, pool.map(double, range(3)))
    say("ended", [handler.num_nodes_waiting() for handler in handlers])
    handlers[0].tell_failure("of this process")
    at_once(*(handler.next_rendezvous for handler in handlers))
    say("again", [handler.generation for handler in handlers], at_once(*(each.tell_success for each in handlers)))
    at_once(*(handler.shutdown for handler in handlers))


if __name__ == "__main__":
    main(*sys.argv[1:])
