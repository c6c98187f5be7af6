"""Frozen values: equality, hash, repr, pickle and replace over named fields.

Rejected: ``dataclasses``. It imports ``inspect`` (7 ms on Python 3.12, about as long as ``subprocess``), which would
delay the first worker of every program that imports Phalanx. A subclass annotates its fields, in order; a class
attribute is a field's default. One that checks or converts them has an ``__init__``, which stores them with `_store`.
Fields of a class that may have very many instances can stand in ``__slots__`` instead.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Self


class Value:
    """The base of a frozen value.

    >>> class Point(Value):
    ...     x: int
    ...     y: int = 2
    >>> Point(1)
    Point(x=1, y=2)
    >>> Point(1, 2).replace(y=3) == Point(1, 3)
    True
    >>> Point(1, 2).x = 5
    Traceback (most recent call last):
    AttributeError: Point is a frozen value: 'x' cannot be set
    """

    __slots__ = ()

    __match_args__: tuple[str, ...] = ()
    _names: frozenset[str] = frozenset()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = cls.__dict__.get("__slots__")
        if own is None and cls.__module__.partition(".")[0] == __name__.partition(".")[0]:
            own = [name for name, kind in cls.__annotations__.items() if not kind.startswith("ClassVar[")]
        own = own or ()  # a class of somebody else's may annotate what it likes
        cls.__match_args__ = (*cls.__match_args__, *own)  # type: ignore[misc] # mypy takes it for a constant
        cls._names = frozenset(cls.__match_args__)

    def __init__(self, *args: Any, **fields: Any) -> None:
        names = self.__match_args__
        known = dict(zip(names, args, strict=False)) | fields if args else fields
        lacking = [name for name in names if name not in known and not hasattr(type(self), name)]
        if lacking or len(known) != len(args) + len(fields) or not known.keys() <= self._names:
            msg = f"{type(self).__name__}: expected {', '.join(names)}, got {len(args)} and {', '.join(fields)}"
            raise TypeError(msg)
        self.__dict__.update(known)

    def _store(self, **fields: Any) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def replace(self, **changes: Any) -> Self:
        """Copy with some fields changed. A field that was derived from others is copied, not derived again.

        Raises:
            TypeError: There is no such field.
        """
        unknown = [name for name in changes if name not in self.__match_args__]
        if unknown:
            raise TypeError(f"{type(self).__name__} has no field {unknown[0]!r}")
        copy = object.__new__(type(self))
        copy._store(**self.__getstate__() | changes)
        return copy

    __replace__ = replace

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is a frozen value: {name!r} cannot be set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is a frozen value: {name!r} cannot be deleted")

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__match_args__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._store(**state)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self.__getstate__() == other.__getstate__()

    def __hash__(self) -> int:
        return hash((type(self), *self.__getstate__().values()))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.__getstate__().items())
        return f"{type(self).__name__}({fields})"
