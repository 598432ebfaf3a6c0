"""Metrics that a program publishes, each to the handler of its group.

Owns the table of handlers and the decorator that times a function. Exceptions of a handler are not
caught. Source: torch.distributed.elastic.metrics.
"""

from __future__ import annotations

import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

__all__ = [
    "ConsoleMetricHandler",
    "MetricData",
    "MetricHandler",
    "MetricStream",
    "MetricsConfig",
    "NullMetricHandler",
    "configure",
    "getStream",
    "get_elapsed_time_ms",
    "prof",
    "profile",
    "publish_metric",
    "put_metric",
]


class MetricData(NamedTuple):
    """One value; `timestamp` is in seconds since 1970."""

    timestamp: Any
    group_name: Any
    name: Any
    value: Any


class MetricsConfig:
    """Parameters for `initialize_metrics`."""

    __slots__ = ["params"]

    def __init__(self, params: dict[str, str] | None = None) -> None:
        self.params: dict[str, str] = params if params is not None else {}


class MetricHandler(ABC):
    """Receives values."""

    @abstractmethod
    def emit(self, metric_data: MetricData) -> None:
        """Handle one value."""


class ConsoleMetricHandler(MetricHandler):
    """Prints each value as a line."""

    def emit(self, metric_data: MetricData) -> None:
        """See MetricHandler."""
        data = metric_data
        print(f"[{data.timestamp}][{data.group_name}]: {data.name}={data.value}")  # noqa: T201


class NullMetricHandler(MetricHandler):
    """Drops each value."""

    def emit(self, metric_data: MetricData) -> None:
        """See MetricHandler."""


class MetricStream:
    """The values of one group."""

    def __init__(self, group_name: str, handler: MetricHandler) -> None:
        self.group_name = group_name
        self.handler = handler

    def add_value(self, metric_name: str, metric_value: int) -> None:
        """Publish one value."""
        self.handler.emit(MetricData(time.time(), self.group_name, metric_name, metric_value))


_handlers: dict[str, MetricHandler] = {}
_default: list[MetricHandler] = [NullMetricHandler()]


def configure(handler: MetricHandler, group: str | None = None) -> None:
    """Send a group's values to `handler`; without a group, those of all other groups."""
    if group is None:
        _default[0] = handler
    else:
        _handlers[group] = handler


def getStream(group: str) -> MetricStream:  # noqa: N802 - torch's name
    """Return a group's stream."""
    return MetricStream(group, _handlers.get(group, _default[0]))


def put_metric(metric_name: str, metric_value: int, metric_group: str = "torchelastic") -> None:
    """Publish one value."""
    getStream(metric_group).add_value(metric_name, metric_value)


def publish_metric(metric_group: str, metric_name: str, metric_value: int) -> None:
    """Publish one value; deprecated as in torch: use put_metric."""
    warnings.warn("publish_metric is deprecated: use put_metric", FutureWarning, stacklevel=2)
    getStream(metric_group).add_value(metric_name, metric_value)


def get_elapsed_time_ms(start_time_in_seconds: float) -> int:
    """Return the milliseconds since a time of time.time()."""
    return int((time.time() - start_time_in_seconds) * 1000)


def prof(fn: Callable[..., Any] | None = None, group: str = "torchelastic") -> Any:
    """Publish success, failure and duration (ms) of each call of the decorated function.

    The name is its qualified name; outside of a class, the last part of its module and its name.
    """
    wrap = _timed(_metric_name, group)
    return wrap(fn) if fn is not None else wrap


def profile(group: str | None = None) -> Any:
    """Do the same as `prof`, under the bare function name; deprecated as in torch: use prof."""
    warnings.warn("profile is deprecated: use prof", FutureWarning, stacklevel=2)
    return _timed(lambda fn: str(fn.__name__), str(group))


def _timed(name_of: Callable[[Any], str], group: str) -> Callable[[Any], Any]:
    def wrap(fn: Any) -> Any:
        @wraps(fn)
        def timed(*args: Any, **kwargs: Any) -> Any:
            name, started = name_of(fn), time.time()
            outcome = "failure"
            try:
                result = fn(*args, **kwargs)
                outcome = "success"
                return result
            finally:
                put_metric(f"{name}.{outcome}", 1, group)
                put_metric(f"{name}.duration.ms", get_elapsed_time_ms(started), group)

        return timed

    return wrap


def _metric_name(fn: Any) -> str:
    qualified = str(fn.__qualname__)
    if "." in qualified or not fn.__module__:
        return qualified
    return f"{fn.__module__.rpartition('.')[2]}.{qualified}"
