"""Who observes the events of a group: its files, its record, and functions of the user's."""

from __future__ import annotations

import os
import sys

from phalanx._engine.group_events import GroupEvents
from phalanx._events import kinds
from phalanx._events.stream import EventStream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from phalanx._engine.supervisor import Supervisor
    from phalanx._logs.layout import LogsDest
    from phalanx._logs.specs import LogsSpecs
    from phalanx._timers.specs import TimerSpecs

    Function = Callable[[dict[str, Any]], object]

OF_TIMERS = (kinds.TimerEvent, kinds.RequestRefused)
"""What the ``on_event`` of `TimerSpecs` is called with."""


def listen(stream: EventStream, timers: TimerSpecs | None, on_event: Function | None) -> None:
    """Have the user's functions called with the events of a stream."""
    if on_event is None and (timers is None or timers.on_event is None):
        return
    from phalanx._events.stream import Listener

    if timers is not None and timers.on_event is not None:
        stream.subscribe(EventStream.USERS, Listener(timers.on_event, "phalanx.timer", OF_TIMERS))
    if on_event is not None:
        stream.subscribe(EventStream.USERS, Listener(on_event, "phalanx.events"))


def keeps_events(specs: LogsSpecs) -> bool:
    """Whether events are kept beside the logs: the folder is the caller's, and not a temporary one."""
    return getattr(specs, "root_log_dir", None) is not None


def attempt_of(envs: Mapping[int, Mapping[str, str]]) -> int:
    """Return the number of the attempt that workers are told, as `DefaultLogsSpecs` has it.

    >>> attempt_of({0: {"TORCHELASTIC_RESTART_COUNT": "2"}}), attempt_of({})
    (2, 0)
    """
    text = envs[min(envs)].get("TORCHELASTIC_RESTART_COUNT", "") if envs else ""
    return int(text) if text.isdecimal() else 0


def begin(
    name: str, envs: Mapping[int, Mapping[str, str]], logs: LogsDest, specs: LogsSpecs, supervisor: Supervisor, *,
    stream: EventStream | None, record: bool, timers: TimerSpecs | None, on_event: Function | None,
) -> GroupEvents | None:  # fmt: skip
    """Emit that a group starts: into ``stream``; without one, into one of the group's own, if anybody observes it."""
    is_own = stream is None
    if stream is None:
        stream = EventStream()
        if keeps_events(specs) and logs.timeline and (record or timers is not None):
            from phalanx._runs.recorder import Recorder, observe

            warn = supervisor.announce
            command = [part for part in sys.argv if part] or [name]
            run_id = getattr(specs, "run_id", "") or name
            recorder = Recorder(name, envs, run_id=run_id, command=command, warn=warn, is_one_group=True)
            observe(stream, warn, recorder if record else None)
        listen(stream, timers, on_event)
        if not stream.is_heard:
            return None
    folder = logs.timeline and (getattr(specs, "run_log_dir", None) or os.path.dirname(logs.timeline))
    events = GroupEvents(stream, attempt_of(envs), is_own=is_own)
    events.emit(kinds.GroupStarting, nprocs=len(envs), folder=folder)
    return events
