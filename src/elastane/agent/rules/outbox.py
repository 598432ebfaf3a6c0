"""Collects the effects of one call of the agent's rules, in their order."""

from __future__ import annotations

from elastane.agent.rules.contact import Contact
from elastane.protocol.effects import AgentEffect, Tell, Transmit
from elastane.protocol.log_events import EventKind, Note
from elastane.protocol.messages import ToCoordinator
from elastane.protocol.model import Fence


class Outbox:
    """The effects collected so far; `fence` is the fence that logged events carry."""

    def __init__(self, node_id: str, contact: Contact) -> None:
        self.fence: Fence | None = None
        self._node_id, self._contact = node_id, contact
        self._effects: list[AgentEffect] = []

    def add(self, effect: AgentEffect) -> None:
        """Add `effect`."""
        self._effects.append(effect)

    def send(self, message: ToCoordinator) -> None:
        """Send `message` to the coordinator.

        Dropped without a session: the agent reports its state when it registers again.
        """
        if self._contact.linked:
            self._effects.append(Transmit(message))

    def log(self, kind: EventKind, reason: str, **data: str | int | float | bool) -> None:
        """Write an event to the event log."""
        note = Note(kind=kind, reason=reason, node_id=self._node_id, fence=self.fence, data=data)
        self._effects.append(Tell(note))

    def pop(self) -> list[AgentEffect]:
        """Return the collected effects and start a new collection."""
        effects, self._effects = self._effects, []
        return effects
