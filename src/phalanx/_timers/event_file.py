"""The file of a group's events: ``events.jsonl``, one JSON object a line, of bounded size."""

from __future__ import annotations

import contextlib
import json
import os

from phalanx._base import files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TextIO

EVENTS = "events.jsonl"
"""The name of the file, in the folder of a run's attempt."""

EVENTS_SIZE = 16 << 20
"""The most bytes of each of the three files that take the events."""

_AT_A_TIME = 1000  # events that are written in one piece


class EventFile:
    """Writes events to three files of at most `EVENTS_SIZE` bytes: the oldest events, the last but newest, the newest.

    A timer of 0.1 s that is only reported on expires ten times a second for as long as its rank hangs: of one rank that
    is 0.2 GB a day. How the trouble began and how it stands is kept; events in between are removed, and counted in
    an event ``events.removed``.

    Args:
        path: The file of the newest events. Beside it, the oldest are in ``PATH.1``, the last but newest in ``PATH.2``.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._count = 0  # events in the newest file
        self._count_before = 0  # and in the one before it
        self._removed = 0
        self._rotations = 0

    def write(self, events: list[dict[str, Any]]) -> None:
        """Add events. Those that cannot be written are left out."""
        with contextlib.suppress(OSError):
            for first in range(0, len(events), _AT_A_TIME):
                self._add(events[first : first + _AT_A_TIME])

    def _add(self, events: list[dict[str, Any]]) -> None:
        text = "".join(json.dumps(event) + "\n" for event in events)
        with self._open(os.O_APPEND) as file:
            size = file.tell()
            if size + len(text) <= EVENTS_SIZE or not size:
                file.write(text)
                self._count += len(events)
                return
        self._rotate()
        removed = {**events[0], "name": "events.removed", "count": self._removed}
        removed = {key: removed[key] for key in ("name", "timestamp", "monotonic_ns", "count") if key in removed}
        with self._open(os.O_TRUNC) as file:
            file.write((json.dumps(removed) + "\n" if self._removed else "") + text)
        self._count = len(events)

    def _open(self, flags: int) -> TextIO:
        fd = files.opened(self._path, os.O_WRONLY | os.O_CREAT | flags)
        return open(fd, "a", encoding="utf-8", errors="backslashreplace")

    def _rotate(self) -> None:
        """Rename the newest file: to ``PATH.1`` the first time, to ``PATH.2`` later."""
        self._rotations += 1
        if self._rotations > 1:
            self._removed, self._count_before = self._removed + self._count_before, self._count
        os.replace(self._path, f"{self._path}.{min(self._rotations, 2)}")
