"""A function and its arguments on their way to the workers, and a value on its way back.

Owns pickling: by reference where the worker can import, by value (cloudpickle) for what lives in ``__main__``, in a
notebook's cell or in another function; and the handing over of what `multiprocessing` keeps in descriptors. Knows
nothing of processes.

The group's payload is pickled once, into one memfd that every worker reads at its own offsets. One pickler writes all
of it; before each rank's arguments its memo is wound back to where the function ended, so that a rank's part may
refer to the function's objects, and never to another rank's.
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
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any
else:
    import _pickle as pickle  # the C half: `pickle` imports re and enum, 3 of a worker's 15 ms

_PROTOCOL = 5  # both ends are the same interpreter, 3.11 or later
_HEADER = 8  # bytes, for the length of the index that follows

_given: list[int] = []  # in a worker: the descriptors that came with the payload


class UnpicklableError(TypeError):
    """Something on its way to or from a worker cannot be pickled. The message names it."""


class _ByValue(Exception):  # noqa: N818 - a turn of the road, not an error
    """What is being pickled holds code that a worker cannot import."""


def pack(
    function: Callable[..., Any], arguments: Mapping[int, tuple[Any, ...]]
) -> tuple[int, list[int], dict[int, list[int]]]:
    """Pickle a call for every rank into a new memfd.

    Returns the memfd, which the caller owns; descriptors that must reach the workers with it and stay their
    owners'; and the indices into these that each rank needs. Raises UnpicklableError, which names the culprit.
    """
    with _Spawning() as spawning:
        try:
            parts = _dump(function, arguments, spawning, by_value=False)
        except Exception:  # noqa: BLE001 - whatever stands in the way by reference is tried by value
            parts = None
        if parts is None:
            spawning.fds.clear()
            try:
                parts = _dump(function, arguments, spawning, by_value=True)
            except Exception as error:
                raise _culprit(function, arguments, error) from error
    shared, ranks = parts
    blobs = [shared[0]]
    index: dict[str, Any] = {
        "path": _search_path(),
        "argv": [str(argument) for argument in getattr(sys, "argv", [])],
        "launcher": os.getpid(),
        "function": (0, len(shared[0])),
        "arguments": {},
    }
    offset = len(shared[0])
    places: dict[int, int] = {}  # the same arguments for several ranks are written once
    for rank, (blob, _fds) in ranks.items():
        if id(blob) not in places:
            places[id(blob)] = offset
            blobs.append(blob)
            offset += len(blob)
        index["arguments"][rank] = (places[id(blob)], len(blob))
    wanted = {rank: [*range(shared[1]), *fds] for rank, (_blob, fds) in ranks.items()}
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
        head = marshal.dumps(index)
        _write(memfd, len(head).to_bytes(_HEADER, "little"), head, *blobs)
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
        self._base = _HEADER + length
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
        unpickler = pickle.Unpickler(io.BytesIO(self._read("function") + self._read("arguments", rank)))
        function = unpickler.load()
        _adopt(function)
        return function, unpickler.load()

    def close(self) -> None:
        """Give the memory back."""
        os.close(self._memfd)

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
        where = _find("the return value", value, 4) or f"the return value ({_type_name(value)})"
        msg = f"{where} cannot be pickled: {_first_line(error)}"
        raise UnpicklableError(msg) from error
    return memfd


def _pickled(value: object, memfd: int, known: Mapping[str, object] | None) -> None:
    with open(memfd, "wb", closefd=False) as file:
        pickler = _pickler(file, by_value=known is None)
        pickler.known = known
        pickler.dump(value)


def _dump(
    function: Callable[..., Any], arguments: Mapping[int, tuple[Any, ...]], spawning: _Spawning, *, by_value: bool
) -> tuple[tuple[bytes, int], dict[int, tuple[bytes, list[int]]]]:
    buffer = io.BytesIO()
    pickler = _pickler(buffer, by_value=by_value)
    pickler.dump(function)
    shared = buffer.getvalue(), len(spawning.fds)
    memo = pickler.memo.copy()
    ranks: dict[int, tuple[bytes, list[int]]] = {}
    seen: dict[int, int] = {}  # the same tuple for several ranks is pickled once
    for rank, values in arguments.items():
        if id(values) in seen:
            ranks[rank] = ranks[seen[id(values)]]
            continue
        first = len(spawning.fds)
        buffer.seek(0)
        buffer.truncate()
        pickler.memo = memo
        pickler.dump(tuple(values))
        ranks[rank] = buffer.getvalue(), list(range(first, len(spawning.fds)))
        seen[id(values)] = rank
    return shared, ranks


def _pickler(file: Any, *, by_value: bool) -> Any:
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
    return type("Pickler", (base,), {"dispatch_table": table})(file, protocol=_PROTOCOL)


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


class _Spawning:
    """Makes `multiprocessing` believe that a process of its own is being spawned in this thread.

    Its locks, queues and connections refuse to be pickled otherwise. Its contract for a "popen" is:
    `duplicate_for_child` takes a descriptor and returns what ``DupFd(...).detach()`` turns back into one, in the child.
    """

    def __init__(self) -> None:
        self.fds: list[int] = []

    def __enter__(self) -> _Spawning:  # noqa: PYI034 - typing.Self would be an import on the worker's start
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


def _search_path() -> list[str]:
    """`sys.path`, with the working directory by its name: a worker's own entry for it may be another."""
    try:
        return [entry or os.getcwd() for entry in sys.path]
    except FileNotFoundError:  # it has been removed: nothing can be imported from there
        return list(filter(None, sys.path))


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


def _write(fd: int, *blobs: bytes) -> None:
    for blob in blobs:
        view = memoryview(blob)
        while view:
            view = view[os.write(fd, view) :]


# --- the search for what cannot be pickled; only ever run on the way to an error


def _culprit(
    function: Callable[..., Any], arguments: Mapping[int, tuple[Any, ...]], error: Exception
) -> UnpicklableError:
    why = _first_line(error)
    if "in a fork context" in why:  # what multiprocessing says of its default objects, without the way out
        why += ' Make it with multiprocessing.get_context("spawn").'
    with _Spawning():
        where = _find(f"the entrypoint {_name(function)}", function, 4)
        if not where:
            for rank, values in arguments.items():
                for position, value in enumerate(values):
                    where = _find(f"argument {position} of rank {rank}", value, 4)
                    if where:
                        return UnpicklableError(f"{where} cannot be sent to a worker: {why}")
    return UnpicklableError(f"{where or 'the entrypoint or an argument'} cannot be sent to a worker: {why}")


def _find(what: str, value: object, depth: int) -> str:
    """Name the innermost part of ``value`` that cannot be pickled, as a path from ``what``; "" if all of it can."""
    try:
        _pickler(io.BytesIO(), by_value=True).dump(value)
    except Exception:  # noqa: BLE001 - any failure is one
        if depth:
            for name, part in _parts(value):
                found = _find(f"{name} of {what}", part, depth - 1)
                if found:
                    return found
        return f"{what} ({_type_name(value)})"
    return ""


def _parts(value: Any) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        yield from ((f"item {key!r}", part) for key, part in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"item {position}", part) for position, part in enumerate(value))
    elif hasattr(value, "__code__"):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            yield f"the variable {name!r}", cell.cell_contents
        for name in value.__code__.co_names:
            if name in value.__globals__:
                yield f"the global {name!r}", value.__globals__[name]
    else:
        for name in ("func", "args", "keywords", "__self__"):
            if hasattr(value, name):
                yield f"{name!r}", getattr(value, name)
        for name, part in getattr(value, "__dict__", {}).items():
            yield f"the attribute {name!r}", part


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", None) or _type_name(function))


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _first_line(error: BaseException) -> str:
    try:
        text = str(error).partition("\n")[0]
    except Exception:  # noqa: BLE001 - an exception may do anything
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
