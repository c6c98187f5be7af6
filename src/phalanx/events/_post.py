"""Records events where nobody waits for it."""

from __future__ import annotations

import copy

from phalanx.events._registry import is_silent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from phalanx._base.delivery import Delivery
    from phalanx.events._values import Event, RdzvEvent

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
    from phalanx.events._destinations import GUARD
    from phalanx.events._record import record

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
