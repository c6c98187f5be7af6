"""Who has come to a job that waits for machines, and who has not: in words, and when that is to be said. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from phalanx._base.text import format_ranks
from phalanx._base.tty import sanitise
from phalanx._rendezvous.records import Node

FIRST = 3.0
"""Seconds that a node waits before it says for whom."""

REPEATS = (10.0, 300.0)
"""Seconds after which it says so again though nothing has changed: at first, doubled each time, and at most."""

CHANGES = 5.0
"""Seconds between two lines on what has changed, at most: as many seconds as there were lines."""

NAMED = 8
"""Nodes that are named one by one."""


def call(nodes: Iterable[Node], least: int, most: int) -> tuple[str, tuple[int, ...]]:
    """Return who has come and who is missing, in words; and the node ranks that are missing, if they were given.

    Args:
        nodes: Those that have come, and can take part.
        least: How many there are to be, at least.
        most: Likewise, at most.

    >>> from phalanx._rendezvous.records import Node
    >>> call([Node("a", "h1", "", 8, order=0), Node("c", "h3", "", 8, order=2)], 4, 4)
    ('2 of 4 nodes have come: 0 (h1), 2 (h3); nodes 1, 3 are missing', (1, 3))
    >>> call([Node("a", "h1", "10.0.0.1", 8)], 2, 4)
    ('1 of 2 to 4 nodes has come: h1; 1 more is needed', ())
    >>> call([], 2, 2)
    ('none of 2 nodes has come; 2 more are needed', ())
    >>> call([Node("a", "h1", "10.0.0.1", 8), Node("b", "h2", "10.0.0.2", 8)], 2, 4)
    ('2 of 2 to 4 nodes have come: h1, h2; 2 more may come', ())
    """
    there = list(nodes)
    wanted = f"{most}" if least == most else f"{least} to {most}"
    count = "none" if not there else len(there)
    text = f"{count} of {wanted} {_noun(most)} {'have' if len(there) > 1 else 'has'} come"
    missing: tuple[int, ...] = ()
    if there and all(node.order >= 0 for node in there):
        there.sort(key=lambda node: node.order)
        missing = tuple(sorted(set(range(least)) - {node.order for node in there}))
        names = [f"{node.order} ({sanitise(node.host)})" for node in there]
    else:
        names = [sanitise(node.host) for node in there]
    if len(names) > NAMED:
        names[NAMED:] = [f"{len(names) - NAMED} more"]
    text += f": {', '.join(names)}" if names else ""
    if missing:
        return f"{text}; {_noun(len(missing))} {format_ranks(missing)} {_are(len(missing))} missing", missing
    left = least - len(there)
    if left <= 0:
        return f"{text}; {most - len(there)} more may come", ()
    return f"{text}; {left} more {_are(left)} needed", ()


class RollCall:
    """When a node that waits says for whom: some seconds after it has begun, when that changes, and now and then.

    Attributes:
        wake: When to `call` again, though nothing has changed; inf: never.
    """

    def __init__(self) -> None:
        self.wake = math.inf
        self._said = ""
        self._count = 0
        self._last = self._again = 0.0

    def call(self, text: str, since: float, now: float) -> bool:
        """Return whether that is to be said now.

        Args:
            text: What there is to be said.
            since: When the node began to wait.
            now: The present moment.

        >>> roll = RollCall()
        >>> [(roll.call("1 of 2", 0.0, now), roll.wake) for now in (1.0, 3.0, 9.0, 13.0)]
        [(False, 3.0), (True, 13.0), (False, 13.0), (True, 33.0)]
        >>> [(roll.call("1 of 3", 0.0, now), roll.wake) for now in (14.0, 15.0)]
        [(False, 15.0), (True, 25.0)]
        """
        if not self._said:
            due = since + FIRST
        elif text != self._said:
            due = min(self._again, self._last + min(float(self._count), CHANGES))
        else:
            due = self._again
        if now < due:
            self.wake = due
            return False
        again = REPEATS[0] if text != self._said else min(2 * (self._again - self._last), REPEATS[1])
        self._said, self._last, self._again, self._count = text, now, now + again, self._count + 1
        self.wake = self._again
        return True


def _noun(count: int) -> str:
    return "node" if count == 1 else "nodes"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"
