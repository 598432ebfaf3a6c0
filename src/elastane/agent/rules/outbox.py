"""What one call of the agent's core asks the world to do, as it is gathered."""

from __future__ import annotations

from elastane.agent.rules.contact import Contact
from elastane.protocol.effects import AgentEffect, Tell, Transmit
from elastane.protocol.log_events import EventKind, Note
from elastane.protocol.messages import ToCoordinator
from elastane.protocol.model import Fence


class Outbox:
    """Effects in their order; `fence` is what events carry."""

    def __init__(self, node_id: str, contact: Contact) -> None:
        self.fence: Fence | None = None
        self._node_id, self._contact = node_id, contact
        self._effects: list[AgentEffect] = []

    def add(self, effect: AgentEffect) -> None:
        """Ask for `effect`."""
        self._effects.append(effect)

    def send(self, message: ToCoordinator) -> None:
        """Send to the coordinator, if there is one; else it hears at the next registration."""
        if self._contact.linked:
            self._effects.append(Transmit(message))

    def tell(self, kind: EventKind, reason: str, **data: str | int | float | bool) -> None:
        """Write an event."""
        note = Note(kind=kind, reason=reason, node_id=self._node_id, fence=self.fence, data=data)
        self._effects.append(Tell(note))

    def take(self) -> list[AgentEffect]:
        """Return what was gathered, and begin anew."""
        effects, self._effects = self._effects, []
        return effects
