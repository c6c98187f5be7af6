"""Whether what an error file tells is what a process has ended of.

Owns the rules for evidence that is older than the end, and for that of another process. Reads no error file, and
refuses to know how a failure is shown.
"""

from __future__ import annotations

from phalanx._evidence import evidence

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_FAILED = 1  # the exit code of an interpreter that an exception has left
_TICK_NS = 10_000_000  # a file's time is that much early, at the most
_TEXT = 200  # characters of a message that is mentioned


def standing(
    data: dict[str, Any] | None,
    path: str,
    *,
    pid: int,
    exitcode: int,
    observed_ns: int | None,
    left_ns: int | None,
    signalled_ns: int | None,
) -> tuple[bool, int | None, str]:
    """Judge error file data.

    An exception that is not known to have left the main function may have been handled, and may not. It stands when the
    end came soon after it, when the interpreter says by its exit code that one has left it, and when we had sent the
    process a signal: it may have been on its way. What it is known to have let go of does not, unless the end
    came soon after, by an exit or by our signal: ``except Exception: return 1`` lets go of it, too.

    Args:
        data: The data, as `evidence.read` gives them.
        path: The file.
        pid: The process that has ended.
        exitcode: Its exit code, negative for a signal.
        observed_ns: When its exit was seen. All moments are on CLOCK_MONOTONIC, in nanoseconds.
        left_ns: When it left by ``sys.exit``, or None.
        signalled_ns: When we had sent it a signal, or None.

    Returns:
        Whether they tell what it has ended of; when the failure began by them, if they tell; what else is to be said.
    """
    author = evidence.written_by(data)
    if data is None or (author in (None, pid) and evidence.is_observed(data)):
        return True, evidence.written_at(data), ""
    ends = [moment for moment in (left_ns, observed_ns, signalled_ns) if moment is not None]
    # What another has recorded may have been copied, from a machine with another clock.
    recorded = evidence.recorded_at(data) if author == pid else evidence.file_at(path)
    age = min(ends) - recorded if ends and recorded is not None else 0
    soon = age <= evidence.SOON_NS
    before = f"{_seconds(age)} before" if ends else "before"
    if author is None:  # torch's, or the user's own: what it says of time is in seconds
        said = "" if soon else f"its error file was written {before} its end"
        dated = recorded is not None and _TICK_NS <= age <= evidence.SOON_NS
        return True, recorded + _TICK_NS if dated and recorded else evidence.written_at(data), said
    if author != pid:
        stands = soon or exitcode > 0 or signalled_ns is not None
        said = f"recorded by process {author}, below the worker, {before} its end"
        return stands, None, said if stands else f"{said}: {_short(data)}"
    if evidence.has_left(data):
        return True, evidence.written_at(data), ""
    handled = evidence.handled_at(data) is not None
    struck = exitcode < 0 and signalled_ns is None and left_ns is None  # by a signal that was not ours
    open_to_doubt = exitcode == _FAILED or signalled_ns is not None
    if left_ns is None and not (handled and struck) and (soon or (open_to_doubt and not handled)):
        return True, evidence.written_at(data), ""
    said = f"it had recorded {_short(data)} {before}, and gone on"
    return False, evidence.written_at(data) if soon and not struck else None, said


def _seconds(nanoseconds: int) -> str:
    seconds = max(nanoseconds, 0) / 1e9
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"  # noqa: PLR2004 - as precise as one cares


def _short(data: dict[str, Any] | None) -> str:
    text = (evidence.message_of(data) or "").split("\n")[0]
    return text if len(text) <= _TEXT else f"{text[:_TEXT]} …"
