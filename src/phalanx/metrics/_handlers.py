"""One metric, and what takes metrics somewhere: to the console, or nowhere."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import namedtuple


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
