"""When what a signal handler of ours raises may come: not in the midst of a step that has to be whole.

Owns the putting off. Knows nothing of signals.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_depth = 0
_late: list[Callable[[], None]] = []


@contextmanager
def whole() -> Iterator[None]:
    """Around a step that is done whole: not between a fork and the noting of its pid, say. May be nested.

    Python's own ``Thread.start`` is one: an exception in its midst can leave a thread that dies before its first line.
    """
    global _depth  # noqa: PLW0603 - handlers run on one thread of the process
    if threading.current_thread() is not threading.main_thread():  # where no handler runs
        yield
        return
    before = _depth
    if not before:
        _late.clear()  # of a step whose end another signal's exception has cut short
    _depth = before + 1
    try:
        yield
    finally:
        _depth = before
        if not before and _late:
            first = _late[0]
            _late.clear()
            first()


def put_off(action: Callable[[], None]) -> bool:
    """For a handler: whether a step is under way. Then ``action``, if it is the first, is called at the step's end.

    >>> with whole():
    ...     put_off(lambda: print("at the end")), print("now")
    now
    (True, None)
    at the end
    >>> put_off(lambda: None)
    False
    """
    if _depth:
        _late.append(action)
    return _depth > 0


def forget() -> None:
    """In a fork of the host: no step is under way."""
    global _depth  # noqa: PLW0603 - as above
    _depth = 0
    _late.clear()
