"""Where events go: the destinations, their handlers, and how an event gets to one, at once or on a thread of its own.

This module is loaded by a launcher that posts nowhere: it imports `logging` only where a destination is used.
"""

from __future__ import annotations

import copy
import os
import sys

from phalanx._base.handler_guard import Guard

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging
    from typing import Any

    from phalanx._base.delivery import Delivery
    from phalanx.events._values import Event, NodeState, RdzvEvent


SILENT = ("null", "dynamic_rendezvous")

registered: dict[str, logging.Handler] = {}
"""Read and changed in single steps, whichever thread does."""


def is_silent(destination: str) -> bool:
    """Whether what goes there goes nowhere."""
    return destination in SILENT and destination not in registered


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
    phalanx.events._recording.UnknownDestinationError: there is no event handler 'consle': there are 'console', ...
    """
    found = registered.get(destination) or _made.get(destination)
    return found if found is not None else _made.setdefault(destination, _make(destination))


def logger_of(destination: str) -> logging.Logger:
    """Get the logger that hands records to the handler of a destination, and to those that others have added to it."""
    import logging

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
    import logging

    text = os.environ.get(LEVEL_ENV, "").strip().upper()
    named = logging.getLevelNamesMapping().get(text)
    if named is None:
        named = int(text) if text.isdecimal() and len(text) < len("1000000") else logging.INFO
    return max(1, named)  # 0 would be the level of the root logger


def _make(destination: str) -> logging.Handler:
    import logging

    if destination == "console":
        return _console()
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
    import logging

    if not isinstance(handler, logging.Handler):
        raise TypeError(f"{whose}: expected a logging.Handler, got {handler!r}")
    return handler


def _console() -> logging.Handler:
    """Make the handler that writes to stderr."""
    from logging import StreamHandler

    class Console(StreamHandler):  # type: ignore[type-arg]  # of any stream
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

    return Console()


RENDEZVOUS = "dynamic_rendezvous"

_frame = sys._getframe  # noqa: SLF001 - the one way to a caller that does not cost a stack


def record(event: Event | RdzvEvent, destination: str = "null") -> None:
    """Hand an event to the handler of a destination, in the caller's thread. What the handler raises is logged once.

    Args:
        event: The event. Its text is the message of a record of the level INFO.
        destination: The name of a handler.

    Raises:
        UnknownDestinationError: There is no such destination; and what `get_logging_handler` raises otherwise.
        TypeError: ``event`` is no event.
    """
    if not callable(getattr(event, "serialize", None)):
        raise TypeError(f"event: expected an Event, got {event!r}")
    if not is_silent(destination):
        logger = logger_of(destination)
        GUARD.call(get_logging_handler(destination), logger.info, event.serialize())


def record_rdzv_event(event: RdzvEvent) -> None:
    """Hand an event of a rendezvous to the handler of ``"dynamic_rendezvous"``, as `record` does.

    Args:
        event: The event.
    """
    record(event, RENDEZVOUS)


def construct_and_record_rdzv_event(
    run_id: str,
    message: str,
    node_state: NodeState,
    name: str = "",
    hostname: str = "",
    pid: int | None = None,
    master_endpoint: str = "",
    local_id: int | None = None,
    rank: int | None = None,
) -> None:
    """Make an event of a rendezvous, and record it. Where no handler is registered for these, nothing is done.

    The event's name is ``<file>:<name>``, the file being the caller's. Where ``node_state`` is FAILED, the event has
    the traceback of the exception that is being handled, if one is.

    Args:
        run_id: The run's id.
        message: What happened, in words.
        node_state: Where the node is.
        name: What happened; by default, the caller's function.
        hostname: The node's host; by default, this machine's name.
        pid: The node's process; by default, this one.
        master_endpoint: Where the store is, if that is known.
        local_id: The node's number in its process, if it has one.
        rank: The node's rank, if it has one.
    """
    import logging

    if is_silent(RENDEZVOUS) or isinstance(get_logging_handler(RENDEZVOUS), logging.NullHandler):
        return
    from phalanx.events._values import NodeState, RdzvEvent

    trace = ""
    if node_state == NodeState.FAILED and sys.exc_info()[0] is not None:
        from traceback import format_exc

        trace = format_exc()
    code = _frame(1).f_code
    event = RdzvEvent(
        name=f"{os.path.basename(code.co_filename)}:{name or code.co_name}",
        run_id=run_id,
        message=message,
        hostname=hostname or os.uname().nodename,
        pid=pid or os.getpid(),
        node_state=node_state,
        master_endpoint=master_endpoint,
        rank=rank,
        local_id=local_id,
        error_trace=trace,
    )
    record_rdzv_event(event)


_deliveries: dict[str, Delivery] = {}  # by destination: a slow handler holds up no other one


def post(event: Event | RdzvEvent, destination: str = "null") -> bool:
    """Have an event recorded on a thread of its own, after those that were posted to the same destination before it.

    Returns at once, and raises nothing: neither the handler nor an entry point that makes it is called here. What they
    raise, and that there is no such destination, is logged to ``phalanx.events``, once. The event is copied: it may be
    changed afterwards. The interpreter's exit waits for at most 2 s. A forked child delivers what it posts itself.

    Args:
        event: The event.
        destination: The name of a handler; each has a thread.

    Returns:
        False if the event is dropped: 100 000 wait already, or no thread can be started.

    >>> from phalanx.events import Event, EventSource, flush
    >>> post(Event("start", EventSource.AGENT))
    True
    >>> flush(10)
    True
    """
    if is_silent(destination):
        return True
    from phalanx._base.delivery import Delivery

    name = f"phalanx-events-{destination}"
    delivery = _deliveries.get(destination) or _deliveries.setdefault(destination, Delivery(name, GUARD))
    return delivery.post(f"the destination {destination!r}", record, _copied(event), destination)


def flush(seconds: float) -> bool:
    """Wait until all that was posted before has been recorded, for at most ``seconds`` (>= 0) in all.

    Returns whether it has been. Called by a handler to which events are posted, it does not wait for that one, and
    returns False.
    """
    from phalanx._base import delivery

    return delivery.flush([*_deliveries.values()], seconds)


def _copied(event: Event | RdzvEvent) -> Event | RdzvEvent:
    try:
        copied: Any = copy.copy(event)
        metadata = getattr(copied, "metadata", None)
        if isinstance(metadata, dict):
            copied.metadata = dict(metadata)
    except Exception:  # noqa: BLE001 - of a class of the user's own
        return event
    return copied  # type: ignore[no-any-return]  # it is what `event` is
