"""What the buttons of a page do: a stop, a restart, a pause and its end, and where the ranks are.

Each goes the way of any other program: `phalanx.attach`, and the command ``phalanx stack``. So the launcher decides who
may, and its report names the user and the pid of this server.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable

from phalanx._base.text import how_many
from phalanx._base.threads import SerialExecutor
from phalanx._base.tty import plain
from phalanx._run.attached import AttachedRun, attach
from phalanx._serve.pages import call

STACK = "stack"
ACTIONS = ("stop", "stop-now", "restart", "pause", "resume", STACK)
"""What can be asked for."""

MOST_AT_ONCE = 8
"""Requests that are carried out at a time: of each run one."""

WITHIN = 40.0
"""Seconds for one. The agents of other machines are asked one after the other question: see `control_socket.WAIT`."""

_MOST_TEXT = 200_000  # characters of stacks


class RefusedError(Exception):
    """What was asked for is not done. ``str()`` is why."""


class Control:
    """Carries out what browsers ask for."""

    def __init__(self) -> None:
        self._busy: set[str] = set()

    async def act(self, path: str, do: str) -> str:
        """Do one of `ACTIONS` with the run in a folder. Returns what has become of it. Raises RefusedError."""
        if path in self._busy or len(self._busy) >= MOST_AT_ONCE:
            what = "this run was asked for something else" if path in self._busy else "too much was asked for"
            raise RefusedError(f"{what} just now, which is not done yet: try again")
        self._busy.add(path)
        try:
            async with asyncio.timeout(WITHIN):
                if do == STACK:
                    return await _stacks(path)
                return await call(SerialExecutor("phalanx-control"), lambda: _act(path, do))
        except TimeoutError:
            raise RefusedError(f"no answer within {WITHIN:g} s") from None
        except (LookupError, RuntimeError, OSError) as error:
            raise RefusedError(plain(str(error))) from None
        finally:
            self._busy.discard(path)


def _act(path: str, do: str) -> str:
    """Raises LookupError, RuntimeError, OSError."""
    run = attach(path, log_dir=os.path.dirname(path))
    text = _DONE[do](run)
    missing = "".join(f"; host {host}: {why}" for host, why in run.missing.items())
    return plain(f"{text}{missing}")


def _stop(run: AttachedRun) -> str:
    run.stop()
    return "It is being stopped: notice, SIGTERM, the grace period, SIGKILL."


def _stop_now(run: AttachedRun) -> str:
    run.stop(now=True)
    return "Its workers are killed."


def _restart(run: AttachedRun) -> str:
    run.restart()
    return "Its next attempt follows, once none of its workers is left."


def _pause(run: AttachedRun) -> str:
    return f"{how_many(len(run.pause()), 'worker')} paused."


def _resume(run: AttachedRun) -> str:
    return f"{how_many(len(run.resume()), 'worker')} continued."


_DONE: dict[str, Callable[[AttachedRun], str]] = {
    "stop": _stop,
    "stop-now": _stop_now,
    "restart": _restart,
    "pause": _pause,
    "resume": _resume,
}


async def _stacks(path: str) -> str:
    """Return what ``phalanx stack`` prints. Raises RefusedError, OSError."""
    command = [sys.executable, "-P", "-m", "phalanx", "stack", "--log-dir", os.path.dirname(path), path]
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdin=null, stdout=pipe, stderr=pipe)
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    text, problem = (plain(data.decode("utf-8", "backslashreplace").strip()) for data in (out, err))
    if not text:
        raise RefusedError(
            problem.removeprefix("Error: ") or f"phalanx stack ended with exit code {process.returncode}"
        )
    text = text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}\n…"
    return f"{text}\n\n{problem}".strip()
