"""The runs in a folder: found, newest first, and found again by what a person types.

Owns what counts as a run's folder, and the reading of names. What a run's record says belongs to `_record`. Imported
when it is needed and not before, because of what that one loads.
"""

from __future__ import annotations

import difflib
import os

from phalanx._core.value import Value
from phalanx.multiprocessing import _record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_LISTED = 5


class RunDir(Value):
    """A run's folder as it was found.

    Attributes:
        path: The folder, absolute.
        run: Its record, or None when there is none that can be read,
        problem: and then why; else "".
        state: That of the record by now, see `_record.state_now`; "unknown" without a record, "unreadable" with a
            damaged one.
        started: The record's, or the folder's last change: Unix time in seconds.
    """

    __slots__ = ("path", "run", "problem", "state", "started")  # noqa: RUF023 - the order is that of the arguments

    path: str
    run: _record.Run | None
    problem: str
    state: str
    started: float

    def __init__(self, path: str, run: _record.Run | None, problem: str, state: str, started: float) -> None:
        self._store(path=path, run=run, problem=problem, state=state, started=started)

    @property
    def name(self) -> str:
        """The folder's name."""
        return os.path.basename(self.path)

    def to_json(self) -> str:
        """One line: ``folder``, ``path``, ``state`` by now, ``problem``, and the record as ``run``, or null."""
        return _record.to_json(folder=self.name, path=self.path, state=self.state, problem=self.problem, run=self.run)


class UnknownRunError(LookupError):
    """No run, or more than one, is called so. The message lists those that are close."""


def look(path: str) -> RunDir:
    """Read what a run's folder says of itself. Never raises: what cannot be read says why."""
    path = os.path.abspath(path)
    try:
        run = _record.read(path)
    except _record.UnreadableRecordError as error:
        state = "unknown" if isinstance(error, _record.NoRecordError) else "unreadable"
        try:
            changed = os.stat(path).st_mtime
        except OSError:  # removed in this moment
            changed = 0.0
        return RunDir(path, None, str(error), state, changed)
    return RunDir(path, run, "", _record.state_now(run), run.started)


def find(root: str) -> list[RunDir]:
    """The runs in a folder, newest first; none when there is no such folder.

    A run is a folder with a ``run.json`` or with attempts in it. One without a record, or with a damaged one, is listed
    as such, by the time of its last change. Other folders, and links, are not listed. Raises OSError when ``root`` is
    there and cannot be listed.
    """
    try:
        with os.scandir(root) as entries:
            folders = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    runs = [look(path) for path in folders if _is_run(path)]
    return sorted(runs, key=lambda run: (run.started, run.name), reverse=True)


def resolve(root: str, text: str | None = None) -> RunDir:
    """Find the run that somebody means.

    Args:
        root: The folder of the runs.
        text: The name of a run's folder in ``root``; or a run id; or the beginning of a folder's name, as long as there
            is only one such; or the path of a run's folder, anywhere. None for the latest run.

    Raises:
        UnknownRunError: There is no such run, or more than one.
        OSError: ``root`` cannot be listed.
    """
    if text is not None and os.sep in text:
        if _is_run(text) or os.path.isdir(os.path.join(text, "0")):  # of start_processes(log_dir=...): ranks alone
            return look(text)
        msg = f"{text!r} is not a run's folder: it has no {_record.FILE} and no attempts"
        raise UnknownRunError(msg)
    runs = find(root)
    if text is None:
        if runs:
            return runs[0]
        msg = f"there are no runs in {root}"
        raise UnknownRunError(msg)
    return _called(root, runs, text)


def _called(root: str, runs: list[RunDir], text: str) -> RunDir:
    """The one that is called so: by the first of the ways of calling it that gives any."""
    for matches in (
        [run for run in runs if run.name == text],
        [run for run in runs if run.run is not None and run.run.run_id == text],
        [run for run in runs if run.name.startswith(text)],
    ):
        if len(matches) == 1:
            return matches[0]
        if matches:
            msg = f"{text!r} can be any of {len(matches)} runs, newest first: {_listing(matches)}"
            raise UnknownRunError(msg)
    if _is_run(text):  # a folder that is here
        return look(text)
    names = {run.name: run for run in runs}
    close = [names[name] for name in difflib.get_close_matches(text, names, n=_LISTED, cutoff=0.5)]
    hint = f"close to it: {_listing(close)}" if close else f"there are: {_listing(runs)}" if runs else "there are none"
    msg = f"there is no run {text!r} in {root}; {hint}"
    raise UnknownRunError(msg)


def _is_run(path: str) -> bool:
    try:
        with os.scandir(path) as entries:
            return any(entry.name == _record.FILE or entry.name.startswith("attempt_") for entry in entries)
    except PermissionError:  # another user's
        return True
    except OSError:
        return False


def _listing(runs: Iterable[RunDir]) -> str:
    names = [run.name for run in runs]
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
