"""Functions and classes by value: what the other side cannot import.

Owns a pickler that builds on cloudpickle and repairs what it loses. What came from the launcher, a worker writes as a
reference, as `pickling` has it. Knows nothing of processes, of descriptors or of where a pickle is kept.

An object goes by value if the other side cannot import it: it lives in ``__main__`` and the caller says that it is not
importable there, or its module does not hold it under its name, or the user has registered its module with cloudpickle.
"""

from __future__ import annotations

import contextlib
import copyreg
import enum
import functools
import io
import sys
import types
import weakref
from _thread import RLock, get_ident

from phalanx._engine.main_module import NAMES
from phalanx._engine.pickling.picklers import (
    PROTOCOL,
    importable_by,
    line_of,
    received,
    reduce_method,
    reduction,
    registered,
    the_launchers,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    import pickle
    from collections.abc import Callable, Iterator
    from typing import Any
else:
    import _pickle as pickle  # the C half, as in `payload`

_DESCRIPTORS = (property, classmethod, staticmethod, functools.cached_property, functools.singledispatchmethod)
_HEAP = 1 << 9  # in the flags of a class: a program made it (CPython's Py_TPFLAGS_HEAPTYPE)
_WITH_SETTER = 6  # the length of a reduction by value: cloudpickle's have a state and a setter


def make(
    file: Any,
    table: dict[type, Callable[[Any], Any]],
    *,
    buffer_callback: Callable[[Any], Any] | None = None,
    importable: Callable[[object], bool],
    sent: list[object] | None,
) -> Any:
    """A pickler that takes by value what the other side cannot import.

    Args:
        file: Where it writes.
        table: Reducers by type. They go before cloudpickle's; methods are always reduced by `reduce_method`.
        buffer_callback: As for `pickle.Pickler`.
        importable: Whether the other side can import an object of ``__main__`` or ``__mp_main__`` by its name. It is
            asked of functions and classes, and of objects whose reduction is a name.
        sent: In a launcher: every object that goes by value is appended, and the worker notes it in `received` under
            its place in the list. None in a worker: what is in `received` is written as a reference.
    """
    import typing

    import cloudpickle  # type: ignore[import-untyped]  # it ships no types

    merged = {**cloudpickle.Pickler.dispatch_table, **_dataclass_markers(), **table}
    merged.pop(typing.TypeVar, None)  # cloudpickle's loses its module and its default
    merged[io.TextIOWrapper] = functools.partial(_reduce_stream, merged[io.TextIOWrapper])
    merged[types.MethodType] = reduce_method
    # A pickler reads its table once, when it is made.
    kind = type("Pickler", (_Repairs, cloudpickle.Pickler), {"dispatch_table": merged})
    pickler = kind(file, protocol=PROTOCOL, buffer_callback=buffer_callback)
    pickler.prepare(importable, sent)
    return pickler


class _Repairs:
    """What `make` lays over cloudpickle's pickler."""

    dispatch_table: dict[type, Callable[[Any], Any]]

    def prepare(self, importable: Callable[[object], bool], sent: list[object] | None) -> None:
        self._importable = importable
        self._returns = sent is None
        self._made: list[object] = [] if sent is None else sent
        self._numbers = {id(obj): number for number, obj in enumerate(self._made)}
        self._notes: dict[int, object] = {}  # empty here, one per pickle there: see `_once`
        self._values: dict[int, list[Any]] = {}  # of type aliases, by id

    def reducer_override(self, obj: Any) -> Any:
        """Called for all but objects of the simplest built-in types (pickle, "Custom Reduction")."""
        kind = type(obj)
        index = received.index(obj) if self._returns else None
        if index is not None:
            reduced: Any = (the_launchers, (index,))
        elif issubclass(kind, type):
            reduced = self._class(obj)
        elif kind is types.FunctionType:
            reduced = self._function(obj)
        elif kind is types.MethodType:
            reduced = self._method(obj)
        elif issubclass(kind, enum.Enum) and self._by_value(kind):
            reduced = self._noted(obj, _reduce_member(obj))
        elif issubclass(kind, _DESCRIPTORS) and kind not in self.dispatch_table:
            reduced = _reduce_descriptor(obj)
        elif kind.__module__ == "typing" and self._of_a_class_by_value(obj):
            reduced = (object.__new__, (kind,), vars(obj))
        else:
            reduced = reduction(obj, self.dispatch_table)
            if isinstance(reduced, str) and not self._found(obj, reduced):
                reduced = self._noted(obj, self._reduce_named(obj))
        return reduced

    def _class(self, obj: Any) -> Any:
        reduced = None if issubclass(obj, enum.Enum) and self._by_value(obj) else self._code(obj)
        if reduced is NotImplemented or (reduced and len(reduced) < _WITH_SETTER):
            return reduced
        return self._noted(obj, self._reduce_class(obj))

    def _function(self, obj: Any) -> Any:
        if obj.__code__ == _dispatcher_code() and self._by_value(obj):
            return self._noted(obj, _reduce_dispatcher(obj))
        reduced = self._code(obj)
        if reduced is NotImplemented or len(reduced) < _WITH_SETTER:
            return reduced
        if getattr(obj, "__type_params__", ()):
            reduced[2][1]["__type_params__"] = obj.__type_params__
        return self._noted(obj, reduced)

    def _code(self, obj: Any) -> Any:
        """What cloudpickle says of a function or class, if it is let."""
        main = getattr(obj, "__module__", None) in NAMES
        if main and self._importable(obj):
            return NotImplemented
        reduced = super().reducer_override(obj)  # type: ignore[misc]  # the class that `make` builds has it
        if reduced is NotImplemented and main:  # cloudpickle takes what is in __mp_main__ by its name
            if issubclass(type(obj), type):
                return _cloudpickle()._dynamic_class_reduce(obj)  # noqa: SLF001 - see `_cloudpickle`
            return self._dynamic_function_reduce(obj)  # type: ignore[attr-defined]  # as above
        return reduced

    def _of_a_class_by_value(self, form: Any) -> bool:
        """Whether it is a generic class with its parameters given, by value. Empty as yet, the class gives no such."""
        origin = getattr(form, "__origin__", None)
        return issubclass(type(origin), type) and self._by_value(origin)

    def _reduce_class(self, obj: type) -> tuple[Any, ...]:
        """As cloudpickle has it, but for what it loses: slots, and what must not run again as the class is made."""
        names = _cloudpickle()._class_getstate(obj)[0]  # noqa: SLF001 - see `_cloudpickle`
        for name, value in list(names.items()):
            if isinstance(value, types.MemberDescriptorType) and value.__objclass__ is obj:
                del names[name]  # a slot: it is made with the class
        given = {name: vars(obj)[name] for name in ("__module__", "__slots__") if name in vars(obj)}
        given["__qualname__"] = obj.__qualname__
        if isinstance(vars(obj).get("__dict__"), property):
            given["__dict__"] = vars(obj)["__dict__"]
        if "__orig_bases__" in vars(obj):
            # The bases' parameters may lead back to the class, so they come with its names. Generic wants some.
            given["__orig_bases__"] = ()
        meta: Any = type(obj)
        if issubclass(meta, enum.EnumType) or meta.__name__ == "_TypedDictMeta":
            maker: type = type  # what they do, they do once: its outcome is among the names
        elif self._returns:  # the launcher's own metaclass has no business with a class that is only passing by
            maker = next(filter(_of_the_library, meta.__mro__))
        else:
            maker = next(kind for kind in meta.__mro__ if not self._by_value(kind))
        hook = next(kind for kind in obj.__mro__[1:] if "__init_subclass__" in vars(kind))
        if _of_the_library(hook):  # `typing.Generic`, say: it takes an empty class well
            hook = object
        heard = hook is not object and not self._returns and not self._by_value(hook)
        tracker = _cloudpickle()._get_or_create_tracker_id(obj)  # noqa: SLF001 - see `_cloudpickle`
        args = (meta, maker, obj.__name__, obj.__bases__, given, hook, tracker)
        return _empty_class, args, (names, heard), None, None, _fill_class

    def _reduce_named(self, obj: Any) -> tuple[Any, ...]:
        """The reduction of what would be found by its name, were its module there."""
        import typing

        kind = type(obj)
        if isinstance(obj, functools._lru_cache_wrapper):  # noqa: SLF001 - it has no other name
            state = {name: value for name, value in vars(obj).items() if name != "cache_parameters"}
            return _cached, (obj.__wrapped__, dict(obj.cache_parameters())), state
        if isinstance(obj, typing.TypeVar | typing.ParamSpec | typing.TypeVarTuple):
            return _reduce_parameter(obj)
        if kind.__name__ == "TypeAliasType":  # typing's, since 3.12
            value = self._values.setdefault(id(obj), [])  # one list, wherever the value leads back to the alias
            if not value:
                value.append(obj.__value__)
            return _alias, (kind, obj.__name__, value, obj.__type_params__, obj.__module__)
        if not all(base is object or base.__flags__ & _HEAP for base in kind.__mro__):
            msg = f"{obj!r} is pickled by its name, and its module is not there on the other side"
            raise pickle.PicklingError(msg)
        return object.__new__, (kind,), obj.__getstate__()  # as `object` has it

    def _method(self, method: types.MethodType) -> Any:
        """As `reduce_method` has it, except of a class by value: it may still be empty when it is asked."""
        reduced = reduce_method(method)
        if reduced[0] is getattr:
            holder = next((kind for kind in line_of(method.__self__) if reduced[1][1] in vars(kind)), None)
            if holder is None or self._by_value(holder):
                return types.MethodType, (method.__func__, method.__self__)
        return reduced

    def _by_value(self, obj: Any) -> bool:
        """Whether a function or class goes by value."""
        if self._returns and received.index(obj) is not None:
            return False
        return not self._found(obj, obj.__qualname__)

    def _found(self, obj: Any, name: str) -> bool:
        """Whether the other side finds an object under a name in the module that is said to be its own."""
        module = _module_of(obj, name)
        if module in NAMES:
            return importable_by(obj, self._importable)
        if any(f"{module}.".startswith(f"{other}.") for other in registered()):
            return False
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        return found is obj

    def _noted(self, obj: object, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
        """The reduction, with the object as one that is known by its number."""
        builder, args, *rest = reduced
        number = self._numbers.get(id(obj))
        if number is None:
            number = self._numbers[id(obj)] = len(self._made)
            self._made.append(obj)
        return (_once if self._returns else _once_received, (self._notes, number, builder, args), *rest)


def _of_the_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in sys.stdlib_module_names


_deaf = RLock()  # held while a class hears of no subclass
_empty: dict[int, type] = {}  # by id: classes that have been made, and not been filled


def _empty_class(
    meta: type,
    maker: Any,
    name: str,
    bases: tuple[type, ...],
    given: dict[str, Any],
    hook: type,
    tracker: str,
) -> type:
    """A class without what is in it, which `_fill_class` adds.

    It is made by ``maker``, one of the metaclasses. ``hook``, the base that has an ``__init_subclass__``, does not hear
    of it as yet: there is nothing to be seen, and what the class statement gave it is not known. One that this process
    knows by its ``tracker``, cloudpickle's id, is that, and stays as it is.
    """
    made: list[type] = []

    def made_by(name: str, bases: tuple[type, ...], names: dict[str, Any]) -> Any:
        made.append(meta(name, bases, names) if maker is meta else maker.__new__(meta, name, bases, names))
        return made[0]

    me = get_ident()

    def hear(cls: type, /, **options: Any) -> None:
        if get_ident() != me:  # a class statement in another thread
            own.__get__(None, cls)(**options)

    with _deaf:
        own: Any = (
            None if hook is object else vars(hook).get("__init_subclass__")
        )  # None: by value, too, and empty as yet
        if own is not None:
            type.__setattr__(hook, "__init_subclass__", classmethod(hear))
        try:
            cls: type = _cloudpickle()._make_skeleton_class(  # noqa: SLF001 - see `_cloudpickle`
                made_by, name, bases, given, tracker, None
            )
            if any(cls is each for each in made):  # a metaclass may compare as it likes
                _empty[id(cls)] = cls
            return cls
        finally:
            if own is not None:
                type.__setattr__(hook, "__init_subclass__", own)


def _fill_class(cls: Any, state: tuple[dict[str, Any], bool]) -> None:
    """Give a class that is empty what is in it, and have its base hear of it, where that is asked for."""
    if _empty.pop(id(cls), None) is None:
        return
    names, heard = state
    guarded = isinstance(type(cls).__setattr__, types.FunctionType)  # such as that of enumerations
    give = type.__setattr__ if guarded else setattr
    for name, value in names.items():
        if name not in ("_abc_impl", "__firstlineno__"):
            give(cls, name, value)
    if "__firstlineno__" in names:  # setting anything else removes it (3.13)
        give(cls, "__firstlineno__", names["__firstlineno__"])
    for other in names.get("_abc_impl", ()):
        cls.register(other)
    if heard:
        with contextlib.suppress(TypeError):  # it wants what the class statement gave it
            super(cls, cls).__init_subclass__()


def _reduce_member(member: Any) -> tuple[Any, ...]:
    """The reduction of an enumeration's member, which does not look it up: the enumeration is not there yet."""
    kind = type(member)
    mixed = kind._member_type_
    # The first that is no Python: the others' `__new__` may want other arguments than they keep.
    base = next(each for each in mixed.__mro__ if isinstance(vars(each).get("__new__"), types.BuiltinFunctionType))
    its_own = vars(base).get("__getnewargs__")
    reduced = (copyreg.__newobj__, (kind,)) if mixed is object else mixed.__reduce_ex__(member, PROTOCOL)  # type: ignore[attr-defined]  # the stubs lack it
    items = (*reduced[3:], None, None)
    if base is object or (its_own is None and reduced[0] is copyreg.__newobj__):  # type: ignore[attr-defined]  # as above
        args: tuple[Any, ...] = ()
    elif its_own is not None:
        args = its_own(member)
    elif reduced[0] is kind:
        args = reduced[1]
    else:
        msg = f"{member!r}: an enumeration that is mixed with {mixed.__qualname__} cannot go by value"
        raise pickle.PicklingError(msg)
    slots = {name: getattr(member, name) for name in _slots(kind) if hasattr(member, name)}
    state = {**slots, **vars(member)}
    return _member, (kind, base, member._name_, args), state, *items[:2], _fill_member


def _slots(kind: type) -> Iterator[str]:
    """The names of the slots of a class. `copyreg` knows them, too, and writes them into the class."""
    for each in kind.__mro__:
        names = vars(each).get("__slots__", ())
        for name in {names} if isinstance(names, str) else {*names} - {"__dict__", "__weakref__"}:
            private = name.startswith("__") and not name.endswith("__")
            yield f"_{each.__name__.lstrip('_')}{name}" if private else name


def _member(kind: type, base: Any, name: str | None, args: tuple[Any, ...]) -> Any:
    made = base.__new__(kind, *args)
    made._name_ = name  # its hash is made of it
    return made


def _fill_member(member: object, state: dict[str, Any]) -> None:
    for name, value in state.items():
        object.__setattr__(member, name, value)


def _reduce_dispatcher(function: Any) -> tuple[Any, ...]:
    """The reduction of a `functools.singledispatch` function."""
    own = ("register", "dispatch", "registry", "_clear_cache")
    state = (
        {name: getattr(function, name) for name in ("__name__", "__qualname__", "__doc__", "__module__")},
        {name: value for name, value in vars(function).items() if name not in own},
        list(function.registry.items()),
    )
    return functools.singledispatch, (function.registry[object],), state, None, None, _fill_dispatcher


def _fill_dispatcher(function: Any, state: tuple[dict[str, Any], dict[str, Any], list[tuple[type, Any]]]) -> None:
    names, extra, registry = state
    for name, value in names.items():
        setattr(function, name, value)
    vars(function).update(extra)
    for kind, implementation in registry:
        function.register(kind, implementation)


@functools.cache
def _dispatcher_code() -> types.CodeType:
    return functools.singledispatch(lambda _value: None).__code__  # type: ignore[attr-defined, no-any-return]  # a function, in truth


def _reduce_descriptor(obj: Any) -> tuple[Any, ...]:
    """The reduction of what a class has for its attributes, by value as it stands there."""
    if isinstance(obj, property):
        return _descriptor, (type(obj), property, (obj.fget, obj.fset, obj.fdel, obj.__doc__)), vars(obj)
    if isinstance(obj, (classmethod, staticmethod)):
        kind = classmethod if isinstance(obj, classmethod) else staticmethod
        return _descriptor, (type(obj), kind, (obj.__func__,)), None
    own = _own(type(obj))
    return _renewed, (type(obj),), {name: value for name, value in vars(obj).items() if name not in own}


def _descriptor(kind: Any, base: Any, args: tuple[Any, ...]) -> Any:
    """An object of a class that was made from a built-in one, with what the latter keeps."""
    made: Any = kind.__new__(kind)
    base.__init__(made, *args)
    return made


def _own(kind: type) -> dict[str, Callable[[], Any]]:
    """What a descriptor from `functools` has for itself alone, and how each is made."""
    if issubclass(kind, functools.cached_property):
        import threading

        return {"lock": threading.RLock}  # until 3.12
    return {"_method_cache": weakref.WeakKeyDictionary}  # in 3.13


def _renewed(kind: Any) -> Any:
    """Such a descriptor, with what it has for itself alone."""
    made = kind.__new__(kind)
    vars(made).update({name: make_it() for name, make_it in _own(kind).items()})
    return made


def _cached(function: Any, options: dict[str, Any]) -> Any:
    return functools.lru_cache(**options)(function)


def _reduce_parameter(obj: Any) -> tuple[Any, ...]:
    """The reduction of a type variable and its like."""
    names = ("bound", "covariant", "contravariant", "infer_variance")  # infer_variance since 3.12
    options = {name: getattr(obj, f"__{name}__") for name in names if hasattr(obj, f"__{name}__")}
    if hasattr(obj, "has_default") and obj.has_default():  # since 3.13
        options["default"] = obj.__default__
    return _parameter, (type(obj), obj.__name__, getattr(obj, "__constraints__", ()), options, obj.__module__)


def _parameter(kind: Any, name: str, constraints: tuple[Any, ...], options: dict[str, Any], module: str) -> Any:
    made = kind(name, *constraints, **options)
    made.__module__ = module
    return made


def _alias(kind: Any, name: str, value: list[Any], parameters: tuple[Any, ...], module: str) -> Any:
    """A type alias. Its value may lead back to it: then the list is filled later, and read when the value is wanted."""
    names = {"__name__": module, "kind": kind, "value": value, "parameters": parameters}
    if parameters:
        return eval(f"kind({name!r}, value[0], type_params=parameters)", names)  # noqa: S307 - it asks its caller's module
    exec(f"type {name} = value[0]", names)  # noqa: S102 - the only way to have it evaluated later
    return names[name]


def _once(notes: dict[int, Any], number: int, builder: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Build an object, or give the one that is built.

    A reduction whose arguments lead back to the object is written twice, one inside the other. ``notes`` is one dict
    for all of a pickle, so that nothing is built twice.
    """
    if number not in notes:
        made = builder(*args)
        notes.setdefault(number, made)
    return notes[number]


def _once_received(notes: dict[int, Any], number: int, builder: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """As `_once`, in a worker: the object is the launcher's ``number``."""
    made = _once(notes, number, builder, args)
    if received.index(made) is None:
        received.note(made, number)
    return made


def _cloudpickle() -> Any:
    """Where cloudpickle keeps its parts. The private ones that are used here have no public counterpart."""
    from cloudpickle import cloudpickle

    return cloudpickle


def _module_of(obj: object, name: str) -> str:
    """The module that the pickler would name, were it to write ``obj`` as a global."""
    import pickle as whole

    module: str = whole.whichmodule(obj, name)  # type: ignore[attr-defined]  # the stubs lack it
    return module


def _reduce_stream(reduce: Callable[[Any], Any], stream: Any) -> Any:
    """Standard streams are the other side's own. What cloudpickle would make of another is a copy of what is in it."""
    if stream in (sys.stdout, sys.stderr):
        return reduce(stream)
    msg = f"cannot pickle {type(stream).__qualname__!r} object"
    raise TypeError(msg)


def _dataclass_markers() -> dict[type, Callable[[Any], Any]]:
    """Reducers for the marks that `dataclasses` compares by identity: each by its name there."""
    import dataclasses

    def by_name(mark: object) -> str:
        return next(name for name, value in vars(dataclasses).items() if value is mark)

    return {
        type(value): by_name for value in vars(dataclasses).values() if type(value).__module__ == dataclasses.__name__
    }
