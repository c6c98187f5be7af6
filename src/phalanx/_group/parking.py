"""What it takes to start a script's group ahead: log files that have no names before it is released."""

from __future__ import annotations

import os

from phalanx._engine.start_errors import NotReleasedError
from phalanx._logs.specs import DefaultLogsSpecs
from phalanx._logs.unnamed import UnnamedLogs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from phalanx._group.plan import Plan
    from phalanx._logs.layout import LogsDest
    from phalanx._logs.specs import LogsSpecs

_MOST_PASSED = 200  # descriptors of log files beside an order to start: unix(7) allows 253 in all


def foresee(
    specs: LogsSpecs, envs: Mapping[int, Mapping[str, str]], plan: Plan, *, record: bool
) -> tuple[LogsDest, UnnamedLogs]:
    """Name the files that a group will have, and open them without a name. Raises NotReleasedError, OSError."""
    if not plan.can_wait:
        raise NotReleasedError("its workers are not started with an interpreter of their own")
    logs = specs.foresee(envs) if isinstance(specs, DefaultLogsSpecs) else None
    if logs is None or logs.max_size or record:
        raise NotReleasedError("its logs cannot wait")
    unnamed = UnnamedLogs(logs, os.path.dirname(os.path.dirname(logs.timeline)))
    if len(unnamed.descriptors()) > _MOST_PASSED:
        unnamed.close()
        raise NotReleasedError("it has too many log files")
    return logs, unnamed
