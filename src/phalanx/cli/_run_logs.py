"""The logs of `phalanx run`: where they are, and what is printed of that before the first worker prints anything."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import click

from phalanx._base import disk, procfs
from phalanx._base.stderr import say
from phalanx._base.text import how_many
from phalanx._runs.paths import folder_for_new_runs, temporary_folder
from phalanx.cli._options import MANY
from phalanx.multiprocessing import DefaultLogsSpecs, LogsDest, Std

KEPT_ATTEMPTS = 100
"""Attempts of which the folders are kept beside the first one's, where nobody says how many."""

BOUNDS = {
    "max_size": "--log-max-size", "keep": "--log-keep", "compress": "--log-compress", "mode": "--log-mode",
    "keep_attempts": "--keep-attempts", "keep_runs": "--keep-runs",
}  # fmt: skip
"""What is said of log files, and the options that say it."""

_INODES, _INODES_EACH = 8, 6  # files and folders of a run with one attempt, and of each of its ranks


class RunLogs(DefaultLogsSpecs):
    """Says where the run's logs are, and what else there is to say, before the first worker can say anything."""

    notes: Sequence[str] = ()
    moved = ""  # why the logs are not where they were to be
    keeps_few = False
    _said = False

    def name_files(self, envs: Mapping[int, Mapping[str, str]]) -> LogsDest:
        """Create the folders, and name the files; where a disk has no room for them, elsewhere. Raises OSError."""
        while True:
            try:
                if self.is_kept:
                    folder = self._root_log_dir or tempfile.gettempdir()
                    os.makedirs(folder, exist_ok=True)
                    disk.check(folder, _INODES + _INODES_EACH * len(envs))
                return super().reify(envs)
            except OSError as error:
                if not self.is_kept or not (disk.is_full(error.errno) or self._root_log_dir is None):
                    raise
                self._go_elsewhere(error)

    def _go_elsewhere(self, error: OSError) -> None:
        """Have the logs from now on in the temporary folder for runs; and where that is full as well, in none."""
        before = self._root_log_dir or "a temporary folder"
        folder = temporary_folder(self._mode)
        self._root_log_dir = folder if folder not in (None, before) else os.devnull
        self._run_log_dir = None
        where = f"logs are kept in {folder}" if self.is_kept else "no logs are kept"
        self.moved = f"{disk.in_words(error, before)}; {where}"
        if self._said:
            say(self.moved)

    def reify(self, envs: Mapping[int, Mapping[str, str]]) -> LogsDest:
        """See `LogsSpecs.reify`."""
        try:
            logs = self.name_files(envs)
        except OSError as error:
            raise click.ClickException(f"--log-dir: {error}") from None
        if self._said:
            return logs
        self._said = True
        where = f"logs in {self.run_log_dir}" if self.run_log_dir else "no logs are kept"
        say(f"{how_many(len(envs), 'worker')}, {where}")
        for note in filter(None, (self.moved, *self.notes)):
            say(note)
        folder = os.path.dirname(self.run_log_dir or "")
        if folder and not self.keeps_few and (kept := _count_in(folder)) > MANY:
            more = "phalanx runs prune removes old runs, --keep-runs N keeps so many"
            say(f"{how_many(kept, 'folder')} are in {folder}; {more}")
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
    moved = ""
    if log_dir != os.devnull and bounds["keep_attempts"] is None:
        bounds = {**bounds, "keep_attempts": KEPT_ATTEMPTS}
    if log_dir is None:
        log_dir, why = folder_for_new_runs(bounds["mode"], make=makes_folder)
        if why:
            moved = f"{why}; runs are kept in {log_dir or 'a temporary folder'}"
    try:
        specs = RunLogs(log_dir, redirects, tee, ranks, **bounds)
    except OSError as error:
        raise click.UsageError(f"--log-dir: {str(error).removeprefix('log_dir: ')}") from None
    specs.moved = moved
    return specs


def umask_notes(mode: int | None) -> list[str]:
    """What is to be said of files that the umask keeps from those whom the folders are opened for."""
    kept = (mode or 0) & (umask := procfs.umask()) & 0o055
    if not kept:
        return []
    who = "the group" if kept & 0o050 else "others"
    return [f"--log-mode {mode:o}: the umask, {umask:03o}, keeps the files from {who}; {umask & ~kept:03o} would not"]
