"""The logs of `phalanx run`: where they are, and what is printed of that before the first worker prints anything.

With ``--logs-specs NAME`` their layout is a plugin's: a class found by an entry point, as with torchrun.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Collection, Container, Mapping, Sequence
from typing import Any

from phalanx._base import disk, procfs
from phalanx._base.stderr import say
from phalanx._base.text import how_many
from phalanx._logs.layout import checked_dest
from phalanx._run.config import MANY, RunError
from phalanx._runs.paths import folder_for_new_runs, temporary_folder
from phalanx.multiprocessing import DefaultLogsSpecs, LogsDest, Std

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from phalanx._run.config import RunConfig
    from phalanx._run.debug_ports import DebugPorts

    T = TypeVar("T")

KEPT_ATTEMPTS = 100
"""Attempts of which the folders are kept beside the first one's, where nobody says how many."""

_BOUNDS = {
    "max_size": "log_max_size", "keep": "log_keep", "compress": "log_compress", "mode": "log_mode",
    "keep_attempts": "keep_attempts",
}  # fmt: skip
"""The parameters of `DefaultLogsSpecs` that bound what is kept, and the options that are called otherwise."""

_INODES, _INODES_EACH = 8, 6  # files and folders of a run with one attempt, and of each of its ranks


class RunLogs(DefaultLogsSpecs):
    """Says where the run's logs are, and what else there is to say, before the first worker can say anything."""

    notes: Sequence[str] = ()
    terminals: Container[int] = ()  # global ranks that have one of their own
    _with_terminal: Sequence[int] = ()  # local ranks
    moved = ""  # why the logs are not where they were to be
    keeps_few = False
    debug_ports: DebugPorts | None = None
    _said = False

    def make_folder(self, run_id: str, ranks: int) -> str:
        """Make the run's folder now, and not with the first attempt's files. Returns it. Raises RunError."""

        def make() -> str:
            if not self.is_kept:
                raise RunError(self.moved)
            made = self._make_run_dir(run_id)
            self._run_log_dir = made[-1]
            self._set_mode(reversed(made))
            return made[-1]

        try:
            return self._where_there_is_room(make, ranks)
        except OSError as error:
            raise RunError(f"--log-dir: {error}") from None

    def name_files(self, envs: Mapping[int, Mapping[str, str]]) -> LogsDest:
        """Create the folders, and name the files; where a disk has no room for them, elsewhere. Raises OSError."""
        self._find_terminals(envs)
        reify = super().reify
        return self._where_there_is_room(lambda: reify(envs), len(envs))

    def _where_there_is_room(self, make: Callable[[], T], ranks: int) -> T:
        while True:
            try:
                if self.is_kept:
                    folder = self._root_log_dir or tempfile.gettempdir()
                    os.makedirs(folder, exist_ok=True)
                    disk.check(folder, _INODES + _INODES_EACH * ranks)
                return make()
            except OSError as error:
                if not self.is_kept or not (disk.is_full(error.errno) or self._root_log_dir is None):
                    raise
                self._go_elsewhere(error)

    def preview(self, envs: Mapping[int, Mapping[str, str]]) -> LogsDest:
        """See `DefaultLogsSpecs.preview`."""
        self._find_terminals(envs)
        return super().preview(envs)

    def _find_terminals(self, envs: Mapping[int, Mapping[str, str]]) -> None:
        self._with_terminal = [rank for rank, env in envs.items() if int(env["RANK"]) in self.terminals]

    def _by_rank(self, ranks: Collection[int]) -> tuple[dict[int, Std], dict[int, Std]]:
        """What a terminal shows is in a file, and on the console unless its stdout is redirected."""
        redirects, tee = super()._by_rank(ranks)
        for rank in self._with_terminal:
            if Std.OUT not in redirects[rank]:
                tee[rank] |= Std.OUT
        return redirects, tee

    def _name_files(self, folder: str, ranks: Collection[int]) -> LogsDest:
        logs = super()._name_files(folder, ranks)
        for rank in self._with_terminal:
            logs.stderrs[rank] = logs.stdouts[rank]
            logs.tee_stderrs.pop(rank, None)
            logs.hidden_stderrs.pop(rank, None)
        return logs.replace(terminals=self._with_terminal)

    def _name_nothing(self, folder: str, ranks: Collection[int]) -> LogsDest:
        if self._with_terminal:
            raise RunError("--pty: a rank with a terminal needs a log file, and there is no room for one")
        return super()._name_nothing(folder, ranks)

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
            raise RunError(f"--log-dir: {error}") from None
        if self._said:
            return logs
        self._said = True
        where = f"logs in {self.run_log_dir}" if self.run_log_dir else "no logs are kept"
        say(f"{how_many(len(envs), 'worker')}, {where}")
        attach = self.debug_ports.write(self.run_log_dir or "", envs) if self.debug_ports else ""
        for note in filter(None, (self.moved, *self.notes, attach)):
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


def bounds_given(config: RunConfig) -> list[str]:
    """Return the options that bound what is kept, of those that were given."""
    names = (*_BOUNDS.values(), "keep_runs")
    return [f"--{name.replace('_', '-')}" for name in names if getattr(config, name)]


def make_logs(
    config: RunConfig, redirects: Std | Mapping[int, Std], tee: Std | Mapping[int, Std], ranks: set[int] | None, *,
    makes_folder: bool,
) -> RunLogs:  # fmt: skip
    """Return the logs in ``--log-dir``, in the default place, or where a plugin has them. Raises ValueError."""
    for name, is_given in (("--log-keep", config.log_keep is not None), ("--log-compress", config.log_compress)):
        if is_given and config.log_max_size is None:
            msg = f"{name}: files are set aside only with --log-max-size; give that, too, like --log-max-size 100MB"
            raise ValueError(msg)
    if config.pty is not None and (config.logs_specs is not None or config.log_dir == os.devnull):
        what = "with --log-dir /dev/null there is none" if config.logs_specs is None else "--logs-specs chooses others"
        raise ValueError(f"--pty: a rank with a terminal has its log file in the run's folder; {what}")
    if config.logs_specs is not None:
        return _own_logs(config.logs_specs, config, redirects, tee, ranks)
    bounds = {key: getattr(config, name) for key, name in _BOUNDS.items()}
    moved, log_dir = "", config.log_dir
    if log_dir != os.devnull and config.keep_attempts is None:
        bounds["keep_attempts"] = KEPT_ATTEMPTS
    if log_dir is None:
        log_dir, why = folder_for_new_runs(config.log_mode, make=makes_folder)
        if why:
            moved = f"{why}; runs are kept in {log_dir or 'a temporary folder'}"
    try:
        specs = RunLogs(log_dir, redirects, tee, ranks, **bounds)
    except OSError as error:
        raise ValueError(f"--log-dir: {str(error).removeprefix('log_dir: ')}") from None
    specs.moved = moved
    specs.terminals = config.pty or ()
    specs.keeps_few = config.keep_runs is not None
    return specs


def umask_notes(mode: int | None) -> list[str]:
    """What is to be said of files that the umask keeps from those whom the folders are opened for."""
    kept = (mode or 0) & (umask := procfs.umask()) & 0o055
    if not kept:
        return []
    who = "the group" if kept & 0o050 else "others"
    return [f"--log-mode {mode:o}: the umask, {umask:03o}, keeps the files from {who}; {umask & ~kept:03o} would not"]


ENTRY_POINTS = ("torchrun.logs_specs", "phalanx.logs_specs")
"""The groups in which plugins are looked for: that of torchrun, and our own."""

_FIELDS = (
    *("stdouts", "stderrs", "tee_stdouts", "tee_stderrs", "error_files", "filtered_stdout", "filtered_stderr"),
    *("hidden_stdouts", "hidden_stderrs", "timeline"),
)


class OwnLogs(RunLogs):
    """Logs whose files a plugin's object names: its ``reify`` returns a `LogsDest`, or what is like it, as torch's."""

    keeps_few = True

    def __init__(self, name: str, made: Any) -> None:
        super().__init__()
        self._name = name
        self._made = made

    @property
    def is_kept(self) -> bool:
        """Whether error files are there after the end: where they are is the plugin's business, and so is that."""
        return True

    @property
    def run_log_dir(self) -> str | None:
        """The folder that the plugin says it has, or None."""
        folder = getattr(self._made, "run_log_dir", None) or getattr(self._made, "root_log_dir", None)
        return folder if isinstance(folder, str) else None

    def name_files(self, envs: Mapping[int, Mapping[str, str]]) -> LogsDest:
        """See `RunLogs.name_files`."""
        try:
            found = self._made.reify({rank: dict(env) for rank, env in envs.items()})
            if not isinstance(found, LogsDest) and all(hasattr(found, name) for name in _FIELDS[:5]):
                found = LogsDest(**{name: getattr(found, name) for name in _FIELDS if hasattr(found, name)})
            return checked_dest(found, envs, self._made)
        except Exception as error:
            text = str(error).removeprefix("logs_specs: ")
            msg = f"--logs-specs {self._name}: {text or type(error).__name__}"
            raise RunError(msg) from error

    def preview(self, envs: Mapping[int, Mapping[str, str]]) -> LogsDest:
        """Name no file: what the plugin's object would name, it would make as well."""
        own = dict.fromkeys(envs, "")
        return LogsDest(own, own, error_files={rank: f"(a plugin's)/{rank}.json" for rank in envs})

    def tidy(self, logs: LogsDest) -> None:
        """See `LogsSpecs.tidy`."""
        tidy = getattr(self._made, "tidy", None)
        if tidy is not None:
            tidy(logs)


def _own_logs(
    name: str, config: RunConfig, redirects: Std | Mapping[int, Std], tee: Std | Mapping[int, Std],
    ranks: set[int] | None,
) -> OwnLogs:  # fmt: skip
    """Find a plugin, and make its object as torchrun does. Raises ValueError."""
    if unheeded := bounds_given(config):
        msg = f"--logs-specs {name}: it is for the plugin to say what files there are; leave {', '.join(unheeded)} out"
        raise ValueError(msg)
    kind = _load(name)
    values: dict[str, Any] = {"redirects": redirects, "tee": tee}
    theirs = _std_of_torch(kind)
    if theirs is not None:
        for key, given in values.items():
            values[key] = theirs(int(given)) if isinstance(given, int) else {
                rank: theirs(int(value)) for rank, value in given.items()
            }  # fmt: skip
    try:
        made = kind(log_dir=config.log_dir, local_ranks_filter=ranks, **values)
    except Exception as error:
        raise ValueError(f"--logs-specs {name}: {type(error).__name__}: {error}") from error
    if callable(getattr(made, "reify", None)):
        return OwnLogs(name, made)
    raise ValueError(f"--logs-specs {name}: expected a subclass of phalanx.multiprocessing.LogsSpecs, got {kind!r}")


def _load(name: str) -> Any:
    from importlib.metadata import entry_points

    points = {point.name: point for group in ENTRY_POINTS for point in entry_points(group=group)}
    if name not in points:
        known = f"there are {', '.join(map(repr, sorted(points)))}" if points else "no plugin is installed"
        msg = f"--logs-specs: there is no {name!r} among the entry points of {' and '.join(ENTRY_POINTS)}: {known}"
        raise ValueError(msg)
    try:
        kind = points[name].load()
    except Exception as error:
        msg = f"--logs-specs {name}: {points[name].value}: {type(error).__name__}: {error}"
        raise ValueError(msg) from error
    if callable(kind):
        return kind
    raise ValueError(f"--logs-specs {name}: {points[name].value}: expected a class, got {kind!r}")


def _std_of_torch(kind: Any) -> Any:
    """Return torch's own Std if a class stands on torch's LogsSpecs, which knows no other; else None."""
    for base in getattr(kind, "__mro__", ()):
        if base.__name__ == "LogsSpecs" and base.__module__.partition(".")[0] == "torch":
            return getattr(sys.modules[base.__module__], "Std", None)
    return None
