"""The one authority on membership, as a pure state machine."""

from elastane.core.rendezvous.machine import Rendezvous
from elastane.core.rendezvous.state import Phase

__all__ = ["Phase", "Rendezvous"]
