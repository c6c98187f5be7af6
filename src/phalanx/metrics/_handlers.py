"""Metrics: one of them, what takes them somewhere, and which handler the metrics of a group go to."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import namedtuple
from collections.abc import Mapping

from phalanx._base import clock
from phalanx._base.handler_guard import Guard


class MetricData(
    namedtuple("MetricData", ["timestamp", "group_name", "name", "value"])  # noqa: PYI024 - `typing` takes 5 ms to import
):
    """One metric, as a handler gets it: a named tuple."""

    __slots__ = ()

    timestamp: float
    """When it was emitted, in seconds of Unix time."""
    group_name: str
    """Its group."""
    name: str
    """Its name."""
    value: int
    """Its value: what `put_metric` was given, also if that is no int."""


class MetricHandler(ABC):
    """Takes metrics somewhere. A handler of your own overrides `emit`; any object that has one will do."""

    @abstractmethod
    def emit(self, metric_data: MetricData) -> None:
        """Take one metric. What it raises is logged once, and the metric is lost.

        Args:
            metric_data: The metric. Several threads may call at once.
        """


class ConsoleMetricHandler(MetricHandler):
    """Writes each metric to stdout, as one line: ``[timestamp][group]: name=value``.

    >>> ConsoleMetricHandler().emit(MetricData(1700000000.25, "my_app", "loss", 3))
    [1700000000.25][my_app]: loss=3
    """

    def emit(self, metric_data: MetricData) -> None:
        """Write ``metric_data``, line end included, by one call: lines of several threads do not mix."""
        timestamp, group, name, value = metric_data
        sys.stdout.write(f"[{timestamp}][{group}]: {name}={value}\n")


class NullMetricHandler(MetricHandler):
    """Takes metrics nowhere."""

    def emit(self, metric_data: MetricData) -> None:
        """Drop ``metric_data``."""


GUARD = Guard("phalanx.metrics")

_handlers: dict[str, MetricHandler] = {}  # by group; read and written in single steps, whichever thread does
_default: MetricHandler = NullMetricHandler()


class MetricsConfig:
    """The parameters of `initialize_metrics`, which does nothing with them.

    Args:
        params: Texts by name; None is none.

    >>> MetricsConfig().params
    {}
    """

    __slots__ = ["params"]

    def __init__(self, params: Mapping[str, str] | None = None) -> None:
        self.params = {} if params is None else params


class MetricStream:
    """A group of metrics, and the handler that they go to.

    Args:
        group_name: The group.
        handler: Its handler.
    """

    def __init__(self, group_name: str, handler: MetricHandler) -> None:
        self.group_name = group_name
        self.handler = handler

    def add_value(self, metric_name: str, metric_value: int) -> None:
        """Emit one metric, with the time of now. What the handler raises is logged once.

        Args:
            metric_name: Its name.
            metric_value: Its value; what is no int is passed on as it is.
        """
        data = MetricData(clock.wall(), self.group_name, metric_name, metric_value)
        GUARD.call(self.handler, lambda: self.handler.emit(data))


def checked(handler: MetricHandler) -> MetricHandler:
    """Refuse what is no handler, where it is given and not where it is used."""
    if isinstance(handler, type) or not callable(getattr(handler, "emit", None)):
        raise TypeError(f"handler: expected an object with a method emit, got {handler!r}")
    return handler


def configure(handler: MetricHandler, group: str | None = None) -> None:
    """Choose where metrics go from now on. May be called at any time, by any thread.

    Args:
        handler: What takes them; a `NullMetricHandler` for nowhere.
        group: The group whose metrics these are; None for all groups for which none is chosen by name.

    Raises:
        TypeError: ``handler`` has no method ``emit``, or is a class.
    """
    global _default  # noqa: PLW0603 - one for the process
    if group is None:
        _default = checked(handler)
    else:
        _handlers[group] = checked(handler)


def getStream(group: str) -> MetricStream:  # noqa: N802 - torch's name
    """Get the stream of a group: with the handler that the group has now, which a later `configure` does not change.

    >>> getStream("my_other_app").group_name
    'my_other_app'
    """
    return MetricStream(group, _handlers.get(group, _default))


def put_metric(metric_name: str, metric_value: int, metric_group: str = "torchelastic") -> None:
    """Emit one metric, with the time of now, to the handler of its group.

    Args:
        metric_name: Its name, like ``"batch.tokens"``.
        metric_value: Its value; what is no int is passed on as it is.
        metric_group: The group. The default is that of torch, where metrics of the launcher have it, too.
    """
    getStream(metric_group).add_value(metric_name, metric_value)


def publish_metric(metric_group: str, metric_name: str, metric_value: int) -> None:
    """Do what `put_metric` does, by an old name, with a FutureWarning.

    Args:
        metric_group: As there.
        metric_name: As there.
        metric_value: As there.
    """
    from warnings import warn

    text = "publish_metric(group, name, value) is deprecated: call put_metric(name, value, group)"
    warn(text, FutureWarning, stacklevel=2)
    put_metric(metric_name, metric_value, metric_group)


def initialize_metrics(cfg: MetricsConfig | None = None) -> None:
    """Do nothing. Torch calls it at a start, for installations that bring a function of their own.

    Args:
        cfg: Not looked at.
    """


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
