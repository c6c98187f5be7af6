"""What is told a person, on stderr.

Owns not waiting for the reader: a console that nobody reads (Ctrl-S, a pager, a reader that hangs), a file on a disk
that does not answer, or a stand-in of the host's must not hold up the stopping of workers, or the end of a run. What
it says is somebody else's business.
"""

from __future__ import annotations

import errno
import os
import select
import sys

from phalanx._base import linux
from phalanx._base.background import Aside
from phalanx._base.control_chars import harmless

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO

PATIENCE = 0.5
"""Seconds in which nothing of a text is taken, after which the rest of it is given up."""


class _Voice:
    """The thread that writes, for as long as there is anything; of one process, and of none of its forks."""

    def __init__(self) -> None:
        self.aside = Aside("phalanx-tell")
        self.owner = os.getpid()
        self.written = 0


_voice = _Voice()


def tell(text: str) -> None:
    """Write ``text`` and a newline to stderr, or as much of it as somebody takes: see `harmless`. Never raises OSError.

    Returns when that is done, or when nothing has been taken for a while.
    """
    mention(text)
    finish()


def mention(text: str) -> None:
    """Have ``text`` told soon, after what was told before. Returns at once."""
    global _voice  # noqa: PLW0603 - one for the process
    if _voice.owner != os.getpid():
        _voice = _Voice()
    stream = sys.stderr
    if not _voice.aside.call(lambda: _say(stream, text)):  # no thread is to be had
        _say(stream, text)


def finish() -> None:
    """Return when all is told, or when nothing has been taken for a while."""
    voice, before = _voice, -1
    while before != voice.written:
        before = voice.written
        if voice.aside.finish(2 * PATIENCE):
            return


def _say(stream: TextIO, text: str) -> None:
    try:
        fd = stream.fileno()
        stream.flush()
        data = memoryview(f"{harmless(text)}\n".encode(stream.encoding, "backslashreplace"))
        try:
            own, most = linux.open_unblocking(fd)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            _write(fd, data, select.PIPE_BUF)  # no descriptor is left; it may block, and nobody waits for that
            return
        try:
            _write(own, data, most)
        finally:
            os.close(own)
    except Exception:  # noqa: BLE001 - closed, or gone, or none; or a stand-in of the host's, which may raise anything
        return


def _write(fd: int, data: memoryview, most: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    while data and poll.poll(PATIENCE * 1000):
        try:
            count = os.write(fd, data[:most])
        except BlockingIOError:  # room, but not for this: a terminal counts otherwise than poll(2)
            most = max(1, most // 2)
            if most == 1:
                return
        else:
            data = data[count:]
            _voice.written += count
