"""The standard streams of a worker: made anew in a fork, flushed at the end, and written to whatever stands there.

Owns what becomes of the streams from before a fork, which somebody may use still. Never raises: a disk is full, a
stream is closed, or it is an object of the user's.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import io
    from typing import Any

_kept: list[Any] = []  # streams from before a fork; their end as objects would write what is in their buffers
_renewed: list[Any] = []  # those of them that can be used again


def say(text: str) -> None:
    """Print to stderr what must not be lost. Never raises, whatever stands there."""
    for stream in (sys.stderr,) if sys.stderr is sys.__stderr__ else (sys.stderr, sys.__stderr__):
        if attempt(stream, "write", text) and attempt(stream, "flush"):
            return


def attempt(stream: object, method: str, *arguments: Any, **options: Any) -> bool:
    """Call a method of a standard stream. Returns whether that went well: a disk is full, or it is closed, or None.

    Or it is an object of the user's, which may do anything.
    """
    try:
        getattr(stream, method)(*arguments, **options)
    except Exception:  # noqa: BLE001 - see above
        return False
    return True


def flush() -> None:
    """Write what is in the buffers, those of streams from before the fork included."""
    for stream in (sys.stdout, sys.stderr, *_renewed):
        attempt(stream, "flush")


def open_anew(*, unbuffered: bool) -> None:
    """Make the standard streams anew on 0, 1 and 2, with the attributes that the interpreter gives them.

    Those that are there were made for what the descriptors were before, and may hold what others wrote. Somebody may
    use them still: they are renewed as well.
    """
    before = [sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__]
    _kept.extend(stream for stream in before if not any(stream is each for each in _kept))
    _renewed[:] = filter(_renew, _kept)
    sys.stdin = sys.__stdin__ = _stream(0, "r", unbuffered=unbuffered)  # type: ignore[misc]  # final, but for us
    sys.__stdout__ = _stream(1, "w", unbuffered=unbuffered)  # type: ignore[misc]  # as above
    sys.__stderr__ = _stream(2, "w", unbuffered=unbuffered)  # type: ignore[misc]  # as above
    # An object of the user's own class, which passes on what it is told, goes on doing so.
    if not _passes_on(sys.stdout):
        sys.stdout = sys.__stdout__
    if not _passes_on(sys.stderr):
        sys.stderr = sys.__stderr__


def _passes_on(stream: object) -> bool:
    """Whether it is of somebody's own class, and writes. Those of the library write to a file, or keep it in memory."""
    import io

    return hasattr(type(stream), "write") and not issubclass(type(stream), io.IOBase)


def _renew(stream: Any) -> bool:
    """Empty a stream that was made for 1 or 2 before the fork, and free its lock, without a write. Returns if it could.

    A thread that is not here may have held the lock at the fork: a flush, even to /dev/null, would wait for ever.
    Python makes no lock anew for a fork. ``__init__`` does.
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
    """A stream's encoding, and how it takes what that cannot say; None where it does not tell."""
    try:
        return stream.encoding, stream.errors
    except (AttributeError, ValueError):  # None, or detached
        return None, None
