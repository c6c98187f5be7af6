"""Builds functions, classes and their parts from a pickle by value: the callables that `by_value` writes into it.

Runs wherever such a pickle is read, so it loads less than the writing does. An object that refers to itself is made
empty first and filled afterwards, as pickle's reductions with a state setter do it.
"""

from __future__ import annotations

import functools
import sys
import types
from _thread import RLock

from phalanx._engine.pickling.picklers import received

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_hook_replaced = RLock()  # held while a base's `__init_subclass__` is replaced
_empty: dict[int, type] = {}  # by id: classes that have been made and not yet filled


def cloudpickle_module() -> Any:
    """The module in which cloudpickle keeps its parts. The private ones used here have no public counterpart."""
    from cloudpickle import cloudpickle  # type: ignore[import-untyped]  # it ships no types

    return cloudpickle


# --- identity


def once(notes: dict[int, Any], number: int, builder: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Build the object with this number, or return it if it has been built.

    A reduction whose arguments lead back to the object is written twice, one inside the other. ``notes`` is one dict
    for the whole pickle, so nothing is built twice.
    """
    if number not in notes:
        made = builder(*args)
        notes.setdefault(number, made)
    return notes[number]


def once_received(notes: dict[int, Any], number: int, builder: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """As `once`, in a worker: also notes in `received` that the object is the launcher's ``number``."""
    made = once(notes, number, builder, args)
    if received.index(made) is None:
        received.note(made, number)
    return made


# --- classes


def make_class(
    meta: type,
    maker: Any,
    name: str,
    bases: tuple[type, ...],
    namespace: dict[str, Any],
    hook: type,
    tracker: str,
) -> type:
    """Make a class without its attributes, which `fill_class` adds.

    Args:
        meta: Its metaclass.
        maker: The metaclass whose ``__new__`` makes it: ``meta`` or one of its bases.
        name: Its name.
        bases: Its bases.
        namespace: What it must have from the beginning, such as its slots.
        hook: The base that defines ``__init_subclass__``. It is not called here: the class has no attributes yet, and
            the keyword arguments of its class statement are not known.
        tracker: cloudpickle's id of the class. If this process has a class with that id, it is returned unchanged.
    """
    made: list[type] = []

    def made_by(name: str, bases: tuple[type, ...], names: dict[str, Any]) -> Any:
        made.append(meta(name, bases, names) if maker is meta else maker.__new__(meta, name, bases, names))
        return made[0]

    def skip(_cls: type, /, **_options: Any) -> None:
        """In place of the base's `__init_subclass__`."""

    with _hook_replaced:
        # None also where the base comes by value and is still empty.
        original: Any = None if hook is object else vars(hook).get("__init_subclass__")
        if original is not None:
            type.__setattr__(hook, "__init_subclass__", classmethod(skip))
        try:
            cls: type = cloudpickle_module()._make_skeleton_class(  # noqa: SLF001 - see `cloudpickle_module`
                made_by, name, bases, namespace, tracker, None
            )
            if any(cls is each for each in made):  # not `in`: a metaclass may define equality
                _empty[id(cls)] = cls
            return cls
        finally:
            if original is not None:
                type.__setattr__(hook, "__init_subclass__", original)


def fill_class(cls: Any, names: dict[str, Any]) -> None:
    """Set the attributes of a class that `make_class` has made."""
    if _empty.pop(id(cls), None) is None:
        return
    guarded = isinstance(type(cls).__setattr__, types.FunctionType)  # such as that of enumerations
    set_attribute = type.__setattr__ if guarded else setattr
    for name, value in names.items():
        if name not in ("_abc_impl", "__firstlineno__"):
            set_attribute(cls, name, value)
    if "__firstlineno__" in names:  # setting anything else removes it (3.13)
        set_attribute(cls, "__firstlineno__", names["__firstlineno__"])
    for other in names.get("_abc_impl", ()):
        cls.register(other)


# --- members of enumerations


def make_member(kind: type, base: Any, name: str | None, args: tuple[Any, ...]) -> Any:
    """Make a member of the enumeration ``kind`` with ``base.__new__``, without looking it up."""
    made = base.__new__(kind, *args)
    made._name_ = name  # its hash is computed from it
    return made


def fill_member(member: object, state: dict[str, Any]) -> None:
    """Set the attributes of a member. Its own ``__setattr__`` may refuse them."""
    for name, value in state.items():
        object.__setattr__(member, name, value)


# --- wrappers


def make_cached_property(kind: Any) -> Any:
    """Make a cached property without its attributes, with a lock of its own where it has one (until Python 3.12)."""
    made = kind.__new__(kind)
    if sys.version_info < (3, 12):
        made.lock = RLock()
    return made


def make_cached(function: Any, options: dict[str, Any]) -> Any:
    """Wrap a function in `functools.lru_cache`, with an empty cache."""
    return functools.lru_cache(**options)(function)


# --- type parameters and aliases


def make_type_parameter(
    kind: Any, name: str, constraints: tuple[Any, ...], options: dict[str, Any], module: str
) -> Any:
    """Make a type variable, or one of its relatives in `typing`."""
    made = kind(name, *constraints, **options)
    made.__module__ = module
    return made


def make_type_alias(kind: Any, name: str, value: Any, parameters: tuple[Any, ...]) -> Any:
    """Make a type alias."""
    return kind(name, value, type_params=parameters)
