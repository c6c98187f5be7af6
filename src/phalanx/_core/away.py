"""What a watcher that has been away owes to timers that expired meanwhile. A pure rule; who waits, measures.

A container was paused, a virtual machine moved, a process stopped. Those that are watched were stopped as well,
perhaps, and were left no time to be in time. Only a wait that ended too late tells of that: what a watcher did itself
meanwhile, however slowly, held up nobody else.
"""

from __future__ import annotations

BRIEFLY = 0.05
"""Seconds by which any wait may end too late on a busy machine."""

LONG = 1.0
"""Seconds by which no wait of a process that may run ends too late."""


def respite(overran: float, span: float, *, again: bool = False) -> float:
    """How many seconds a timer has that expired during a wait which ended ``overran`` seconds too late. 0: none.

    After a long absence, its ``span`` once more: the time that it had from the beginning (0 or less: not known). After
    a short one a second at the most, and not ``again``: on a machine that is always busy, it would never expire.

    >>> respite(0.01, 60), respite(0.3, 60), respite(0.3, 0.2), respite(0.3, 60, again=True), respite(5, 60)
    (0.0, 1.0, 0.2, 0.0, 60)
    """
    if span <= 0:
        span = LONG
    if overran > LONG:
        return span
    return min(span, LONG) if overran > BRIEFLY and not again else 0.0
