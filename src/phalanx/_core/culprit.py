"""The search for what cannot be pickled. Only ever run on the way to an error, and loaded then."""

from __future__ import annotations

import io

from phalanx._core.payload import Spawning, UnpicklableError, make_pickler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any


def culprit(
    function: Callable[..., Any], arguments: Mapping[int, tuple[Any, ...]], error: Exception
) -> UnpicklableError:
    why = first_line(error)
    if "in a fork context" in why:  # what multiprocessing says of its default objects, without the way out
        why += ' Make it with multiprocessing.get_context("spawn").'
    with Spawning():
        where = find(f"the entrypoint {_name(function)}", function, 4)
        if not where:
            for rank, values in arguments.items():
                for position, value in enumerate(values):
                    where = find(f"argument {position} of rank {rank}", value, 4)
                    if where:
                        return UnpicklableError(f"{where} cannot be sent to a worker: {why}")
    return UnpicklableError(f"{where or 'the entrypoint or an argument'} cannot be sent to a worker: {why}")


def find(what: str, value: object, depth: int) -> str:
    """Name the innermost part of ``value`` that cannot be pickled, as a path from ``what``; "" if all of it can."""
    try:
        make_pickler(io.BytesIO(), by_value=True).dump(value)
    except Exception:  # noqa: BLE001 - any failure is one
        if depth:
            for name, part in _parts(value):
                found = find(f"{name} of {what}", part, depth - 1)
                if found:
                    return found
        return f"{what} ({type_name(value)})"
    return ""


def _parts(value: Any) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        yield from ((f"item {key!r}", part) for key, part in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"item {position}", part) for position, part in enumerate(value))
    elif hasattr(value, "__code__"):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            yield f"the variable {name!r}", cell.cell_contents
        for name in value.__code__.co_names:
            if name in value.__globals__:
                yield f"the global {name!r}", value.__globals__[name]
    else:
        for name in ("func", "args", "keywords", "__self__"):
            if hasattr(value, name):
                yield f"{name!r}", getattr(value, name)
        for name, part in getattr(value, "__dict__", {}).items():
            yield f"the attribute {name!r}", part


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", None) or type_name(function))


def type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def first_line(error: BaseException) -> str:
    try:
        text = str(error).partition("\n")[0]
    except Exception:  # noqa: BLE001 - an exception may do anything
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
