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
import sys

from phalanx._engine import main_module
from phalanx._engine.pickling.passed_fds import FdHandle
from phalanx._engine.pickling.picklers import Nowhere, plain, sharing_reducers, wants_by_value

TYPE_CHECKING = False
if TYPE_CHECKING:
    import pickle
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any
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
    if not wants_by_value():
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
