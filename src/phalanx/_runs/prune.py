"""Runs that are not kept any longer: which they are, what they take, and their removal.

Owns what is never removed: a run that still runs, or may; another user's; and what has no record that can be read:
it may be anything, or a newer version's run. Says nothing to anybody.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import time

from phalanx._base import clock
from phalanx._base.frozen import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from phalanx._runs.catalog import RunDir

REMOVED = ".phalanx-removed-"
"""What the name of a folder begins with whose removal has begun."""

_TAIL = 48
"""Characters of the run's name that follow, so that no name becomes too long: its end is what makes it the only one."""

_TRIES = 100
_BLOCK = 512  # bytes of st_blocks, see stat(2)
_DATED = ("succeeded", "failed", "stopped", "lost")


class Stored(Value):
    """A run, and what it takes.

    Attributes:
        run: It.
        size: Bytes on the disk.
        changed: When anything in it was last changed, in Unix time in seconds.
    """

    __slots__ = ("run", "size", "changed")  # noqa: RUF023 - the order is that of the arguments

    run: RunDir
    size: int
    changed: float

    def __init__(self, run: RunDir, size: int, changed: float) -> None:
        self._store(run=run, size=size, changed=changed)


def choose(
    stored: Iterable[Stored],
    now: float,
    *,
    older: float | None = None,
    keep: int | None = None,
    larger: int | None = None,
) -> list[Stored]:
    """The runs that can go, by any of the rules that are given; the oldest first.

    Args:
        stored: All runs, the newest first.
        now: Unix time in seconds.
        older: Those in which nothing was changed for so many seconds.
        keep: All but so many, the newest.
        larger: The oldest, until what is left takes no more than so many bytes.
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
    """Whether a run has ended. Of one from before the machine's last start, a change since then says that it has not.

    It can be another machine's of the same name then, with a file system that both have.
    """
    from phalanx._runs import record

    run = it.run.run
    if it.run.state != "lost" or run is None or record.is_here(run):
        return it.run.state in _DATED
    return it.changed < clock.booted()


def measure(run: RunDir) -> Stored:
    """What a run takes. What cannot be looked at is not counted."""
    size, changed = 0, run.started
    for found in _entries(run.path):
        size += _taken(found)
        changed = max(changed, found.st_mtime)
    return Stored(run, size, changed)


def total(runs: Iterable[RunDir], most: int) -> tuple[int, bool]:
    """How many bytes some runs take, and whether that is all: at most ``most`` files are looked at."""
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

    Returns how many were removed, the bytes, and what could not be removed, and why. Raises OSError: it cannot be
    listed.
    """
    from phalanx._runs.catalog import find

    begun, found = half_removed([root]), find([root])
    chosen = choose((Stored(run, 0, 0.0) for run in found), time.time(), keep=keep)
    return remove(begun, (measure(it.run) for it in chosen))


def remove(begun: Iterable[str], chosen: Iterable[Stored]) -> tuple[int, int, list[str]]:
    """Remove runs, and what is left of others. Returns as `prune`. What others remove meanwhile is theirs to count."""
    number = freed = 0
    failed: list[str] = []
    for path in begun:
        _remove_tree(path, failed)
    for it in chosen:
        try:
            aside = _set_aside(it)
        except OSError as error:
            failed.append(f"{it.run.path}: {error.strerror or error}")
            continue
        if aside and _remove_tree(aside, failed):
            number += 1
            freed += it.size
    return number, freed, failed


def _set_aside(it: Stored) -> str:
    """Give a run's folder a name that is no run's: nobody is to read half of it. Returns its path; "": it stays.

    So it does when it runs by now (a person may have been asked for long), or when others have removed it. Raises
    OSError.
    """
    from phalanx._runs.catalog import look

    path = it.run.path
    if not _can_go(it.replace(run=look(path))):
        return ""
    folder, name = os.path.split(path)
    aside = os.path.join(folder, REMOVED + name[-_TAIL:])
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return ""
    return aside


def _remove_tree(path: str, failed: list[str]) -> bool:
    """Remove a folder, which others may remove at the same time. Returns whether it is gone, or adds to what failed."""
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
    """Bytes on the disk. Of a file with several names, each has its share."""
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
    """The folders of ours whose removal was begun, and not finished."""
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
