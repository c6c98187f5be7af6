"""Calls functions that others have written, so that their exceptions do not reach whoever had something to tell.

Owns what has been reported of them, and how deep calls are nested. Does not know what is told.
"""

from __future__ import annotations

import _thread
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

MOST_NESTED = 8
"""How many calls may be under way within each other on one thread. A handler may cause a further call, which calls it
again; without a limit, two further calls each time would not end."""

MOST_REPORTED = 100
"""How many reports one guard makes. Each keeps its handler alive, so that no other one gets its id."""

RAISED = "raised; what else it raises is not reported"

_here = _thread._local()  # noqa: SLF001 - threading.local, which takes threading to import


def depth() -> int:
    """How many calls of handlers are under way on this thread, with those of other threads that have led to it."""
    return int(getattr(_here, "depth", 0))


@contextmanager
def nested_in(count: int) -> Iterator[None]:
    """Count the calls of this block as made within ``count`` others."""
    before = depth()
    _here.depth = count
    try:
        yield
    finally:
        _here.depth = before


class Guard:
    """Calls handlers, and logs what they raise: once for each handler.

    Args:
        logger: The name of the logger.

    >>> import logging
    >>> logging.getLogger("example").addHandler(logging.NullHandler())
    >>> guard = Guard("example")
    >>> guard.call(print, print, "done")
    done
    >>> guard.call(print, divmod, 1, 0)
    """

    def __init__(self, logger: str) -> None:
        self._logger = logger
        self._reported: dict[tuple[str, str], list[object]] = {}

    def call(self, handler: object, action: Callable[..., object], *args: object) -> None:
        """Call ``action(*args)``, which calls ``handler``.

        What is no Exception (KeyboardInterrupt, SystemExit) is raised, and so is a SignalException, which a signal
        handler has raised in the midst of the call.
        """
        count = depth()
        if count >= MOST_NESTED:
            self.report(handler, f"causes calls of itself: those that are more than {MOST_NESTED} deep are dropped")
            return
        _here.depth = count + 1
        try:
            action(*args)
        except Exception as error:
            if any(kind.__name__ == "SignalException" for kind in type(error).__mro__):  # ours or torch's
                raise
            self.report(handler, RAISED, error)
        finally:
            _here.depth = count

    def report(self, whose: object, what: str, error: BaseException | None = None) -> None:
        """Log ``what`` has become of a handler, or of what a text names, unless that has been logged. Never raises."""
        kind = type(whose)
        name = whose if isinstance(whose, str) else f"the handler {kind.__module__}.{kind.__qualname__}"
        key = (name if isinstance(whose, str) else str(id(whose)), what)
        mine = [whose]
        if len(self._reported) < MOST_REPORTED and self._reported.setdefault(key, mine) is mine:
            self.tell(f"{name} {what}", error)  # setdefault is one step: of several threads one tells

    def tell(self, text: str, error: BaseException | None = None) -> None:
        """Log an error. Never raises an Exception."""
        with suppress(Exception):  # the host's logging may raise, too
            from logging import getLogger

            getLogger(self._logger).error("%s", text, exc_info=error)
