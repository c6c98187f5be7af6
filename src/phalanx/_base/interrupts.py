"""Defers what a signal handler of ours raises until a step that must not be cut short has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_depth = 0
_late: list[Callable[[], None]] = []


@contextmanager
def deferred() -> Iterator[None]:
    """Run a step without interruption by our signal handlers, as from a fork to the storing of its pid. May be nested.

    Python's own ``Thread.start`` is such a step: an exception in the midst of it can leave a thread that ends before
    its first line.
    """
    global _depth  # noqa: PLW0603 - handlers run on one thread of the process
    if threading.current_thread() is not threading.main_thread():  # no handler runs on this thread
        yield
        return
    before = _depth
    if not before:
        _late.clear()  # left by a step whose end another signal's exception has cut short
    _depth = before + 1
    try:
        yield
    finally:
        _depth = before
        if not before and _late:
            first = _late[0]
            _late.clear()
            first()


def defer(action: Callable[[], None]) -> bool:
    """Have ``action`` called at the end of the step that is under way, if it is the first. For signal handlers.

    Returns False, and does nothing, when no step is under way.

    >>> with deferred():
    ...     defer(lambda: print("at the end")), print("now")
    now
    (True, None)
    at the end
    >>> defer(lambda: None)
    False
    """
    if _depth:
        _late.append(action)
    return _depth > 0


def reset() -> None:
    """Forget the step that was under way at a fork, in the child."""
    global _depth  # noqa: PLW0603 - as above
    _depth = 0
    _late.clear()
