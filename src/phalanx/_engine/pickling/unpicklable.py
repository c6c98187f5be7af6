"""Finds what cannot be pickled, and names it in the error. The search runs only after pickling has failed.

It reads what objects store and calls none of their code: attributes may be properties, and `__getattr__` may do
anything. Of others' code, only pickling itself runs. An exception in the search ends it, and never replaces the error
that is being explained.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from types import (
    BuiltinMethodType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any

_MAX_DEPTH = 4
_MAX_PARTS = 4000  # that are looked at, each of which is pickled
_MAX_KEY = 60  # characters of a key in a message


class UnpicklableError(TypeError):
    """Something on its way to or from a worker cannot be pickled. The message names it."""

    __module__ = "phalanx.multiprocessing"  # as people know it, in tracebacks and pickles


def explain_call(
    function: Callable[..., Any],
    arguments: Mapping[int, tuple[Any, ...]],
    error: Exception,
    pickler: Callable[[], Any],
) -> UnpicklableError:
    """Make the exception for a call whose pickling has raised ``error``. It names the part that cannot be pickled.

    ``pickler`` makes a pickler to try the parts with.
    """
    why = first_line(error)
    if "in a fork context" in why:  # multiprocessing's message about its default objects, which names no remedy
        why += ' Make it with multiprocessing.get_context("spawn").'
    where = ""
    with suppress(Exception):
        where = _find_in_call(function, arguments, pickler)
    return UnpicklableError(f"{where or 'the entrypoint or an argument'} cannot be sent to a worker: {why}")


def _find_in_call(
    function: Callable[..., Any], arguments: Mapping[int, tuple[Any, ...]], pickler: Callable[[], Any]
) -> str:
    search = Search(pickler)
    where = search.find(f"the entrypoint {_name(function)}", function)
    seen = set()  # by id: several ranks may have the same arguments
    for rank, values in arguments.items():
        for position, value in enumerate(values):
            if where or search.left <= 0:
                return where
            if id(value) not in seen:
                seen.add(id(value))
                where = search.find(f"argument {position} of rank {rank}", value)
    return where


class Search:
    """Walks through the parts of an object, at most `_MAX_PARTS`. ``pickler`` makes a pickler to try them with."""

    def __init__(self, pickler: Callable[[], Any]) -> None:
        self.left = _MAX_PARTS
        self._pickler = pickler
        self._path: set[int] = set()  # ids of the objects that hold the current one: an object may hold itself

    def find(self, what: str, value: object, depth: int = _MAX_DEPTH) -> str:
        """Name the innermost part of ``value`` that cannot be pickled, as a path from ``what``; "" if all of it can.

        A part that lies too deep, or behind too many others, is named by the object that holds it.
        """
        self.left -= 1
        if self._can_be_pickled(value):
            return ""
        self._path.add(id(value))
        with suppress(Exception):  # it may change during the search
            for name, part in _parts(value) if depth else ():
                if self.left <= 0:
                    break
                found = "" if id(part) in self._path else self.find(f"{name} of {what}", part, depth - 1)
                if found:
                    return found
        self._path.discard(id(value))
        return f"{what} ({type_name(value)})"

    def _can_be_pickled(self, value: object) -> bool:
        try:
            self._pickler().dump(value)
        except Exception:  # noqa: BLE001 - any failure is one
            return False
        return True


def _parts(value: Any) -> Iterator[tuple[str, object]]:
    kind = type(value)  # `isinstance` would ask a proxy for its class
    if issubclass(kind, dict):
        for key, part in dict.items(value):
            yield f"item {_shown(key)}", part
        yield from ((f"the key {_shown(key)}", key) for key in dict.keys(value) if type(key) not in (str, int))
    for base in (list, tuple, set, frozenset):
        if issubclass(kind, base):
            yield from ((f"item {position}", part) for position, part in enumerate(base.__iter__(value)))
    if kind is FunctionType:
        yield from _variables(value)
    elif kind in (MethodType, BuiltinMethodType):
        yield "'__self__'", value.__self__
    elif issubclass(kind, partial):
        for name in ("func", "args", "keywords"):
            yield f"{name!r}", vars(partial)[name].__get__(value)
    yield from ((f"the attribute {_shown(name)}", part) for name, part in _attributes(value))


def _variables(function: FunctionType) -> Iterator[tuple[str, object]]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f"the variable {name!r}", cell.cell_contents
        except ValueError:  # it has no value yet, or no longer
            continue
    for name in code.co_names:
        if name in function.__globals__:
            yield f"the global {name!r}", function.__globals__[name]


def _attributes(value: object) -> Iterator[tuple[object, object]]:
    """The items of the object's real dictionary, also where its class defines a ``__dict__`` of its own."""
    stores = (vars(base).get("__dict__") for base in type(value).__mro__)
    store = next((store for store in stores if type(store) is GetSetDescriptorType), None)
    held: Any = {} if store is None else store.__get__(value)
    if type(held) is MappingProxyType:  # that of a class: leave out the descriptors of its slots
        slots = (GetSetDescriptorType, MemberDescriptorType)
        held = {name: part for name, part in held.items() if type(part) not in slots}
    yield from dict.items(held)


def _shown(key: object) -> str:
    try:
        text = repr(key)
    except Exception:  # noqa: BLE001 - a key may do anything
        text = f"<{type_name(key)}>"
    return text if len(text) <= _MAX_KEY else f"{text[:_MAX_KEY]}…"


def _name(function: object) -> str:
    kind = type(function)
    has_name = kind in (FunctionType, MethodType, BuiltinMethodType) or issubclass(kind, type)
    name = getattr(function, "__qualname__", None) if has_name else dict(_attributes(function)).get("__qualname__")
    return name if type(name) is str else type_name(function)


def type_name(value: object) -> str:
    """The qualified name of an object's class, with its module."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def first_line(error: BaseException) -> str:
    """The name of an exception, and the first line of its message."""
    try:
        text = str(error).partition("\n")[0]
    except Exception:  # noqa: BLE001 - an exception may do anything
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
