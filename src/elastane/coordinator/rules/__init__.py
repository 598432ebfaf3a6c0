"""The one authority on membership, as a pure state machine."""

from elastane.coordinator.rules.machine import Rendezvous
from elastane.coordinator.rules.state import Phase

__all__ = ["Phase", "Rendezvous"]
