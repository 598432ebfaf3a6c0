"""Events as JSON lines, each to a handler by name: torch's own, unchanged.

Events of elastane's agents have a timestamp; torch's agents leave it 0.
"""

from torch.distributed.elastic.events import (
    construct_and_record_rdzv_event,
    record,
    record_rdzv_event,
)
from torch.distributed.elastic.events.api import (
    Event,
    EventMetadataValue,
    EventSource,
    NodeState,
    RdzvEvent,
)
from torch.distributed.elastic.events.handlers import get_logging_handler

from elastane.elastic import use_torchs

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
use_torchs(__name__, "api", "handlers")
