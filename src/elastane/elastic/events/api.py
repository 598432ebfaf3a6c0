"""Events as JSON lines: what happened, its source, and when.

Source: torch.distributed.elastic.events. A timestamp that is not given is the time at which the
event is made (torch leaves it 0).
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from enum import Enum

__all__ = ["Event", "EventMetadataValue", "EventSource", "NodeState", "RdzvEvent"]
EventMetadataValue = str | int | float | bool | None


class EventSource(str, Enum):  # noqa: UP042 - as torch shows it
    """The source of an event."""

    AGENT = "AGENT"
    WORKER = "WORKER"


@dataclass
class Event:
    """One event; `timestamp` is in milliseconds since 1970."""

    name: str
    source: EventSource
    timestamp: int = 0
    metadata: dict[str, EventMetadataValue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.timestamp = self.timestamp or int(time.time() * 1000)

    def __str__(self) -> str:
        return self.serialize()

    @staticmethod
    def deserialize(data: str | Event) -> Event:
        """Parse a line; ValueError, KeyError or TypeError if it is no event."""
        if isinstance(data, Event):
            return data
        found = json.loads(data)
        return Event(**{**found, "source": EventSource[found["source"]]})

    def serialize(self) -> str:
        """Return the event as one line."""
        return json.dumps(asdict(self))


class NodeState(str, Enum):  # noqa: UP042
    """The progress of a node in a rendezvous."""

    INIT = "INIT"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


@dataclass
class RdzvEvent:
    """One event of a rendezvous."""

    name: str
    run_id: str
    message: str
    hostname: str
    pid: int
    node_state: NodeState
    master_endpoint: str = ""
    rank: int | None = None
    local_id: int | None = None
    error_trace: str = ""

    def __str__(self) -> str:
        return self.serialize()

    @staticmethod
    def deserialize(data: str | RdzvEvent) -> RdzvEvent:
        """Parse a line; ValueError, KeyError or TypeError if it is no event."""
        if isinstance(data, RdzvEvent):
            return data
        found = json.loads(data)
        return RdzvEvent(**{**found, "node_state": NodeState[found["node_state"]]})

    def serialize(self) -> str:
        """Return the event as one line."""
        return json.dumps(asdict(self))
