"""Which handler the metrics of a group go to, and how they get there."""

from __future__ import annotations

from phalanx._base import clock
from phalanx._base.delivery import Guard
from phalanx.metrics._handlers import MetricData, MetricHandler, NullMetricHandler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

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
