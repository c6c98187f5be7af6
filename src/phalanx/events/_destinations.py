"""Which handler a destination names, and the logger that has it."""

from __future__ import annotations

import io
import logging
import os
import sys

from phalanx._base.delivery import Guard
from phalanx.events._registry import SILENT, registered

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LEVEL_ENV = "LOGLEVEL"
"""The variable that says from which level on a destination's logger lets records pass, when it is first used."""

ENTRY_POINTS = "phalanx.event_handlers"
GUARD = Guard("phalanx.events")

_made: dict[str, logging.Handler] = {}  # both are read and changed in single steps, whichever thread does
_attached: dict[str, logging.Handler] = {}  # which one the logger has


class UnknownDestinationError(KeyError):
    """No handler has this name. The message has the names that there are."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


def register_logging_handler(destination: str, handler: logging.Handler) -> None:
    """Let a destination name a handler from now on, also one that has a handler already. Torch has no such function.

    Args:
        destination: The name, as `record` takes it.
        handler: Takes records whose message is the JSON text of an event.

    Raises:
        TypeError: ``destination`` is no text, or ``handler`` no `logging.Handler`.

    >>> import logging, sys
    >>> from phalanx.events import Event, EventSource, record
    >>> register_logging_handler("mine", logging.StreamHandler(sys.stdout))
    >>> record(Event("start", EventSource.WORKER, timestamp=1), "mine")
    {"name": "start", "source": "WORKER", "timestamp": 1, "metadata": {}}
    """
    if not isinstance(destination, str):
        raise TypeError(f"destination: expected a text, got {destination!r}")
    registered[destination] = _checked(handler, f"the handler of {destination!r}")


def get_logging_handler(destination: str = "null") -> logging.Handler:
    """Get the handler of a destination: the same one each time.

    Args:
        destination: Its name.

    Raises:
        UnknownDestinationError: There is no such destination. It is a KeyError.
        TypeError: What an entry point with this name has, or makes, is no `logging.Handler`.
        Exception: What such an entry point raises.

    >>> get_logging_handler()
    <NullHandler (NOTSET)>
    >>> get_logging_handler("consle")
    Traceback (most recent call last):
    phalanx.events._destinations.UnknownDestinationError: there is no event handler 'consle': there are 'console', ...
    """
    found = registered.get(destination) or _made.get(destination)
    return found if found is not None else _made.setdefault(destination, _make(destination))


def logger_of(destination: str) -> logging.Logger:
    """Get the logger that hands records to the handler of a destination, and to those that others have added to it."""
    handler = get_logging_handler(destination)
    logger = logging.getLogger(f"phalanx.events.{destination}")
    before = _attached.get(destination)
    if before is not handler:
        if before is None:
            logger.propagate = False
            logger.setLevel(_level())
        others = [each for each in logger.handlers if each is not before and each is not handler]
        logger.handlers = [*others, handler]  # in one step: no record goes to both, or to neither
        _attached[destination] = handler
    logger.disabled = False  # logging.config disables all loggers that it is not told of, unless it is asked not to
    return logger


def _level() -> int:
    text = os.environ.get(LEVEL_ENV, "").strip().upper()
    named = logging.getLevelNamesMapping().get(text)
    if named is None:
        named = int(text) if text.isdecimal() and len(text) < len("1000000") else logging.INFO
    return max(1, named)  # 0 would be the level of the root logger


def _make(destination: str) -> logging.Handler:
    if destination == "console":
        return _Console()
    if destination in SILENT:
        return logging.NullHandler()
    from importlib.metadata import entry_points

    points = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if destination not in points:
        known = ", ".join(map(repr, sorted({"console", *SILENT, *registered, *points})))
        raise UnknownDestinationError(f"there is no event handler {destination!r}: there are {known}")
    found = points[destination].load()
    if not isinstance(found, logging.Handler) and callable(found):
        found = found()
    return _checked(found, f"the entry point {destination!r} of {ENTRY_POINTS}")


def _checked(handler: object, whose: str) -> logging.Handler:
    if not isinstance(handler, logging.Handler):
        raise TypeError(f"{whose}: expected a logging.Handler, got {handler!r}")
    return handler


class _Console(logging.StreamHandler[io.TextIOBase]):
    """Writes to what stderr is now, also after it has been replaced; or to the stream that it was given."""

    def __init__(self) -> None:
        self._given: Any = None
        stream: Any = None  # stderr
        super().__init__(stream)

    @property
    def stream(self) -> Any:
        return self._given or sys.stderr

    @stream.setter
    def stream(self, stream: Any) -> None:
        self._given = None if stream is sys.stderr else stream
