"""Waiting for the ends of processes by their pidfds. Owns that no such wait lasts for ever; knows no process."""

from __future__ import annotations

import select
import threading

from phalanx._base import clock, interrupts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def wait(pidfds: Iterable[int], seconds: float) -> bool:
    """Wait until all have exited, for at most ``seconds``. Returns whether they have."""
    deadline = clock.now() + seconds
    poll = select.poll()
    waiting = set(pidfds)
    for pidfd in waiting:
        poll.register(pidfd, select.POLLIN)
    while waiting:
        ready = poll.poll(max(0.0, deadline - clock.now()) * 1000)
        if not ready:
            return False
        for pidfd, _events in ready:
            poll.unregister(pidfd)
            waiting.discard(pidfd)
    return True


def reap_later(reap: Callable[[], object]) -> None:
    """Have ``reap`` called, which waits for a child that outlives SIGKILL: it may end one day, and nobody waits."""
    try:
        with interrupts.whole():
            threading.Thread(target=reap, name="phalanx-reaper", daemon=True).start()
    except RuntimeError:  # no thread is to be had: it stays a zombie until this process ends
        return
