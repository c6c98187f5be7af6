"""Builds the command line of a Python interpreter: which one, how it finds Phalanx, how a debugger follows it."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import nullcontext

from phalanx._base import unpatched

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager
    from typing import Any

_OURS = sys.executable

FOLLOW_ENV = "PHALANX_DEBUGGER"
"""The environment variable with `follow_fork` for a worker that is a fork."""

HINT = "multiprocessing.set_executable() names a Python interpreter"


def executable() -> str:
    """Find the interpreter's path: that of `multiprocessing.set_executable`, else `sys.executable`.

    Raises OSError when there is none: Python is embedded in another program; or the program is frozen (PyInstaller), so
    that its interpreter is the program itself, and no other one could import what is within it.
    """
    spawn = sys.modules.get("multiprocessing.spawn")
    get = getattr(spawn, "get_executable", None)  # missing while another thread loads the module
    chosen = os.fsdecode(get() or "") if get is not None else ""
    path = chosen if chosen not in ("", _OURS) else sys.executable or ""
    if not path:
        raise OSError(errno.ENOENT, f"sys.executable is empty: this process is no Python interpreter; {HINT}")
    if getattr(sys, "frozen", False) and (path == sys.executable or not os.path.isdir(os.path.dirname(__file__))):
        what = f"this program is frozen, and its interpreter is {sys.executable}, which would run the program again"
        raise OSError(errno.ENOEXEC, f"{what}: it can start functions, by start_method 'fork', and nothing else")
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


def debugger() -> Any:
    """The part of pydevd that has replaced `os.fork` and its like, to follow this process's children; else None."""
    return sys.modules.get("_pydev_bundle.pydev_monkey") if hasattr(os, "original_fork") else None


def followed(argv: Sequence[bytes]) -> list[bytes]:
    """Add to a worker's command line what this process's debugger (debugpy, PyCharm's) adds to those of its children.

    A Python connects to the debugger then, as a child of this process, before anything else.
    """
    patch = getattr(debugger(), "patch_args", None)
    return list(argv) if patch is None else [os.fsencode(part) for part in patch([os.fsdecode(part) for part in argv])]


def follow_fork() -> str:
    """The code by which a fork, or a fork of a fork, connects to this process's debugger; "" without one."""
    return os.fsdecode(followed([b"python", b"-c", b""])[-1])


def unfollowed() -> AbstractContextManager[object]:
    """In this context the debugger follows nothing that is started: guard, keeper and fork server are not debugged.

    They run no code of the user's, have no thread to spare for a debugger, and must never be held by one.
    """
    skip: Any = getattr(debugger(), "skip_subprocess_arg_patch", nullcontext)
    return skip()  # type: ignore[no-any-return]  # pydevd has no types


def fork() -> int:
    """Fork, as `os.fork` does, where warnings are errors, too. Raises OSError.

    Since Python 3.15, the warning that this process has threads can be an exception: here, once there is a child.
    """
    return _fork_that_tells_its_pid() if sys.version_info >= (3, 15) else os.fork()


def _fork_that_tells_its_pid() -> int:
    reader, writer = os.pipe()
    try:
        pid = os.fork()
        if pid == 0:
            os.write(writer, b"%d" % os.getpid())
    except DeprecationWarning:
        os.close(writer)
        writer = -1
        told = os.read(reader, 20)
        if not told:
            raise ChildProcessError("the fork has ended") from None
        pid = int(told)
    finally:
        os.close(reader)
        if writer >= 0:
            os.close(writer)
    return pid


def start_helper(
    command: Sequence[str], fd: int, env: Mapping[str, str] | Mapping[bytes, bytes]
) -> subprocess.Popen[bytes]:
    """Start a helper process of ours that inherits ``fd``, and that no debugger follows. Raises OSError.

    It has a session of its own: a Ctrl-C at the terminal is for the launcher.
    """
    subprocess = unpatched.module("subprocess")
    with unfollowed():
        return subprocess.Popen(  # type: ignore[no-any-return]  # the unpatched module has no types
            command, stdin=subprocess.DEVNULL, pass_fds=[fd], start_new_session=True, env=env
        )


def folder_of(name: str) -> str:
    """Find the folder on the path from which this process has imported a module, or its package; "" if it has not."""
    module = sys.modules.get(name.partition(".")[0])
    file = getattr(module, "__file__", None) or ""
    return os.path.dirname(os.path.dirname(file) if hasattr(module, "__path__") else file)


def flags() -> list[str]:
    """List the options (-O, -W, -X …) of this interpreter, for another one that is to run alike."""
    import subprocess

    return subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined, no-any-return]  # noqa: SLF001 - the standard library's own multiprocessing relies on it
