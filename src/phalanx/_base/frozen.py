"""Frozen values: equality, hash, repr, pickle and replace over named fields.

Rejected: ``dataclasses``. It imports ``inspect`` (7 ms on Python 3.12, about as long as ``subprocess``), which would
delay the first worker of every program that imports Phalanx. A subclass annotates its fields, and stores them in
``__init__`` with `_store`; with ``__slots__``, these are its fields.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Self


class Value:
    """The base of a frozen value.

    >>> class Point(Value):
    ...     __slots__ = ("x", "y")
    ...     def __init__(self, x, y):
    ...         self._store(x=x, y=y)
    >>> Point(1, 2)
    Point(x=1, y=2)
    >>> Point(1, 2).replace(y=3) == Point(1, 3)
    True
    >>> Point(1, 2).x = 5
    Traceback (most recent call last):
    AttributeError: Point is a frozen value: 'x' cannot be set
    """

    __slots__ = ()

    __match_args__: tuple[str, ...] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = cls.__dict__.get("__slots__", cls.__annotations__)
        cls.__match_args__ = (*cls.__match_args__, *own)  # type: ignore[misc] # mypy takes it for a constant

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
