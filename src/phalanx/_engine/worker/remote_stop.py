"""Stops the worker that runs this file, by `sys.remote_exec`, for a `phalanx debug` that waits for that.

The command listens at a Unix socket of an abstract name (unix(7)) with the worker's pid in it, which the kernel removes
when the command ends. The answer is a line: "at", and the socket at which the worker is debugged; "busy", to be asked
again; or "no", and why. The program stops if the command, which may have given up, then sends a byte.

The program's main thread runs this between two of its instructions, or in a call of C code that a signal has
interrupted. So it imports only what cannot be half imported then, and stops in no code of Phalanx, which may hold a
lock. The worker has Python 3.14 or later, and may have another Phalanx than the command.
"""

from __future__ import annotations

import _socket  # `socket` may be half imported
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

_WITHIN = 5.0  # seconds in which a command that waits takes the connection
_STARTERS = ("script.py", "function.py")  # whose frames lie below those of the program
_FOLDER = os.path.join("phalanx", "_engine", "worker", "")
_LIBRARY = os.path.dirname(os.__file__)


def _asked() -> _socket.socket | None:
    """Connect to the command that waits, of this user or root; None: there is none."""
    link = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
    link.settimeout(_WITHIN)
    try:
        link.connect(f"\0phalanx-debug-{os.getpid()}")
        credentials = link.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)  # pid, uid, gid
        uid = int.from_bytes(credentials[4:8], sys.byteorder)
        if uid in (os.geteuid(), 0):
            return link
    except OSError:
        pass
    link.close()
    return None


def _is_starter(frame: FrameType) -> bool:
    folder, name = os.path.split(frame.f_code.co_filename)
    return name in _STARTERS and os.path.join(folder, "").endswith(_FOLDER) and "_debugger" in frame.f_globals


def _is_library(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return path.startswith("<frozen ") or (path.startswith(_LIBRARY) and "-packages" not in path)


def _answer(frame: FrameType | None) -> tuple[str, Any]:
    """Return the answer, and what stops the program."""
    starter = frame
    while starter is not None and not _is_starter(starter):
        starter = starter.f_back
    if frame is None or starter is None:
        return "no it runs no program that Phalanx has started (--no-python, or greenlets)", None
    root = starter.f_code.co_filename.rpartition(os.path.join("_engine", ""))[0]
    caller = frame  # of the library, which code of Phalanx may have called
    while caller is not starter and _is_library(caller) and caller.f_back is not None:
        caller = caller.f_back
    if frame is starter or (caller is not starter and caller.f_code.co_filename.startswith(root)):
        return "busy", None
    try:
        breakpoints = starter.f_globals["_debugger"]()
        path = breakpoints.listen()
    except BaseException as error:  # noqa: BLE001 - of the program, whose signal handlers may raise; it goes on
        return f"no {type(error).__name__}: {error}", None
    return f"at {path}" if path else "no it can have no socket: see its stderr", breakpoints.stop_now


def _stop(frame: FrameType | None) -> None:
    link = _asked()
    if link is None:
        return
    answer, stop = _answer(frame)
    try:
        link.sendall(os.fsencode(answer), _socket.MSG_NOSIGNAL)
        link.shutdown(_socket.SHUT_WR)
        waits = link.recv(1)
    except OSError:  # it has gone
        return
    finally:
        link.close()
    if waits and answer.startswith("at "):
        stop(frame)  # nothing may follow: it would be traced


_stop(sys._getframe(1))  # noqa: SLF001 - that of the program
