"""Logs expired timers; the logger is ``phalanx.timer``."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from logging import Logger

__all__ = ["log_debug_info_for_expired_timers"]


def log_debug_info_for_expired_timers(run_id: str, expired_timers: Mapping[int, Sequence[str]]) -> None:
    """Log a warning per worker that names its expired timers; nothing when there are none.

    Args:
        run_id: The run of the workers; may be empty.
        expired_timers: Worker id → the scopes that expired.

    >>> import logging, sys
    >>> handler = logging.StreamHandler(sys.stdout)
    >>> logging.getLogger("phalanx.timer").addHandler(handler)
    >>> log_debug_info_for_expired_timers("job", {4242: ["all_reduce", "train.py:41"], 4243: ["all_reduce"]})
    run job: worker 4242 has 2 expired timers: all_reduce, train.py:41
    run job: worker 4243 has 1 expired timer: all_reduce
    >>> log_debug_info_for_expired_timers("", {4242: ["all_reduce"]})
    worker 4242 has 1 expired timer: all_reduce
    >>> logging.getLogger("phalanx.timer").removeHandler(handler)
    """
    for worker, scopes in expired_timers.items():
        logger().warning(
            "%sworker %s has %d expired timer%s: %s",
            f"run {run_id}: " if run_id else "",
            worker,
            len(scopes),
            "" if len(scopes) == 1 else "s",
            ", ".join(map(str, scopes)),
        )


def logger() -> Logger:
    """Return the logger of all timer servers. Loads `logging`, which a worker that only sets timers never needs."""
    from logging import getLogger

    return getLogger("phalanx.timer")
