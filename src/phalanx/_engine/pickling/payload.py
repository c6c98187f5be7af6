"""A function and its arguments on their way to the workers.

Owns pickling: by reference what the workers can import, the main module included, which they run again; by value
(cloudpickle) what has no other way: lambdas, closures, what a notebook's cells define. And the handing over of what
`multiprocessing` keeps in descriptors. Knows nothing of processes; the way back is that of `returned`.

The group's payload is pickled once, into one memfd that every worker reads at its own offsets. One memo serves all of
it: functions and classes by value come first, then the function, then each rank's arguments, before which the memo is
wound back to where the function ended. So a rank's part may refer to the function's objects, and never to another
rank's.

Large buffers (an array's elements) stay out of the pickle (PEP 574). They are written into the memfd once, and every
worker maps them: whatever their size and however many the workers, there is one copy, and none is made on the way.
The memfd is sealed: a worker that opens it to write, or goes around numpy's flag, changes nothing of another's.
That holds for arguments. What belongs to a function by value (its globals, its closure) each worker has for itself;
the memory of a tensor that is an argument as well is shared, as it is where the function is imported.
"""

from __future__ import annotations

import copyreg
import io
import marshal
import os
import sys

from phalanx._engine import main_module
from phalanx._engine.pickling.passed_fds import Given, Handle
from phalanx._engine.worker import mp_child

TYPE_CHECKING = False
if TYPE_CHECKING:
    import pickle
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any
else:
    import _pickle as pickle  # the C half: `pickle` imports re and enum, 3 of a worker's 15 ms

_PAGE = os.sysconf("SC_PAGESIZE")  # where a mapping may begin
_HEADER = 8  # bytes, for the length of the index that follows

LARGE = 1 << 20
"""Bytes from which a buffer is shared by all workers. A smaller one is cheaper to copy."""


class UnpicklableError(TypeError):
    """Something on its way to or from a worker cannot be pickled. The message names it."""

    __module__ = "phalanx.multiprocessing"  # as people know it, in tracebacks and pickles


class Packed:
    """What `pack` has written.

    Attributes:
        memfd: The payload, which the owner of this closes.
        fds: Descriptors that must reach the workers with it, and stay their owners'.
        owners: What these belong to. It may have been made to be pickled, and has to live until they have been sent.
        wanted: The indices into these that each rank needs.
        sent: What has gone by value, by its number; None where nothing was tried so.
    """

    def __init__(
        self, memfd: int, fds: list[int], owners: list[object], wanted: dict[int, list[int]], sent: list[object] | None
    ) -> None:
        self.memfd = memfd
        self.fds = fds
        self.owners = owners
        self.wanted = wanted
        self.sent = sent or []
        self.by_value = sent is not None

    def close(self) -> None:
        """The workers have it all."""
        os.close(self.memfd)
        self.owners.clear()


def pack(
    function: Callable[..., Any],
    arguments: Mapping[int, tuple[Any, ...]],
    *,
    writable: bool = False,
    numbered: bool = False,
    main: main_module.Source | None = None,
    family: mp_child.Family | None = None,
    envs: Mapping[int, Mapping[str, str]] | None = None,
) -> Packed:
    """Pickle a call for every rank into a new memfd.

    Args:
        function: What is called.
        arguments: Rank → the positional arguments.
        writable: Whether workers may write to large buffers, each to its own copy of the pages that it writes to.
        numbered: Whether the rank comes before the arguments; the function's value is not wanted then.
        main: What the workers run again as their main module; None: what is defined there goes by value.
        family: What the workers are as children of `multiprocessing`; default: those of start method "spawn".
        envs: Rank → the variables that are set once more when the main module has been run.

    Raises UnpicklableError, which names the culprit.
    """
    family = family or mp_child.Family("spawn", len(arguments))
    with Spawning() as spawning:
        parts, sent = _pickle(function, arguments, spawning, main)
    blobs, index = _lay_out(parts)
    buffers = _Buffers()
    for rank, three in parts.items():
        index["buffers"][rank] = [buffers.place(each) for part in three for each in part.buffers]
    index |= {"writable": writable, "numbered": numbered, "main": main}
    index["envs"] = {rank: dict(env) for rank, env in (envs or {}).items() if env}
    index["own"] = {rank: len(code.buffers + called.buffers) for rank, (code, called, _arguments) in parts.items()}
    index["members"] = {rank: family.member(number) for number, rank in enumerate(arguments)}
    numbers = {rank: [number for part in three for number in part.fds] for rank, three in parts.items()}
    given = spawning.fds
    tracker = mp_child.resource_tracker()
    if tracker is not None:
        # One tracker for all: a worker's own would unlink shared memory that it has only attached, by name perhaps.
        index["tracker"] = len(given)
        given = [*given, tracker]
        for which in numbers.values():
            which.append(len(given) - 1)
    index["fds"] = numbers
    fds, wanted = _once_each(given, numbers)
    from phalanx._base import sealed_memfd  # a worker loads this module, and needs none of that

    memfd = sealed_memfd.new("phalanx-payload")
    try:
        index["start"] = _page_after(sum(map(len, blobs)))  # of the buffers, behind the head, which has its own pages
        head = marshal.dumps(index)
        first = _page_after(_HEADER + len(head))
        _write(memfd, 0, len(head).to_bytes(_HEADER, "little"), head)
        _write(memfd, first, *blobs)
        buffers.write(memfd, first + index["start"])
        sealed_memfd.seal_for_maps(memfd)  # no worker can change what another one reads
    except BaseException:
        os.close(memfd)
        raise
    return Packed(memfd, fds, spawning.owners, wanted, sent)


class Payload:
    """A worker's view of what `pack` wrote."""

    def __init__(self, memfd: int, fds: list[int]) -> None:
        self._memfd = memfd
        length = int.from_bytes(os.pread(memfd, _HEADER, 0), "little")
        self.index: dict[str, Any] = marshal.loads(os.pread(memfd, length, _HEADER))  # noqa: S302 - our launcher wrote it
        self._base = _page_after(_HEADER + length)
        self._fds = fds

    def take(self, rank: int) -> int | None:
        """Take the descriptors of ``rank``. Returns that of the launcher's resource tracker, if there is one."""
        # They are numbered as in the launcher; a worker has only its own.
        which = self.index["fds"][rank]
        numbered = dict(zip(which, self._fds, strict=True))
        self._given = Given([numbered.get(index, -1) for index in range(max(which, default=-1) + 1)])
        tracker = self.index.get("tracker", -1)
        return self._given.take(tracker) if tracker in numbered else None

    def load(self, rank: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Unpickle the function and the arguments of ``rank``. Raises whatever unpickling raises."""
        data = io.BytesIO(b"".join(self._read(place) for place in self.index["parts"][rank]))
        unpickler = pickle.Unpickler(data, buffers=self._map(rank))
        with self._given:
            code = unpickler.load()
            function = unpickler.load()
            if self.index["main"] is None:
                _adopt(*code)
            return function, unpickler.load()

    def close(self) -> None:
        """Give the descriptor back. What is mapped stays for as long as somebody refers to it."""
        os.close(self._memfd)

    def _map(self, rank: int) -> list[memoryview]:
        """Large buffers: the pages that all share, or, to be written to, such of our own in their place (mmap(2))."""
        places, own = self.index["buffers"][rank], self.index["own"][rank]
        return self._mapped(places[:own], writable=True) + self._mapped(places[own:], writable=self.index["writable"])

    def _mapped(self, places: list[tuple[int, int]], *, writable: bool) -> list[memoryview]:
        """Those that are neighbours are mapped together: each mapping keeps a descriptor."""
        if not places:
            return []
        import mmap

        how = (mmap.MAP_SHARED, mmap.PROT_READ)
        if writable:
            how = (mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        start = self._base + self.index["start"]
        views: dict[tuple[int, int], memoryview] = {}
        for run in _neighbours(places):
            first, (last, length) = run[0][0], run[-1]
            whole = memoryview(mmap.mmap(self._memfd, last + length - first, *how, offset=start + first))
            for place in run:
                views[place] = whole[place[0] - first :][: place[1]]
        return [views[place] for place in places]

    def _read(self, place: tuple[int, int]) -> bytes:
        offset, length = place
        parts = []
        while length:  # one read returns at most 2 GiB
            parts.append(os.pread(self._memfd, length, self._base + offset))
            offset += len(parts[-1])
            length -= len(parts[-1])
        return b"".join(parts)


def _lay_out(parts: _Parts) -> tuple[list[bytes], dict[str, Any]]:
    """The pickles, in the order in which they are written, and the index that finds them again."""
    blobs: list[bytes] = []
    places: dict[int, tuple[int, int]] = {}  # what several ranks have is written once
    end = 0
    for part in (part for three in parts.values() for part in three):
        if id(part) not in places:
            places[id(part)] = (end, len(part.pickle))
            blobs.append(part.pickle)
            end += len(part.pickle)
    index: dict[str, Any] = {
        "path": search_path(),
        "argv": [str(argument) for argument in getattr(sys, "argv", [])],
        "parts": {rank: [places[id(part)] for part in three] for rank, three in parts.items()},
        "buffers": {},
    }
    return blobs, index


def _once_each(fds: list[int], numbers: dict[int, list[int]]) -> tuple[list[int], dict[int, list[int]]]:
    """What several ranks have is sent once: a process may have few descriptors, and a model has one for each tensor.

    Returns the descriptors, and the indices into them of each rank, in the order of its ``numbers``.
    """
    places: dict[tuple[int, int], int] = {}  # by the descriptor, and how many of it the rank has before
    wanted: dict[int, list[int]] = {}
    for rank, which in numbers.items():
        had: dict[int, int] = {}
        wanted[rank] = []
        for fd in (fds[number] for number in which):
            had[fd] = had.get(fd, -1) + 1
            wanted[rank].append(places.setdefault((fd, had[fd]), len(places)))
    return [fd for fd, _before in places], wanted


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
        large = {id(each): cls(each) for each in values if type(each) in (bytes, bytearray) and len(each) >= LARGE}
        return tuple(large.get(id(value), value) for value in values) if large else values


class _Part:
    """One object, pickled."""

    def __init__(self, pickle: bytes, buffers: list[pickle.PickleBuffer], fds: list[int], *, shared: bool) -> None:
        self.pickle = pickle
        self.buffers = buffers  # that are not in it
        self.fds = fds  # and the descriptors that belong to it, by their numbers
        self.shared = shared  # whether several workers may unpickle it


_Parts = dict[int, tuple[_Part, _Part, _Part]]
"""The code that goes by value, the function and the arguments of each rank."""


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


def _pickle(
    function: Callable[..., Any],
    arguments: Mapping[int, tuple[Any, ...]],
    spawning: Spawning,
    main: main_module.Source | None,
) -> tuple[_Parts, list[object] | None]:
    """Pickle it all: by reference, else by value. Also returns what has gone so, or None. Raises UnpicklableError."""
    from phalanx._engine.pickling.picklers import wants_by_value

    if not wants_by_value():
        pickling = _Pickling(spawning, main)
        try:
            parts = pickling.dump((), function, arguments)
        except Exception:  # noqa: BLE001 - whatever stands in the way by reference is tried by value
            spawning.clear()
        else:
            if main is not None or not pickling.names_main(parts):
                return parts, None
            spawning.clear()
    try:
        pickling = _Pickling(spawning, main, by_value=True)
        parts = pickling.dump(pickling.find_code(function, arguments), function, arguments)
    except Exception as error:
        from phalanx._engine.pickling.unpicklable import culprit

        raise culprit(function, arguments, error, main) from error
    return parts, pickling.sent


class _Pickling:
    """The pickling of one payload."""

    def __init__(self, spawning: Spawning, main: main_module.Source | None, *, by_value: bool = False) -> None:
        self._spawning = spawning
        self._main = main
        self._by_value = by_value
        self._counted = False
        self._file = io.BytesIO()
        self._buffers: list[pickle.PickleBuffer] = []
        self._given: dict[int, object] = {}  # by id: the memory of tensors that are arguments
        self.sent: list[object] = []

    def find_code(self, function: Callable[..., Any], arguments: Mapping[int, tuple[Any, ...]]) -> list[object]:
        """What will go by value, in the function and the arguments: found by pickling them to nowhere."""
        found: list[object] = []
        table = dict.fromkeys(sharing(), lambda _value: (_nothing, ()))
        pickler = make_pickler(Nowhere(), table, self._main, sent=found, buffer_callback=lambda _buffer: False)
        call = function, list({id(values): values for values in arguments.values()}.values())
        pickler.dump(call)
        if found and "torch" in sys.modules:
            from phalanx._engine.pickling import tensors

            pickler = make_pickler(Nowhere(), table | tensors.noted(self._given), self._main, sent=list(found))
            pickler.memo = {id(each): (number, each) for number, each in enumerate(found)}  # not looked into
            pickler.dump(call)
        return found

    def dump(
        self, code: Sequence[object], function: Callable[..., Any], arguments: Mapping[int, tuple[Any, ...]]
    ) -> _Parts:
        """Pickle code that goes by value, then the function and each rank's arguments."""
        shared = {kind: self._count(reduce) for kind, reduce in sharing().items()}
        ours = dict(shared)
        if "torch" in sys.modules:  # what belongs to code alone is copied, as it is where a worker imports it
            from phalanx._engine.pickling import tensors

            ours |= tensors.by_value(shared, given=self._given)
        coder = self._pickler(ours)
        first = self._part(coder, tuple(code))
        pickler = self._pickler(shared)
        start = coder.memo.copy()
        called = self._part(pickler, function, start)
        after = pickler.memo.copy()
        parts: _Parts = {}
        seen: dict[int, _Part] = {}  # the same tuple for several ranks is pickled once
        for rank, values in arguments.items():
            if parts and not first.shared:
                first = self._part(coder, tuple(code), {})
                start = coder.memo.copy()
            if parts and not (first.shared and called.shared):
                called = self._part(pickler, function, start)
                after = pickler.memo.copy()
            part = seen.get(id(values)) or self._part(pickler, Large.among(tuple(values)), after)
            if part.shared and called.shared and first.shared:
                seen[id(values)] = part
            parts[rank] = (first, called, part)
        return parts

    @staticmethod
    def names_main(parts: _Parts) -> bool:
        """Whether something is found by its name in the main module, which the workers do not run."""
        pickles = {id(part): part.pickle for three in parts.values() for part in three}
        return any(name.encode() in data for data in pickles.values() for name in main_module.NAMES)

    def _pickler(self, table: Mapping[type, Any]) -> Any:
        sent = self.sent if self._by_value else None
        return make_pickler(self._file, table, self._main, sent=sent, buffer_callback=self._keep)

    def _keep(self, buffer: pickle.PickleBuffer) -> bool:
        """Called for each buffer; what is true stays in the pickle."""
        if buffer.raw().nbytes < LARGE:
            return True
        self._buffers.append(buffer)
        return False

    def _count(self, reduce: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A reducer that is known to have been used.

        What it returns may be for one receiver: where memory is found by its name, or on a device, receivers are
        counted.
        """

        def counted(value: Any) -> Any:
            self._counted = True
            self._spawning.owners.append(value)
            return reduce(value)

        return counted

    def _part(self, pickler: Any, value: object, memo: Any = None) -> _Part:
        first = len(self._spawning.fds)
        self._counted = False
        self._buffers.clear()
        self._file.seek(0)
        self._file.truncate()
        if memo is not None:
            pickler.memo = memo
        pickler.dump(value)
        fds = list(range(first, len(self._spawning.fds)))
        return _Part(self._file.getvalue(), list(self._buffers), fds, shared=not self._counted)


class Nowhere:
    """A file that keeps nothing."""

    def write(self, data: bytes | pickle.PickleBuffer) -> int:
        return memoryview(data).nbytes  # a large array comes as a PickleBuffer, which has no len


def _nothing(*_ignored: object) -> bool:
    """What stands for an object that is not looked into; and what is found in no main module."""
    return False


def sharing() -> dict[type, Any]:
    """The reducers of `multiprocessing`: connections, sockets, and what frameworks have registered (shared tensors)."""
    reduction = mp_child.loaded("multiprocessing.reduction")
    return {} if reduction is None else dict(reduction.ForkingPickler._extra_reducers)


def make_pickler(
    file: Any,
    table: Mapping[type, Any],
    main: main_module.Source | None,
    *,
    sent: list[object] | None,
    buffer_callback: Callable[[Any], Any] | None = None,
) -> Any:
    """A pickler by reference, or, given the list ``sent`` for what goes so, by value.

    ``table`` has the reducers that go before those of `copyreg`. ``main`` is what the other side has for main module.
    """
    importable = _nothing if main is None else main_module.finds
    table = {**copyreg.dispatch_table, **table}
    if sent is None:
        from phalanx._engine.pickling.picklers import plain

        return plain(file, table, buffer_callback=buffer_callback, importable=importable, returns=False)
    from phalanx._engine.pickling import by_value

    return by_value.make(file, table, buffer_callback=buffer_callback, importable=importable, sent=sent)


class Spawning:
    """Makes `multiprocessing` believe that a process of its own is being spawned in this thread.

    Its locks, queues and connections refuse to be pickled otherwise. Its contract for a "popen" is:
    `duplicate_for_child` takes a descriptor and returns what ``DupFd(...).detach()`` turns back into one, in the child.
    """

    def __init__(self) -> None:
        self.fds: list[int] = []
        self.owners: list[object] = []

    def __enter__(self) -> Spawning:  # noqa: PYI034 - typing.Self would be an import on the worker's start
        from multiprocessing import context

        context.set_spawning_popen(self)  # type: ignore[arg-type]  # see above
        return self

    def __exit__(self, *_error: object) -> None:
        from multiprocessing import context

        context.set_spawning_popen(None)

    def clear(self) -> None:
        """Forget all that has been taken along."""
        self.fds.clear()
        self.owners.clear()

    def duplicate_for_child(self, fd: int) -> int:
        """Take a descriptor along."""
        self.fds.append(fd)
        return len(self.fds) - 1

    def DupFd(self, index: int) -> Handle:  # noqa: N802 - the name is multiprocessing's
        """What is pickled in place of the descriptor."""
        return Handle(index)


def search_path() -> list[str]:
    """`sys.path`, with the working directory by its name: a worker's own entry for it may be another.

    Those of before come first, ours and that of `multiprocessing`: modules may have been imported from there. What is
    no text (a `pathlib.Path`) is left out: no import looks there, here or in a worker.
    """
    given: list[Any] = list(sys.path)
    process = mp_child.loaded("multiprocessing.process")
    original = None if process is None else process.ORIGINAL_DIR
    here = list(dict.fromkeys(filter(None, (original, _BEGUN_IN, _working_directory()))))
    return [name for entry in given if isinstance(entry, str) for name in (["".join(entry)] if entry else here)]


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it has been removed: nothing can be imported from there
        return ""


_BEGUN_IN = _working_directory()


def _adopt(*code: object) -> None:
    """Show what has come by value from a ``__main__`` under its names there in this process's ``__main__``.

    An instance of a class from there can then be pickled (for a queue, say) by the class's name.
    """
    main = vars(sys.modules["__main__"])
    function = type(_adopt)
    for each in code:
        if isinstance(each, function):
            names = each.__globals__
            if names.get("__name__") in main_module.NAMES and names is not main:
                main.update({name: value for name, value in names.items() if not name.startswith("__")})
        if isinstance(each, (type, function)) and each.__module__ in main_module.NAMES and "." not in each.__qualname__:
            main.setdefault(each.__qualname__, each)


def _write(fd: int, offset: int, *blobs: bytes | memoryview) -> None:
    for blob in blobs:
        view = memoryview(blob)
        while view:
            count = os.pwrite(fd, view, offset)
            view, offset = view[count:], offset + count
