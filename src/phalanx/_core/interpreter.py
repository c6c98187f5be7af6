"""The Python that is to run ours: which one, and how it is told. Knows nothing of what it will do."""

from __future__ import annotations

import errno
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_OURS = sys.executable

HINT = "multiprocessing.set_executable() names a Python interpreter"


def executable() -> str:
    """The interpreter's path: what `multiprocessing.set_executable` has been told, else `sys.executable`.

    Raises OSError when there is none: this is a program in which Python is embedded.
    """
    spawn = sys.modules.get("multiprocessing.spawn")
    tell = getattr(spawn, "get_executable", None)  # it has none yet while another thread loads it
    told = os.fsdecode(tell() or "") if tell is not None else ""
    path = told if told not in ("", _OURS) else sys.executable or ""
    if not path:
        raise OSError(errno.ENOENT, f"sys.executable is empty: this process is no Python interpreter; {HINT}")
    return path


def command(flags: Sequence[str], code: str) -> list[str]:
    """The command line of an interpreter with ``flags`` that can import Phalanx and runs ``code``. It has `sys`."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return [executable(), *flags, "-c", f"import sys;sys.path.append({root!r});{code}"]
