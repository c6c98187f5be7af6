"""Runs that are not kept any longer: which they are, what they take, and their removal.

Owns what is never removed: a run that still runs, or may; another user's; and what has no record and
may be anything. Says nothing to anybody.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time

from phalanx._core.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from phalanx.multiprocessing._runs import RunDir

REMOVED = ".removed-"
"""What the name of a folder begins with whose removal has begun."""

_YOUNG = 3600.0
"""Seconds for which a run whose record cannot be read may yet be one that runs."""

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
        if (by_age or by_count or by_size) and _can_go(it, now):
            left -= it.size
            chosen.append(it)
    return chosen


def _can_go(it: Stored, now: float) -> bool:
    return it.run.state in _DATED or (it.run.state == "unreadable" and now - it.changed > _YOUNG)


def measure(run: RunDir) -> Stored:
    """What a run takes. What cannot be looked at is not counted."""
    size, changed = 0, run.started
    for found in _entries(run.path):
        size += found.st_blocks * _BLOCK
        changed = max(changed, found.st_mtime)
    return Stored(run, size, changed)


def total(roots: Iterable[str], most: int) -> tuple[int, int, bool]:
    """How many runs there are, or other folders, how many bytes they take, and whether that is all.

    No more than ``most`` files are looked at.
    """
    number = taken = 0
    for root in roots:
        with contextlib.suppress(OSError), os.scandir(root) as entries:
            folders = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
            number += len(folders)
            for folder in folders:
                for found in _entries(folder):
                    most -= 1
                    if most < 0:
                        return number, taken, False
                    taken += found.st_blocks * _BLOCK
    return number, taken, True


def prune(root: str, keep: int) -> tuple[int, int]:
    """Remove all but the newest runs in a folder. Returns how many were removed, and the bytes. Raises OSError."""
    from phalanx.multiprocessing._runs import find

    removed = freed = 0
    for path in half_removed([root]):
        remove(path)
    found = find([root])
    for it in choose((Stored(run, 0, run.started) for run in found), time.time(), keep=keep):
        stored = measure(it.run)
        with contextlib.suppress(FileNotFoundError):  # somebody was faster
            remove(it.run.path)
            removed += 1
            freed += stored.size
    return removed, freed


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


def remove(path: str) -> None:
    """Remove a run's folder. Raises OSError; what is left then has a name that is no run's."""
    folder, name = os.path.split(path)
    if not name.startswith(REMOVED):  # nobody is to read half of it
        aside = os.path.join(folder, REMOVED + name)
        os.rename(path, aside)
        path = aside
    shutil.rmtree(path)


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
