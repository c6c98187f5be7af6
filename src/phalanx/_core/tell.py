"""What the command line tells a person, on stderr.

Owns not waiting for the reader: a console that nobody reads (Ctrl-S, a pager, a reader that hangs) must not hold up the
stopping of workers, or the end of a run. What it says is somebody else's business.
"""

from __future__ import annotations

import os
import select
import sys

from phalanx._core import linux

PATIENCE = 0.5
"""Seconds in which nothing of a text is taken, after which the rest of it is given up."""


def tell(text: str) -> None:
    """Write ``text`` and a newline to stderr, or as much of it as somebody takes. Never raises OSError."""
    try:
        fd = sys.stderr.fileno()
        sys.stderr.flush()
        data = memoryview(f"{text}\n".encode(sys.stderr.encoding, "backslashreplace"))
        own, most = linux.open_unblocking(fd)
        try:
            _write(own, data, most)
        finally:
            os.close(own)
    except (OSError, ValueError, AttributeError):  # closed, or gone, or none
        return


def _write(fd: int, data: memoryview, most: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    while data and poll.poll(PATIENCE * 1000):
        try:
            data = data[os.write(fd, data[:most]) :]
        except BlockingIOError:  # room, but not for this: a terminal counts otherwise than poll(2)
            most = max(1, most // 2)
            if most == 1:
                return
