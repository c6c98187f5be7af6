"""The payload of a group, as its workers read it: one memfd with the pickled calls of all ranks.

Every worker reads the same memfd at its own offsets::

    length of the index (8 bytes) | index (marshal) | pickles | large buffers

The pickles and the buffers each begin on a page of their own. Large buffers (an array's elements) are not in the
pickles (PEP 574): every worker maps them, so there is one copy, whatever their size and however many the workers. The
memfd is sealed: a worker that opens it for writing, or clears numpy's flag, changes nothing of another's.
`call_pickler` writes all of it; it is not imported here, because this is on every worker's start.
"""

from __future__ import annotations

import io
import marshal
import os
import sys
from _thread import _local

from phalanx._engine import main_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    import pickle
    from collections.abc import Callable, Sequence
    from typing import Any
else:
    import _pickle as pickle  # the C half: `pickle` imports re and enum, 3 of a worker's 15 ms

Extent = tuple[int, int]
"""Where something lies in the memfd: offset and length in bytes."""

HEADER = 8
"""Bytes, for the length of the index that follows."""

_PAGE = os.sysconf("SC_PAGESIZE")  # where a mapping may begin


def page_after(offset: int) -> int:
    """The first page boundary at or after an offset, in bytes."""
    return -(-offset // _PAGE) * _PAGE


class Payload:
    """Reads in a worker what `pack` has written.

    Args:
        memfd: The payload. `close` closes it.
        fds: The other descriptors that this worker has inherited for its call.
    """

    def __init__(self, memfd: int, fds: list[int]) -> None:
        self._memfd = memfd
        length = int.from_bytes(os.pread(memfd, HEADER, 0), "little")
        self.index: dict[str, Any] = marshal.loads(os.pread(memfd, length, HEADER))  # noqa: S302 - our launcher wrote it
        self._base = page_after(HEADER + length)
        self._fds = fds

    def take(self, rank: int) -> int | None:
        """Take ownership of the descriptors of ``rank``. Returns that of the launcher's resource tracker, if any."""
        # Pickles number them as the launcher does; a worker has only its own.
        numbers = self.index["fds"][rank]
        by_number = dict(zip(numbers, self._fds, strict=True))
        self._received = ReceivedFds([by_number.get(number, -1) for number in range(max(numbers, default=-1) + 1)])
        tracker = self.index.get("tracker", -1)
        return self._received.take(tracker) if tracker in by_number else None

    def prepare(self) -> None:
        """Unpickle what others than `multiprocessing` have its children unpickle before all else."""
        if self.index["prepared"]:
            pickle.loads(self.index["prepared"])

    def load(self, rank: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Unpickle the function and the arguments of ``rank``. Raises whatever unpickling raises."""
        data = io.BytesIO(b"".join(self._read(extent) for extent in self.index["parts"][rank]))
        unpickler = pickle.Unpickler(data, buffers=self._map(rank))
        with self._received:
            code = unpickler.load()
            function = unpickler.load()
            if self.index["main"] is None:
                _add_to_main(*code)
            return function, unpickler.load()

    def close(self) -> None:
        """Close the memfd. Mapped buffers stay for as long as something refers to them."""
        os.close(self._memfd)

    def _map(self, rank: int) -> list[memoryview]:
        """Map the large buffers of a rank (mmap(2)): shared pages, or private copies if the worker may write to them.

        What belongs to the function itself (its globals, its closure) is always a private copy.
        """
        extents, private = self.index["buffers"][rank], self.index["private"][rank]
        of_function, of_arguments = extents[:private], extents[private:]
        return self._mapped(of_function, writable=True) + self._mapped(of_arguments, writable=self.index["writable"])

    def _mapped(self, extents: list[Extent], *, writable: bool) -> list[memoryview]:
        """Map extents; those that adjoin with one mapping, because each mapping keeps a descriptor open."""
        if not extents:
            return []
        import mmap

        how = (mmap.MAP_SHARED, mmap.PROT_READ)
        if writable:
            how = (mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        start = self._base + self.index["start"]
        views: dict[Extent, memoryview] = {}
        for run in _adjoining(extents):
            first, (last, length) = run[0][0], run[-1]
            whole = memoryview(mmap.mmap(self._memfd, last + length - first, *how, offset=start + first))
            for extent in run:
                views[extent] = whole[extent[0] - first :][: extent[1]]
        return [views[extent] for extent in extents]

    def _read(self, extent: Extent) -> bytes:
        offset, length = extent
        parts = []
        while length:  # one pread returns at most 2 GiB
            parts.append(os.pread(self._memfd, length, self._base + offset))
            offset += len(parts[-1])
            length -= len(parts[-1])
        return b"".join(parts)


def _adjoining(extents: list[Extent]) -> list[list[Extent]]:
    """Sort extents into lists in which each begins on the page at which the one before ends."""
    runs: list[list[Extent]] = []
    for extent in sorted(set(extents)):
        if runs and sum(map(page_after, (runs[-1][-1][0], runs[-1][-1][1]))) == extent[0]:
            runs[-1].append(extent)
        else:
            runs.append([extent])
    return runs


def _add_to_main(*code: object) -> None:
    """Add functions and classes that were sent by value from a ``__main__`` to this process's ``__main__``.

    An instance of such a class can then be pickled (for a queue, say) by the class's name.
    """
    main = vars(sys.modules["__main__"])
    function = type(_add_to_main)
    for each in code:
        if isinstance(each, function):
            names = each.__globals__
            if names.get("__name__") in main_module.NAMES and names is not main:
                main.update({name: value for name, value in names.items() if not name.startswith("__")})
        if isinstance(each, (type, function)) and each.__module__ in main_module.NAMES and "." not in each.__qualname__:
            main.setdefault(each.__qualname__, each)


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
