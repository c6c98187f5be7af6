"""Removes runs: chooses them by age, number or size, measures and deletes them.

Owns what is never removed: a run that still goes on, or may; another user's; and a folder without a readable record,
which may be anything, or a newer version's run. The exception are the temporary folders of groups that were given no
log folder, which `_logs.temporary` knows by their marker. Prints nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import time
from collections.abc import Iterable, Iterator

from phalanx._base import clock
from phalanx._base.frozen import Value
from phalanx._logs import temporary
from phalanx._runs import record
from phalanx._runs.catalog import REMOVED, RunDir, find, look

_TAIL = 48
"""Characters of the run's name after `REMOVED`, so that no name gets too long. They are its last, which are unique."""

_TRIES = 100
_BLOCK = 512  # bytes of st_blocks, see stat(2)
_ENDED = ("succeeded", "failed", "stopped", "lost")

TEMPORARY = "temporary"
"""The state of a temporary folder."""


class Stored(Value):
    """A run, and the space that it takes.

    Attributes:
        run: The run.
        size: Bytes on the disk.
        changed: When anything in its folder was last changed (Unix time, seconds).
    """

    run: RunDir
    size: int
    changed: float


def choose(
    stored: Iterable[Stored],
    now: float,
    *,
    older: float | None = None,
    keep: int | None = None,
    larger: int | None = None,
) -> list[Stored]:
    """Choose the runs to remove, by any of the given rules; the oldest first.

    Args:
        stored: All runs, the newest first.
        now: Unix time in seconds.
        older: Those in which nothing has changed for so many seconds.
        keep: All but the newest so many.
        larger: The oldest, until the others take no more than so many bytes.
    """
    ours = [it for it in stored if it.run.owner == os.geteuid()]
    left = sum(it.size for it in ours)
    chosen = []
    for index, it in reversed(list(enumerate(ours))):
        by_age = older is not None and now - it.changed > older
        by_count = keep is not None and index >= keep
        by_size = larger is not None and left > larger
        if (by_age or by_count or by_size) and _can_go(it):
            left -= it.size
            chosen.append(it)
    return chosen


def _can_go(it: Stored) -> bool:
    """Whether a run has ended.

    A run from before this machine's last boot counts as ended only if nothing has changed in it since: it may run on
    another machine of the same name, which shares the file system.
    """
    run = it.run.run
    if it.run.state == TEMPORARY:
        return temporary.is_left(it.run.path)
    if it.run.state != "lost" or run is None or record.is_here(run):
        return it.run.state in _ENDED
    return it.changed < clock.booted()


def find_temporary(root: str) -> list[Stored]:
    """Return the temporary folders in ``root`` that are the caller's, and whose process has ended, newest first."""
    found = [RunDir(path, None, "", TEMPORARY, 0.0, os.geteuid()) for path in temporary.left_in(root)]
    return sorted(map(measure, found), key=lambda it: it.changed, reverse=True)


def measure(run: RunDir) -> Stored:
    """Measure the space that a run takes. Folders and files that cannot be read are not counted."""
    size, changed = 0, run.started
    for found in _entries(run.path):
        size += _taken(found)
        changed = max(changed, found.st_mtime)
    return Stored(run, size, changed)


def total(runs: Iterable[RunDir], most: int) -> tuple[int, bool]:
    """Return the bytes that some runs take, and whether that is all: at most ``most`` files are counted."""
    taken = 0
    for run in runs:
        for found in _entries(run.path):
            most -= 1
            if most < 0:
                return taken, False
            taken += _taken(found)
    return taken, True


def prune(root: str, keep: int) -> tuple[int, int, list[str]]:
    """Remove all but the newest runs in a folder.

    Returns the number of removed runs, their bytes, and the paths that could not be removed, each with the reason.
    Raises OSError: the folder cannot be listed.
    """
    begun, found = half_removed([root]), find([root])
    chosen = choose((Stored(run, 0, 0.0) for run in found), time.time(), keep=keep)
    return remove(begun, (measure(it.run) for it in chosen))


def remove(begun: Iterable[str], chosen: Iterable[Stored]) -> tuple[int, int, list[str]]:
    """Remove runs, and the half removed folders ``begun``. Returns as `prune`. Runs that others remove do not count."""
    number = freed = 0
    failed: list[str] = []
    for path in begun:
        _remove_tree(path, failed)
    for it in chosen:
        try:
            renamed = _rename(it)
        except OSError as error:
            failed.append(f"{it.run.path}: {error.strerror or error}")
            continue
        if renamed and _remove_tree(renamed, failed):
            number += 1
            freed += it.size
    return number, freed, failed


def _rename(it: Stored) -> str:
    """Rename a run's folder, so that nobody reads half of it. Returns its path; "" if it stays. Raises OSError.

    It stays if it runs by now (the user may have taken long to confirm), or if others have removed it.
    """
    path = it.run.path
    if not _can_go(it if it.run.state == TEMPORARY else it.replace(run=look(path))):
        return ""
    folder, name = os.path.split(path)
    renamed = os.path.join(folder, REMOVED + name[-_TAIL:])
    try:
        os.rename(path, renamed)
    except FileNotFoundError:
        return ""
    return renamed


def _remove_tree(path: str, failed: list[str]) -> bool:
    """Remove a folder, which others may remove at the same time. Returns whether it is gone, or adds to ``failed``."""
    why = os.strerror(errno.EBUSY)
    for _ in range(_TRIES):
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            if os.path.lexists(path):
                continue
        except RecursionError:
            why = "its folders are too deep"
            break
        except OSError as error:
            why = error.strerror or str(error)
            break
        return True
    failed.append(f"{path}: {why}")
    return False


def _taken(found: os.stat_result) -> int:
    """Return the bytes on the disk. A file with several names counts for each with its share."""
    return found.st_blocks * _BLOCK // (1 if stat.S_ISDIR(found.st_mode) else max(found.st_nlink, 1))


def _entries(path: str) -> Iterator[os.stat_result]:
    folders = [path]
    while folders:
        folder = folders.pop()
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            yield os.lstat(folder)
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        yield entry.stat(follow_symlinks=False)


def half_removed(roots: Iterable[str]) -> list[str]:
    """Return the folders of ours whose removal was begun, and not finished."""
    found = []
    for root in roots:
        with contextlib.suppress(OSError), os.scandir(root) as entries:
            found += [
                entry.path
                for entry in entries
                if entry.name.startswith(REMOVED)
                and entry.is_dir(follow_symlinks=False)
                and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
            ]
    return found
