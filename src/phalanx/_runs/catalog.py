"""Finds runs: all in a folder, newest first; or the one that a user names.

Owns what counts as a run's folder, who owns it, and how a name is resolved.

A folder of runs can be shared, and a run in it, or its record, can belong to another user. Such a run is listed, and
can be read by its name; but it is never "the latest", and its pids are never signalled.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import shlex
import time
from collections.abc import Callable, Iterable, Sequence

from phalanx._base import files
from phalanx._base.clock import format_duration
from phalanx._base.frozen import Value
from phalanx._runs import record

REMOVED = ".phalanx-removed-"
"""What a folder's name begins with once its removal has begun. It is no run any more."""

_LISTED = 5  # runs in an error's message


class RunDir(Value):
    """A run's folder, and its record at the time when it was read.

    Attributes:
        path: The folder, absolute.
        run: Its record; None if there is none that can be read.
        problem: Why the record cannot be read; else "".
        state: The run's present state, see `record.state_now`; "unknown" without a record, "unreadable" with a damaged
            one.
        started: When the run started, or without a record, when the folder was last changed (Unix time, seconds).
        owner: The uid of the folder's owner; or of the record's, if that is neither the caller nor root.
    """

    path: str
    run: record.Run | None
    problem: str
    state: str
    started: float
    owner: int = files.ROOT

    @property
    def name(self) -> str:
        """The folder's name."""
        return os.path.basename(self.path)

    @property
    def is_ours(self) -> bool:
        """Whether it belongs to the caller or to root."""
        return self.owner in (os.geteuid(), files.ROOT)

    def strange_link(self) -> str:
        """Find a folder of an attempt or a rank that is a link of another user: who reads below it reads elsewhere.

        Returns its path; "": there is none. Files are checked where they are opened, see `files`.
        """
        folders = [self.path]
        for depth in range(2):
            entries = []
            for folder in folders:
                with contextlib.suppress(OSError), os.scandir(folder) as found:
                    entries += [entry for entry in found if depth or entry.name.startswith("attempt_")]
            for entry in entries:
                if entry.is_symlink() and not files.is_ours(entry.stat(follow_symlinks=False)):
                    return entry.path
            folders = [entry.path for entry in entries]
        return ""

    def heading(self) -> list[str]:
        """Return lines on the run as such, which stand above its report."""
        run = self.run
        if run is None:
            return [f"{self.name}: {self.problem}" if self.state == "unreadable" else self.name]
        code = f" with exit code {run.exit_code}" if run.exit_code else ""
        spent = ""
        if self.state == "running":
            spent = f" for {format_duration(time.time() - run.started)}"
        elif run.ended is not None:
            spent = f" after {format_duration(run.ended - run.started)}"
        fields = {
            "command": shlex.join(run.argv or run.command),
            "folder": run.cwd,
            "host": run.host,
            "time": time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(run.started)),
        }
        lines = [f"  {key:10}: {value}" for key, value in fields.items() if value]
        return [f"{self.name}: {self.state}{code}{spent}", *lines]

    def to_json(self) -> str:
        """Return one line of JSON: ``folder``, ``path``, ``state``, ``problem``, and as ``run`` the record or null."""
        return record.to_json(folder=self.name, path=self.path, state=self.state, problem=self.problem, run=self.run)


class UnknownRunError(LookupError):
    """No run, or more than one, has this name. The message lists similar ones."""


def look(path: str) -> RunDir:
    """Read a run's folder. Never raises: ``problem`` says why its record cannot be read."""
    path = os.path.abspath(path)
    try:
        folder = os.stat(path)
        changed, owner = folder.st_mtime, folder.st_uid
    except OSError:  # removed just now
        changed, owner = 0.0, files.ROOT
    try:
        run, author = record.read_owned(path)
    except record.UnreadableRecordError as error:
        state = "unknown" if isinstance(error, record.NoRecordError) else "unreadable"
        return RunDir(path, None, str(error), state, changed, owner)
    if author not in (os.geteuid(), files.ROOT):
        owner = author
    return RunDir(path, run, "", record.state_now(run), run.started, owner)


def find(roots: Iterable[str]) -> list[RunDir]:
    """Return the runs in some folders, newest first, with brief records. A missing folder has none.

    A run is a folder with a ``run.json`` or with attempts in it. One without a record, or with a damaged one, is listed
    as such, by the time of its last change. Other folders, and links, are not listed. Raises OSError: a folder exists
    and cannot be listed.
    """
    folders: list[str] = []
    for root in roots:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(root) as entries:
            folders += [
                entry.path
                for entry in entries
                if not entry.name.startswith(REMOVED) and entry.is_dir(follow_symlinks=False)
            ]
    runs = [look(path) for path in folders if is_run(path)]
    runs = [found if found.run is None else found.replace(run=record.brief(found.run)) for found in runs]
    return sorted(runs, key=lambda run: (run.started, run.name), reverse=True)


def resolve(roots: Sequence[str], text: str | None = None) -> RunDir:
    """Find the run that a user means.

    Args:
        roots: The folders that hold runs.
        text: The name of a run's folder in one of them; or a run id; or the beginning of one name only; or the path of
            a run's folder, anywhere. None for the latest run of the caller or root. A run of another user is found only
            if none of these fits.

    Raises:
        UnknownRunError: There is no such run, or more than one.
        OSError: One of ``roots`` cannot be listed.
    """
    if text is not None and os.sep in text:
        if is_run(text) or os.path.isdir(os.path.join(text, "0")):  # start_processes(log_dir=...): only ranks
            return look(text)
        msg = f"{text!r} is not a run's folder: it has no {record.FILE} and no attempts"
        raise UnknownRunError(msg)
    runs, where = find(roots), " or ".join(roots)
    if text is not None:
        return look(_called(where, runs, text).path)
    latest = next((run for run in runs if run.is_ours), None)
    if latest is None:
        msg = f"there are no runs in {where}"
        if runs:
            msg = f"there are no runs of yours in {where}; of other users, which have to be named: {_listing(runs)}"
        raise UnknownRunError(msg)
    return look(latest.path)


def live(roots: Sequence[str], text: str | None = None, note: Callable[[str], object] = lambda _: None) -> RunDir:
    """Find the run that a user means, as `resolve` does, if it runs, and here; None: the latest that does.

    ``note`` is called with a line, if that is one of several. Raises UnknownRunError, also of a run that has ended,
    that runs elsewhere, or that is another user's, unless the caller is root; OSError.
    """
    found = _latest_live(roots, note) if text is None else resolve(roots, text)
    why = ""
    if not found.is_ours and os.geteuid() != files.ROOT:
        why = f"belongs to uid {found.owner}: only that user, and root, can reach its processes"
    elif found.run is None:
        why = f"cannot be asked: {found.problem}"
    elif found.state != "running":
        why = f"has ended ({found.state}); see phalanx report {found.name}"
    elif not record.is_here(found.run):
        why = f"runs on {found.run.host}, in another container or boot of it: ask there"
    if why:
        msg = f"{found.name} {why}"
        raise UnknownRunError(msg)
    return found


def _latest_live(roots: Sequence[str], note: Callable[[str], object]) -> RunDir:
    runs = [run for run in find(roots) if run.is_ours]
    those = [run for run in runs if run.state == "running"]
    if runs and not those:
        msg = f"no run in {' or '.join(roots)} is running; the latest is {runs[0].name} ({runs[0].state})"
        raise UnknownRunError(msg)
    those = [run for run in those if run.run is not None and record.is_here(run.run)] or those
    found = look(those[0].path) if those else resolve(roots)  # which raises
    if len(those) > 1:
        note(f"{found.name}, the latest of {len(those)} runs that run")
    return found


def _called(where: str, runs: list[RunDir], text: str) -> RunDir:
    """Return the run with this name, id or beginning of a name: by the first of these that any run has."""
    ours, others = [run for run in runs if run.is_ours], [run for run in runs if not run.is_ours]
    for matches in (
        matches
        for some in (ours, others)
        for matches in (
            [run for run in some if run.name == text],
            [run for run in some if run.run is not None and run.run.run_id == text],
            [run for run in some if run.name.startswith(text)],
        )
    ):
        if len(matches) == 1:
            return matches[0]
        if matches:
            msg = f"{text!r} can be any of {len(matches)} runs, newest first: {_listing(matches)}"
            raise UnknownRunError(msg)
    if is_run(text):  # a folder that is here
        return look(text)
    names = {run.name: run for run in runs}
    close = [names[name] for name in difflib.get_close_matches(text, names, n=_LISTED, cutoff=0.5)]
    hint = f"close to it: {_listing(close)}" if close else f"there are: {_listing(runs)}" if runs else "there are none"
    msg = f"there is no run {text!r} in {where}; {hint}"
    raise UnknownRunError(msg)


def is_run(path: str) -> bool:
    """Whether a folder is that of a run: it has a record, or an attempt; or only its owner may list it."""
    try:
        with os.scandir(path) as entries:
            return any(entry.name == record.FILE or entry.name.startswith("attempt_") for entry in entries)
    except PermissionError:  # another user's
        return True
    except OSError:
        return False


def _listing(runs: Iterable[RunDir]) -> str:
    names = [run.name for run in runs]
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
