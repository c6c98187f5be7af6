"""A group's timers: the table that its workers find, who reports on it, and where its events go.

Owns the joining of these. What a timer is, and what follows when it expires, is the engine's business.
"""

from __future__ import annotations

import contextlib
import json
import os

from phalanx._base import files
from phalanx._base.control_chars import sanitise
from phalanx._timers import timetable
from phalanx._timers.hang_report import HangReport

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import Any, TextIO

    from phalanx._logs.specs import LogsDest
    from phalanx._timers.specs import TimerSpecs

EVENTS = "events.jsonl"
"""The file of a run's attempt that takes the group's events, one JSON object a line."""

EVENTS_SIZE = 16 << 20
"""The most bytes of one of the three files that take them."""

_TOGETHER = 1000  # events that go to one file
_SEATS = 64  # for each rank: itself, and processes below it. The file is sparse: what nobody sits in takes no memory
_LEAST_SEATS, _MOST_SEATS = 1024, 16384


def watch(
    specs: TimerSpecs,
    logs: LogsDest,
    ranks: Collection[int],
    say: Callable[[str], bool],
    *,
    keep: bool,
    stacks: bool = True,
    speak: Callable[[str], None] | None = None,
) -> tuple[HangReport | None, dict[int, dict[str, str]]]:
    """Make what reports on a group's timers. Returns it, and the variables that tell each rank's worker of the table.

    ``say`` shows a line, and returns whether that was possible; if not, ``speak`` is told, or the log. Events are
    written beside the logs only if those are to ``keep``, and ``stacks`` beside the error files.

    When there is no memory, or no descriptor, for the table, that is said, and the group goes without; unless the
    ``specs`` ask for more than is usual: then it raises OSError.
    """
    try:
        seats = min(max(_LEAST_SEATS, _SEATS * len(ranks)), max(_MOST_SEATS, len(ranks)))
        table = timetable.Timetable(seats, specs.hang_timeout)
    except OSError as error:
        if specs != type(specs)():
            raise OSError(error.errno, f"timers cannot be watched: {error.strerror}") from error
        _log(f"timers are not watched: {error.strerror}")
        return None, {}
    path = os.path.join(os.path.dirname(logs.timeline), EVENTS) if keep and logs.timeline else ""
    write = EventFile(path).write if path else lambda _events: None

    def show(text: str) -> None:
        if not say(f"phalanx: {text}"):
            (speak or _log)(sanitise(text))

    report = HangReport(table, specs.on_expiry, logs.error_files, write, specs.on_event, show, stacks=stacks)
    return report, {rank: {timetable.ENV: f"{table.address}:{rank}"} for rank in ranks}


class EventFile:
    """Takes events, in three files of `EVENTS_SIZE` bytes at the most: the first ones, those before, and the newest.

    A timer of 0.1 s that is only reported on expires ten times a second for as long as its rank hangs: of one rank that
    is 0.2 GB a day. How a trouble began and how it stands is kept; what was in between goes, and that is told.

    Args:
        path: Where the newest are. Beside it, the first ones are ``PATH.1``, those before the newest ``PATH.2``.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._held = 0  # events in the newest file
        self._before = 0  # and in the one before it
        self._gone = 0  # those that were removed
        self._turns = 0

    def write(self, events: list[dict[str, Any]]) -> None:
        """Add events. What cannot be written is left out."""
        with contextlib.suppress(OSError):
            for first in range(0, len(events), _TOGETHER):
                self._add(events[first : first + _TOGETHER])

    def _add(self, events: list[dict[str, Any]]) -> None:
        text = "".join(json.dumps(event) + "\n" for event in events)
        with self._opened(os.O_APPEND) as file:
            size = file.tell()
            if size + len(text) <= EVENTS_SIZE or not size:
                file.write(text)
                self._held += len(events)
                return
        self._turn()
        told = {**events[0], "name": "events.removed", "count": self._gone}
        told = {key: told[key] for key in ("name", "timestamp", "monotonic_ns", "count") if key in told}
        with self._opened(os.O_TRUNC) as file:
            file.write((json.dumps(told) + "\n" if self._gone else "") + text)
        self._held = len(events)

    def _opened(self, flags: int) -> TextIO:
        fd = files.opened(self._path, os.O_WRONLY | os.O_CREAT | flags)
        return open(fd, "a", encoding="utf-8", errors="backslashreplace")

    def _turn(self) -> None:
        """Set the newest aside."""
        self._turns += 1
        if self._turns > 1:
            self._gone, self._before = self._gone + self._before, self._held
        os.replace(self._path, f"{self._path}.{min(self._turns, 2)}")


def _log(text: str) -> None:
    from logging import getLogger

    getLogger("phalanx.timer").warning("%s", text)
