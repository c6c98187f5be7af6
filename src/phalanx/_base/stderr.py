"""Writes to stderr without blocking.

A console that nobody reads (Ctrl-S, a pager, a reader that hangs), a file on a disk that does not answer, or a stand-in
of the host's must not delay the stopping of workers, or the end of a run. So a thread writes, and what is not taken for
`STALL` is dropped.
"""

from __future__ import annotations

import errno
import os
import select
import sys

from phalanx._base import linux
from phalanx._base.threads import SerialExecutor
from phalanx._base.tty import printable, sanitise

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO

STALL = 0.5
"""Seconds without progress after which the rest of a text is dropped."""

LAST_STALL = 2.0
"""The same for what a failed worker writes last."""


class _Writer:
    """The background thread that writes. A fork makes its own."""

    def __init__(self) -> None:
        self.executor = SerialExecutor("phalanx-tell")
        self.owner = os.getpid()
        self.written = 0


_writer = _Writer()


def tell(text: str) -> None:
    """Write ``text`` and a newline to stderr, sanitised (see `sanitise`). Never raises OSError.

    Returns when that is done, or after `STALL` without progress.
    """
    mention(text)
    finish()


def say(text: str) -> None:
    """Write lines of the command line's own, after ``phalanx: ``. What a terminal would obey is shown as escapes."""
    tell("\n".join(map(printable, f"phalanx: {text}".split("\n"))))


def mention(text: str) -> None:
    """Write ``text`` as `tell` does, on a background thread, after earlier texts. Returns at once."""
    global _writer  # noqa: PLW0603 - one for the process
    if _writer.owner != os.getpid():
        _writer = _Writer()
    stream = sys.stderr
    if not _writer.executor.submit(lambda: _write_text(stream, text)):  # no thread can be started
        _write_text(stream, text)


def finish() -> None:
    """Return when all texts are written, or after `STALL` without progress."""
    writer, before = _writer, -1
    while before != writer.written:
        before = writer.written
        if writer.executor.drain(2 * STALL):
            return


def write_last(text: str) -> bool:
    """Write ``text`` as `tell` does, on this thread, in a process that ends: its end is waited for by others.

    After `LAST_STALL` without progress the rest is dropped. Returns whether there is a stderr to write to.
    """
    return _write_text(sys.stderr, text, LAST_STALL)


def _write_text(stream: TextIO, text: str, patience: float = STALL) -> bool:
    """Write a text. Returns False if the stream is closed or broken."""
    try:
        import io

        if not isinstance(stream, io.TextIOWrapper) or isinstance(stream.buffer, io.BytesIO):
            # A stand-in of the host's (a notebook's, a test runner's): its descriptor, if any, may lead elsewhere.
            stream.write(f"{sanitise(text)}\n")
            stream.flush()
            return True
        fd = stream.fileno()
        stream.flush()
        data = memoryview(f"{sanitise(text)}\n".encode(stream.encoding, "backslashreplace"))
        try:
            own, most = linux.open_nonblocking(fd)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            _write(fd, data, select.PIPE_BUF, patience)  # no descriptor is left; it may block, and nobody waits
            return True
        try:
            _write(own, data, most, patience)
        finally:
            os.close(own)
    except Exception:  # noqa: BLE001 - closed, or gone, or none; or a stand-in of the host's, which may raise anything
        return False
    return True


def _write(fd: int, data: memoryview, most: int, patience: float) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    while data and poll.poll(patience * 1000):
        try:
            count = os.write(fd, data[:most])
        except BlockingIOError:  # room, but not for this: a terminal counts otherwise than poll(2)
            most = max(1, most // 2)
            if most == 1:
                return
        else:
            data = data[count:]
            _writer.written += count


def warn(text: str, level: str = "WARNING") -> None:
    """Log a warning, or what has another level. Without a log handler, write it to stderr, without blocking on a pipe.

    A handler that raises does not keep it from stderr.
    """
    if "logging" in sys.modules:
        import logging

        logger, number = logging.getLogger("phalanx"), getattr(logging, level)
        if logger.hasHandlers() or not logger.isEnabledFor(number):
            try:
                logger.log(number, "%s", text)
            except BaseException as error:  # the handler is the host's
                tell(f"phalanx: a handler of the log has raised {error!r} at: {text}")
                if not isinstance(error, Exception):  # to end this thread, or on the main thread the program
                    raise
            return
    tell(f"phalanx: {text}")
