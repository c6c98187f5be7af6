"""Reopens the standard streams of a worker after a fork, writes to them, and flushes them at the end.

Owns the streams from before a fork, which user code may still hold. Never raises, whatever is wrong with a stream: the
disk is full, it is closed, or it is an object of the user's.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import io
    from typing import Any

_kept: list[Any] = []  # streams from before a fork; their finalizers would write what is in their buffers
_renewed: list[Any] = []  # those of them that were made usable again


def write_stderr(text: str) -> None:
    """Write to sys.stderr, or where that fails to sys.__stderr__. Never raises."""
    for stream in (sys.stderr,) if sys.stderr is sys.__stderr__ else (sys.stderr, sys.__stderr__):
        if try_call(stream, "write", text) and try_call(stream, "flush"):
            return


def try_call(stream: object, method: str, *arguments: Any, **options: Any) -> bool:
    """Call a method of a standard stream. Returns False if it raises.

    The disk may be full, the stream closed or None, or an object of the user's, which may raise anything.
    """
    try:
        getattr(stream, method)(*arguments, **options)
    except Exception:  # noqa: BLE001 - see above
        return False
    return True


def flush() -> None:
    """Flush the standard streams, and those from before the fork."""
    for stream in (sys.stdout, sys.stderr, *_renewed):
        try_call(stream, "flush")


def reopen(*, unbuffered: bool) -> None:
    """Make new standard streams on descriptors 0, 1 and 2, with the attributes that the interpreter gives them.

    The old ones were made for other files, and their buffers may hold text of the parent. User code may still hold
    them: they are emptied and made usable on the new files.
    """
    before = [sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__]
    _kept.extend(stream for stream in before if not any(stream is each for each in _kept))
    _renewed[:] = filter(_renew, _kept)
    sys.stdin = sys.__stdin__ = _stream(0, "r", unbuffered=unbuffered)  # type: ignore[misc]  # final, but for us
    sys.__stdout__ = _stream(1, "w", unbuffered=unbuffered)  # type: ignore[misc]  # as above
    sys.__stderr__ = _stream(2, "w", unbuffered=unbuffered)  # type: ignore[misc]  # as above
    # An object of the user's own class, which writes to another stream, stays.
    if not _is_of_user(sys.stdout):
        sys.stdout = sys.__stdout__
    if not _is_of_user(sys.stderr):
        sys.stderr = sys.__stderr__


def _is_of_user(stream: object) -> bool:
    """Whether a stream is of the user's own class. Those of `io` write to a file, or keep the text in memory."""
    import io

    return hasattr(type(stream), "write") and not issubclass(type(stream), io.IOBase)


def _renew(stream: Any) -> bool:
    """Empty a stream that was made for 1 or 2 before the fork, and replace its lock, without a write.

    A thread that does not exist here may have held the lock at the fork: a flush, even to /dev/null, would wait for
    ever. Python renews no lock at a fork. ``__init__`` does. Returns False for a stream of another kind.
    """
    import io

    try:
        binary = stream.buffer
        if not (isinstance(stream, io.TextIOWrapper) and isinstance(binary, io.BufferedWriter)):
            return False
        if binary.raw.fileno() not in (1, 2):
            return False
        io.BufferedWriter.__init__(binary, binary.raw)
        io.TextIOWrapper.__init__(stream, binary, stream.encoding, stream.errors, "\n", line_buffering=True)
    except Exception:  # noqa: BLE001 - None, closed, detached, or an object of the user's: nothing can be done
        return False
    return True


def _stream(fd: int, mode: str, *, unbuffered: bool) -> io.TextIOWrapper:
    import io

    encoding, errors = _coding((sys.__stdin__, sys.__stdout__, sys.__stderr__)[fd])
    raw = io.FileIO(fd, mode, closefd=False)
    raw.name = ("<stdin>", "<stdout>", "<stderr>")[fd]
    binary: Any = io.BufferedReader(raw) if mode == "r" else raw if unbuffered else io.BufferedWriter(raw)
    by_line = mode == "w" and not unbuffered
    text = io.TextIOWrapper(binary, encoding, errors, "\n", line_buffering=by_line, write_through=unbuffered)
    text.mode = mode  # type: ignore[misc]  # typeshed has it read-only
    return text


def _coding(stream: Any) -> tuple[str | None, str | None]:
    """Read a stream's encoding and error handler; None where it has none."""
    try:
        return stream.encoding, stream.errors
    except (AttributeError, ValueError):  # None, or detached
        return None, None
