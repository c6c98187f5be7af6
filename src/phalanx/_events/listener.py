"""Calls a function of the user's with each event, as an object of JSON."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from phalanx._events.kinds import Event


class Listener:
    """An observer of an `EventStream` for a function of the user's. The first exception that it raises is logged.

    Args:
        function: Called with each event, see `Event.to_object`.
        logger: The logger's name.
        kinds: The kinds of events that it is called with; default: all.
    """

    def __init__(
        self, function: Callable[[dict[str, Any]], object], logger: str, kinds: tuple[type[Event], ...] = ()
    ) -> None:
        self._function = function
        self._logger = logger
        self._kinds = kinds
        self._has_raised = False

    def __call__(self, events: Iterable[Event]) -> None:
        """Call the function with each of these."""
        for event in events:
            if self._kinds and not isinstance(event, self._kinds):
                continue
            try:
                self._function(event.to_object())
            except BaseException:  # the thread is there for the function alone
                if not self._has_raised:
                    self._has_raised = True
                    from logging import getLogger

                    getLogger(self._logger).exception("on_event raised at %s", event.name)
