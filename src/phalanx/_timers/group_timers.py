"""Sets up the watch over a group's timers: the table, the reporter, and the environment of the workers."""

from __future__ import annotations

from phalanx._base.tty import sanitise
from phalanx._timers.hang_reporter import HangReporter
from phalanx._timers.layout import TIMERS_ENV
from phalanx._timers.table import TimerTable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from phalanx._logs.layout import LogsDest
    from phalanx._timers.specs import TimerSpecs

_SEATS = 64  # for each rank: itself, and processes below it. The file is sparse: a free seat takes no memory
_LEAST_SEATS, _MOST_SEATS = 1024, 16384


def watch(
    specs: TimerSpecs,
    logs: LogsDest,
    ranks: Collection[int],
    say: Callable[[str], bool],
    *,
    stacks: bool = True,
    speak: Callable[[str], None] | None = None,
) -> tuple[HangReporter | None, dict[int, dict[str, str]]]:
    """Make a group's table and its reporter. Returns the reporter, and each rank's environment variables for the table.

    If there is no memory or no descriptor for the table, that is logged, and the group runs without timers: no reporter
    and no variables are returned. If the ``specs`` are not the default ones, OSError is raised instead.

    Args:
        specs: What follows an expiry.
        logs: The group's log files.
        ranks: Its local ranks.
        say: Shows a line on the group's consoles, and returns whether that was possible.
        stacks: Whether stacks are written to files beside the error files.
        speak: Shows a line if ``say`` cannot. Default: it is logged.
    """
    try:
        seats = min(max(_LEAST_SEATS, _SEATS * len(ranks)), max(_MOST_SEATS, len(ranks)))
        table = TimerTable(seats, specs.hang_timeout)
    except OSError as error:
        if specs != type(specs)():
            raise OSError(error.errno, f"timers cannot be watched: {error.strerror}") from error
        _log(f"timers are not watched: {error.strerror}")
        return None, {}

    def show(text: str) -> None:
        if not say(f"phalanx: {text}"):
            (speak or _log)(sanitise(text))

    reporter = HangReporter(table, specs.on_expiry, logs.error_files, show, stacks=stacks)
    return reporter, {rank: {TIMERS_ENV: f"{table.address}:{rank}"} for rank in ranks}


def _log(text: str) -> None:
    from logging import getLogger

    getLogger("phalanx.timer").warning("%s", text)
