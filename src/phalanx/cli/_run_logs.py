"""The logs of `phalanx run`: where they are, and what is printed of that before the first worker prints anything."""

from __future__ import annotations

import os

import click

from phalanx._base import procfs
from phalanx._runs.paths import folder_for_new_runs
from phalanx.cli._runs_folders import MANY
from phalanx.cli._say import say
from phalanx.multiprocessing import DefaultLogsSpecs, LogsDest, Std

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any


class RunLogs(DefaultLogsSpecs):
    """Says where the run's logs are, and what else there is to say, before the first worker can say anything."""

    notes: Sequence[str] = ()
    keeps_few = False
    workers = 0  # of the run, where those of `reify` are not all
    _said = False

    def name_files(self, envs: Mapping[int, Mapping[str, str]]) -> LogsDest:
        """Create the folders, and name the files. Raises OSError."""
        return super().reify(envs)

    def reify(self, envs: Mapping[int, Mapping[str, str]]) -> LogsDest:
        """See `LogsSpecs.reify`."""
        try:
            logs = self.name_files(envs)
        except OSError as error:
            msg = f"--log-dir: {error}"
            raise click.ClickException(msg) from None
        if self._said:
            return logs
        self._said = True
        where = f"logs in {self.run_log_dir}" if self.run_log_dir else "no logs are kept"
        count = self.workers or len(envs)
        say(f"{count} worker{'s' * (count > 1)}, {where}")
        for note in self.notes:
            say(note)
        look = self.run_log_dir and not self.keeps_few
        kept = _count_in(os.path.dirname(self.run_log_dir or "")) if look else 0
        if kept > MANY:
            where = os.path.dirname(self.run_log_dir or "")
            more = "phalanx runs prune removes old runs, --keep-runs N keeps so many"
            say(f"{kept:,} folders are in {where}; {more}")
        return logs


def _count_in(folder: str) -> int:
    try:
        with os.scandir(folder) as entries:
            return sum(entry.is_dir(follow_symlinks=False) for entry in entries)
    except OSError:
        return 0


def run_logs(
    log_dir: str | None,
    redirects: Std | Mapping[int, Std],
    tee: Std | Mapping[int, Std],
    ranks: set[int] | None,
    bounds: Mapping[str, Any],
    *,
    makes_folder: bool,
) -> RunLogs:
    """Logs in ``log_dir``, or in the default place."""
    said = []
    if log_dir is None:
        log_dir, is_temporary = folder_for_new_runs(bounds["mode"], make=makes_folder)
        if is_temporary:
            said = [f"the home folder cannot be written to; runs are kept in {log_dir or 'a temporary folder'}"]
    try:
        specs = RunLogs(log_dir, redirects, tee, ranks, **bounds)
    except OSError as error:
        msg = f"--log-dir: {str(error).removeprefix('log_dir: ')}"
        raise click.UsageError(msg) from None
    specs.notes = said
    return specs


def umask_notes(mode: int | None) -> list[str]:
    """What is to be said of files that the umask keeps from those whom the folders are opened for."""
    kept = (mode or 0) & (umask := procfs.umask()) & 0o055
    if not kept:
        return []
    who = "the group" if kept & 0o050 else "others"
    return [f"--log-mode {mode:o}: the umask, {umask:03o}, keeps the files from {who}; {umask & ~kept:03o} would not"]
