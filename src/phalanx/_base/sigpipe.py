"""Writing to a pipe whose reader may have gone, from a process that such a write could end.

Owns what becomes of SIGPIPE meanwhile. The interpreter ignores the signal; a program may have put that back to the
default (its output shall end quietly in `head`), or have a handler of its own, and neither is meant for a pipe of ours.
MSG_NOSIGNAL is for sockets alone.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    import signal
else:
    import _signal as signal  # the C half: `signal` builds enums for 3 ms
    import posix as os  # the C half: `os` itself takes 1 of the 13 ms in which a keeper gets up


def write(fd: int, data: bytes) -> int:
    """os.write(), but a pipe without a reader raises BrokenPipeError and does nothing else, in any process."""
    if signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN:
        return os.write(fd, data)
    # It comes to the thread that wrote (write(2) raises it there): it is held up for that long, and taken out if it
    # came by us. The mask is asked for first: a handler of another signal may raise from the call that changes it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGPIPE,))
        was_pending = signal.SIGPIPE in signal.sigpending()
        try:
            return os.write(fd, data)
        except BrokenPipeError:
            if not was_pending:
                signal.sigtimedwait((signal.SIGPIPE,), 0)
            raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
