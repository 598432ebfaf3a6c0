"""The coordinator: the asyncio shell around the pure rendezvous, and the client that asks it."""

from elastane.coordinator.client import query
from elastane.coordinator.server import Coordinator, Machine

__all__ = ["Coordinator", "Machine", "query"]
