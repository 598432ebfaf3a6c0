"""The rules of membership: a pure state machine that decides, and performs nothing.

`Rendezvous` takes events with their time and returns effects. `machine` holds the phases and the
theory of operation. `state` is composed of parts that own the facts; the other modules hold the
decisions of one subject each. Imports go one way, from rules to parts. Nothing outside imports the
inner modules, except checks of the simulation.
"""

from elastane.coordinator.rules.machine import Rendezvous
from elastane.coordinator.rules.state import MembershipPhase

__all__ = ["MembershipPhase", "Rendezvous"]
