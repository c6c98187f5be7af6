"""A group's timers: the table that its workers find, who reports on it, and where its events go.

Owns the joining of these. What a timer is, and what follows when it expires, is the engine's business.
"""

from __future__ import annotations

import contextlib
import json
import os

from phalanx._core import files, timetable
from phalanx._core.hang_report import HangReport
from phalanx._core.harmless import harmless

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import Any

    from phalanx.multiprocessing._logs import LogsDest
    from phalanx.timer import TimerSpecs

EVENTS = "events.jsonl"
"""The file of a run's attempt that takes the group's events, one JSON object a line."""

_SEATS = 64  # for each rank: itself, and processes below it. The file is sparse: what nobody sits in takes no memory
_LEAST_SEATS, _MOST_SEATS = 1024, 16384


def watch(
    specs: TimerSpecs,
    logs: LogsDest,
    ranks: Collection[int],
    say: Callable[[str], bool],
    *,
    keep: bool,
) -> tuple[HangReport | None, dict[int, dict[str, str]]]:
    """Make what reports on a group's timers. Returns it, and the variables that tell each rank's worker of the table.

    ``say`` shows a line, and returns whether that was possible. Events are written beside the logs only if those are
    to ``keep``.

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

    def show(text: str) -> None:
        if not say(f"phalanx: {text}"):
            _log(harmless(text))

    report = HangReport(table, specs.on_expiry, logs.error_files, _writer(path), specs.on_event, show)
    return report, {rank: {timetable.ENV: f"{table.address}:{rank}"} for rank in ranks}


def _writer(path: str) -> Callable[[list[dict[str, Any]]], None]:
    def write(events: list[dict[str, Any]]) -> None:
        if path:
            with contextlib.suppress(OSError):
                fd = files.opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                with open(fd, "a", encoding="utf-8", errors="backslashreplace") as file:
                    file.writelines(json.dumps(event) + "\n" for event in events)

    return write


def _log(text: str) -> None:
    from logging import getLogger

    getLogger("phalanx.timer").warning("%s", text)
