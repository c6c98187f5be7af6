"""Decides whether the exception in an error file is what its process ended of.

The exception may be older than the end, and handled; or the file may be another process's. This module reads no error
file.
"""

from __future__ import annotations

from phalanx._base import clock
from phalanx._base.clock import format_duration
from phalanx._evidence.error_file import (
    SOON_NS,
    file_at,
    handled_at,
    has_left,
    is_observed,
    message_of,
    recorded_at,
    written_at,
    written_by,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_UNCAUGHT = 1  # the exit code of an interpreter that an exception has left
_TICK_NS = 10_000_000  # a file's time is early by so much, at the most
_TEXT = 200  # characters of a message that is quoted


def attribute(
    data: dict[str, Any] | None,
    path: str,
    *,
    pid: int,
    exitcode: int,
    observed_ns: int | None,
    left_ns: int | None,
    signalled_ns: int | None,
) -> tuple[bool, int | None, str]:
    """Decide whether error file data tell the cause of a process's end.

    An exception that is not known to have left the main function may have been handled. It is taken for the cause if
    the end came soon after it (`SOON_NS`), if the exit code is that of an uncaught exception, or if we had sent the
    process a signal: the exception may have been on its way up. An exception that is known to have been freed is taken
    for the cause only if the end came soon after it, by an exit or by our signal: ``except Exception: return 1`` frees
    it, too.

    Args:
        data: The data, as `read_error_file` returns them.
        path: The file.
        pid: The process that has ended.
        exitcode: Its exit code, negative for a signal.
        observed_ns: When its exit was seen. All moments are on CLOCK_MONOTONIC, in nanoseconds.
        left_ns: When it left by ``sys.exit``, or None.
        signalled_ns: When we had sent it a signal, or None.

    Returns:
        Whether the data tell the cause; when the failure began, as far as the data tell; a remark for the report.
    """
    author = written_by(data)
    if data is None or (author in (None, pid) and is_observed(data)):
        return True, written_at(data), ""
    ends = [moment for moment in (left_ns, observed_ns, signalled_ns) if moment is not None]
    # Another process's evidence may have been copied from a machine with another clock.
    recorded = recorded_at(data) if author == pid else file_at(path)
    age = min(ends) - recorded if ends and recorded is not None else 0
    soon = age <= SOON_NS
    before = f"{format_duration(age / clock.NS)} before" if ends else "before"
    if author is None:  # torch's, or the user's own: its timestamps are in seconds
        remark = "" if soon else f"its error file was written {before} its end"
        dated = recorded is not None and _TICK_NS <= age <= SOON_NS
        return True, recorded + _TICK_NS if dated and recorded else written_at(data), remark
    if author != pid:
        is_cause = soon or exitcode > 0 or signalled_ns is not None
        remark = f"recorded by process {author}, below the worker, {before} its end"
        return is_cause, None, remark if is_cause else f"{remark}: {_short(data)}"
    if has_left(data):
        return True, written_at(data), ""
    handled = handled_at(data) is not None
    killed_by_others = exitcode < 0 and signalled_ns is None and left_ns is None  # of a signal that was not ours
    may_be_uncaught = exitcode == _UNCAUGHT or signalled_ns is not None
    if left_ns is None and not (handled and killed_by_others) and (soon or (may_be_uncaught and not handled)):
        return True, written_at(data), ""
    remark = f"it had recorded {_short(data)} {before}, and gone on"
    return False, written_at(data) if soon and not killed_by_others else None, remark


def _short(data: dict[str, Any] | None) -> str:
    text = (message_of(data) or "").split("\n")[0]
    return text if len(text) <= _TEXT else f"{text[:_TEXT]} …"
