"""What watches a group beside its supervisor: who takes its events, timers, what shows its lines, the stop flag.

Most groups have few of these, so what makes them is loaded when it is needed.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import ExitStack
    from typing import Any

    from phalanx._engine.group_events import GroupEvents
    from phalanx._engine.stop_flag import StopFlag
    from phalanx._engine.supervisor import Supervisor
    from phalanx._events.stream import EventStream
    from phalanx._group.plan import GroupOptions
    from phalanx._logs.console import ConsoleSpecs
    from phalanx._logs.layout import LogsDest
    from phalanx._logs.pump import Pump
    from phalanx._logs.specs import LogsSpecs
    from phalanx._timers.hang_reporter import HangReporter
    from phalanx._timers.specs import TimerSpecs

    Envs = Mapping[int, Mapping[str, str]]
    Function = Callable[[dict[str, Any]], object]


def listen(stream: EventStream, timers: TimerSpecs | None, on_event: Function | None) -> None:
    """Have the user's functions called with the events of a stream: that of ``timers`` with those of timers."""
    if on_event is None and (timers is None or timers.on_event is None):
        return
    from phalanx._events import kinds
    from phalanx._events.stream import Listener

    if timers is not None and timers.on_event is not None:
        of_timers = (kinds.TimerEvent, kinds.RequestRefused)
        stream.subscribe(stream.USERS, Listener(timers.on_event, "phalanx.timer", of_timers))
    if on_event is not None:
        stream.subscribe(stream.USERS, Listener(on_event, "phalanx.events"))


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


def begin_events(
    name: str, envs: Envs, logs: LogsDest, options: GroupOptions, supervisor: Supervisor, undo: ExitStack
) -> GroupEvents | None:
    """Emit that a group starts: into the stream that it was given, or one of its own, if anybody observes that."""
    stream, timers, is_own = options.events, options.timers, options.events is None
    if stream is None and not options.record and timers is None and options.on_event is None:
        return None
    from phalanx._engine.group_events import GroupEvents
    from phalanx._events import kinds
    from phalanx._events.stream import EventStream

    specs = options.logs_specs
    if stream is None:
        stream = EventStream()
        if keeps_events(specs) and logs.timeline and (options.record or timers is not None):
            from phalanx._runs.recorder import Recorder, observe

            command = [part for part in sys.argv if part] or [name]
            run_id, announce = getattr(specs, "run_id", "") or name, supervisor.lines.announce
            recorder = Recorder(name, envs, run_id=run_id, command=command, warn=announce, is_one_group=True)
            observe(stream, announce, recorder if options.record else None)
        listen(stream, timers, options.on_event)
        if not stream.is_heard:
            return None
    folder = logs.timeline and (getattr(specs, "run_log_dir", None) or os.path.dirname(logs.timeline))
    events = GroupEvents(stream, attempt_of(envs), is_own=is_own)
    events.emit(kinds.GroupStarting, nprocs=len(envs), folder=folder)
    undo.callback(events.end)
    undo.push(events.not_started)
    return events


def watch_timers(
    envs: Envs, logs: LogsDest, options: GroupOptions, supervisor: Supervisor, undo: ExitStack
) -> tuple[HangReporter | None, dict[int, dict[str, str]]]:
    """Make the report of hangs and the table of timers, if timers are to be watched, and each rank's variables."""
    if options.timers is None:
        return None, {}
    from phalanx._timers import hang_reporter

    report, variables = hang_reporter.watch(
        options.timers, logs, envs, supervisor.lines.say,
        stacks=getattr(options.logs_specs, "is_kept", True), speak=options.speak,
        numbers={rank: int(number) for rank, env in envs.items() if (number := env.get("RANK", "")).isdecimal()},
    )  # fmt: skip
    if report is not None:
        undo.callback(report.close)
    return report, variables


def make_pump(
    logs: LogsDest, envs: Envs, prefixes: Mapping[int, str] | None, console: ConsoleSpecs, options: GroupOptions
) -> Pump | None:
    """Make what follows the log files; None, if no stream goes to a file."""
    if not any((*logs.stdouts.values(), *logs.stderrs.values())):
        return None
    from phalanx._logs import group_pump

    return group_pump.make_pump(logs, envs, prefixes, console, options.filters, options.on_reader_gone)


def make_stop_flag(notice: tuple[int, float] | None, undo: ExitStack) -> tuple[StopFlag | None, dict[str, str]]:
    """Make the page with the stop flag, if a planned stop begins with a notice, and the variables that name it."""
    if notice is None:
        return None, {}
    from phalanx._engine.stop_flag import StopFlag

    flag = StopFlag(*notice)
    undo.callback(flag.close)
    return flag, flag.environment()


def locate(error_files: Mapping[int, str], alive: Callable[[], dict[int, int]]) -> dict[int, str]:
    """Return where the workers that are alive are."""
    from phalanx._stacks import collect

    return collect.locate(alive, error_files)
