"""Failures: how a worker records its own, what a launcher knows of it, and the report that a person reads.

`record` and `ErrorHandler` are for workers, the other names for launchers. The module owns the meaning of the error
file, and the report. It does not start, watch or stop workers: it is given exit codes, paths and moments.
"""

from __future__ import annotations

from phalanx._outcomes.failure import Outcome, ProcessFailure, describe_exit, first_failure, signal_name
from phalanx.errors._child_failed import ChildFailedError
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
    from phalanx._base.rank_ranges import format_ranks
    from phalanx._outcomes.report import format_report


def __getattr__(name: str) -> object:
    """The report's functions, loaded when first used: nobody needs them unless something has failed."""
    if name == "format_ranks":
        from phalanx._base.rank_ranges import format_ranks

        return format_ranks
    if name == "format_report":
        from phalanx._outcomes.report import format_report

        return format_report
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
