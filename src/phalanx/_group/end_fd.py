"""A descriptor that becomes readable when a group has ended, for other event loops."""

from __future__ import annotations

import os
from _thread import RLock


class EndFd:
    """An eventfd(2): `ring` makes it readable for good.

    >>> end = EndFd()
    >>> end.ring(); os.eventfd_read(end.fileno())
    1
    >>> end.close()
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Between a look at the descriptor and the write its number could become another file's. Reentrant, for a signal
        # handler that closes while its own thread rings.
        self._gate = RLock()

    def fileno(self) -> int:
        """Return the descriptor; -1 after `close`."""
        return self._fd

    def ring(self) -> None:
        """Make it readable."""
        with self._gate:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        """Close it. Idempotent."""
        with self._gate:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    __del__ = close
