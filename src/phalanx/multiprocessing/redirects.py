"""Send this process's stdout or stderr to a file, for a while, by its descriptor.

Owns descriptors 1 and 2 between `redirect`'s begin and end. Knows nothing of groups: the streams of workers are set
before their first instruction, by who starts them.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["redirect", "redirect_stderr", "redirect_stdout"]

_DESCRIPTORS = {"stdout": 1, "stderr": 2}

_FREE = 3
"""The first descriptor that is no standard stream: what we open must not land on one that happens to be closed."""


@contextlib.contextmanager
def redirect(std: str, to_file: str | os.PathLike[str]) -> Iterator[None]:
    r"""Redirect a standard stream of this process to a file, as a context manager.

    The file descriptor is redirected (`dup2(2)`), not ``sys.stdout``: what C code and child processes write goes to the
    file, too. What Python's stream and the C library's ``stdout`` and ``stderr`` hold back in buffers is written out
    before and after, so that each byte lands on its own side. Other buffers of C code (`fdopen(3)`) are its own to
    flush: the C library can only flush them all at once, for which it waits for every reader of a stream, a thread in
    `input` for one. At the end the descriptor is what it was, closed if it was closed, whatever happened
    meanwhile. Redirections can be nested, also to the same file.

    A ``sys.stdout`` that is closed, None, or not on the descriptor (a notebook's, a test runner's) is left as it is;
    what is printed to such an object does not go to the file.

    Args:
        std: ``"stdout"`` or ``"stderr"``.
        to_file: The file. It is created, or emptied if it is there. Its folder must exist.

    Yields:
        Nothing.

    Raises:
        ValueError: ``std`` is neither of the two.
        OSError: The file cannot be opened (FileNotFoundError: its folder is not there); nothing has been changed then.
            Or, at the end, what was written cannot be flushed to it (a full disk); the stream has been restored then.

    Descriptors belong to the process: while it is redirected, it is so for all threads.

    >>> import os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "out.txt")
    ...     with redirect("stdout", path):
    ...         code = os.system("echo from a child process")
    ...     with open(path) as file:
    ...         file.read()
    'from a child process\n'
    """
    if std not in _DESCRIPTORS:
        msg = f"std: expected 'stdout' or 'stderr', got {std!r}"
        raise ValueError(msg)
    fd = _DESCRIPTORS[std]
    # O_APPEND: two streams that are sent to the same file write behind, not over, each other.
    file = _above_standard(os.open(to_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666))
    before: int | None = None
    try:
        with contextlib.suppress(OSError):  # a closed descriptor, or a reader that is gone: as broken as it was
            _flush(std)
        with contextlib.suppress(OSError):  # EBADF: it is closed, and will be again
            before = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FREE)
        os.dup2(file, fd)
    except BaseException:
        if before is not None:
            os.close(before)
        raise
    finally:
        os.close(file)
    try:
        yield
    finally:
        try:
            _flush(std)
        finally:
            if before is None:
                with contextlib.suppress(OSError):  # the body has closed it
                    os.close(fd)
            else:
                os.dup2(before, fd)
                os.close(before)


redirect_stdout = functools.partial(redirect, "stdout")
"""`redirect` for stdout: ``with redirect_stdout(path): ...``."""

redirect_stderr = functools.partial(redirect, "stderr")
"""`redirect` for stderr: ``with redirect_stderr(path): ...``."""


def _above_standard(fd: int) -> int:
    """Move a new descriptor out of the way of the standard streams."""
    if fd >= _FREE:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FREE)
    finally:
        os.close(fd)


def _flush(std: str) -> None:
    """Write out what Python and the C library hold back. Raises OSError, after all have had their turn."""
    failed = None
    for stream in {id(stream): stream for stream in (getattr(sys, std), getattr(sys, f"__{std}__"))}.values():
        try:
            stream.flush()
        except OSError as error:
            failed = error
        except (ValueError, AttributeError):  # closed, or None
            continue
    import ctypes

    library = ctypes.CDLL(None)
    for name in _DESCRIPTORS:  # not fflush(3) with NULL, which takes the lock of stdin as well: a reader has it
        library.fflush(ctypes.c_void_p.in_dll(library, name))
    if failed is not None:
        raise failed
