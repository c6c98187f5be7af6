"""Pickles by reference; and what pickling by reference and by value have in common.

Owns `plain`, which writes by reference, and `Unpickler`, which reads a worker's result in the launcher: there
``__mp_main__`` is the launcher's ``__main__``, and a reference to an object that the launcher has sent by value is that
object. Knows nothing of processes, of descriptors or of where a pickle is kept.
"""

from __future__ import annotations

import sys
import types
from _frozen_importlib_external import PathFinder as _PathFinder  # without the time that `importlib.machinery` takes

from phalanx._base.unpatched import loaded
from phalanx._engine.main_module import NAMES

TYPE_CHECKING = False
if TYPE_CHECKING:
    import pickle
    from collections.abc import Callable
    from typing import Any
else:
    import _pickle as pickle  # the C half, as in `payload`

PROTOCOL = 5
"""Pickle's protocol: both ends are the same interpreter, 3.11 or later."""


class NotByName(Exception):  # noqa: N818 - the caller goes on by value
    """An object that is being pickled by reference holds something that the other side cannot import."""


class Received(dict[int, tuple[int, object]]):
    """The objects that the launcher sent to this process by value, each with its index, by its id.

    It keeps references to the objects, so that no other object gets their ids.
    """

    def note(self, obj: object, index: int) -> None:
        """Store an object under its index."""
        self[id(obj)] = index, obj

    def index(self, obj: object) -> int | None:
        """Return the index of an object; None if it did not come from the launcher."""
        return self.get(id(obj), (None,))[0]


received = Received()


def plain(
    file: Any,
    table: dict[type, Callable[[Any], Any]],
    *,
    buffer_callback: Callable[[Any], Any] | None = None,
    importable: Callable[[object], bool],
    returns: bool = True,
) -> Any:
    """Make a pickler by reference. Its ``dump`` raises NotByName at an object that would have to go by value.

    Parameters as for `by_value.make`. With ``returns``, objects in `received` are written as references.
    """
    kind = type("Pickler", (_Plain,), {"dispatch_table": {**table, types.MethodType: reduce_method}})
    pickler = kind(file, protocol=PROTOCOL, buffer_callback=buffer_callback)
    pickler.importable = importable
    pickler.returns = returns
    pickler.modules = OnPath()
    return pickler


class OnPath:
    """Which modules a worker can import, whose path is this process's.

    A module that was loaded from a file without the path is one that it cannot (pytest's ``--import-mode=importlib``,
    `importlib.util.spec_from_file_location`), and one whose folder has left the path. It suffices to search for the
    outermost package: what is in it, it has loaded.
    """

    def __init__(self) -> None:
        self._found: dict[str, bool] = {}

    def has(self, module: object) -> bool:
        """Whether workers find a module by its name; one that is not here, or was not loaded, counts as found."""
        if not isinstance(module, str):
            return True
        top = module.partition(".")[0]
        found = self._found.get(top)
        if found is None:
            found = self._found[top] = top in NAMES or top in sys.stdlib_module_names or _is_on_path(top)
        return found


class Unpickler(pickle.Unpickler):
    """Reads a worker's result in the launcher. ``sent`` is the list that `by_value.make` filled for this group."""

    def __init__(self, file: Any, sent: list[object], *, buffers: Any = None) -> None:
        super().__init__(file, buffers=buffers)
        self._sent = sent

    def find_class(self, module: str, name: str) -> Any:
        """Find a global by its name. A worker's ``__mp_main__`` is the launcher's ``__main__``."""
        if module == __name__ and name == "the_launchers":
            return self._sent.__getitem__
        return super().find_class("__main__" if module == "__mp_main__" else module, name)


def the_launchers(index: int) -> object:
    """Takes the place of the object that the launcher sent under ``index``; `Unpickler` replaces it."""
    raise pickle.UnpicklingError(f"object {index} is the launcher's: only the launcher can unpickle this")


def reduce_method(method: types.MethodType) -> tuple[Any, ...]:
    """Reduce a bound method, also a private one, whose name is mangled in its class."""
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
    """The names under which ``owner`` may have ``function``: its own, or what each class mangles a private one to."""
    name = getattr(function, "__name__", None)
    if not isinstance(name, str):
        return []
    if not name.startswith("__") or name.endswith("__"):
        return [name]
    return [f"_{kind.__name__.lstrip('_')}{name}" for kind in line_of(owner)]


def line_of(owner: object) -> tuple[type, ...]:
    """The method resolution order of a class, or of an object's class."""
    kind: type = type(owner)
    return (owner if issubclass(kind, type) else kind).__mro__  # type: ignore[attr-defined, no-any-return]  # it is a class


class _Plain(pickle.Pickler):
    importable: Callable[[object], bool]
    returns: bool
    modules: OnPath
    dispatch_table: dict[type, Callable[[Any], Any]]

    def reducer_override(self, obj: Any) -> Any:
        """Called for all but objects of the simplest built-in types (pickle, "Custom Reduction")."""
        index = received.index(obj) if self.returns else None
        if index is not None:
            return the_launchers, (index,)
        module = getattr(obj, "__module__", None)
        if module in NAMES:
            if is_code(obj):
                if not self.importable(obj):
                    raise NotByName
                return NotImplemented
            reduced = reduction(obj, self.dispatch_table)
            if isinstance(reduced, str) and not importable_by(obj, self.importable):
                raise NotByName
            return reduced
        if not self.returns and is_code(obj) and not self.modules.has(module):
            raise NotByName
        return NotImplemented


def _is_on_path(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    if not isinstance(spec, type(sys.__spec__)):  # it was not loaded, but made
        return True
    from phalanx._engine.main_module import search_path  # here: workers load this module, and have no use for that one

    for finder in sys.meta_path:
        try:
            # The workers' path has working directories that the launcher has left.
            found = finder.find_spec(name, search_path() if finder is _PathFinder else None)
        except Exception:  # noqa: BLE001 - the user's finder: the worker's import tells what is wrong with it
            return True
        if found is not None:
            folders = set(found.submodule_search_locations or ()) & set(spec.submodule_search_locations or ())
            return found.origin == spec.origin and bool(spec.has_location or folders or spec.origin)
    return False


def is_code(obj: object) -> bool:
    """Whether it is a function or a class; a proxy, whose ``__class__`` is one of these, is not."""
    return issubclass(type(obj), (type, types.FunctionType))


def reduction(obj: Any, table: dict[type, Callable[[Any], Any]]) -> Any:
    """Return the reduction that the pickler would use by itself."""
    reducer = table.get(type(obj))
    return obj.__reduce_ex__(PROTOCOL) if reducer is None else reducer(obj)


def importable_by(obj: object, importable: Callable[[object], bool]) -> bool:
    """Whether an object of ``__main__`` whose reduction is a name can be imported: it, or its class."""
    kind = type(obj)
    return importable(obj) or (kind.__module__ in NAMES and not issubclass(kind, type) and importable(kind))


def registered() -> set[str]:
    """The modules that the user has registered with ``cloudpickle.register_pickle_by_value``.

    Does not import cloudpickle: a program that has not imported it has registered nothing.
    """
    registry = getattr(sys.modules.get("cloudpickle"), "list_registry_pickle_by_value", None)
    return set() if registry is None else set(registry())


def sharing_reducers() -> dict[type, Any]:
    """The reducers of `multiprocessing`: connections, sockets, and what frameworks have registered (shared tensors)."""
    module = loaded("multiprocessing.reduction")
    return {} if module is None else dict(module.ForkingPickler._extra_reducers)


class Nowhere:
    """A file that discards what is written to it."""

    def write(self, data: bytes | pickle.PickleBuffer) -> int:
        """Discard data. Returns its size in bytes."""
        return memoryview(data).nbytes  # a large array comes as a PickleBuffer, which has no len
