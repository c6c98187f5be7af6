"""Events: what happens to a job, as JSON texts that a handler of the standard ``logging`` takes somewhere.

The names of ``torch.distributed.elastic.events``. A *destination* is the name of a handler: ``"null"`` (nowhere),
``"console"`` (stderr), ``"dynamic_rendezvous"`` (nowhere, until a handler is registered), a name that
`register_logging_handler` was given, or that of an entry point in the group ``phalanx.event_handlers``, which is a
`logging.Handler` or makes one when it is called without arguments.

`record` calls the handler in the caller's thread, `post` on a thread of its own. What a handler raises reaches neither:
it is logged to ``phalanx.events``, once for each handler. The logger of a destination is
``phalanx.events.<destination>``; its level is that of the variable LOGLEVEL, INFO by default, and events have INFO.

>>> import phalanx.events as events
>>> event = events.Event("epoch", events.EventSource.WORKER, metadata={"loss": 0.25})
>>> print(event)
{"name": "epoch", "source": "WORKER", "timestamp": 0, "metadata": {"loss": 0.25}}
>>> events.Event.deserialize(event.serialize()) == event
True
>>> events.record(event)  # to "null"
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from phalanx.events._recording import (
        UnknownDestinationError,
        construct_and_record_rdzv_event,
        flush,
        get_logging_handler,
        post,
        record,
        record_rdzv_event,
        register_logging_handler,
    )
    from phalanx.events._values import Event, EventMetadataValue, EventSource, NodeState, RdzvEvent

_VALUES = ("Event", "EventMetadataValue", "EventSource", "NodeState", "RdzvEvent")

__all__ = [
    "Event",
    "EventMetadataValue",
    "EventSource",
    "NodeState",
    "RdzvEvent",
    "UnknownDestinationError",
    "construct_and_record_rdzv_event",
    "flush",
    "get_logging_handler",
    "post",
    "record",
    "record_rdzv_event",
    "register_logging_handler",
]


def __getattr__(name: str) -> Any:
    """Import the module of one name: a launcher that posts nowhere loads neither `logging` nor `dataclasses`."""
    from importlib import import_module

    if name not in __all__:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    home = "._values" if name in _VALUES else "._recording"
    value = globals()[name] = getattr(import_module(home, __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
