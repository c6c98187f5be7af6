"""Reports a hang in words: the line about it, and the error file of the process that hangs.

Both watchers use this, so that a hang reads the same wherever it was found: that of a group (`hang_reporter`), and a
stand-alone timer server (`phalanx.timer`). They decide which timers have expired, take the stacks, and send signals.
"""

from __future__ import annotations

import signal

from phalanx._base.clock import format_duration
from phalanx._evidence import error_file
from phalanx._evidence.describe import without_own_frames

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from typing import Any

    from phalanx._timers.hang import Hang


class NotWrittenError(Exception):
    """An error file could not be written. ``str()`` says why; ``text`` is what it would have contained."""

    def __init__(self, why: str, text: str) -> None:
        super().__init__(why)
        self.text = text


def line(
    subject: str, hangs: Sequence[Hang], moment: int, where: Sequence[str] = (), number: int = 0, *, sent: bool = True
) -> str:
    """Return the line about a hang.

    Args:
        subject: What hangs: ``rank 3``, ``pid 4242``.
        hangs: Its expired timers, the first one first. Of those with one description, the longest overdue counts.
        moment: Now (CLOCK_MONOTONIC, nanoseconds).
        where: Where it is, and where others are, in lines.
        number: The signal that follows; 0: none.
        sent: Whether that could be sent.

    >>> from phalanx._timers.hang import Hang
    >>> from phalanx._timers.hang import Timer
    >>> hang = Hang(0, 42, True, Timer(0, 1, 5_000_000_000, 2_000_000_000, 0, "load", "train.py:7"))
    >>> line("rank 0", [hang], 5_002_500_000, ["it is in fetch (train.py:9)"], 9)
    "rank 0: 'load' (train.py:7) was not left within 2 s; 2ms over; it is in fetch (train.py:9); SIGKILL"
    """
    parts = []
    for description, those in by_description(hangs).items():
        parts += [description, f"{format_duration(max(hang.overdue(moment) for hang in those))} over"]
    parts += [part for text in where for part in text.split("\n")]
    if number:
        parts.append(_signal_name(number) if sent else f"{_signal_name(number)} was not sent")
    return f"{subject}: {'; '.join(parts)}"


def is_recorded(path: str, writers: Collection[int]) -> bool:
    """Whether one of ``writers`` has recorded a failure in an error file, and has not handled it since."""
    return _stands(error_file.read_error_file(path)[0], writers)


def write_error_file(
    path: str,
    hangs: Sequence[Hang],
    moment: int,
    where: Sequence[str],
    stack: str,
    *,
    worker: int,
    writers: Collection[int],
    began: int = 0,
    stacks_file: str = "",
) -> bool:
    """Write the error file of a process that hangs, unless one of ``writers`` has recorded a failure there.

    An exception that a writer has recorded and then handled is no failure: it is replaced, and mentioned.

    Args:
        path: The error file.
        hangs: Its expired timers, at least one; the first one is what the failure names.
        moment: Now (CLOCK_MONOTONIC, nanoseconds).
        where: Where it is, and where others are, in lines.
        stack: Its stacks.
        worker: The pid that the failure is recorded for.
        writers: The pids of processes whose own record is kept.
        began: When it began to fail (CLOCK_MONOTONIC, nanoseconds); 0: at the first deadline.
        stacks_file: The name of the file in each rank's folder that has the stacks of that rank; empty: there is none.

    Returns:
        Whether it was written.

    Raises:
        NotWrittenError: The disk is full, say, or no descriptor is left.
    """
    first, *others = hangs
    known = error_file.read_error_file(path)[0]
    if _stands(known, writers):
        return False
    lines = [_overdue(first, moment), *filter(None, where)]
    if error_file.handled_at(known) is not None:
        recorded = (error_file.message_of(known) or "").partition("\n")[0]
        lines.append(f"it had recorded {recorded} before, and gone on")
    lines += [f"also: {hang.description}; {_overdue(hang, moment)}" for hang in others]
    if stacks_file:
        lines.append(f"stacks of all ranks: {stacks_file} in each rank's folder")
    text, detail = first.message, "\n".join(lines)
    try:
        error_file.write_error_file(
            path,
            text,
            without_own_frames(stack),
            monotonic_ns=began or first.timer.deadline,
            pid=worker,
            observer="timer",
            scope=first.timer.scope or first.timer.location,
            detail=detail,
        )
    except Exception as error:
        raise NotWrittenError(str(error), f"{text}\n{detail}") from error
    return True


def by_description(hangs: Sequence[Hang]) -> dict[str, list[Hang]]:
    """Group hangs by their description."""
    same: dict[str, list[Hang]] = {}
    for hang in hangs:
        same.setdefault(hang.description, []).append(hang)
    return same


def _stands(data: dict[str, Any] | None, writers: Collection[int]) -> bool:
    return error_file.written_by(data) in writers and error_file.handled_at(data) is None


def _signal_name(number: int) -> str:
    """Return the name of a signal, ``signal 42`` if it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _overdue(hang: Hang, moment: int) -> str:
    return f"{format_duration(hang.overdue(moment))} over its deadline"
