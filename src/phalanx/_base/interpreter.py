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


# What comes first on the path is the working directory, where anybody may have put a signal.py, or a phalanx.py. So
# while our own modules are imported, there is the standard library, and nothing before it; and then where Phalanx is.
# The library is where `encodings` is from, which no interpreter gets up without, and what comes after that: in most
# Pythons below PREFIX/lib, but not in one that is run where it was built. PREFIX may end with a slash, or be named
# "my-packages".
_PATH = (
    "std=getattr(sys.modules['encodings'],'__file__','').rsplit('/',2)[0];"
    "lib=[p.rstrip('/')+'/lib'for p in(sys.base_prefix,sys.base_exec_prefix)];"
    "sys.path[:]=[*(d for last,d in zip(['',*sys.path],sys.path)"
    "if std and std in(last,d)and not d.endswith('-packages')"
    "or any(d.startswith(p)and'-packages'not in d[len(p):]for p in lib)),{root!r}];"
)


def command(options: Sequence[str], code: str, before: str = "") -> list[str]:
    """The command line of an interpreter with ``options`` that runs ``code``, which finds Phalanx on `sys.path`.

    On `sys.path` is the standard library beside that, and nothing else. The code has `sys`. ``before`` runs first, with
    the `sys.path` of the interpreter itself: ``-c`` puts the working directory there, unless the path is safe.
    """
    here = os.path.dirname(os.path.abspath(__file__))
    boot = os.path.join(here, "boot.py")
    # To run a file takes 1 ms longer. And in a zip file, there is none that could be run.
    first = boot if sys.version_info >= (3, 13) and os.path.exists(boot) else "-c"
    root = os.path.dirname(os.path.dirname(here))
    return [executable(), *options, first, f"import sys;{before}{_PATH.format(root=root)}{code}"]


def folder_of(name: str) -> str:
    """The folder on the path from which this process has imported a module, or its package; "" if it has not."""
    module = sys.modules.get(name.partition(".")[0])
    file = getattr(module, "__file__", None) or ""
    return os.path.dirname(os.path.dirname(file) if hasattr(module, "__path__") else file)


def flags() -> list[str]:
    """The options (-O, -W, -X …) with which this interpreter runs, for another that should run alike."""
    import subprocess

    return subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined, no-any-return]  # noqa: SLF001 - the standard library's own multiprocessing relies on it
