"""Removes error files of an earlier run with the files beside them; and, after a run, those that are empty."""

from __future__ import annotations

import os

from phalanx._base import files
from phalanx._evidence.fatal_signals import fatal_path, read_fatal_file
from phalanx._evidence.recording import exit_path
from phalanx._evidence.stack_signals import all_stack_files, holds_no_stack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


def remove_old(paths: Iterable[str]) -> None:
    """Remove error files of an earlier run, and the files beside them, which would pass for evidence of this one.

    What is not a regular file (a folder, or a device that somebody has put there) is not evidence, and is not removed;
    nor is a link of ours to such a one (/dev/stderr). Raises OSError.
    """
    for path in paths:
        for name in (path, exit_path(path), fatal_path(path), *all_stack_files(path)) if path else ():
            try:
                if _is_old(name):
                    os.unlink(name)
            except (FileNotFoundError, NotADirectoryError):
                continue


def remove_empty(path: str) -> None:
    """Remove what an ended process left beside its error file and is of no more use. Never raises.

    That is `exit_path`, which has been read; `fatal_path`, unless it has stacks, or the only copy of an exception; and
    each `stacks_path` without stacks.
    """
    try:
        os.unlink(exit_path(path))
    except (OSError, ValueError):
        pass
    try:
        author, _moment, _message, _stack, rest = read_fatal_file(path)
        copied = author and not rest and os.path.exists(path)  # the launcher has written the exception there
        if copied or os.stat(fatal_path(path)).st_size == 0:
            os.unlink(fatal_path(path))
    except (OSError, ValueError):
        pass
    for name in all_stack_files(path):
        try:
            if holds_no_stack(name):
                os.unlink(name)
        except (OSError, ValueError):
            pass


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
