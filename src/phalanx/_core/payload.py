"""A function and its arguments on their way to the workers, and a value on its way back.

Owns pickling: by reference where the worker can import, by value (cloudpickle) for what lives in ``__main__``, in a
notebook's cell or in another function; and the handing over of what `multiprocessing` keeps in descriptors. Knows
nothing of processes.

The group's payload is pickled once, into one memfd that every worker reads at its own offsets. One pickler writes all
of it; before each rank's arguments its memo is wound back to where the function ended, so that a rank's part may
refer to the function's objects, and never to another rank's.

Large buffers (an array's elements) stay out of the pickle (PEP 574). They are written into the memfd once, and every
worker maps them: whatever their size and however many the workers, there is one copy, and none is made on the way.
"""

from __future__ import annotations

import copyreg
import io
import marshal
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import pickle
    from collections.abc import Callable, Mapping
    from typing import Any
else:
    import _pickle as pickle  # the C half: `pickle` imports re and enum, 3 of a worker's 15 ms

_PAGE = os.sysconf("SC_PAGESIZE")  # where a mapping may begin
_PROTOCOL = 5  # both ends are the same interpreter, 3.11 or later
_HEADER = 8  # bytes, for the length of the index that follows

LARGE = 1 << 20
"""Bytes from which a buffer is shared by all workers. A smaller one is cheaper to copy."""

_given: list[int] = []  # in a worker: the descriptors that came with the payload


class UnpicklableError(TypeError):
    """Something on its way to or from a worker cannot be pickled. The message names it."""


class _ByValue(Exception):  # noqa: N818 - a turn of the road, not an error
    """What is being pickled holds code that a worker cannot import."""


def pack(
    function: Callable[..., Any],
    arguments: Mapping[int, tuple[Any, ...]],
    *,
    writable: bool = False,
    numbered: bool = False,
) -> tuple[int, list[int], dict[int, list[int]]]:
    """Pickle a call for every rank into a new memfd.

    A function that is ``numbered`` is to be called with the rank before its arguments, and its value is not wanted.
    With ``writable``, workers may write to large buffers, each to its own copy of the pages that it writes to.

    Returns the memfd, which the caller owns; descriptors that must reach the workers with it and stay their
    owners'; and the indices into these that each rank needs. Raises UnpicklableError, which names the culprit.
    """
    with Spawning() as spawning:
        try:
            parts = _dump(function, arguments, spawning, by_value=False)
        except Exception:  # noqa: BLE001 - whatever stands in the way by reference is tried by value
            parts = None
        if parts is None:
            spawning.fds.clear()
            try:
                parts = _dump(function, arguments, spawning, by_value=True)
            except Exception as error:
                from phalanx._core.culprit import culprit

                raise culprit(function, arguments, error) from error
    shared, ranks = parts
    blobs, index = _lay_out(shared, ranks)
    buffers = _Buffers()
    for rank, part in ranks.items():
        index["buffers"][rank] = [buffers.place(buffer) for buffer in (*shared.buffers, *part.buffers)]
    index["writable"] = writable
    index["numbered"] = numbered
    wanted = {rank: [*shared.fds, *part.fds] for rank, part in ranks.items()}
    fds = spawning.fds
    if any(b"multiprocessing" in blob for blob in blobs):
        index["multiprocessing"] = _multiprocessing_state()
    tracker = _resource_tracker()
    if tracker is not None:
        # One tracker for all: a worker's own would unlink shared memory that it has only attached, by name perhaps.
        index["tracker"] = len(fds)
        fds = [*fds, tracker]
        for which in wanted.values():
            which.append(len(fds) - 1)
    index["fds"] = wanted
    memfd = os.memfd_create("phalanx-payload")
    try:
        index["start"] = _page_after(sum(map(len, blobs)))  # of the buffers, behind the head, which has its own pages
        head = marshal.dumps(index)
        first = _page_after(_HEADER + len(head))
        _write(memfd, 0, len(head).to_bytes(_HEADER, "little"), head)
        _write(memfd, first, *blobs)
        buffers.write(memfd, first + index["start"])
    except BaseException:
        os.close(memfd)
        raise
    return memfd, fds, wanted


class Payload:
    """A worker's view of what `pack` wrote."""

    def __init__(self, memfd: int, fds: list[int]) -> None:
        self._memfd = memfd
        length = int.from_bytes(os.pread(memfd, _HEADER, 0), "little")
        self.index: dict[str, Any] = marshal.loads(os.pread(memfd, length, _HEADER))  # noqa: S302 - our launcher wrote it
        self._base = _page_after(_HEADER + length)
        self._fds = fds

    def load(self, rank: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Unpickle the function and the arguments of ``rank``. Raises whatever unpickling raises."""
        # Descriptors are numbered as in the launcher; a worker has only its own.
        which = self.index["fds"][rank]
        _given[:] = [-1] * (max(which, default=-1) + 1)
        for index, fd in zip(which, self._fds, strict=True):
            _given[index] = fd
        tracker = self.index.get("tracker")
        if tracker is not None:
            from multiprocessing import resource_tracker

            resource_tracker._resource_tracker._fd = _given[tracker]  # type: ignore[attr-defined]  # as multiprocessing.spawn does
        data = io.BytesIO(self._read("function") + self._read("arguments", rank))
        unpickler = pickle.Unpickler(data, buffers=self._map(self.index["buffers"][rank]))
        function = unpickler.load()
        _adopt(function)
        return function, unpickler.load()

    def close(self) -> None:
        """Give the descriptor back. What is mapped stays for as long as somebody refers to it."""
        os.close(self._memfd)

    def _map(self, places: list[tuple[int, int]]) -> list[memoryview]:
        """Large buffers: the pages that all share, or, to be written to, such of our own in their place (mmap(2)).

        Those that are neighbours are mapped together: each mapping keeps a descriptor.
        """
        if not places:
            return []
        import mmap

        how = (mmap.MAP_SHARED, mmap.PROT_READ)
        if self.index["writable"]:
            how = (mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        start = self._base + self.index["start"]
        views: dict[tuple[int, int], memoryview] = {}
        for run in _neighbours(places):
            first, (last, length) = run[0][0], run[-1]
            whole = memoryview(mmap.mmap(self._memfd, last + length - first, *how, offset=start + first))
            for place in run:
                views[place] = whole[place[0] - first :][: place[1]]
        return [views[place] for place in places]

    def _read(self, *keys: str | int) -> bytes:
        place: Any = self.index
        for key in keys:
            place = place[key]
        offset, length = place
        parts = []
        while length:  # one read returns at most 2 GiB
            parts.append(os.pread(self._memfd, length, self._base + offset))
            offset += len(parts[-1])
            length -= len(parts[-1])
        return b"".join(parts)


def pack_value(value: object, known: Mapping[str, object]) -> int:
    """Pickle a return value into a new memfd. Raises UnpicklableError.

    ``known`` is what the launcher's ``__main__`` holds: an instance of a class from there comes back as one of
    that very class.
    """
    try:
        memfd = os.memfd_create("phalanx-result")
        try:
            try:
                _pickled(value, memfd, known)
            except Exception:  # noqa: BLE001 - as in `pack`
                os.ftruncate(memfd, 0)
                os.lseek(memfd, 0, os.SEEK_SET)
                _pickled(value, memfd, None)
        except BaseException:
            os.close(memfd)
            raise
    except Exception as error:
        from phalanx._core.culprit import find, first_line, type_name

        where = find("the return value", value, 4) or f"the return value ({type_name(value)})"
        msg = f"{where} cannot be pickled: {first_line(error)}"
        raise UnpicklableError(msg) from error
    return memfd


def _pickled(value: object, memfd: int, known: Mapping[str, object] | None) -> None:
    with open(memfd, "wb", closefd=False) as file:
        pickler = make_pickler(file, by_value=known is None)
        pickler.known = known
        pickler.dump(value)


def _lay_out(shared: _Part, ranks: Mapping[int, _Part]) -> tuple[list[bytes], dict[str, Any]]:
    """The pickles, in the order in which they are written, and the index that finds them again."""
    blobs = [shared.pickle]
    offset = len(shared.pickle)
    index: dict[str, Any] = {
        "path": search_path(),
        "argv": [str(argument) for argument in getattr(sys, "argv", [])],
        "launcher": os.getpid(),
        "function": (0, offset),
        "arguments": {},
        "buffers": {},
    }
    places: dict[int, int] = {}  # the same arguments for several ranks are written once
    for rank, part in ranks.items():
        if id(part) not in places:
            places[id(part)] = offset
            blobs.append(part.pickle)
            offset += len(part.pickle)
        index["arguments"][rank] = (places[id(part)], len(part.pickle))
    return blobs, index


def _neighbours(places: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """The places, by their order, in lists in which each begins on the page at which the one before ends."""
    runs: list[list[tuple[int, int]]] = []
    for place in sorted(set(places)):
        if runs and sum(map(_page_after, (runs[-1][-1][0], runs[-1][-1][1]))) == place[0]:
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs


def _page_after(place: int) -> int:
    return -(-place // _PAGE) * _PAGE


class Large:
    """A large ``bytes`` or ``bytearray``, which the pickler would not keep out of the pickle by itself.

    It arrives as what it is: one that owns its memory, and so is copied once more by each worker.
    """

    def __init__(self, value: bytes | bytearray) -> None:
        self._value = value

    def __reduce_ex__(self, _protocol: object) -> tuple[type, tuple[pickle.PickleBuffer]]:
        return type(self._value), (pickle.PickleBuffer(self._value),)

    @classmethod
    def among(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """``values`` with those that are large in a wrap."""
        if any(type(value) in (bytes, bytearray) and len(value) >= LARGE for value in values):
            return tuple(cls(value) if type(value) in (bytes, bytearray) else value for value in values)
        return values


class _Part:
    """One object, pickled."""

    def __init__(self, pickle: bytes, buffers: list[pickle.PickleBuffer], fds: list[int]) -> None:
        self.pickle = pickle
        self.buffers = buffers  # that are not in it
        self.fds = fds  # and the descriptors that belong to it, by their numbers


class _Buffers:
    """Large buffers, each at a page of its own; one that several ranks have is there once."""

    def __init__(self) -> None:
        self._views: list[memoryview] = []
        self._places: dict[tuple[int, int], tuple[int, int]] = {}  # by address and length
        self._end = 0

    def place(self, buffer: pickle.PickleBuffer) -> tuple[int, int]:
        """Where it is going to be."""
        view = buffer.raw()
        key = (_address(view), view.nbytes)
        if key not in self._places:
            self._places[key] = (self._end, view.nbytes)
            self._views.append(view)
            self._end += _page_after(view.nbytes)
        return self._places[key]

    def write(self, fd: int, start: int) -> None:
        """Write them all."""
        if self._end:
            os.ftruncate(fd, start + self._end)
        for view, (offset, _length) in zip(self._views, self._places.values(), strict=True):
            _write(fd, start + offset, view)


def _address(view: memoryview) -> int:
    import ctypes

    if view.readonly:
        return id(view.obj)  # what cannot be written to has no address for ctypes
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _dump(
    function: Callable[..., Any], arguments: Mapping[int, tuple[Any, ...]], spawning: Spawning, *, by_value: bool
) -> tuple[_Part, dict[int, _Part]]:
    file = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        """Called for each buffer; what is true stays in the pickle."""
        if buffer.raw().nbytes < LARGE:
            return True
        buffers.append(buffer)
        return False

    def dumped(value: object) -> _Part:
        first = len(spawning.fds)
        buffers.clear()
        file.seek(0)
        file.truncate()
        pickler.dump(value)
        return _Part(file.getvalue(), list(buffers), list(range(first, len(spawning.fds))))

    pickler = make_pickler(file, by_value=by_value, buffer_callback=keep)
    shared = dumped(function)
    memo = pickler.memo.copy()
    ranks: dict[int, _Part] = {}
    seen: dict[int, int] = {}  # the same tuple for several ranks is pickled once
    for rank, values in arguments.items():
        if id(values) in seen:
            ranks[rank] = ranks[seen[id(values)]]
            continue
        pickler.memo = memo
        ranks[rank] = dumped(Large.among(tuple(values)))
        seen[id(values)] = rank
    return shared, ranks


def make_pickler(file: Any, *, by_value: bool, buffer_callback: Callable[[Any], bool] | None = None) -> Any:
    tables: list[Any] = [copyreg.dispatch_table]
    reduction = sys.modules.get("multiprocessing.reduction")
    if reduction is not None:  # connections, sockets, and what frameworks have registered there (shared tensors)
        tables.insert(0, reduction.ForkingPickler._extra_reducers)
    base: Any = _ByReference
    if by_value:
        import cloudpickle  # type: ignore[import-untyped]  # it ships no types

        base = cloudpickle.Pickler
        tables.insert(1, dict(base.dispatch_table))
    # A pickler looks for its table once, when it is made, and finds the class's: setting it on the instance is too
    # late.
    table = {name: value for table in reversed(tables) for name, value in table.items()}
    kind = type("Pickler", (base,), {"dispatch_table": table})
    return kind(file, protocol=_PROTOCOL, buffer_callback=buffer_callback)


class _ByReference(pickle.Pickler):
    """The plain pickler, which gives up at once at code that the other side could not import."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.known: Mapping[str, object] = {}  # what the other side's __main__ holds, by name

    def reducer_override(self, obj: Any) -> Any:
        """Called for functions and classes among others (pickle documentation, "Custom Reduction")."""
        if getattr(obj, "__module__", None) == "__main__":
            name = getattr(obj, "__qualname__", None)
            if name is not None and self.known.get(name) is not obj:
                raise _ByValue
        return NotImplemented


class Spawning:
    """Makes `multiprocessing` believe that a process of its own is being spawned in this thread.

    Its locks, queues and connections refuse to be pickled otherwise. Its contract for a "popen" is:
    `duplicate_for_child` takes a descriptor and returns what ``DupFd(...).detach()`` turns back into one, in the child.
    """

    def __init__(self) -> None:
        self.fds: list[int] = []

    def __enter__(self) -> Spawning:  # noqa: PYI034 - typing.Self would be an import on the worker's start
        context = sys.modules.get("multiprocessing.context")
        if context is not None:
            context.set_spawning_popen(self)
        return self

    def __exit__(self, *_error: object) -> None:
        context = sys.modules.get("multiprocessing.context")
        if context is not None:
            context.set_spawning_popen(None)

    def duplicate_for_child(self, fd: int) -> int:
        """Take a descriptor along."""
        self.fds.append(fd)
        return len(self.fds) - 1

    def DupFd(self, index: int) -> _Given:  # noqa: N802 - the name is multiprocessing's
        """What is pickled in place of the descriptor."""
        return _Given(index)


class _Given:
    """A descriptor in a pickle: its place among those that came with the payload."""

    def __init__(self, index: int) -> None:
        self._index = index

    def detach(self) -> int:
        """The descriptor, in the worker; the caller owns it from now on."""
        fd, _given[self._index] = _given[self._index], -1
        return fd


def search_path() -> list[str]:
    """`sys.path`, with the working directory by its name: a worker's own entry for it may be another.

    What is no text (a `pathlib.Path`) is left out: no import looks there, here or in a worker.
    """
    given: list[Any] = list(sys.path)
    entries = ["".join(entry) for entry in given if isinstance(entry, str)]
    try:
        return [entry or os.getcwd() for entry in entries]
    except FileNotFoundError:  # it has been removed: nothing can be imported from there
        return list(filter(None, entries))


def _multiprocessing_state() -> dict[str, Any]:
    from multiprocessing import process

    return {"authkey": bytes(process.current_process().authkey)}


def _resource_tracker() -> int | None:
    """The descriptor on which this process's resource tracker listens, if it has one."""
    module = sys.modules.get("multiprocessing.resource_tracker")
    return None if module is None else module._resource_tracker._fd  # as multiprocessing.spawn does


def _adopt(function: Callable[..., Any]) -> None:
    """Show the names of a by-value function's ``__main__`` as this process's ``__main__``.

    An instance of a class from there can then be sent back (through a queue, say) by the class's name.
    """
    function = getattr(function, "func", function)  # functools.partial
    function = getattr(function, "__func__", function)  # a bound method
    names = getattr(function, "__globals__", {})
    main = vars(sys.modules["__main__"])
    if names.get("__name__") == "__main__" and names is not main:
        main.update({name: value for name, value in names.items() if not name.startswith("__")})
    if getattr(function, "__module__", None) == "__main__":
        main.setdefault(getattr(function, "__name__", ""), function)


def _write(fd: int, offset: int, *blobs: bytes | memoryview) -> None:
    for blob in blobs:
        view = memoryview(blob)
        while view:
            count = os.pwrite(fd, view, offset)
            view, offset = view[count:], offset + count
