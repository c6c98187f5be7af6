"""Redirects this process's stdout or stderr to a file, for the duration of a ``with`` block, by its descriptor.

Owns descriptors 1 and 2 between `redirect`'s begin and end. Knows nothing of groups: the keeper sets the streams of
workers before their first instruction.
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
"""The first descriptor that is no standard stream: what we open must not get the number of a closed one."""


@contextlib.contextmanager
def redirect(std: str, to_file: str | os.PathLike[str]) -> Iterator[None]:
    r"""Redirect a standard stream of this process to a file, as a context manager.

    The file descriptor is redirected (`dup2(2)`), not ``sys.stdout``: the file also gets the output of C code and of
    child processes. The buffers of Python's stream and of the C library's ``stdout`` and ``stderr`` are flushed before
    and after, so that output from before the block does not reach the file, and that of the block does. Other buffers
    of C code (`fdopen(3)`) are not flushed: the C library can only flush all at once, and waits for every thread that
    reads a stream then, one in `input` for example. At the end the descriptor is restored, or closed if it was closed,
    whatever happened meanwhile. Redirections can be nested, also to the same file.

    A ``sys.stdout`` that is closed, None, or not on the descriptor (a notebook's, a test runner's) is not changed, and
    what is printed to it does not go to the file.

    Args:
        std: ``"stdout"`` or ``"stderr"``.
        to_file: The file. It is created, or emptied if it exists. Its folder must exist.

    Yields:
        Nothing.

    Raises:
        ValueError: ``std`` is neither of the two.
        OSError: The file cannot be opened (FileNotFoundError: its folder does not exist), and nothing has been changed.
            Or, at the end, the buffers cannot be flushed to it (a full disk), and the stream has been restored.

    Descriptors belong to the process: the stream is redirected for all threads.

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
        raise ValueError(f"std: expected 'stdout' or 'stderr', got {std!r}")
    fd = _DESCRIPTORS[std]
    # O_APPEND: two streams that are redirected to the same file append to it, and do not overwrite each other.
    file = _above_standard(os.open(to_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666))
    before: int | None = None
    try:
        with contextlib.suppress(OSError):  # EBADF: it is closed, and is closed again at the end
            before = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FREE)
        if before is None:
            _occupy(fd)
        with contextlib.suppress(OSError):  # a reader that has closed: it was broken before
            _flush(std)
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
    """Move a new descriptor above those of the standard streams."""
    if fd >= _FREE:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FREE)
    finally:
        os.close(fd)


def _occupy(fd: int) -> None:
    """Open a descriptor that is closed. Else a file of ctypes gets its number: libffi 3.5 opens one, and keeps it."""
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    if nowhere != fd:
        os.dup2(nowhere, fd)
        os.close(nowhere)


def _flush(std: str) -> None:
    """Flush the buffers of Python and the C library. Raises OSError, after all have been tried."""
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
    for name in _DESCRIPTORS:  # not fflush(NULL), which also takes the lock of stdin: a thread that reads holds it
        library.fflush(ctypes.c_void_p.in_dll(library, name))
    if failed is not None:
        raise failed
