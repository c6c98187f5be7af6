"""Pickling by reference, and what both ways of pickling have in common.

Owns `plain`, which writes by reference, and `Unpickler`, which reads what comes back from a worker: `__mp_main__` is
the launcher's ``__main__``, and a reference to what the launcher has sent by value is the launcher's own object. Knows
nothing of processes, of descriptors or of where a pickle is kept.
"""

from __future__ import annotations

import sys
import types

from phalanx._engine.main_module import NAMES

TYPE_CHECKING = False
if TYPE_CHECKING:
    import pickle
    from collections.abc import Callable
    from typing import Any
else:
    import _pickle as pickle  # the C half, as in `payload`

PROTOCOL = 5
"""Of pickle: both ends are the same interpreter, 3.11 or later."""


class NotByName(Exception):  # noqa: N818 - the caller goes on by value
    """What is being pickled by reference holds something that the other side cannot import."""


class Received:
    """What this process has unpickled of what its launcher sent by value, and the index of each.

    It refers to the objects, so that their ids stay theirs.
    """

    def __init__(self) -> None:
        self._objects: list[object] = []
        self._indices: dict[int, int] = {}  # by id

    def __len__(self) -> int:
        return len(self._objects)

    def note(self, obj: object, index: int) -> None:
        """Remember an object under its index."""
        self._objects.append(obj)
        self._indices[id(obj)] = index

    def index(self, obj: object) -> int | None:
        """The index of an object; None if it did not come from the launcher."""
        return self._indices.get(id(obj))

    def clear(self) -> None:
        """Forget all of it: another payload is about to be unpickled, or this process is a fork of the one that did."""
        self._indices.clear()
        self._objects.clear()


received = Received()


def wants_by_value() -> bool:
    """Whether the user has registered modules with ``cloudpickle.register_pickle_by_value``.

    Does not import cloudpickle: who has not imported it has registered nothing.
    """
    return bool(registered())


def plain(
    file: Any,
    table: dict[type, Callable[[Any], Any]],
    *,
    buffer_callback: Callable[[Any], Any] | None = None,
    importable: Callable[[object], bool],
    returns: bool = True,
) -> Any:
    """A pickler by reference. Its ``dump`` raises NotByName at what would have to go by value.

    Parameters as for `make`. If it ``returns`` a value, what is in `received` is written as a reference.
    """
    kind = type("Pickler", (_Plain,), {"dispatch_table": {**table, types.MethodType: reduce_method}})
    pickler = kind(file, protocol=PROTOCOL, buffer_callback=buffer_callback)
    pickler.importable = importable
    pickler.returns = returns
    return pickler


class Unpickler(pickle.Unpickler):
    """Reads a worker's result in the launcher. ``sent`` is the list that `make` filled for this group."""

    def __init__(self, file: Any, sent: list[object], *, buffers: Any = None) -> None:
        super().__init__(file, buffers=buffers)
        self._sent = sent

    def find_class(self, module: str, name: str) -> Any:
        """A global by its name. A worker's ``__mp_main__`` is the launcher's ``__main__``."""
        if module == __name__ and name == "the_launchers":
            return self._sent.__getitem__
        return super().find_class("__main__" if module == "__mp_main__" else module, name)


def the_launchers(index: int) -> object:
    """Stands in a result for the object that the launcher sent under ``index``: `Unpickler` reads it."""
    raise pickle.UnpicklingError(f"object {index} is the launcher's: only the launcher can unpickle this")


def reduce_method(method: types.MethodType) -> tuple[Any, ...]:
    """The reduction of a bound method, a private one (whose name is mangled in its class) included."""
    function, owner = method.__func__, method.__self__
    for name in _names(function, owner):
        if _is_method(owner, name, function):
            return getattr, (owner, name)
    return types.MethodType, (function, owner)


def _is_method(owner: object, name: str, function: object) -> bool:
    """Whether ``owner`` has ``function`` as its method ``name``."""
    try:
        found = getattr(owner, name)
    except Exception:  # noqa: BLE001 - it may be a property, which may raise anything
        return False
    return type(found) is types.MethodType and found.__func__ is function and found.__self__ is owner


def _names(function: Any, owner: object) -> list[str]:
    """The names that ``owner`` may have for ``function``: its own, or what each class makes of a private one."""
    name = getattr(function, "__name__", None)
    if not isinstance(name, str):
        return []
    if not name.startswith("__") or name.endswith("__"):
        return [name]
    return [f"_{kind.__name__.lstrip('_')}{name}" for kind in line_of(owner)]


def line_of(owner: object) -> tuple[type, ...]:
    kind: type = type(owner)
    return (owner if issubclass(kind, type) else kind).__mro__  # type: ignore[attr-defined, no-any-return]  # it is a class


class _Plain(pickle.Pickler):
    importable: Callable[[object], bool]
    returns: bool
    dispatch_table: dict[type, Callable[[Any], Any]]

    def reducer_override(self, obj: Any) -> Any:
        """Called for all but objects of the simplest built-in types (pickle, "Custom Reduction")."""
        index = received.index(obj) if self.returns else None
        if index is not None:
            return the_launchers, (index,)
        if getattr(obj, "__module__", None) in NAMES:
            if is_code(obj):
                if not self.importable(obj):
                    raise NotByName
                return NotImplemented
            reduced = reduction(obj, self.dispatch_table)
            if isinstance(reduced, str) and not importable_by(obj, self.importable):
                raise NotByName
            return reduced
        return NotImplemented


def is_code(obj: object) -> bool:
    """Whether it is a function or a class, and no proxy that says so of itself."""
    return issubclass(type(obj), (type, types.FunctionType))


def reduction(obj: Any, table: dict[type, Callable[[Any], Any]]) -> Any:
    """What the pickler would find by itself."""
    reducer = table.get(type(obj))
    return obj.__reduce_ex__(PROTOCOL) if reducer is None else reducer(obj)


def importable_by(obj: object, importable: Callable[[object], bool]) -> bool:
    """Whether an object of ``__main__`` whose reduction is a name can be imported: it, or the class that it is of."""
    kind = type(obj)
    return importable(obj) or (kind.__module__ in NAMES and not issubclass(kind, type) and importable(kind))


def registered() -> set[str]:
    """The modules that the user has registered with cloudpickle."""
    registry = getattr(sys.modules.get("cloudpickle"), "list_registry_pickle_by_value", None)
    return set() if registry is None else set(registry())
