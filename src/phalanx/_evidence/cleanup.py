"""Removes error files of an earlier run with the files beside them; and, after a run, those that are empty."""

from __future__ import annotations

import os

from phalanx._base import files
from phalanx._evidence.recording import exit_path
from phalanx._evidence.stack_signals import fatal_path, holds_no_stack, is_stacks_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


def remove_old(paths: Iterable[str]) -> None:
    """Remove error files of an earlier run, and the files beside them, which would pass for evidence of this one.

    What is not a regular file (a folder, or a device that somebody has put there) is not evidence, and is not removed;
    nor is a link of ours to such a one (/dev/stderr). Raises OSError.
    """
    for path in paths:
        for name in _existing(path) if path else ():
            try:
                if _is_old(name):
                    os.unlink(name)
            except (FileNotFoundError, NotADirectoryError):
                continue


def remove_empty(path: str) -> None:
    """Remove what an ended process left beside its error file and is of no more use. Never raises.

    That is `exit_path`, which has been read; `fatal_path`, unless it has stacks; and each `stacks_path` without stacks.
    """
    try:
        names = _existing(path)
    except ValueError:  # a null character
        return
    for name in names:
        try:
            if name == fatal_path(path):
                is_empty = os.stat(name).st_size == 0
            else:
                is_empty = name == exit_path(path) or (name != path and holds_no_stack(name))
            if is_empty:
                os.unlink(name)
        except OSError:
            continue


def _existing(path: str) -> list[str]:
    """Return an error file and the files beside it, as far as they exist: one look at their folder for all of them."""
    fixed = path, exit_path(path), fatal_path(path)
    folder, name = os.path.split(path)
    head = path.removesuffix(name)  # as it is written: `folder//name`, say
    try:
        found = [head + each for each in os.listdir(folder or os.curdir) if each.startswith(name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError:  # it must not be read
        return [*fixed]
    return [each for each in found if each in fixed or is_stacks_path(each, path)]


def _is_old(path: str) -> bool:
    """Whether a path is a regular file, or a link to one or to nothing. Raises OSError."""
    found = os.lstat(path)
    if files.kind(found.st_mode) == files.LINK:
        try:
            found = os.lstat(files.target(path))
        except OSError:  # it leads to nothing
            return True
    what = files.kind(found.st_mode)
    return not what or (what == files.LINK and not files.is_of_kernel(found))
