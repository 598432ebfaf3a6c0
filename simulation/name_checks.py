"""Checks node ids: no agent loses its own to another agent while it may live.

A coordinator may give a node id to another agent once the first one's session has ended, once it
was silent for the silence limit, or once the job's owner or the coordinator has let it go.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastane.protocol.effects import WriteEvent
from elastane.protocol.events import Broken, Fenced, Received, RendezvousEvent
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import Close, Join, Refused, Release, ToAgent, Welcome

_GOODBYES = (Close, Refused, Release)


@dataclass(slots=True)
class _Holder:
    """The agent that has a node id: its session, and when the coordinator heard from it."""

    incarnation: str
    session: int
    heard_s: float
    has_ended: bool = False


class NameCheck:
    """The node ids that one coordinator has given to agents."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._holders: dict[str, _Holder] = {}
        self._joins: dict[int, Join] = {}
        self._let_go = frozenset[str]()

    def handles(self, event: RendezvousEvent, now_s: float) -> None:
        """Record an event that the coordinator is about to handle."""
        match event:
            case Received(session=session, message=message):
                if isinstance(message, Join):
                    self._joins[session] = message
                for holder in self._of(session):
                    holder.heard_s = now_s
            case Broken(session=session):
                for holder in self._of(session):
                    holder.has_ended = True
            case Fenced(incarnations=incarnations, dead=dead):
                self._let_go = frozenset(incarnations + dead)
            case _:
                pass

    def writes(self, effect: WriteEvent) -> None:
        """Record an event of the coordinator's log: it gives up a node that does not stop."""
        event = effect.event
        if event.kind is EventKind.NODE_DEPARTED and "did not report" in event.reason:
            self._holders.pop(event.node_id, None)

    def sends(self, session: int, message: ToAgent, now_s: float) -> str:
        """Record a message of the coordinator; return what is wrong with it, if anything."""
        if isinstance(message, _GOODBYES):
            for holder in self._of(session):
                holder.has_ended = True
        if not isinstance(message, Welcome):
            return ""
        node = self._joins[session].node
        before = self._holders.get(node.node_id)
        self._holders[node.node_id] = _Holder(node.incarnation, session, now_s)
        if before is None or before.has_ended or before.incarnation == node.incarnation:
            return ""
        silent_s = now_s - before.heard_s
        if silent_s >= self._silence_s or before.incarnation in self._let_go:
            return ""
        who = f"{before.incarnation}, heard {silent_s:.1f} s ago,"
        return f"{who} lost its node id to {node.incarnation}"

    def _of(self, session: int) -> list[_Holder]:
        return [holder for holder in self._holders.values() if holder.session == session]
