"""The store of one attempt, served by the handler of node rank 0, and new for each attempt.

Its socket listens before its port is announced, so no client is refused and no two attempts share
keys. The agents' keys have a prefix, the workers' have none. `AgentStore` also records how far an
agent in torch's shape has come: only an agent that succeeded enters its exit barrier.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from elastane.agent.membership import MemberPlace

_PREFIX = "elastane.agents"
# torch's agents write keys below the first prefix, and the second once all workers succeeded.
_AGENT_KEYS = "torchelastic/"
_BARRIER_KEYS = "torchelastic/agent/terminal_state"


class AgentStore(PrefixStore):
    """The agents' part of a store. Records which keys Python code writes, as agents do."""

    def __init__(self, prefix: str, store: Store) -> None:
        super().__init__(prefix, store)
        self.is_agents = False
        self.has_succeeded = False

    def set(self, key: str, value: str | bytes) -> None:
        """Write a key."""
        self._note(key)
        super().set(key, value)  # type: ignore[arg-type]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, and return its value."""
        self._note(key)
        return int(super().add(key, amount))

    def _note(self, key: str) -> None:
        self.is_agents = self.is_agents or key.startswith(_AGENT_KEYS)
        self.has_succeeded = self.has_succeeded or key.startswith(_BARRIER_KEYS)


def open_attempt_store(place: MemberPlace, timeout: timedelta) -> Store:
    """Serve the attempt's store on node rank 0; connect to it on any other node.

    Raises RuntimeError (torch's DistError) if its server went away meanwhile.
    """
    where = place.assignment
    if place.listener is None:
        return TCPStore(
            where.master_addr,
            where.master_port,
            is_master=False,
            wait_for_workers=False,
            timeout=timeout,
        )
    is_v6 = ":" in place.listener.getsockname()[0]
    return TCPStore(
        "::1" if is_v6 else "127.0.0.1",
        where.master_port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=place.listener.detach(),
    )


def agents_part(store: Store, given: Store | None, run_id: str, place: MemberPlace) -> AgentStore:
    """Return the agents' view of the attempt's store, or of the store that the user gave."""
    if given is None:
        return AgentStore(_PREFIX, store)
    fence = place.assignment.fence
    return AgentStore(f"{_PREFIX}.{run_id}.{fence.round}.{fence.attempt}", given)


def progress_of(store: Any) -> tuple[bool, bool]:
    """Return whether an agent in torch's shape uses `store`, and whether it has succeeded."""
    if not isinstance(store, AgentStore):
        return False, False
    return store.is_agents, store.has_succeeded
