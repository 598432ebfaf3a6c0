"""The elastic rendezvous: a handler over a membership, and backends that others write.

Owns what `next_rendezvous` returns. A `RendezvousBackend` (one register with a fencing token) is
put under our own machinery as a store, so its nodes get the same elections, rounds and fences as
any job here. Differences from torch 2.13, all on purpose: `num_nodes_waiting` is also above 0 when
a node failed or left; each attempt has a new store; who is shut down by a signal, or dies, leaves
the job at once; nothing that is read is ever unpickled.
"""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any, NoReturn

from torch.distributed import Store  # type: ignore[attr-defined]

from elastane.agent.membership import MemberPlace, Membership
from elastane.elastic.rendezvous._attempt_store import (
    AgentStore,
    agents_part,
    open_attempt_store,
)
from elastane.elastic.rendezvous._configure import RendezvousOptions, membership_of, membership_over
from elastane.elastic.rendezvous._errors import raise_as_api
from elastane.elastic.rendezvous._settings import RendezvousSettings, RendezvousTimeout
from elastane.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from elastane.errors import ElastaneError
from elastane.options.conf import timing_of
from elastane.stores.register import RegisterStore

__all__ = [
    "DynamicRendezvousHandler",
    "RendezvousBackend",
    "RendezvousSettings",
    "RendezvousTimeout",
    "create_handler",
]

Token = Any
_STORE_TIMEOUT_S = 60
# After the store of an attempt was lost: its host's end is told within the time of silence.
_LOSS_MARGIN_S = 5.0
_OPT_OUT = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class RendezvousBackend(ABC):
    """One value with a fencing token, kept where all nodes reach it.

    All that a custom backend has to be. Calls come from a thread of the handler's, one at a time.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The backend's name, under which it is registered."""

    @abstractmethod
    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the value and its token, None where there is none yet.

        Not older than any write that ended before. Raises RendezvousConnectionError where the
        backend is out of reach; that is tried again.
        """

    @abstractmethod
    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Replace the value that `token` is of; with None, write where there is no value yet.

        Of several that hold the same token one may succeed. Returns the value that is there now,
        its token, and whether it is `state`.
        """


class DynamicRendezvousHandler(RendezvousHandler):
    """See the module. One node of one job; its heartbeats need nobody to call it."""

    @classmethod
    def from_backend(  # noqa: PLR0913, PLR0917
        cls,
        run_id: str,
        store: Store | None,
        backend: RendezvousBackend,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        timeout: RendezvousTimeout | None = None,
        keep_alive_interval: int = 5,
        keep_alive_max_attempt: int = 3,
    ) -> DynamicRendezvousHandler:
        """Make a handler whose coordinator is elected in a backend.

        `store` holds what agents tell each other, under a prefix of each attempt; None: a new
        store is served for each attempt.
        """
        settings = RendezvousSettings(
            run_id,
            min_nodes,
            max_nodes,
            timeout or RendezvousTimeout(),
            timedelta(seconds=keep_alive_interval),
            keep_alive_max_attempt,
        )
        settings.check()
        wish = RendezvousOptions(
            run_id,
            min_nodes,
            max_nodes,
            timing_of(_durations(settings)),
            local_addr,
            settings.timeout.close.total_seconds(),
        )
        name = backend.name
        membership = membership_over(wish, lambda: RegisterStore(backend, name))
        return cls(local_addr or socket.getfqdn(), settings, name, store, membership)

    def __init__(
        self,
        node: str,
        settings: RendezvousSettings,
        backend_name: str,
        store: Store | None,
        state_holder: Membership,
    ) -> None:
        settings.check()
        self._node = node
        self._settings = settings
        self._backend_name = backend_name
        self._given_store = store
        self._membership = state_holder
        self._served: Store | None = None
        self._agents: AgentStore | None = None
        self._places = 0

    @property
    def settings(self) -> RendezvousSettings:
        """What it was made with."""
        return self._settings

    def get_backend(self) -> str:
        """See RendezvousHandler."""
        return self._backend_name

    @property
    def use_agent_store(self) -> bool:
        """Whether workers meet at the store that the handler of node rank 0 serves."""
        return os.environ.get(_OPT_OUT, "0") != "1"

    def next_rendezvous(self) -> RendezvousInfo:
        """Return this node's place in the next world, and a store that is new with it.

        Gives back the place held before. A node that is not needed waits for as long as the job
        runs. See RendezvousHandler for what it raises.
        """
        while True:
            self._served = self._agents = None
            place = self._join()
            try:
                return self._info_of(place)
            except RuntimeError as error:  # torch's DistError: the store's host is going
                if not self._membership.wait_change(self._loss_s()):
                    raise RendezvousConnectionError(
                        f"{place}: the store at {place.assignment.master_addr}:"
                        f"{place.assignment.master_port} cannot be reached: {error}"
                    ) from error

    def is_closed(self) -> bool:
        """See RendezvousHandler."""
        try:
            return self._membership.has_ended()
        except ElastaneError as error:
            raise_as_api(error)

    def set_closed(self) -> None:
        """Close the job; nodes that are in a world may finish, within the close timeout."""
        try:
            heard = self._membership.close(True, "set_closed() was called", stays=True)
        except ElastaneError as error:
            raise_as_api(error)
        if not heard:
            raise RendezvousConnectionError(
                f"job {self._settings.run_id}: no coordinator heard that it is to be closed"
            )

    def num_nodes_waiting(self) -> int:
        """Return 1 when this node has to come back, whatever for; else 0.

        Also when a node failed, left or died, and when the job was closed.
        """
        try:
            return int(self._membership.has_changed)
        except ElastaneError as error:
            raise_as_api(error)

    def get_run_id(self) -> str:
        """See RendezvousHandler."""
        return self._settings.run_id

    def shutdown(self) -> bool:
        """Close the job and let go of it; return whether that succeeded.

        Where an agent's workers all succeeded, the job ends when those of all nodes have, and this
        waits for them. A node that is in no world closes nothing.
        """
        membership = self._membership
        try:
            if membership.place is None or membership.outcome is not None:
                membership.leave("its handler was shut down")
                return True
            is_agents = self._agents is not None and self._agents.is_agents
            if self._agents is not None and self._agents.has_succeeded:
                membership.finish()
                return True
            reason = "its workers failed for good" if is_agents else "its handler was shut down"
            return membership.close(not is_agents, reason)
        except ElastaneError:
            return membership.outcome is not None
        finally:
            self._served = self._agents = None

    def _join(self) -> MemberPlace:
        known = self._membership.outcome is not None
        try:
            place = self._membership.join()
        except ElastaneError as error:
            self._raise(error, known)
        self._places += 1
        return place

    def _raise(self, error: ElastaneError, known: bool) -> NoReturn:
        outcome = self._membership.outcome
        if outcome is not None and outcome.ok and not known and self._places == 0:
            raise RendezvousGracefulExitError(
                f"this node was not needed: {outcome.reason}"
            ) from error
        raise_as_api(error)

    def _info_of(self, place: MemberPlace) -> RendezvousInfo:
        timeout = timedelta(seconds=_STORE_TIMEOUT_S)
        store = self._served = open_attempt_store(place, timeout)
        agents = agents_part(store, self._given_store, self._settings.run_id, place)
        self._agents = agents
        where = place.assignment
        bootstrap = RendezvousStoreInfo(where.master_addr, where.master_port)
        if not self.use_agent_store:
            local_addr = where.master_addr if place.node_rank == 0 else None
            bootstrap = RendezvousStoreInfo.build(place.node_rank, agents, local_addr)
        return RendezvousInfo(agents, place.node_rank, place.nodes, bootstrap)

    def _loss_s(self) -> float:
        return self._membership.config.spec.timing.silence_s + _LOSS_MARGIN_S


def create_handler(
    store: Store | None, backend: RendezvousBackend, params: RendezvousParameters
) -> DynamicRendezvousHandler:
    """Make a handler over a backend, with the bounds that `params` name.

    Read are join_timeout, last_call_timeout, close_timeout, heartbeat_timeout (seconds),
    keep_alive_interval (seconds) and keep_alive_max_attempt.
    """
    bounds = [
        timedelta(seconds=seconds) if seconds is not None else None
        for seconds in (
            params.get_as_int(f"{name}_timeout")
            for name in ("join", "last_call", "close", "heartbeat")
        )
    ]
    return DynamicRendezvousHandler.from_backend(
        params.run_id,
        store,
        backend,
        params.min_nodes,
        params.max_nodes,
        params.local_addr,
        RendezvousTimeout(*bounds),
        keep_alive_interval=_whole(params, "keep_alive_interval", 5),
        keep_alive_max_attempt=_whole(params, "keep_alive_max_attempt", 3),
    )


def create_builtin_handler(params: RendezvousParameters) -> DynamicRendezvousHandler:
    """Make the handler of one of our own backends."""
    try:
        membership = membership_of(params)
    except ElastaneError as error:
        raise RendezvousError(str(error)) from error
    timing = membership.config.spec.timing
    settings = RendezvousSettings(
        params.run_id,
        params.min_nodes,
        params.max_nodes,
        RendezvousTimeout(
            join=timedelta(seconds=timing.join_timeout_s),
            last_call=timedelta(seconds=timing.last_call_max_s),
            close=timedelta(seconds=membership.config.close_grace_s),
        ),
        timedelta(seconds=timing.heartbeat_s),
        round(timing.silence_s / timing.heartbeat_s),
    )
    node = params.local_addr or socket.getfqdn()
    return DynamicRendezvousHandler(node, settings, params.backend, None, membership)


def _durations(settings: RendezvousSettings) -> dict[str, float]:
    beat_s = settings.keep_alive_interval.total_seconds()
    timeout = settings.timeout
    bounds = {
        "join": ("join_timeout_s", timeout.join),
        "last_call": ("last_call_max_s", timeout.last_call),
    }
    return {
        **{
            key: bound.total_seconds()
            for name, (key, bound) in bounds.items()
            if name in timeout.given
        },
        "heartbeat_s": beat_s,
        "silence_s": beat_s * max(2, settings.keep_alive_max_attempt),
    }


def _whole(params: RendezvousParameters, key: str, default: int) -> int:
    value = params.get_as_int(key, default)
    if value is None:
        raise TypeError(f"rendezvous configuration {key} = None: expected a whole number")
    return value
