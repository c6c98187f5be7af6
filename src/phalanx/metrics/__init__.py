"""Metrics: numbers that a program tells, by group and name, and handlers that take them somewhere.

The names of ``torch.distributed.elastic.metrics``. Until `configure` is called, metrics go nowhere. A handler is called
in the thread that calls `put_metric`, and by several threads at once where several do; `BackgroundMetricHandler` calls
one on a thread of its own. What a handler raises does not reach the program: it is logged to ``phalanx.metrics``, once
for each handler. A call that a handler causes from within itself is dropped when more than 8 are nested.

>>> import phalanx.metrics as metrics
>>> class Shown(metrics.MetricHandler):
...     def emit(self, metric_data):
...         print(metric_data.group_name, metric_data.name, metric_data.value)
>>> metrics.configure(Shown(), group="my_app")
>>> metrics.put_metric("batch.tokens", 4096, "my_app")
my_app batch.tokens 4096
>>> metrics.put_metric("batch.tokens", 4096)  # the group "torchelastic", which has no handler
"""

from __future__ import annotations

from phalanx.metrics._handlers import (
    BackgroundMetricHandler,
    ConsoleMetricHandler,
    MetricData,
    MetricHandler,
    MetricsConfig,
    MetricStream,
    NullMetricHandler,
    configure,
    getStream,
    initialize_metrics,
    publish_metric,
    put_metric,
)
from phalanx.metrics._prof import get_elapsed_time_ms, prof, profile

__all__ = [
    "BackgroundMetricHandler",
    "ConsoleMetricHandler",
    "MetricData",
    "MetricHandler",
    "MetricStream",
    "MetricsConfig",
    "NullMetricHandler",
    "configure",
    "getStream",
    "get_elapsed_time_ms",
    "initialize_metrics",
    "prof",
    "profile",
    "publish_metric",
    "put_metric",
]
