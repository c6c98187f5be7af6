"""Logs whose layout is a plugin's: ``--logs-specs NAME``, a class found by an entry point, as with torchrun."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import click

from phalanx._logs.layout import checked_dest
from phalanx.cli._run_logs import BOUNDS, RunLogs
from phalanx.multiprocessing import LogsDest, Std

ENTRY_POINTS = ("torchrun.logs_specs", "phalanx.logs_specs")
"""The groups in which plugins are looked for: that of torchrun, and our own."""

_FIELDS = (
    *("stdouts", "stderrs", "tee_stdouts", "tee_stderrs", "error_files", "filtered_stdout", "filtered_stderr"),
    *("hidden_stdouts", "hidden_stderrs", "timeline"),
)


class OwnLogs(RunLogs):
    """Logs whose files a plugin's object names.

    Args:
        name: The plugin's name.
        made: The object. Its ``reify`` returns a `LogsDest`, or what has the same attributes, as torch's.
    """

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
            raise click.ClickException(msg) from error

    def preview(self, envs: Mapping[int, Mapping[str, str]]) -> LogsDest:
        """Name no file: what the plugin's object would name, it would make as well."""
        own = dict.fromkeys(envs, "")
        return LogsDest(own, own, error_files={rank: f"(a plugin's)/{rank}.json" for rank in envs})

    def tidy(self, logs: LogsDest) -> None:
        """See `LogsSpecs.tidy`."""
        tidy = getattr(self._made, "tidy", None)
        if tidy is not None:
            tidy(logs)


def own_logs(
    name: str,
    log_dir: str | None,
    redirects: Std | Mapping[int, Std],
    tee: Std | Mapping[int, Std],
    ranks: set[int] | None,
    bounds: Mapping[str, object],
) -> OwnLogs:
    """Find a plugin, and make its object as torchrun does. Raises UsageError."""
    unheeded = [option for key, option in BOUNDS.items() if bounds[key]]
    if unheeded:
        msg = f"--logs-specs {name}: it is for the plugin to say what files there are; leave {', '.join(unheeded)} out"
        raise click.UsageError(msg)
    kind = _load(name)
    values: dict[str, Any] = {"redirects": redirects, "tee": tee}
    theirs = _std_of_torch(kind)
    if theirs is not None:
        for key, given in values.items():
            values[key] = theirs(int(given)) if isinstance(given, int) else {
                rank: theirs(int(value)) for rank, value in given.items()
            }  # fmt: skip
    try:
        made = kind(log_dir=log_dir, local_ranks_filter=ranks, **values)
    except Exception as error:
        raise click.UsageError(f"--logs-specs {name}: {type(error).__name__}: {error}") from error
    if not callable(getattr(made, "reify", None)):
        msg = f"--logs-specs {name}: expected a subclass of phalanx.multiprocessing.LogsSpecs, got {kind!r}"
        raise click.UsageError(msg)
    return OwnLogs(name, made)


def _load(name: str) -> Any:
    from importlib.metadata import entry_points

    points = {point.name: point for group in ENTRY_POINTS for point in entry_points(group=group)}
    if name not in points:
        known = f"there are {', '.join(map(repr, sorted(points)))}" if points else "no plugin is installed"
        msg = f"--logs-specs: there is no {name!r} among the entry points of {' and '.join(ENTRY_POINTS)}: {known}"
        raise click.UsageError(msg)
    try:
        kind = points[name].load()
    except Exception as error:
        msg = f"--logs-specs {name}: {points[name].value}: {type(error).__name__}: {error}"
        raise click.UsageError(msg) from error
    if not callable(kind):
        raise click.UsageError(f"--logs-specs {name}: {points[name].value}: expected a class, got {kind!r}")
    return kind


def _std_of_torch(kind: Any) -> Any:
    """Return torch's own Std if a class stands on torch's LogsSpecs, which knows no other; else None."""
    for base in getattr(kind, "__mro__", ()):
        if base.__name__ == "LogsSpecs" and base.__module__.partition(".")[0] == "torch":
            return getattr(sys.modules[base.__module__], "Std", None)
    return None
