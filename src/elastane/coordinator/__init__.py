"""The coordinator: the one authority on membership, and how it is found and elected.

`rules` decide, without I/O. `server` is the asyncio shell that brings them events and performs
their effects. `host` runs a coordinator inside an agent, `leadership` and `election` determine in
which one. `query` asks a running coordinator for its status.
"""

from elastane.coordinator.client import query
from elastane.coordinator.server import Coordinator

__all__ = ["Coordinator", "query"]
