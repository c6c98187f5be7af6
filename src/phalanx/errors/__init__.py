"""Failures: how a worker records its own, what its launcher knows of them, and the report for people.

`record` and `ErrorHandler` run in workers; `ProcessFailure`, `Outcome` and `ChildFailedError` are what a launcher gets.
"""

from __future__ import annotations

from phalanx._outcomes.child_failed import ChildFailedError
from phalanx._outcomes.failure import (
    Outcome,
    ProcessFailure,
    describe_exit,
    first_failure,
    signal_name,
)
from phalanx.errors._handler import ErrorHandler, get_error_handler, record

__all__ = [
    "ChildFailedError",
    "ErrorHandler",
    "Outcome",
    "ProcessFailure",
    "describe_exit",
    "first_failure",
    "format_ranks",
    "format_report",
    "get_error_handler",
    "record",
    "signal_name",
]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx._base.text import format_ranks
    from phalanx._outcomes.report import format_report


def __getattr__(name: str) -> object:
    """Import the report's functions when they are first used: they are needed only after a failure."""
    if name == "format_ranks":
        from phalanx._base.text import format_ranks

        return format_ranks
    if name == "format_report":
        from phalanx._outcomes.report import format_report

        return format_report
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
