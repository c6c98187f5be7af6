"""Writes to a pipe whose reader may be gone, without SIGPIPE.

The interpreter ignores the signal; a program may have restored the default (so that its output ends quietly in `head`),
or have a handler of its own, and neither is meant for a pipe of ours. MSG_NOSIGNAL works on sockets alone.
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
    """As os.write(), but a pipe without a reader raises BrokenPipeError, and the process receives no SIGPIPE."""
    if signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN:
        return os.write(fd, data)
    # The kernel sends it to the thread that wrote: it is blocked there during the write, and taken by sigtimedwait(2)
    # if it is pending then. The mask is read first: a handler of another signal may raise from the call that sets it.
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


def reader_is_gone(fd: int) -> bool:
    """Whether a descriptor is a pipe or a socket that nobody can read from any more."""
    import select

    poll = select.poll()
    poll.register(fd, 0)
    return any(events & select.POLLERR for _fd, events in poll.poll(0))
