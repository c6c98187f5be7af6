"""The error file: its format, its writing as one step, and its reading without trust.

The format is that of torch elastic, with keys of our own inside ``extraInfo``::

    {"message": {"message": "ValueError: bad shape",
                 "extraInfo": {"py_callstack": "Traceback ...", "timestamp": "1795184205",
                               "monotonic_ns": 81232345678, "pid": 4242}}}

``timestamp`` is Unix time in whole seconds, as a string. Moments are in nanoseconds on CLOCK_MONOTONIC, which all
processes of one kernel share, so that they order failures that fall into the same second.

- ``monotonic_ns``: when the failure began.
- ``recorded_ns``: when it was recorded, if that was later.
- ``pid``: the process that failed.
- ``left``: true if the exception is known to have left the main function.
- ``handled_ns``: when the exception was freed without having left the main function; null if it has not been.
- ``lost_connection``: true if the exception, or any in its chain, is a lost connection: a peer may have caused it.
- ``observer``: who wrote the file, if not the process itself: ``"timer"`` or ``"launcher"``.
- ``detail``: for an expired timer, lines on what expired.
- ``before``: what the file held before, in brief if it was evidence of this process, whole if not.
- ``afterwards``: the message of an exception that the process raised later.

A flat file (``{"message": "text"}``) has these keys beside its message.

A worker loads this module before its script starts, in whatever Python the script runs (3.8 or later).
"""

from __future__ import annotations

import errno
import os
import time

from phalanx._base import files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ERROR_FILE_ENV = "TORCHELASTIC_ERROR_FILE"
"""The environment variable that names a worker's error file."""

DEBUG_SUFFIX = ".debug."
"""Between the name of the error file and a pid: the socket at which that process is debugged while it stands."""

POST_MORTEM_ENV = "PHALANX_POST_MORTEM"
"""The environment variable that has a worker stand where it has raised the exception that ends it: 1."""

DEBUGPY_ENV = "PHALANX_DEBUGPY_LISTEN"
"""The environment variable with the port of debugpy in a worker, and " wait" if that waits for an editor."""

BREAKPOINT_TIMEOUT_ENV = "PHALANX_BREAKPOINT_TIMEOUT"
"""The environment variable with the seconds after which a worker at a breakpoint, to which nobody attaches, is hung."""

READ_LIMIT = 4 << 20
"""The most bytes that `read_error_file` accepts. `record` writes no longer file: of two texts of `TEXT_LIMIT`
characters that take more as JSON it keeps less, and what was there before only if that fits in, too."""

SOON_NS = 10_000_000_000
"""Nanoseconds after an exception was recorded, or a file of the user's written, in which an end is put down to it."""

FOLLOWED = "afterwards"
"""The key of an exception that a process raised after the failure that its error file records."""

_UNHANDLED = b'"handled_ns": null'  # cannot occur inside a message, where the quotes would be escaped
_ROOM = 20  # characters for the value of ``handled_ns``, which is filled in later, in place
_IRREPLACEABLE = (1, 13, 16, 30)
"""EPERM, EACCES, EBUSY and EROFS, as numbers of Linux. rename(2) fails with these for a mount point, and in a folder of
others, where the file itself may still be writable."""


def write_error_file(
    path: str,
    message: str,
    py_callstack: str,
    *,
    monotonic_ns: int | None = None,
    pid: int | None = None,
    **extra: Any,
) -> None:
    """Write an error file in one step: a reader sees the old file, or none, or all of the new one.

    What is there and is no regular file (a device) is written in place, and so is a file that cannot be replaced (a
    mount point, or a file in a folder of others). That is not one step. A missing folder is made. A link that belongs
    to us or to root is followed; any other link is replaced.

    ``monotonic_ns`` (default: now) and ``pid`` (default: this process) go into ``extraInfo``, as does ``extra``, by its
    ``repr`` where JSON cannot represent it. Raises OSError if it could not be written: nothing is left over, and a file
    that was there is untouched.
    """
    moment = time.monotonic_ns() if monotonic_ns is None else monotonic_ns
    info = {
        "py_callstack": py_callstack,
        "timestamp": str(wall_clock(moment)),
        "monotonic_ns": moment,
        "pid": os.getpid() if pid is None else pid,
    }
    info.update(extra)
    write_json(path, {"message": {"message": message, "extraInfo": info}})


def wall_clock(moment: int) -> int:
    """Convert a moment of CLOCK_MONOTONIC, in nanoseconds, to Unix time in whole seconds."""
    return int(time.time() - (time.monotonic_ns() - moment) / 1e9)


def write_json(path: str, value: Any) -> None:
    """Write `value` as JSON to `path` in one step. Raises OSError as `write_error_file` does."""
    write_data(path, encode(value))


def encode(value: Any) -> bytes:
    """Encode a value as JSON, with room for the moment of ``handled_ns``."""
    import json

    # A lone surrogate becomes \\udXXX, which inside a JSON string is the right escape for it.
    text = json.dumps(value, ensure_ascii=False, default=_repr).encode("utf-8", "backslashreplace")
    return text.replace(_UNHANDLED, _UNHANDLED[:-4] + b"null".ljust(_ROOM), 1)


def _root() -> tuple[int, int] | None:
    try:
        status = os.stat("/")
    except OSError:
        return None
    return status.st_dev, status.st_ino


_ROOT = _root()  # as it was before the program began


def check_root() -> None:
    """Raise OSError if this process has another root (chroot(2)) than at its start: a path would lead elsewhere."""
    if _root() != _ROOT:
        raise OSError(errno.EXDEV, "the root is another one than at the start")


def write_data(path: str, data: bytes) -> None:
    """Write what `encode` returned to an error file; how, see `write_error_file`. Raises OSError."""
    path = files.target(path)  # a link of ours stays a link
    try:
        found = os.lstat(path)
        what = files.kind(found.st_mode)
        if what and (what != files.LINK or files.is_ours(found)):  # a link of ours that `target` keeps is of /proc
            _write_in_place(path, data)
            return
    except FileNotFoundError:
        pass
    try:
        _replace(path, data)
    except OSError as exc:
        if exc.errno not in _IRREPLACEABLE or not os.path.exists(path):
            raise
        _write_in_place(path, data)


def _write_in_place(path: str, data: bytes) -> None:
    fd = files.opened(path, os.O_WRONLY | os.O_TRUNC, links=files.OWN_LINKS, regular=False)
    try:
        files.write_all(fd, data)
    finally:
        os.close(fd)


def _replace(path: str, data: bytes) -> None:
    # The temporary name does not contain the final one, which may be as long as the file system allows.
    # No fsync: the page cache outlives the process, and the file has to survive the death of the process alone.
    name = f".error.{os.getpid()}.{time.monotonic_ns()}.tmp"
    folder = os.path.dirname(path) or os.curdir
    os.makedirs(folder, exist_ok=True)  # the folder may not have been made yet, or been removed
    files.replace(path, os.path.join(folder, name), data)


def note_handled(path: str, noted: tuple[int, int]) -> None:
    """Fill in ``handled_ns``: the recorded exception was freed, and the process goes on. Raises OSError, ValueError.

    It is written in place, and only if the file is still the one with the identity ``noted`` (`file_identity`): another
    thread may have recorded something else, and a loop may handle many exceptions.
    """
    import json

    fd = files.opened(path, os.O_RDWR, links=files.OWN_LINKS)
    try:
        found = os.fstat(fd)
        if (found.st_ino, found.st_mtime_ns) != noted:
            return
        raw = files.pread(fd, READ_LIMIT)
        place = raw.find(_UNHANDLED)
        data = json.loads(raw.decode("utf-8", "replace"))
        if place >= 0 and written_by(data) == os.getpid() and not has_left(data):
            os.pwrite(fd, (b"%d" % time.monotonic_ns()).ljust(_ROOM), place + len(_UNHANDLED) - 4)
    finally:
        os.close(fd)


def open_to_append(path: str, more: int = 0) -> int:
    """Open a regular file to append to it; make what is missing of its path. Never waits for a FIFO. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | more
    try:
        return files.opened(path, flags)
    except FileNotFoundError:
        if not path:
            raise
        os.makedirs(os.path.dirname(path) or os.curdir, exist_ok=True)
        return files.opened(path, flags)


def read_error_file(path: str) -> tuple[dict[str, Any] | None, str]:
    """Read an error file, which anyone may have written, or half written. Never raises, and never blocks.

    Returns the JSON object and ``""``; or None and the reason: ``"missing"`` or ``"unreadable: ..."``. An object
    without a message is returned with ``"unreadable: it has no message"``. Bytes that are not UTF-8 are replaced.

    >>> read_error_file("/nowhere/error.json")
    (None, 'missing')
    >>> read_error_file("/")
    (None, 'unreadable: it is not a regular file, but a folder')
    """
    why = ""
    try:
        raw = read_bytes(path, READ_LIMIT + 1)
        if len(raw) > READ_LIMIT:
            why = f"it is longer than {READ_LIMIT} bytes"
        elif not raw:
            why = "it is empty"
        else:
            import json

            data = json.loads(raw.decode("utf-8", "replace"))
            if isinstance(data, dict):
                return data, "" if message_of(data) is not None else "unreadable: it has no message"
            why = "it holds no JSON object"
    except (FileNotFoundError, NotADirectoryError):
        return None, "missing"
    except OSError as exc:
        why = exc.strerror or str(exc)
    except ImportError as exc:
        why = str(exc)
    except ValueError as exc:
        why = f"damaged or half written ({exc})"
    except (RecursionError, MemoryError) as exc:
        why = f"{type(exc).__name__} while parsing it"
    return None, f"unreadable: {why}"


def read_bytes(path: str, limit: int) -> bytes:
    """Read at most ``limit`` bytes of a regular file. Raises OSError."""
    return files.read(path, limit, links=files.OWN_LINKS)


def extra_info(data: dict[str, Any] | None) -> dict[str, Any]:
    """Return the dict with the keys of our own: ``extraInfo``, or for a flat file the data themselves."""
    message = (data or {}).get("message")
    info = message.get("extraInfo") if isinstance(message, dict) else data if isinstance(message, str) else None
    return info if isinstance(info, dict) else {}


def message_of(data: dict[str, Any] | None) -> str | None:
    """Return the message of error file data, or None if they have none."""
    message = (data or {}).get("message")
    if isinstance(message, dict):
        message = message.get("message")
    return message if isinstance(message, str) else None


def written_by(data: dict[str, Any] | None) -> int | None:
    """Return the pid in error file data (as `read_error_file` returns them), or None."""
    return _number(extra_info(data).get("pid"))


def written_at(data: dict[str, Any] | None) -> int | None:
    """Return when the failure of error file data began (CLOCK_MONOTONIC, nanoseconds), or None.

    It is None for a file that the launcher wrote: its moment is that of the end, not of the failure.
    """
    info = extra_info(data)
    return _number(info.get("monotonic_ns")) if info.get("observer", "timer") == "timer" else None


def recorded_at(data: dict[str, Any] | None) -> int | None:
    """Return when the failure of error file data was recorded (CLOCK_MONOTONIC, nanoseconds), or None."""
    found = _number(extra_info(data).get("recorded_ns"))
    return written_at(data) if found is None else found


def handled_at(data: dict[str, Any] | None) -> int | None:
    """Return when the exception of error file data was freed without having left main (CLOCK_MONOTONIC, ns)."""
    return _number(extra_info(data).get("handled_ns"))


def has_left(data: dict[str, Any] | None) -> bool:
    """Whether the exception of error file data is known to have left the main function."""
    return extra_info(data).get("left") is True


def has_lost_connection(data: dict[str, Any] | None) -> bool:
    """Whether the exception of error file data, or one in its chain, is known to be a lost connection."""
    return extra_info(data).get("lost_connection") is True


def is_observed(data: dict[str, Any] | None) -> bool:
    """Whether a watcher of timers or the launcher wrote error file data, and not the process itself."""
    return "observer" in extra_info(data)


def is_of_timer(data: dict[str, Any] | None) -> bool:
    """Whether error file data record an expired timer."""
    return bool(extra_info(data).get("observer") == "timer")


def timer_detail(path: str) -> str:
    """Return the lines that an error file holds on an expired timer; ``""`` if it records none. Never raises."""
    try:
        if b'"observer"' not in read_bytes(path, READ_LIMIT):
            return ""
    except (OSError, ValueError):
        return ""
    info = extra_info(read_error_file(path)[0])
    detail = info.get("detail")
    return detail if info.get("observer") == "timer" and isinstance(detail, str) else ""


def remove_timer_evidence(path: str) -> None:
    """Remove an error file if it records an expired timer and nothing else. Never raises."""
    try:
        data = read_error_file(path)[0]
        if is_of_timer(data) and FOLLOWED not in extra_info(data):
            os.unlink(path)
    except (OSError, ValueError):
        pass


def is_of_run(path: str) -> bool:
    """Whether an error file is in the folder of a run that has a record: `phalanx` finds such a one. Never raises."""
    return os.path.exists(os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(path))), "run.json"))


def may_write(path: str) -> bool:
    """Whether a path has nothing at it, or an error file of any writer. Never raises."""
    data, problem = read_error_file(path)
    return problem == "missing" or (data is not None and "message" in data)


def file_identity(path: str) -> tuple[int, int]:
    """Return a file's inode and modification time in nanoseconds, zeros if there is no file. Never raises."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return 0, 0
    return found.st_ino, found.st_mtime_ns


def file_at(path: str) -> int | None:
    """Return when a file was last written (CLOCK_MONOTONIC, nanoseconds); None if it is empty. Never raises.

    The file's own time is some milliseconds early, and wrong by every step that the wall clock has taken since.
    """
    try:
        found = os.stat(path)
        if found.st_size == 0:
            return None
        return time.monotonic_ns() - (time.time_ns() - found.st_mtime_ns)
    except (OSError, ValueError):
        return None


def _number(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 63 else None


def _repr(value: object) -> str:
    try:
        return repr(value)
    except BaseException:  # noqa: BLE001 - a method of the user's can raise anything
        return f"<a {type(value).__name__} whose __repr__ raises>"
