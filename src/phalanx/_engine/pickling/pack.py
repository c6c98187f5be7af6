"""Packs a group's call, a function and the arguments of every rank, into the payload that its workers read.

Runs in the launcher. The call is pickled once for the whole group (`call_pickler`), and written once into one memfd,
whose layout is described in `payload`. Knows nothing of processes; `results` has the way back.
"""

from __future__ import annotations

import marshal
import os
import sys

from phalanx._base import linux
from phalanx._engine import mp_parent
from phalanx._engine.pickling.call_pickler import Spawning, pickle_call
from phalanx._engine.pickling.payload import HEADER, page_after
from phalanx._engine.search_path import search_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    import pickle
    from collections.abc import Callable, Mapping
    from typing import Any

    from phalanx._engine import main_module
    from phalanx._engine.pickling.call_pickler import Parts
    from phalanx._engine.pickling.payload import Extent


class Packed:
    """A call that `pack` has written.

    Attributes:
        memfd: The payload. `close` closes it.
        fds: Descriptors that must reach the workers with it. Their owners close them.
        owners: The objects that own these. They may have been made for the pickling alone, and are kept until the
            descriptors have been sent.
        fd_indices: Local rank → the indices into ``fds`` of those that the rank inherits.
        sent: The objects that were pickled by value, by their number.
        by_value: Whether the call was pickled by value.
    """

    def __init__(
        self,
        memfd: int,
        fds: list[int],
        owners: list[object],
        fd_indices: dict[int, list[int]],
        sent: list[object] | None,
    ) -> None:
        self.memfd = memfd
        self.fds = fds
        self.owners = owners
        self.fd_indices = fd_indices
        self.sent = sent or []
        self.by_value = sent is not None

    def close(self) -> None:
        """Close the memfd, once the workers have everything."""
        os.close(self.memfd)
        self.owners.clear()


def pack(
    function: Callable[..., Any],
    arguments: Mapping[int, tuple[Any, ...]],
    *,
    writable: bool = False,
    numbered: bool = False,
    main: main_module.Source | None = None,
    identities: mp_parent.ChildIdentities | None = None,
    envs: Mapping[int, Mapping[str, str]] | None = None,
) -> Packed:
    """Pickle a call for every rank into a new memfd.

    Args:
        function: The function to call.
        arguments: Local rank → its positional arguments.
        writable: Whether workers may write to large buffers, each to its own copy of the pages that it writes to.
        numbered: Whether the function takes the rank before the arguments; its return value is not sent back then.
        main: What the workers run again as their main module; None: what is defined there is pickled by value.
        identities: The workers as children of `multiprocessing`; default: those of start method "spawn".
        envs: Local rank → the variables that are set once more after the main module has run.

    Raises UnpicklableError, which names what cannot be pickled.
    """
    identities = identities or mp_parent.ChildIdentities("spawn", arguments)
    with Spawning() as spawning:
        parts, sent = pickle_call(function, arguments, spawning, main)
    blobs, index = _lay_out(parts)
    buffers = _Buffers()
    for rank, three in parts.items():
        index["buffers"][rank] = [buffers.add(each) for part in three for each in part.buffers]
    index |= {"writable": writable, "numbered": numbered, "main": main}
    index["envs"] = {rank: dict(env) for rank, env in (envs or {}).items() if env}
    index["private"] = {rank: len(code.buffers + called.buffers) for rank, (code, called, _arguments) in parts.items()}
    index["children"] = {rank: identities.state(rank) for rank in arguments}
    numbers = {rank: [number for part in three for number in part.fds] for rank, three in parts.items()}
    passed = spawning.fds
    tracker = mp_parent.resource_tracker()
    if tracker is not None:
        # One tracker for all: a worker's own would unlink shared memory that the worker has only attached, by name.
        index["tracker"] = len(passed)
        passed = [*passed, tracker]
        for of_rank in numbers.values():
            of_rank.append(len(passed) - 1)
    index["fds"] = numbers
    index["prepared"] = mp_parent.prepared_by_others()
    fds, fd_indices = _without_duplicates(passed, numbers)
    memfd = linux.memory_file("phalanx-payload")
    try:
        index["start"] = page_after(sum(map(len, blobs)))  # of the buffers, from where the pickles begin
        head = marshal.dumps(index)
        first = page_after(HEADER + len(head))
        _write(memfd, 0, len(head).to_bytes(HEADER, "little"), head)
        _write(memfd, first, *blobs)
        buffers.write(memfd, first + index["start"])
        linux.seal_for_maps(memfd)  # no worker can change what another one reads
    except BaseException:
        os.close(memfd)
        raise
    return Packed(memfd, fds, spawning.owners, fd_indices, sent)


def _lay_out(parts: Parts) -> tuple[list[bytes], dict[str, Any]]:
    """Returns the pickles, in the order in which they are written, and the index with their extents."""
    blobs: list[bytes] = []
    extents: dict[int, Extent] = {}  # by id of the part: one that several ranks have is written once
    end = 0
    for part in (part for three in parts.values() for part in three):
        if id(part) not in extents:
            extents[id(part)] = (end, len(part.pickle))
            blobs.append(part.pickle)
            end += len(part.pickle)
    index: dict[str, Any] = {
        "path": search_path(),
        "argv": [str(argument) for argument in getattr(sys, "argv", [])],
        "parts": {rank: [extents[id(part)] for part in three] for rank, three in parts.items()},
        "buffers": {},
    }
    return blobs, index


def _without_duplicates(fds: list[int], numbers: dict[int, list[int]]) -> tuple[list[int], dict[int, list[int]]]:
    """Drop repeated descriptors: a process may have few open ones, and a model has one for each tensor.

    A descriptor that one rank has several times stays as often.

    Returns the descriptors, and for each rank the indices into them, in the order of its ``numbers``.
    """
    indices: dict[tuple[int, int], int] = {}  # by the descriptor, and how many of it the rank has before
    by_rank: dict[int, list[int]] = {}
    for rank, of_rank in numbers.items():
        repeats: dict[int, int] = {}
        by_rank[rank] = []
        for fd in (fds[number] for number in of_rank):
            repeats[fd] = repeats.get(fd, -1) + 1
            by_rank[rank].append(indices.setdefault((fd, repeats[fd]), len(indices)))
    return [fd for fd, _repeat in indices], by_rank


class _Buffers:
    """Large buffers, each on pages of its own; one that several ranks have is written once."""

    def __init__(self) -> None:
        self._views: list[memoryview] = []
        self._extents: dict[tuple[int, int], Extent] = {}  # by address and length
        self._end = 0

    def add(self, buffer: pickle.PickleBuffer) -> Extent:
        """Add a buffer. Returns its extent, from where the buffers begin."""
        view = buffer.raw()
        key = (_address(view), view.nbytes)
        if key not in self._extents:
            self._extents[key] = (self._end, view.nbytes)
            self._views.append(view)
            self._end += page_after(view.nbytes)
        return self._extents[key]

    def write(self, fd: int, start: int) -> None:
        """Write all buffers to a file, from the offset ``start`` on."""
        if self._end:
            os.ftruncate(fd, start + self._end)
        for view, (offset, _length) in zip(self._views, self._extents.values(), strict=True):
            _write(fd, start + offset, view)


def _address(view: memoryview) -> int:
    """The address of a buffer, or, of one that ctypes refuses because it is read-only, the id of its owner."""
    import ctypes

    if view.readonly:
        return id(view.obj)
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _write(fd: int, offset: int, *blobs: bytes | memoryview) -> None:
    for blob in blobs:
        view = memoryview(blob)
        while view:
            count = os.pwrite(fd, view, offset)
            view, offset = view[count:], offset + count
