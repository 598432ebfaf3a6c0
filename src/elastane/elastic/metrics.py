"""Metrics that a program publishes, each to the handler of its group: torch's own.

    metrics.configure(metrics.ConsoleMetricHandler(), group="my_app")
    metrics.put_metric("samples", 128, "my_app")

`initialize_metrics` is elastane's own, since torch's does nothing. LaunchConfig.metrics_cfg uses
it.
"""

from __future__ import annotations

from torch.distributed.elastic.metrics.api import (
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

from elastane.elastic import use_torchs

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
use_torchs(__name__, "api")


def initialize_metrics(cfg: MetricsConfig | None = None) -> None:
    """Configure the handler that `cfg.params` names: `handler` is console or null.

    `group` is its group. Without parameters nothing changes. ValueError for another handler.
    """
    params = (cfg.params if cfg is not None else None) or {}
    if "handler" not in params:
        return
    handlers = {"console": ConsoleMetricHandler, "null": NullMetricHandler}
    if params["handler"] not in handlers:
        raise ValueError(f"metrics handler {params['handler']!r}: one of {', '.join(handlers)}")
    configure(handlers[params["handler"]](), params.get("group"))
