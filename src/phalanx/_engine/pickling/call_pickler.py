"""Pickles a call for all ranks of a group: by reference, or by value if that is not possible.

By reference goes what the workers can import, the main module included, which they run again. By value (cloudpickle)
goes what has no other way: lambdas, closures, what a notebook's cells define. Descriptors that `multiprocessing`
objects hold are collected beside the pickles (`Spawning`).

One pickler memo serves the whole group: code by value comes first, then the function, then each rank's arguments,
before which the memo is set back to where the function ended. So a rank's part may refer to objects of the function,
and never to another rank's.

Large buffers stay out of the pickles, and all workers share them. That holds for arguments. What belongs to a function
by value (its globals, its closure) each worker has for itself; the memory of a tensor that is an argument as well is
shared, as it is where the function is imported.
"""

from __future__ import annotations

import copyreg
import io
import marshal
import os
import sys

from phalanx._base import linux
from phalanx._engine import main_module, mp_parent
from phalanx._engine.main_module import search_path
from phalanx._engine.pickling.payload import HEADER, FdHandle, page_after
from phalanx._engine.pickling.picklers import Nowhere, plain, registered, sharing_reducers

TYPE_CHECKING = False
if TYPE_CHECKING:
    import pickle
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from phalanx._engine.pickling.payload import Extent
else:
    import _pickle as pickle  # the C half, as in `payload`

LARGE = 1 << 20
"""Bytes from which a buffer is shared by all workers. A smaller one is cheaper to copy."""


class Part:
    """One pickled object of a call.

    Attributes:
        pickle: The pickle.
        buffers: The large buffers that are not in it.
        fds: The descriptors that belong to it, by their numbers in `Spawning`.
        shared: Whether several workers may unpickle it.
    """

    def __init__(self, pickle: bytes, buffers: list[pickle.PickleBuffer], fds: list[int], *, shared: bool) -> None:
        self.pickle = pickle
        self.buffers = buffers
        self.fds = fds
        self.shared = shared


Parts = dict[int, tuple[Part, Part, Part]]
"""Local rank → the code that goes by value, the function, the arguments."""


def pickle_call(
    function: Callable[..., Any],
    arguments: Mapping[int, tuple[Any, ...]],
    spawning: Spawning,
    main: main_module.Source | None,
) -> tuple[Parts, list[object] | None]:
    """Pickle a function and the arguments of every rank, while ``spawning`` is entered.

    Returns the parts, and the objects that went by value, or None if none did. Raises UnpicklableError.
    """
    if not registered():
        pickling = _CallPickling(spawning, main)
        try:
            parts = pickling.dump((), function, arguments)
        except Exception:  # noqa: BLE001 - whatever cannot go by reference is tried by value
            spawning.clear()
        else:
            if main is not None or not pickling.names_main(parts):
                return parts, None
            spawning.clear()
    try:
        pickling = _CallPickling(spawning, main, by_value=True)
        parts = pickling.dump(pickling.find_code(function, arguments), function, arguments)
    except Exception as error:
        from phalanx._engine.pickling.unpicklable import explain_call

        def pickler() -> Any:
            return _make_pickler(Nowhere(), sharing_reducers(), main, sent=[])

        raise explain_call(function, arguments, error, pickler) from error
    return parts, pickling.sent


class _CallPickling:
    """One attempt at pickling a call, either by reference or by value."""

    def __init__(self, spawning: Spawning, main: main_module.Source | None, *, by_value: bool = False) -> None:
        self._spawning = spawning
        self._main = main
        self._by_value = by_value
        self._used_sharing = False
        self._file = io.BytesIO()
        self._buffers: list[pickle.PickleBuffer] = []
        self._argument_memory: dict[int, object] = {}  # by id: the memory of tensors that are arguments
        self.sent: list[object] = []

    def find_code(self, function: Callable[..., Any], arguments: Mapping[int, tuple[Any, ...]]) -> list[object]:
        """Find the objects in the function and the arguments that go by value, by pickling all to nowhere."""
        found: list[object] = []
        table = dict.fromkeys(sharing_reducers(), lambda _value: (_false, ()))
        pickler = _make_pickler(Nowhere(), table, self._main, sent=found, buffer_callback=lambda _buffer: False)
        call = function, list({id(values): values for values in arguments.values()}.values())
        pickler.dump(call)
        if found and "torch" in sys.modules:
            from phalanx._engine.pickling import tensors

            table |= tensors.noting_reducers(self._argument_memory)
            pickler = _make_pickler(Nowhere(), table, self._main, sent=list(found))
            pickler.memo = {id(each): (number, each) for number, each in enumerate(found)}  # not looked into
            pickler.dump(call)
        return found

    def dump(
        self, code: Sequence[object], function: Callable[..., Any], arguments: Mapping[int, tuple[Any, ...]]
    ) -> Parts:
        """Pickle the code that goes by value, then the function and each rank's arguments."""
        shared = {kind: self._noting_use(reduce) for kind, reduce in sharing_reducers().items()}
        of_code = dict(shared)
        if "torch" in sys.modules:  # tensors of the code alone are copied, as they are where a worker imports it
            from phalanx._engine.pickling import tensors

            of_code |= tensors.copying_reducers(shared, keep_shared=self._argument_memory)
        coder = self._pickler(of_code)
        first = self._part(coder, tuple(code))
        pickler = self._pickler(shared)
        start = coder.memo.copy()
        called = self._part(pickler, function, start)
        after = pickler.memo.copy()
        parts: Parts = {}
        seen: dict[int, Part] = {}  # a tuple that several ranks have is pickled once
        for rank, values in arguments.items():
            if parts and not first.shared:
                first = self._part(coder, tuple(code), {})
                start = coder.memo.copy()
            if parts and not (first.shared and called.shared):
                called = self._part(pickler, function, start)
                after = pickler.memo.copy()
            part = seen.get(id(values)) or self._part(pickler, _Large.wrap(tuple(values)), after)
            if part.shared and called.shared and first.shared:
                seen[id(values)] = part
            parts[rank] = (first, called, part)
        return parts

    @staticmethod
    def names_main(parts: Parts) -> bool:
        """Whether a pickle refers by name to the main module, which the workers do not run."""
        pickles = {id(part): part.pickle for three in parts.values() for part in three}
        return any(name.encode() in data for data in pickles.values() for name in main_module.NAMES)

    def _pickler(self, table: Mapping[type, Any]) -> Any:
        sent = self.sent if self._by_value else None
        return _make_pickler(self._file, table, self._main, sent=sent, buffer_callback=self._keep_in_pickle)

    def _keep_in_pickle(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether a buffer stays in the pickle. The pickler calls this for each."""
        if buffer.raw().nbytes < LARGE:
            return True
        self._buffers.append(buffer)
        return False

    def _noting_use(self, reduce: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap a reducer of shared objects so that its use is noted.

        Its reduction may be valid for one receiver only: memory that is found by name, or that is on a device, counts
        its receivers.
        """

        def noting(value: Any) -> Any:
            self._used_sharing = True
            self._spawning.owners.append(value)
            return reduce(value)

        return noting

    def _part(self, pickler: Any, value: object, memo: Any = None) -> Part:
        first = len(self._spawning.fds)
        self._used_sharing = False
        self._buffers.clear()
        self._file.seek(0)
        self._file.truncate()
        if memo is not None:
            pickler.memo = memo
        pickler.dump(value)
        fds = list(range(first, len(self._spawning.fds)))
        return Part(self._file.getvalue(), list(self._buffers), fds, shared=not self._used_sharing)


class _Large:
    """Wraps a large ``bytes`` or ``bytearray``, so that the pickler keeps it out of the pickle.

    It is unpickled as its own type, which owns its memory, so each worker makes one more copy.
    """

    def __init__(self, value: bytes | bytearray) -> None:
        self._value = value

    def __reduce_ex__(self, _protocol: object) -> tuple[type, tuple[pickle.PickleBuffer]]:
        return type(self._value), (pickle.PickleBuffer(self._value),)

    @classmethod
    def wrap(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return ``values`` with the large ones wrapped."""
        large = {id(each): cls(each) for each in values if type(each) in (bytes, bytearray) and len(each) >= LARGE}
        return tuple(large.get(id(value), value) for value in values) if large else values


def _false(*_ignored: object) -> bool:
    """Return False: in place of an object that is not looked into, and for "not importable from the main module"."""
    return False


def _make_pickler(
    file: Any,
    table: Mapping[type, Any],
    main: main_module.Source | None,
    *,
    sent: list[object] | None,
    buffer_callback: Callable[[Any], Any] | None = None,
) -> Any:
    """Make a pickler by reference, or by value if there is a list ``sent`` for the objects that go so.

    ``table`` has the reducers that take precedence over those of `copyreg`. ``main`` is what the workers run again as
    their main module.
    """
    importable = _false if main is None else main_module.finds
    table = {**copyreg.dispatch_table, **table}
    if sent is None:
        return plain(file, table, buffer_callback=buffer_callback, importable=importable, returns=False)
    from phalanx._engine.pickling import by_value

    return by_value.make(file, table, buffer_callback=buffer_callback, importable=importable, sent=sent)


class Spawning:
    """Makes `multiprocessing` assume that this thread is spawning one of its processes, while it is entered.

    Its locks, queues and connections refuse to be pickled otherwise. It calls two methods of the process object
    ("popen") that it is given: `duplicate_for_child` takes a descriptor, and returns a number; `DupFd` returns what is
    pickled in place of the descriptor with that number.
    """

    def __init__(self) -> None:
        self.fds: list[int] = []
        self.owners: list[object] = []

    def __enter__(self) -> Spawning:  # noqa: PYI034 - typing.Self would be one more import
        from multiprocessing import context

        context.set_spawning_popen(self)  # type: ignore[arg-type]  # see above
        return self

    def __exit__(self, *_error: object) -> None:
        from multiprocessing import context

        context.set_spawning_popen(None)

    def clear(self) -> None:
        """Forget all descriptors and their owners."""
        self.fds.clear()
        self.owners.clear()

    def duplicate_for_child(self, fd: int) -> int:
        """Add a descriptor. Returns its number."""
        self.fds.append(fd)
        return len(self.fds) - 1

    def DupFd(self, number: int) -> FdHandle:  # noqa: N802 - the name is multiprocessing's
        """Return what is pickled in place of a descriptor."""
        return FdHandle(number)


class Packed:
    """A call that `pack` has written.

    Attributes:
        memfd: The payload. `close` closes it.
        fds: Descriptors that must reach the workers with it. Their owners close them.
        owners: The objects that own these, perhaps made for the pickling alone: kept until the descriptors are sent.
        fd_indices: Local rank → the indices into ``fds`` of those that the rank inherits.
        sent: The objects that were pickled by value, by their number.
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
    """Pickle a call for every rank into a new memfd. Raises UnpicklableError, which names what cannot be pickled.

    ``writable``: whether workers may write to large buffers, each to its own copy of the pages that it writes to.
    ``numbered``: whether the function takes the rank before the arguments; its return value is not sent back then.
    ``main``: what the workers run again as their main module; None: what is defined there is pickled by value.
    ``identities``: the workers as children of `multiprocessing`; default: those of start method "spawn". ``envs``: the
    variables of each rank that are set once more after the main module has run.
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
