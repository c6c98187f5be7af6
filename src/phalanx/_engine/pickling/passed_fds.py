"""Descriptors that travel beside a pickle: what stands for them in it, and who owns them on arrival."""

from __future__ import annotations

import os
from _thread import _local

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_unpickling = _local()  # the descriptors of what this thread unpickles


class Given:
    """Owns descriptors that have arrived: a context in which what is unpickled may take them. It closes the rest."""

    def __init__(self, fds: Sequence[int] = ()) -> None:
        self._fds = list(fds)
        self._outer: Given | None = None

    def take(self, index: int) -> int:
        """The descriptor, which is the caller's from now on."""
        fd, self._fds[index] = self._fds[index], -1
        return fd

    def close(self) -> None:
        """Close what nobody has taken. Idempotent."""
        while self._fds:
            fd = self._fds.pop()
            if fd >= 0:
                os.close(fd)

    def __enter__(self) -> None:
        self._outer = getattr(_unpickling, "given", None)  # what is unpickled may wait for another group
        _unpickling.given = self

    def __exit__(self, *_error: object) -> None:
        _unpickling.given, self._outer = self._outer, None
        self.close()

    def __del__(self) -> None:
        self.close()


class Handle:
    """Stands for a descriptor in a pickle, by its number among those that travel with it.

    It has the method of what `multiprocessing.reduction.DupFd` returns.
    """

    def __init__(self, index: int) -> None:
        self._index = index

    def detach(self) -> int:
        """The descriptor; the caller owns it from now on."""
        given: Given = _unpickling.given
        return given.take(self._index)
