"""Events as JSON lines, each to a handler by name. Source: torch.distributed.elastic.events."""

from __future__ import annotations

import inspect
import logging
import os
import socket
import traceback
from pathlib import PurePath

from elastane.elastic.events.api import (
    Event,
    EventMetadataValue,
    EventSource,
    NodeState,
    RdzvEvent,
)
from elastane.elastic.events.handlers import get_logging_handler

__all__ = [
    "Event",
    "EventMetadataValue",
    "EventSource",
    "NodeState",
    "RdzvEvent",
    "construct_and_record_rdzv_event",
    "get_logging_handler",
    "record",
    "record_rdzv_event",
]
_RENDEZVOUS = "dynamic_rendezvous"
_loggers: dict[str, logging.Logger] = {}


def record(event: Event, destination: str = "null") -> None:
    """Send an event to the handler named `destination`."""
    _logger(destination).info(event.serialize())


def record_rdzv_event(event: RdzvEvent) -> None:
    """Send an event to the handler `dynamic_rendezvous`."""
    _logger(_RENDEZVOUS).info(event.serialize())


def construct_and_record_rdzv_event(  # noqa: PLR0913, PLR0917 - torch's signature
    run_id: str,
    message: str,
    node_state: NodeState,
    name: str = "",
    hostname: str = "",
    pid: int | None = None,
    master_endpoint: str = "",
    local_id: int | None = None,
    rank: int | None = None,
) -> None:
    """Make an event of a rendezvous and send it; returns at once if no handler listens.

    Its name begins with the caller's file. Without `name`, it ends with the caller's function.
    """
    if isinstance(get_logging_handler(_RENDEZVOUS), logging.NullHandler):
        return
    caller = inspect.stack()[1]
    record_rdzv_event(
        RdzvEvent(
            name=f"{PurePath(caller.filename).name}:{name or caller.function}",
            run_id=run_id,
            message=message,
            hostname=hostname or socket.getfqdn(),
            pid=pid or os.getpid(),
            node_state=node_state,
            master_endpoint=master_endpoint,
            rank=rank,
            local_id=local_id,
            error_trace=traceback.format_exc() if node_state is NodeState.FAILED else "",
        )
    )


def _logger(destination: str) -> logging.Logger:
    """Return the logger of a handler; it does not propagate, so each event is handled once."""
    if destination not in _loggers:
        logger = logging.getLogger(f"torchelastic-events-{destination}")
        logger.setLevel(os.environ.get("LOGLEVEL", "INFO"))
        logger.propagate = False
        logger.addHandler(get_logging_handler(destination))
        _loggers[destination] = logger
    return _loggers[destination]
