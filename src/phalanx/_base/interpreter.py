"""Builds the command line of a Python interpreter that runs our code: which interpreter, and how it finds Phalanx."""

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
    """Find the interpreter's path: that of `multiprocessing.set_executable`, else `sys.executable`.

    Raises OSError when there is none: Python is embedded in another program.
    """
    spawn = sys.modules.get("multiprocessing.spawn")
    get = getattr(spawn, "get_executable", None)  # missing while another thread loads the module
    chosen = os.fsdecode(get() or "") if get is not None else ""
    path = chosen if chosen not in ("", _OURS) else sys.executable or ""
    if not path:
        raise OSError(errno.ENOENT, f"sys.executable is empty: this process is no Python interpreter; {HINT}")
    return path


# The first entry of sys.path is the working directory, which may hold a signal.py or a phalanx.py. So while our own
# modules are imported, the path holds the standard library first, then the folder of Phalanx, and nothing else.
# The library is the folder from which `encodings` comes, which every interpreter imports as it starts, and the entry
# after it: in most Pythons below PREFIX/lib, but not in one that is run where it was built. PREFIX may end with a
# slash, or be named "my-packages".
_PATH = (
    "std=getattr(sys.modules['encodings'],'__file__','').rsplit('/',2)[0];"
    "lib=[p.rstrip('/')+'/lib'for p in(sys.base_prefix,sys.base_exec_prefix)];"
    "sys.path[:]=[*(d for last,d in zip(['',*sys.path],sys.path)"
    "if std and std in(last,d)and not d.endswith('-packages')"
    "or any(d.startswith(p)and'-packages'not in d[len(p):]for p in lib)),{root!r}];"
)


def command(options: Sequence[str], code: str, before: str = "") -> list[str]:
    """Build the command line of an interpreter with ``options`` that runs ``code``.

    The code finds Phalanx and the standard library on `sys.path`, and nothing else; `sys` is imported. ``before`` runs
    first, with the `sys.path` of the interpreter itself: ``-c`` puts the working directory there, unless the path is
    safe.
    """
    here = os.path.dirname(os.path.abspath(__file__))
    boot = os.path.join(here, "boot.py")
    # Running a file takes 1 ms longer than -c. In a zip file there is none that could be run.
    first = boot if sys.version_info >= (3, 13) and os.path.exists(boot) else "-c"
    root = os.path.dirname(os.path.dirname(here))
    return [executable(), *options, first, f"import sys;{before}{_PATH.format(root=root)}{code}"]


def folder_of(name: str) -> str:
    """Find the folder on the path from which this process has imported a module, or its package; "" if it has not."""
    module = sys.modules.get(name.partition(".")[0])
    file = getattr(module, "__file__", None) or ""
    return os.path.dirname(os.path.dirname(file) if hasattr(module, "__path__") else file)


def flags() -> list[str]:
    """List the options (-O, -W, -X …) of this interpreter, for another one that is to run alike."""
    import subprocess

    return subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined, no-any-return]  # noqa: SLF001 - the standard library's own multiprocessing relies on it
