"""Keeps the ``run.json`` of a run while it goes on.

Owns when it is written, and that no failure of it can harm the run. What it looks like is `_record`'s business, which
is loaded when the workers run: msgspec is not on the way to the start.
"""

from __future__ import annotations

import time

from phalanx._core import linux
from phalanx._core.aside import Aside

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from phalanx.multiprocessing import DefaultLogsSpecs, Outcome, PContext
    from phalanx.multiprocessing._record import Rank, RankState, Run, State

PATIENCE = 5.0
"""Seconds that the end of a run waits for a disk that does not answer."""

_CAUSE_LIMIT = 500


class Recorder:
    """The record of one run, made before its start.

    Args:
        group: The group that is going to be started.
        specs: Where its folder is, once it has one.
        run_id: What the run is called.
        command: What is run, with its arguments.
        say: Tells a person a line. It is called at most once: when the record cannot be written.
    """

    def __init__(
        self, group: PContext, specs: DefaultLogsSpecs, *, run_id: str, command: list[str], say: Callable[[str], None]
    ) -> None:
        self._group = group
        self._specs = specs
        self._run_id = run_id
        self._command = command
        self._say = say
        self._started = time.time()
        self._run: Run | None = None
        self._failed = False
        self._aside = Aside("phalanx-record")

    def running(self) -> None:
        """The workers run. Returns at once."""
        self._write(self._begun)

    def ended(self, state: State, exit_code: int, cause: str = "") -> None:
        """The run is over, and all of its processes are gone. Returns when that is written, or takes too long."""
        self._write(lambda: self._over(state, exit_code, cause))
        if not self._aside.finish(PATIENCE):
            self._refuse(f"the disk has not answered for {PATIENCE:g} s")

    def _write(self, make: Callable[[], Run]) -> None:
        folder = self._specs.run_log_dir
        if folder is None:  # refused before it had one
            return

        def write() -> None:
            try:
                from phalanx.multiprocessing import _record

                self._run = make()
                _record.write(folder, self._run)
            except Exception as error:  # noqa: BLE001 - whatever it is, a run of days must not end for a note on it
                self._refuse(error)

        # A disk that does not answer must hold back neither a signal nor the end.
        if not self._aside.call(write):
            write()

    def _refuse(self, why: object) -> None:
        if not self._failed:
            self._failed = True
            self._say(f"the run goes on, but its run.json cannot be written: {why}")

    def _begun(self) -> Run:
        from phalanx.multiprocessing import _record

        return _record.begin(
            run_id=self._run_id,
            name=self._group.name,
            command=self._command,
            started=self._started,
            nprocs=self._group.nprocs,
            ranks=self._ranks({}, "running"),
        )

    def _over(self, state: State, exit_code: int, cause: str) -> Run:
        from phalanx.multiprocessing import _record

        run = self._run or self._begun()
        try:
            result = self._group.wait(0)
        except RuntimeError:  # it was never up, or its keeper was killed
            result = None
        ranks = self._ranks({} if result is None else result.outcomes, "lost")
        leftovers = [] if result is None else [_record.Leftover.of(leftover) for leftover in result.leftovers]
        return _record.end(
            run, state=state, exit_code=exit_code, cause=_one_line(cause), ranks=ranks, leftovers=leftovers
        )

    def _ranks(self, outcomes: dict[int, Outcome], otherwise: RankState) -> list[Rank]:
        """Every rank that was started, with its outcome as far as there is one."""
        from phalanx.multiprocessing._record import Rank

        try:
            pids = self._group.pids()
        except RuntimeError:  # it was never up
            return []
        known = (
            {} if self._run is None else {rank.local_rank: rank.pid_started for rank in self._run.attempts[-1].ranks}
        )
        ranks = []
        for local_rank, pid in pids.items():
            rank = int(self._group.envs[local_rank]["RANK"])
            outcome = outcomes.get(local_rank)
            state: Any = otherwise if outcome is None else outcome.state
            exitcode, sent = (None, None) if outcome is None else (outcome.exitcode, outcome.signal_sent)
            start = known[local_rank] if local_rank in known else _started(pid)
            ranks.append(
                Rank(
                    rank=rank,
                    local_rank=local_rank,
                    pid=pid,
                    pid_started=start,
                    state=state,
                    exitcode=exitcode,
                    signal_sent=sent,
                )
            )
        return ranks


def _started(pid: int) -> int:
    try:
        return linux.Stat(pid).start
    except OSError:  # it has exited, or /proc hides it (hidepid)
        return 0


def _one_line(text: str) -> str:
    r"""The first line that says anything.

    >>> _one_line("\n  ValueError: bad shape\n  (see above)")
    'ValueError: bad shape'
    """
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= _CAUSE_LIMIT else f"{line[: _CAUSE_LIMIT - 1]}…"
