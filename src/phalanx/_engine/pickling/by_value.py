"""Pickles functions and classes by value, for a process that cannot import them.

Owns a pickler that builds on cloudpickle and repairs what it loses. A worker writes objects that came from the launcher
as references, as `picklers` does. At the end are the callables that such a pickle names, by which it is read: an object
that refers to itself is made empty first and filled afterwards, as pickle's reductions with a state setter do it. Knows
nothing of processes, of descriptors or of where a pickle is kept.

An object goes by value if the other side cannot import it: it lives in ``__main__`` and is not importable there
according to the caller, or its module does not hold it under its name, or the user has registered its module with
cloudpickle.
"""

from __future__ import annotations

import enum
import functools
import io
import sys
import types
from _thread import RLock

from phalanx._engine.main_module import NAMES
from phalanx._engine.pickling.picklers import (
    PROTOCOL,
    OnPath,
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
    from collections.abc import Callable, Sequence
    from typing import Any
else:
    import _pickle as pickle  # the C half, as in `payload`

_HEAPTYPE = 1 << 9  # in the flags of a class: it is on the heap, made at run time (CPython's Py_TPFLAGS_HEAPTYPE)
_MIXED = (object, int, float, complex, str, bytes, tuple)
"""The types that an enumeration which goes by value may be mixed with."""

_VALUES = 1  # of `annotationlib.Format`, which takes long to import
_WITH_SETTER = 6  # the length of cloudpickle's reductions by value: they end with a state setter


def make(
    file: Any,
    table: dict[type, Callable[[Any], Any]],
    *,
    buffer_callback: Callable[[Any], Any] | None = None,
    importable: Callable[[object], bool],
    sent: list[object] | None,
) -> Any:
    """Make a pickler that writes by value what the other side cannot import.

    The reducers of ``table`` take precedence over cloudpickle's; methods are always reduced by `reduce_method`.
    ``importable`` returns whether the other side can import an object of ``__main__`` or ``__mp_main__`` by its name;
    it is called for functions and classes, and for objects whose reduction is a name. In a launcher, every object that
    goes by value is appended to ``sent``, and the worker notes it in `received` under its index in the list. In a
    worker, ``sent`` is None, and objects in `received` are written as references.
    """
    import typing

    import cloudpickle  # type: ignore[import-untyped]  # it ships no types

    merged = {**cloudpickle.Pickler.dispatch_table, **_dataclass_markers(), **table}
    merged.pop(typing.TypeVar, None)  # cloudpickle's loses its module and its default
    merged[io.TextIOWrapper] = functools.partial(_reduce_stream, merged[io.TextIOWrapper])
    merged[types.MethodType] = reduce_method
    merged[functools.cached_property] = _reduce_cached_property
    # Its `__new__` wants a function since Python 3.14.
    merged[functools.partialmethod] = lambda method: (object.__new__, (type(method),), vars(method))
    # A pickler reads its table once, when it is made.
    kind = type("Pickler", (_PicklerByValue, cloudpickle.Pickler), {"dispatch_table": merged})
    pickler = kind(file, protocol=PROTOCOL, buffer_callback=buffer_callback)
    pickler.prepare(importable, sent)
    return pickler


class _PicklerByValue:
    """Overrides cloudpickle's pickler, which is the next base of the class that `make` builds."""

    dispatch_table: dict[type, Callable[[Any], Any]]

    def prepare(self, importable: Callable[[object], bool], sent: list[object] | None) -> None:
        self._importable = importable
        self._modules = OnPath()
        self._returns = sent is None
        self._sent: list[object] = [] if sent is None else sent
        self._numbers = {id(obj): number for number, obj in enumerate(self._sent)}
        self._notes: dict[int, object] = {}  # see `once`: empty here, filled by the reader

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
            reduced = self._numbered(obj, _reduce_member(obj))
        elif kind.__module__ == "typing" and self._of_a_class_by_value(obj):
            reduced = (object.__new__, (kind,), vars(obj))
        else:
            reduced = reduction(obj, self.dispatch_table)
            if isinstance(reduced, str) and not self._found(obj, reduced):
                reduced = self._numbered(obj, self._reduce_named(obj))
        return reduced

    def _class(self, obj: Any) -> Any:
        reduced = None if issubclass(obj, enum.Enum) and self._by_value(obj) else self._code(obj)
        if reduced is NotImplemented or (reduced and len(reduced) < _WITH_SETTER):
            return reduced
        return self._numbered(obj, self._reduce_class(obj))

    def _function(self, obj: Any) -> Any:
        reduced = self._code(obj)
        if reduced is NotImplemented or len(reduced) < _WITH_SETTER:
            return reduced
        if getattr(obj, "__type_params__", ()):
            reduced[2][1]["__type_params__"] = obj.__type_params__
        return self._numbered(obj, reduced)

    def _code(self, obj: Any) -> Any:
        """Cloudpickle's reduction of a function or class; NotImplemented if it goes by its name."""
        main = getattr(obj, "__module__", None) in NAMES
        if main and self._importable(obj):
            return NotImplemented
        reduced = super().reducer_override(obj)  # type: ignore[misc]  # the class that `make` builds has it
        by_name = reduced is NotImplemented  # cloudpickle does so with __mp_main__, and with all that it finds here
        if by_name and (main or not self._on_path(obj.__module__)):
            if issubclass(type(obj), type):
                return cloudpickle_module()._dynamic_class_reduce(obj)  # noqa: SLF001 - see `cloudpickle_module`
            return self._dynamic_function_reduce(obj)
        return reduced

    def _dynamic_function_reduce(self, obj: Any) -> Any:
        """Called by cloudpickle's pickler for a function that goes by value."""
        return super()._dynamic_function_reduce(_with_annotations(obj))  # type: ignore[misc]  # as in `_code`

    def _of_a_class_by_value(self, form: Any) -> bool:
        """Whether it is ``C[T]`` of a class C that goes by value. While C is empty, ``C[T]`` cannot be evaluated."""
        origin = getattr(form, "__origin__", None)
        return issubclass(type(origin), type) and self._by_value(origin)

    def _reduce_class(self, obj: type) -> tuple[Any, ...]:
        """Reduce a class as cloudpickle does, but keep its slots, and do not repeat what its metaclass has done."""
        names = cloudpickle_module()._class_getstate(obj)[0]  # noqa: SLF001 - see `cloudpickle_module`
        for name, value in list(names.items()):
            if isinstance(value, types.MemberDescriptorType) and value.__objclass__ is obj:
                del names[name]  # a slot: it comes into being with the class
        # Since 3.14. It is not asked for `__annotate__`, which would note in the class that it has none.
        if vars(obj).get("__annotate_func__") is not None and "__annotations_cache__" not in names:
            names["__annotations__"] = _annotations(obj)
        namespace = {name: vars(obj)[name] for name in ("__module__", "__slots__") if name in vars(obj)}
        namespace["__qualname__"] = obj.__qualname__
        if isinstance(vars(obj).get("__dict__"), property):
            namespace["__dict__"] = vars(obj)["__dict__"]
        if "__orig_bases__" in vars(obj):
            # The bases' parameters may lead back to the class, so they come with its attributes. Generic needs one.
            namespace["__orig_bases__"] = ()
        meta: Any = type(obj)
        if issubclass(meta, enum.EnumType) or meta.__name__ == "_TypedDictMeta":
            maker: type = type  # these metaclasses compute attributes, which are among the names already
        elif self._returns:  # a class that is only returned must not run code of a metaclass in the launcher
            maker = next(filter(_in_standard_library, meta.__mro__))
        else:
            maker = next(kind for kind in meta.__mro__ if not self._by_value(kind))
        hook = next(kind for kind in obj.__mro__[1:] if "__init_subclass__" in vars(kind))
        if _in_standard_library(hook):  # such as `typing.Generic`, which accepts an empty class
            hook = object
        tracker = cloudpickle_module()._get_or_create_tracker_id(obj)  # noqa: SLF001 - see `cloudpickle_module`
        args = (meta, maker, obj.__name__, obj.__bases__, namespace, hook, tracker)
        return make_class, args, names, None, None, fill_class

    def _reduce_named(self, obj: Any) -> tuple[Any, ...]:
        """Reduce an object that pickle would write by its name in a module which the other side does not have."""
        import typing

        kind = type(obj)
        if isinstance(obj, functools._lru_cache_wrapper):  # noqa: SLF001 - it has no other name
            state = {name: value for name, value in vars(obj).items() if name != "cache_parameters"}
            return make_cached, (obj.__wrapped__, dict(obj.cache_parameters())), state
        if isinstance(obj, typing.TypeVar | typing.ParamSpec | typing.TypeVarTuple):
            return _reduce_parameter(obj)
        if kind.__name__ == "TypeAliasType":  # typing's, since 3.12
            return make_type_alias, (kind, obj.__name__, obj.__value__, obj.__type_params__)
        if not all(base is object or base.__flags__ & _HEAPTYPE for base in kind.__mro__):
            raise pickle.PicklingError(f"{obj!r} is pickled by its name, and its module is not there on the other side")
        return object.__new__, (kind,), obj.__getstate__()  # as `object` has it

    def _method(self, method: types.MethodType) -> Any:
        """Reduce a method as `reduce_method` does; but a class by value may still be empty when it is read."""
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
        """Whether the other side finds an object under a name in the module that the object names."""
        module = _module_of(obj, name)
        if module in NAMES:
            return importable_by(obj, self._importable)
        if not self._on_path(module):
            return False
        if any(f"{module}.".startswith(f"{other}.") for other in registered()):
            return False
        return _follow(sys.modules.get(module), name.split(".")) is obj

    def _on_path(self, module: object) -> bool:
        return self._returns or self._modules.has(module)

    def _numbered(self, obj: object, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
        """Wrap a reduction so that the object is built once, under its number."""
        builder, args, *rest = reduced
        number = self._numbers.get(id(obj))
        if number is None:
            number = self._numbers[id(obj)] = len(self._sent)
            self._sent.append(obj)
        return (once if self._returns else once_received, (self._notes, number, builder, args), *rest)


def _in_standard_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in sys.stdlib_module_names


def _annotations(obj: Any) -> dict[str, Any]:
    """Return the annotations of a function or class: as texts those that have names that are not defined.

    Since Python 3.14 they are evaluated when they are asked for, and then kept in the class: not here.
    """
    found: dict[str, Any]
    try:
        found = obj.__annotate__(_VALUES)
    except Exception:  # noqa: BLE001 - whatever an expression raises: of a name for type checkers alone, NameError
        import importlib

        library: Any = importlib.import_module("annotationlib")  # by name: type checkers of older Pythons lack it
        texts = library.get_annotations(obj, format=library.Format.STRING)
        found = library.get_annotations(obj, format=library.Format.FORWARDREF)
        found = {name: texts[name] if "ForwardRef(" in repr(it) else it for name, it in found.items()}
    return found


def _with_annotations(function: types.FunctionType) -> types.FunctionType:
    """Return a function whose annotations can be read: the given one, or one like it."""
    try:
        function.__annotations__  # noqa: B018 - it may raise
    except Exception:  # noqa: BLE001 - as above
        like = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        like.__dict__.update(function.__dict__)
        for name in ("__kwdefaults__", "__qualname__", "__module__", "__doc__"):
            setattr(like, name, getattr(function, name))
        like.__annotations__ = _annotations(function)
        return like
    return function


def _reduce_member(member: Any) -> tuple[Any, ...]:
    """Reduce an enumeration's member without a lookup: the enumeration may not be complete when it is read."""
    kind = type(member)
    mixed = kind._member_type_
    if mixed not in _MIXED:
        msg = f"{member!r}: an enumeration mixed with {mixed.__qualname__} cannot go by value: put it into a module"
        raise pickle.PicklingError(msg)
    slotted = next((base for base in kind.__mro__ if base is not mixed and vars(base).get("__slots__")), None)
    if slotted is not None:
        msg = f"{member!r}: an enumeration mixed with {slotted.__qualname__}, which has slots, cannot go by value: "
        raise pickle.PicklingError(f"{msg}put it into a module")
    args = () if mixed is object else mixed.__getnewargs__(member)
    return make_member, (kind, mixed, member._name_, args), vars(member), None, None, fill_member


def _reduce_cached_property(obj: functools.cached_property[Any]) -> tuple[Any, ...]:
    """Reduce a cached property without its lock, which it has until Python 3.12."""
    return make_cached_property, (type(obj),), {name: value for name, value in vars(obj).items() if name != "lock"}


def _reduce_parameter(obj: Any) -> tuple[Any, ...]:
    """Reduce a type variable, or one of its relatives in `typing`."""
    names = ("bound", "covariant", "contravariant", "infer_variance")  # infer_variance since 3.12
    options = {name: getattr(obj, f"__{name}__") for name in names if hasattr(obj, f"__{name}__")}
    if hasattr(obj, "has_default") and obj.has_default():  # since 3.13
        options["default"] = obj.__default__
    return make_type_parameter, (type(obj), obj.__name__, getattr(obj, "__constraints__", ()), options, obj.__module__)


def _module_of(obj: object, name: str) -> str:
    """The module that the pickler names when it writes ``obj`` as a global: its own, or the first that has it.

    `pickle.whichmodule` is not asked: since Python 3.14 it raises where that module does not lead to the object.
    """
    module: str | None = getattr(obj, "__module__", None)
    if module is not None:
        return module
    path = name.split(".")
    others = [each for each in sys.modules.copy() if each not in NAMES]
    return next((each for each in others if _follow(sys.modules.get(each), path) is obj), "__main__")


def _follow(found: Any, path: Sequence[str]) -> Any:
    """Return what the attributes of an object lead to, one after the other; None: nothing."""
    for part in path:
        found = getattr(found, part, None)
    return found


def _reduce_stream(reduce: Callable[[Any], Any], stream: Any) -> Any:
    """Reduce a standard stream to that of the other side. Refuse others: cloudpickle would copy a file's content."""
    if stream in (sys.stdout, sys.stderr):
        return reduce(stream)
    raise TypeError(f"cannot pickle {type(stream).__qualname__!r} object")


def _dataclass_markers() -> dict[type, Callable[[Any], Any]]:
    """Reducers for the markers that `dataclasses` compares by identity: each is written by its name there."""
    import dataclasses

    def by_name(mark: object) -> str:
        return next(name for name, value in vars(dataclasses).items() if value is mark)

    return {
        type(value): by_name for value in vars(dataclasses).values() if type(value).__module__ == dataclasses.__name__
    }


_hook_replaced = RLock()  # held while a base's `__init_subclass__` is replaced
_empty: dict[int, type] = {}  # by id: classes that have been made and not yet filled


def cloudpickle_module() -> Any:
    """The module in which cloudpickle keeps its parts. The private ones used here have no public counterpart."""
    from cloudpickle import cloudpickle

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

    ``maker`` is the metaclass whose ``__new__`` makes it: ``meta`` or one of its bases. ``namespace`` is what it must
    have from the beginning, such as its slots. ``hook`` is the base that defines ``__init_subclass__``, which is not
    called here: the class has no attributes yet, and the keyword arguments of its class statement are not known. If
    this process has a class with the ``tracker`` id of cloudpickle, that is returned unchanged.
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
