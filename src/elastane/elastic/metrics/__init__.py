"""Metrics that a program publishes, each to the handler of its group.

    metrics.configure(metrics.ConsoleMetricHandler(), group="my_app")
    metrics.put_metric("samples", 128, "my_app")

Source: torch.distributed.elastic.metrics.
"""

from __future__ import annotations

from elastane.elastic.metrics.api import (
    ConsoleMetricHandler,
    MetricData,
    MetricHandler,
    MetricsConfig,
    NullMetricHandler,
    configure,
    get_elapsed_time_ms,
    getStream,
    prof,
    profile,
    publish_metric,
    put_metric,
)

__all__ = [
    "ConsoleMetricHandler",
    "MetricData",
    "MetricHandler",
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


def initialize_metrics(cfg: MetricsConfig | None = None) -> None:
    """Configure the handler that `cfg.params` names: `handler` is console or null.

    `group` is its group. Without parameters nothing changes. ValueError for another handler.
    (torch's function does nothing.)
    """
    params = dict(cfg.params) if cfg is not None else {}
    if "handler" not in params:
        return
    handlers = {"console": ConsoleMetricHandler, "null": NullMetricHandler}
    if params["handler"] not in handlers:
        raise ValueError(f"metrics handler {params['handler']!r}: one of {', '.join(handlers)}")
    configure(handlers[params["handler"]](), params.get("group"))
