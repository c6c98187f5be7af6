"""Records events in the caller's thread."""

from __future__ import annotations

import os
import sys

from phalanx.events._destinations import GUARD, get_logging_handler, logger_of
from phalanx.events._registry import is_silent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.events._values import Event, NodeState, RdzvEvent

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
