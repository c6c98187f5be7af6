"""Releases what a closed or dropped group holds: signal handlers, the warm process, temporary files."""

from __future__ import annotations

import contextlib
import os

from phalanx._base import stderr
from phalanx._engine import host_signals
from phalanx._evidence.cleanup import remove_empty, remove_old

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx._engine.group_events import GroupEvents
    from phalanx._engine.supervisor import Supervisor
    from phalanx._group.first_failure import FirstFailure
    from phalanx._group.warm import Warm
    from phalanx._logs.layout import LogsDest
    from phalanx._logs.specs import LogsSpecs

TIDY = 5.0
"""Seconds that `close` waits for the removal of files: a disk may not answer."""


def release(
    supervisor: Supervisor,
    logs: LogsDest,
    specs: LogsSpecs,
    warm: Warm | None = None,
    events: GroupEvents | None = None,
    first: FirstFailure | None = None,
) -> None:
    """Release what a closed or dropped group holds in this process, and remove its temporary and empty files."""
    if supervisor.owner != os.getpid():  # this process is a fork of the owner, and exits
        return
    try:
        host_signals.release(supervisor)
    finally:  # a signal handler may raise in the first step
        if warm is not None:
            warm.close()
        if events is not None:
            supervisor.done.then(events.end)
    if supervisor.done:
        supervisor.last_chore(lambda: _remove(logs, specs, first), TIDY)
    stderr.finish()


def _remove(logs: LogsDest, specs: LogsSpecs, first: FirstFailure | None) -> None:
    if first is not None and first.is_temporary and first.all_succeeded:
        with contextlib.suppress(OSError):
            remove_old(logs.error_files.values())  # of exceptions that were handled
    for path in logs.error_files.values():
        remove_empty(path)
    specs.tidy(logs)
