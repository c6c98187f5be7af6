"""The import path that workers get from their launcher.

Imported when the program imports Phalanx: the working directory of that moment is part of the path.
"""

from __future__ import annotations

import os
import sys

from phalanx._base.loaded_modules import loaded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def search_path() -> list[str]:
    """Return `sys.path`, with the working directory as an absolute path in place of an empty entry.

    Before it come earlier working directories, since modules may have been imported from there: the one in which
    `multiprocessing` was imported, and the one in which this module was. Entries that are no strings (a
    `pathlib.Path`) are left out: the import system ignores them, here and in a worker.
    """
    entries: list[Any] = list(sys.path)
    process = loaded("multiprocessing.process")
    original = None if process is None else process.ORIGINAL_DIR
    here = list(dict.fromkeys(filter(None, (original, _initial_directory, _working_directory()))))
    return [name for entry in entries if isinstance(entry, str) for name in (["".join(entry)] if entry else here)]


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it has been removed: nothing can be imported from there
        return ""


_initial_directory = _working_directory()
