"""The decorators that measure functions, and what they emit."""

from __future__ import annotations

from functools import partial, wraps

from phalanx._base import clock
from phalanx.metrics._handlers import put_metric

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any, ParamSpec, TypeVar, overload

    P = ParamSpec("P")
    R = TypeVar("R")

_COROUTINE = 0x80  # inspect.CO_COROUTINE; inspect takes 7 ms to import


if TYPE_CHECKING:  # apart from the above: mypy wants a block of overloads alone

    @overload
    def prof(fn: Callable[P, R], group: str = ...) -> Callable[P, R]: ...
    @overload
    def prof(fn: None = None, group: str = ...) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def prof(fn: Callable[..., Any] | None = None, group: str = "torchelastic") -> Any:
    """Emit metrics of each call of a function: ``@prof``, or ``@prof(group="my_app")``.

    - ``<name>.success``, with the value 1, when it returns;
    - ``<name>.failure``, with the value 1, when it raises an Exception, which is raised on;
    - ``<name>.duration.ms``, with the time that it took in whole milliseconds, in each case; alone, if it ends with
      KeyboardInterrupt, SystemExit or another exception that is no Exception.

    The name is the qualified one (``Trainer.step``), or that of the module without its packages and that of the
    function (``train.main``). Of an ``async`` function the whole run is measured; of a generator, the call
    that makes it.

    Args:
        fn: The function, coroutine function, static method or class method.
        group: The group of the metrics.

    Returns:
        The function that takes its place; without ``fn``, a decorator.

    Raises:
        TypeError: ``fn`` cannot be called.

    >>> from phalanx.metrics import MetricHandler, configure
    >>> class Names(MetricHandler):
    ...     def emit(self, metric_data):
    ...         print(metric_data.name)
    >>> configure(Names(), "example")
    >>> class Trainer:
    ...     @prof(group="example")
    ...     def step(self):
    ...         return 3
    >>> Trainer().step()
    Trainer.step.success
    Trainer.step.duration.ms
    3
    """
    return partial(_measured, group=group) if fn is None else _measured(fn, group)


def profile(group: str | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Do what ``prof(group=...)`` does, by an old name, with a FutureWarning, and with the function's bare name.

    Args:
        group: The group of the metrics. None is a group of its own, without a name.

    Returns:
        A decorator.
    """
    from warnings import warn

    warn("profile is deprecated: use prof(group=...)", FutureWarning, stacklevel=2)
    if callable(group):
        raise TypeError("profile: write it with parentheses, @profile()")
    return lambda function: _wrapped(function, getattr(function, "__name__", type(function).__name__), group)


def get_elapsed_time_ms(start_time_in_seconds: float) -> int:
    """Get the time since ``start_time_in_seconds``, a moment in Unix time (`time.time`), in whole milliseconds.

    >>> import time
    >>> get_elapsed_time_ms(time.time() - 1) >= 1000
    True
    """
    return int((clock.wall() - start_time_in_seconds) * 1000)


def _measured(function: Any, group: str) -> Any:
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(_measured(function.__func__, group))
    if not callable(function):
        raise TypeError(f"prof: expected a function, got {function!r}; a group is given by name: prof(group=...)")
    return _wrapped(function, _name(function), group)


def _wrapped(function: Callable[..., Any], name: str, group: str | None) -> Any:
    inner = _unwrapped(function)
    if getattr(getattr(inner, "__code__", None), "co_flags", 0) & _COROUTINE:

        @wraps(function)
        async def run(*args: Any, **kwargs: Any) -> Any:
            with _Measure(name, group):
                return await function(*args, **kwargs)

        return run

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _Measure(name, group):
            return function(*args, **kwargs)

    return call


def _name(function: Callable[..., Any]) -> str:
    inner = _unwrapped(function)
    whole = str(getattr(inner, "__qualname__", None) or type(inner).__qualname__)
    module = getattr(inner, "__module__", None)
    return whole if "." in whole or not module else f"{module.rpartition('.')[2]}.{whole}"


def _unwrapped(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    return function


class _Measure:
    """A call that is under way, and emits metrics at its end."""

    def __init__(self, name: str, group: str | None) -> None:
        self._name = name
        self._group: Any = group
        self._begun = clock.now()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        took = int((clock.now() - self._begun) * 1000)
        if kind is None or issubclass(kind, Exception):
            put_metric(f"{self._name}.{'failure' if kind else 'success'}", 1, self._group)
        put_metric(f"{self._name}.duration.ms", took, self._group)
