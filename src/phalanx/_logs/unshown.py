"""Tells the user, on stderr, which lines are not shown, and why: their files have them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from phalanx._base.files import UnfitError
from phalanx._base.stderr import tell
from phalanx._base.text import how_many
from phalanx._base.tty import printable
from phalanx._logs.follower import Follower
from phalanx._logs.sink import Sink
from phalanx._logs.stream import Stream

_MOST_NAMED = 16  # files
_MOST_COUNTED = 64 << 20  # bytes of unread lines that are counted; those beyond are reported as more


def report_unfit(unfit: UnfitError, reported: set[str]) -> None:
    """Report a file that cannot be read. Once each: ``reported`` collects the paths, up to a bound."""
    if unfit.filename in reported or len(reported) > _MOST_NAMED:
        return
    reported.add(unfit.filename)
    if len(reported) > _MOST_NAMED:
        tell("phalanx: more files cannot be shown, which are not named")
    else:
        tell(f"phalanx: {printable(unfit.filename)} is not shown: {unfit.strerror}")


def report_refused(sinks: Iterable[Sink]) -> None:
    """Report the sinks that refused a write: a full disk, mostly. A sink whose reader closed it is not reported."""
    for sink in sinks:
        if sink.refusal is not None:
            where = printable(sink.path) or "the console"
            why = getattr(sink.refusal, "strerror", None) or repr(sink.refusal)
            tell(f"phalanx: {where}: {why}; lines are missing there, the log files have them")


def report_missing(left: Mapping[Stream, tuple[int, bool]], pending: Mapping[object, int]) -> None:
    """Report how many lines of each file have not been shown.

    Args:
        left: By stream, the lines that have not been read, and whether there are more.
        pending: By source, the lines that have been read, but wait to be written.
    """
    named = 0
    for stream, (unread, beyond) in left.items():
        lines = unread + sum(pending.get(source, 0) for _view, source in stream.views[:1])
        if lines or beyond:
            named += 1
            if named <= _MOST_NAMED:
                many = f"{'over ' * beyond}{how_many(lines, 'more line')}" if lines else "more"
                tell(f"phalanx: … {many} in {printable(stream.follower.path)}")
    if named > _MOST_NAMED:
        tell(f"phalanx: … and more in {how_many(named - _MOST_NAMED, 'other file')}")


def count_unread(streams: Iterable[Stream], dirty: Mapping[Stream, None]) -> dict[Stream, tuple[int, bool]]:
    """Count the unread lines of each stream, in a bounded number of bytes. Only the streams in ``dirty`` have any.

    Returns them, by stream, and whether there are more.
    """
    left, budget = {}, _MOST_COUNTED
    for stream in streams:
        unread, read, beyond = 0, 0, False
        if stream in dirty:
            unread, read, beyond = _lines_left(stream.follower, budget)
            budget -= read
        left[stream] = unread, beyond
    return left


def _lines_left(follower: Follower, limit: int) -> tuple[int, int, bool]:
    try:
        return follower.lines_left(limit)
    except OSError:
        return 0, 0, False
