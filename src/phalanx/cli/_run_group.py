"""A group of `phalanx run`, from its start to its end: signals, the report, the exit code."""

from __future__ import annotations

import os
import signal

import click

from phalanx._base import interrupts
from phalanx._base.stderr import mention, tell
from phalanx._engine.host_signals import signals_to_handle
from phalanx._outcomes.outcome import NOT_AVAILABLE
from phalanx._outcomes.result import verdict
from phalanx.cli import _python
from phalanx.cli._say import say
from phalanx.multiprocessing import (
    KeeperLostError,
    PContext,
    PreloadError,
    RunProcsResult,
    ScriptContext,
    SignalException,
)
from phalanx.multiprocessing.errors import ChildFailedError, record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from phalanx._runs.recorder import Recorder, Seen
    from phalanx.cli._run_logs import RunLogs


def see_through(group: PContext, recorder: Recorder, specs: RunLogs, grace: float, *, colour: bool) -> int:
    """Start the group, wait for its end, and say what became of it. Returns the exit code."""
    try:
        group.start()
        recorder.record_start()
        # Now: at the end there may be no descriptor, or no disk. And whole: a handler's exception in the midst of an
        # import can leave the lock of the import system taken, for which the thread that writes run.json would wait.
        with interrupts.deferred():
            from phalanx.errors import format_report  # noqa: F401 - see above

        result = group.wait()
    except SignalException as error:
        try:
            code = _stop(group, error.sigval, grace)
        except SignalException:  # the second has come at once
            code = _stop(group, error.sigval, grace, at_once=True)
        failed = _failed_before(group)
        if failed is None:
            recorder.record_end_and_wait("stopped", code, error.sigval.name)
            return code
        result = failed
    except KeeperLostError as error:
        say(f"Error: {error}")
        known = RunProcsResult(failures=dict(error.failures))
        code = verdict(known)[0] or 1
        recorder.record_end_and_wait("failed", code, str(error))
        _report(group.name, known, specs, colour=colour)
        return code
    except PreloadError as error:
        say(f"Error: {error}")
        recorder.record_end_and_wait("failed", 1, str(error))
        return 1
    except OSError as error:
        recorder.record_end_and_wait("failed", 1, text := _in_our_words(error, group))
        raise click.ClickException(text) from None
    except ValueError as error:
        recorder.record_end_and_wait("failed", 2, text := _in_our_words(error, group))
        raise click.UsageError(text) from None
    finally:
        group.close(signal.SIGKILL)  # ended already, unless one more signal has broken out of `_stop`
    code, cause = verdict(result)
    recorder.record_end_and_wait("failed" if code else "succeeded", code, cause)
    _report(group.name, result, specs, colour=colour)
    return code


def _in_our_words(error: Exception, group: PContext) -> str:
    """What the library says of the program, said of what the user has given."""
    head, text = "entrypoint: ", str(error)
    if not text.startswith(head):
        return text
    chosen = isinstance(group, ScriptContext) and os.environ.get(_python.CHOICE)
    return f"{_python.CHOICE if chosen else 'SCRIPT'}: {text.removeprefix(head)}"


def _stop(group: PContext, first: signal.Signals, grace: float, *, at_once: bool = False) -> int:
    """Close the group: gracefully, and at once on a further signal. Cleanup is never abandoned.

    Beyond the second there is nothing to be asked for, and a worker may send them without end: they are ignored.
    """
    death, seconds = first, grace
    while True:
        try:
            if at_once:
                death, seconds = signal.SIGKILL, 0.0
                for number in signals_to_handle():
                    signal.signal(number, signal.SIG_IGN)
            if group.is_open:
                text = (
                    "killing the workers"
                    if death == signal.SIGKILL
                    else f"stopping the workers (at most {seconds:g} s; once more to kill them)"
                )
                text = f"phalanx: {death.name}: {text}"
                if not group.say(text):  # above the live lines of a terminal
                    mention(text)
            group.close(death, seconds)
        except SignalException:
            at_once = True
        except KeeperLostError:
            return 128 + first
        else:
            return 128 + first


def look(group: PContext) -> Seen:
    """What is known of a group now."""
    try:
        pids = group.pids()
    except RuntimeError:  # it was never up
        return {}, None
    try:
        return pids, group.wait(0)
    except RuntimeError:  # nor is it; or its keeper was killed
        return pids, None


def _failed_before(group: PContext) -> RunProcsResult | None:
    """The result of a stopped group, if a rank had failed by itself before that."""
    try:
        result = group.wait(0)
    except KeeperLostError as error:
        result = RunProcsResult(failures=dict(error.failures))
    except RuntimeError:  # it was never up
        return None
    return result if result is not None and result.failures else None


def _report(name: str, result: RunProcsResult, logs: RunLogs, *, colour: bool) -> None:
    """Say what went wrong, if anything did."""
    if not result.failures:
        for rank, outcome in result.outcomes.items():
            if outcome.state != "succeeded" or outcome.early:
                say(f"rank {rank}: {outcome.describe()}")
        return

    log_dir, failures = logs.run_log_dir or "", result.failures
    if not logs.is_kept:  # the error files have gone with the group
        failures = {rank: failure.replace(error_file=NOT_AVAILABLE) for rank, failure in failures.items()}

    @record  # a launcher that is itself a worker passes the root cause on to its own error file
    def fail() -> None:
        raise ChildFailedError(name, failures, outcomes=result.outcomes, log_dir=log_dir)

    try:
        fail()
    except ChildFailedError as error:
        from phalanx.errors import format_report

        style = _style if colour else None
        tell(format_report(name, error.failures, outcomes=error.outcomes, log_dir=log_dir, style=style))


def _style(kind: str, line: str) -> str:
    looks: dict[str, dict[str, Any]] = {
        "rule": {"dim": True},
        "title": {"fg": "red", "bold": True},
        "heading": {"bold": True},
        "error": {"fg": "red"},
    }
    return click.style(line, **looks.get(kind, {}))
