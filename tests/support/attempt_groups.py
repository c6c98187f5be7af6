"""What tests of attempts share: a runner of one machine, and teams whose attempts are groups of shells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
