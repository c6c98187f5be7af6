"""What tests of attempts share: a runner of one machine, and teams whose attempts are groups of shells."""

from __future__ import annotations

import linecache
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Self

import pytest

from phalanx._engine import host_signals
from phalanx._group.restart_policy import AttemptEnd
from phalanx._run.attempts import Attempts, Ending
from phalanx._run.group_team import GroupTeam
from phalanx._run.runner import Runner, Team
from phalanx.agent import RestartPolicy
from phalanx.multiprocessing import DefaultLogsSpecs, PContext, SubprocessContext

__all__ = ("AttemptEnd", "Ending", "GroupTeam", "LocalRunner", "Team", "Told", "shells")


class LocalRunner(Runner):
    """The runner of the attempts of one machine, which are `attempts`."""

    def __init__(self, team: Team, policy: RestartPolicy, *, signals: bool = True, events: Any = None) -> None:
        self.attempts = Attempts(policy)
        super().__init__(team, self.attempts, signals=signals, events=events)
        self.ask_stop, self.ask_restart = self.attempts.ask_stop, self.attempts.ask_restart

    @property
    def state(self) -> str:
        return self.attempts.state

    @property
    def number(self) -> int:
        return self.attempts.number

    @property
    def ends(self) -> list[AttemptEnd]:
        return list(self.attempts.ending.ends)

    def run(self) -> Ending:
        """Carry on to the end."""
        self.carry()
        return self.attempts.ending


class Told(GroupTeam):
    """Keeps the lines that are shown while no group does."""

    def __init__(self, make: Callable[[int, PContext | None], PContext]) -> None:
        super().__init__(make)
        self.said: list[str] = []

    def _speak(self, text: str) -> None:
        self.said.append(text)


def shells(script: str | Callable[[int], str], nprocs: int = 1, folder: str = "", **options: Any) -> Told:
    """Return a team of shells.

    Args:
        script: What they run, with ``$ATTEMPT`` and ``$RANK``; or a function that returns it for an attempt.
        nprocs: How many there are.
        folder: Where their logs are, if that is not a temporary folder.
        **options: Of `PContext`; with ``specs``, options of `DefaultLogsSpecs`.
    """
    specs = {"run_id": "r", **options.pop("specs", {})} if folder else options.pop("specs", {})

    def make(attempt: int, before: PContext | None) -> PContext:
        text = script if isinstance(script, str) else script(attempt)
        return SubprocessContext(
            "shells",
            "/bin/sh",
            dict.fromkeys(range(nprocs), ("-c", text)),
            {rank: {"ATTEMPT": str(attempt), "RANK": str(rank)} for rank in range(nprocs)},
            DefaultLogsSpecs(folder or None, **specs),
            follows=before,
            **options,
        )

    return Told(make)


class Interrupter:
    """Sends SIGTERM to this process when the ``moment``-th line of the agent is about to run.

    Lines of ``with`` are passed over: they are run again before ``__exit__`` is called, where no real signal raises.

    Args:
        moment: Which.
        more: Ends of paths of further sources of which the lines count.
    """

    def __init__(self, moment: int, more: Sequence[str] = ()) -> None:
        self._left = moment
        self._sources = ("_run/attempts.py", "_run/runner.py", "_run/group_team.py", *more)
        self._patch = pytest.MonkeyPatch()
        self.fired = ""
        """Where it was sent: the name of the function, and the line; "": there are fewer lines."""

    def __enter__(self) -> Self:
        self._patch.setattr(host_signals, "_APART", 0.0)  # signals raise however soon one follows another
        host_signals.acquire(self)  # `run` has not done so yet in its first lines
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_error: object) -> None:
        sys.settrace(None)
        host_signals.release(self)
        self._patch.undo()

    def _trace(self, frame: FrameType, event: str, _argument: object) -> Any:
        name = frame.f_code.co_filename
        if not name.endswith(self._sources) or frame.f_code.co_name == "__del__":  # what is raised there is lost
            return None
        if event == "line" and not linecache.getline(name, frame.f_lineno).lstrip().startswith("with "):
            self._left -= 1
            if self._left == 0:
                self.fired = f"{frame.f_code.co_name}:{frame.f_lineno}"
                sys.settrace(None)
                os.kill(os.getpid(), signal.SIGTERM)
        return self._trace


def interrupted_at_each_line(run: Callable[[Interrupter], object], more: Sequence[str] = (), step: int = 1) -> set[str]:
    """Call ``run`` with an interrupter for each moment, ``step`` apart, until none comes. Returns the functions hit."""
    seen: set[str] = set()
    moment = 1
    while True:
        interrupter = Interrupter(moment, more)
        run(interrupter)
        if not interrupter.fired:
            return seen
        seen.add(interrupter.fired.partition(":")[0])
        moment += step
