"""What tests of attempts share: teams whose attempts are groups of shells."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx._run.group_team import GroupTeam
from phalanx.multiprocessing import DefaultLogsSpecs, SubprocessContext

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from phalanx.multiprocessing import PContext


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
