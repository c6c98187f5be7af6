"""A handler that nobody waits for."""

from __future__ import annotations

from phalanx.metrics._handlers import MetricData, MetricHandler
from phalanx.metrics._streams import GUARD, checked


class BackgroundMetricHandler(MetricHandler):
    """Calls another handler on a thread of its own, so that a slow one holds nobody up. Torch has none.

    Metrics are delivered in the order in which they were emitted, one after another. At most 100 000 wait; those beyond
    are dropped. The interpreter's exit waits for at most 2 s. A forked child delivers what it emits itself. Values are
    kept until they are delivered: emit ``loss.item()``, and not a tensor.

    Args:
        handler: The handler to call.

    Raises:
        TypeError: ``handler`` has no method ``emit``, or is a class.

    >>> from phalanx.metrics import configure, put_metric
    >>> values = []
    >>> class Kept(MetricHandler):
    ...     def emit(self, metric_data):
    ...         values.append(metric_data.value)
    >>> handler = BackgroundMetricHandler(Kept())
    >>> configure(handler, group="slow")
    >>> put_metric("steps", 10, "slow")  # returns at once
    >>> handler.flush(10), values
    (True, [10])
    """

    def __init__(self, handler: MetricHandler) -> None:
        from phalanx._base.delivery import Delivery

        self.handler = checked(handler)
        self._delivery = Delivery("phalanx-metrics", GUARD)

    def emit(self, metric_data: MetricData) -> None:
        """Have the handler called with ``metric_data``, later. Returns at once."""
        self._delivery.post(self.handler, GUARD.call, self.handler, self.handler.emit, metric_data)

    def flush(self, seconds: float) -> bool:
        """Wait until all that was emitted before has been delivered, for at most ``seconds`` (>= 0).

        Returns whether it has been. Called by the handler itself, it does not wait, and returns False.
        """
        return self._delivery.flush(seconds)
