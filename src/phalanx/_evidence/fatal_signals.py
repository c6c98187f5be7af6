"""The file ``error.json.fatal``: Python stacks, which the interpreter writes when the process gets a fatal signal.

It is also the fallback for an exception whose error file cannot be written. A worker loads this module before its
script starts, in whatever Python the script runs (3.8 or later).
"""

from __future__ import annotations

import os

from phalanx._evidence.describe import TEXT_LIMIT, decode_dump, without_own_frames
from phalanx._evidence.error_file import ERROR_FILE_ENV, READ_LIMIT, file_at, open_to_append, read_bytes

FATAL_SIGNALS = (4, 6, 7, 8, 11)
"""SIGILL, SIGABRT, SIGBUS, SIGFPE and SIGSEGV, at which the interpreter's fault handler writes stacks.

They are numbers of Linux, the same on all machines that Phalanx is tested on, because `signal` takes long to import.
"""

_FALLBACK = b"# exception of process "  # how `fatal_path` begins if it is a fallback
_FALLBACK_HEADER = _FALLBACK + b"%d, began %d, message %d bytes, traceback %d bytes\n"


def fatal_path(path: str) -> str:
    """Return the path of the file that takes the Python stacks at a fatal signal.

    >>> fatal_path("/logs/0/error.json")
    '/logs/0/error.json.fatal'
    """
    return path + ".fatal"


def catch_fatal_signals(path: str | None = None) -> bool:
    """Have the interpreter write the stacks of all threads to `fatal_path` at a fatal signal. Never raises.

    The handler can only write to an open descriptor, so the file is opened now and stays open as long as the process
    lives. It stays empty unless the process gets such a signal; the launcher removes an empty one (`remove_empty`). It
    is also the fallback for an exception: a process that has changed its user may not be able to write its error file
    any more, see `write_fallback`. Returns whether this was done: not if the user has enabled faulthandler already.
    """
    try:
        import faulthandler

        path = path or os.environ.get(ERROR_FILE_ENV)
        if not path or _kept_open(path) >= 0:
            return False
        fd = open_to_append(fatal_path(path))
        found = os.fstat(fd)
        _kept[path] = fd, found.st_dev, found.st_ino, os.getpid()
        if faulthandler.is_enabled():
            return False
        faulthandler.enable(fd)
    except (OSError, ValueError, RuntimeError, ImportError):
        return False
    return True


_kept = {}  # type: dict[str, tuple[int, int, int, int]]
"""For each error file: the descriptor of its `fatal_path`, the file's device and inode, and the pid that opened it.
The type is a comment, because a worker may run Python 3.8."""


def _kept_open(path: str) -> int:
    """Return the descriptor of `fatal_path` that this process has open; -1 if none: the user may have closed it."""
    fd, device, number, pid = _kept.get(path, (-1, 0, 0, 0))
    if fd < 0 or pid != os.getpid():
        return -1
    try:
        found = os.fstat(fd)
    except OSError:
        return -1
    return fd if (found.st_dev, found.st_ino) == (device, number) else -1


def write_fallback(path: str, message: str, stack: str, began: int) -> bool:
    """Write an exception that ends this process to `fatal_path`. Returns whether that is open. Raises OSError.

    It imports nothing, because a process that may not write its error file may not read the library either. The texts
    are as `describe` returns them; ``began`` is when the failure began, on CLOCK_MONOTONIC, in nanoseconds.
    """
    fd = _kept_open(path)
    if fd < 0:
        return False
    texts = message.encode("utf-8", "backslashreplace"), stack.encode("utf-8", "backslashreplace")
    data = _FALLBACK_HEADER % (os.getpid(), began, len(texts[0]), len(texts[1])) + texts[0] + b"\n" + texts[1] + b"\n"
    os.ftruncate(fd, 0)
    while data:
        data = data[os.write(fd, data) :]
    return True


def read_fallback(path: str, pid: int) -> tuple[str, str, int] | None:
    """Return message, traceback and moment of the exception that a process wrote by `write_fallback`. Never raises.

    It is at the start of `fatal_path`: a line with the pid, the moment and the lengths in bytes, then the texts.
    """
    author, moment, message, stack, _rest = read_fatal_file(path)
    return (message, stack, moment) if author and author == pid and moment < 1 << 63 else None


def read_fatal_stacks(path: str, limit: int = TEXT_LIMIT) -> str:
    """Return the stacks that a fatal signal left, without our own frames; ``""`` if there are none. Never raises."""
    return without_own_frames(decode_dump(read_fatal_file(path)[-1][:limit]))


def fatal_at(path: str) -> int | None:
    """Return when a fatal signal came that left stacks (CLOCK_MONOTONIC, nanoseconds), or None. Never raises."""
    return file_at(fatal_path(path))


def read_fatal_file(path: str, limit: int = READ_LIMIT) -> tuple[int, int, str, str, bytes]:
    """Return what `fatal_path` holds: pid, moment, message and traceback of an exception (0 and ""), and the rest."""
    try:
        data = read_bytes(fatal_path(path), limit)
    except (OSError, ValueError):
        data = b""
    head, _newline, texts = data.partition(b"\n")
    words = head[len(_FALLBACK) :].replace(b",", b"").split()
    numbers = [int(word) for word in words if word.isdigit() and len(word) < 20]  # noqa: PLR2004 - of 64 bits at the most
    if not head.startswith(_FALLBACK) or len(numbers) != 4:  # noqa: PLR2004 - as the header has
        return 0, 0, "", "", data
    author, moment, first, second = numbers
    message, stack = texts[:first], texts[first + 1 : first + 1 + second]
    rest = texts[first + 1 + second + 1 :]
    return author, moment, message.decode("utf-8", "replace"), stack.decode("utf-8", "replace"), rest
