"""Descriptors that travel beside a pickle: their handles in the pickle, and their owner in the receiving process."""

from __future__ import annotations

import os
from _thread import _local

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_unpickling = _local()  # has the descriptors that belong to the pickle which this thread is reading


class ReceivedFds:
    """Owns received descriptors. While it is entered, handles that are unpickled take theirs; `close` closes the rest.

    Leaving it closes it.
    """

    def __init__(self, fds: Sequence[int] = ()) -> None:
        self._fds = list(fds)
        self._outer: ReceivedFds | None = None

    def take(self, index: int) -> int:
        """Return a descriptor, which the caller owns from now on."""
        fd, self._fds[index] = self._fds[index], -1
        return fd

    def close(self) -> None:
        """Close the descriptors that have not been taken. Idempotent."""
        while self._fds:
            fd = self._fds.pop()
            if fd >= 0:
                os.close(fd)

    def __enter__(self) -> None:
        self._outer = getattr(_unpickling, "received", None)  # an object that is unpickled may wait for another group
        _unpickling.received = self

    def __exit__(self, *_error: object) -> None:
        _unpickling.received, self._outer = self._outer, None
        self.close()

    def __del__(self) -> None:
        self.close()


class FdHandle:
    """Takes the place of a descriptor in a pickle: its number among those that travel with the pickle.

    It has the method of the object that `multiprocessing.reduction.DupFd` returns.
    """

    def __init__(self, index: int) -> None:
        self._index = index

    def detach(self) -> int:
        """Return the descriptor, which the caller owns from now on."""
        received: ReceivedFds = _unpickling.received
        return received.take(self._index)
