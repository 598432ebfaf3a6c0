"""The elastic rendezvous: a handler over a membership, and custom backends.

Owns the result of `next_rendezvous`, and the store of an attempt. The handler of node rank 0 serves
that store. Its socket listens before its port is announced, so no client is refused. A
`RendezvousBackend` (one register with a fencing token) is used as a store of elastane's membership,
so its nodes get the same elections, rounds and fences as any job.

torch's rendezvous is not used: it never reports a departure, and reuses one store for all attempts.
Here `num_nodes_waiting` is also above 0 if a node failed or left, and each attempt has a new store.
A node that is stopped by a signal, or dies, leaves the job at once. Data are never unpickled.
"""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from elastane.agent.membership import MemberPlace, Membership
from elastane.elastic.rendezvous._configure import RendezvousOptions, membership_of, membership_over
from elastane.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    raise_as_api,
)
from elastane.errors import ElastaneError
from elastane.options.rendezvous import timing_of
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
_TIMEOUTS_S = {"join": 600, "last_call": 30, "close": 30, "heartbeat": 5}

# After the loss of an attempt's store, the death of its host is reported within the silence timeout
# plus this margin.
_LOSS_MARGIN_S = 5.0

_OPT_OUT = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_PREFIX = "elastane.agents"
# torch's agents write keys below the first prefix, and the second once all workers succeeded.
_AGENT_KEYS = "torchelastic/"
_BARRIER_KEYS = "torchelastic/agent/terminal_state"


class RendezvousTimeout:
    """The timeouts of a rendezvous.

    `join`: too few nodes for this long ends the job. `last_call`: the longest wait for more than
    the minimum; it ends earlier, 3 s after the latest arrival. `close`: how long other nodes may
    run after a node closed the job. `heartbeat` has no effect here, since heartbeats are part of a
    session.
    """

    join: timedelta
    last_call: timedelta
    close: timedelta
    heartbeat: timedelta

    def __init__(
        self,
        join: timedelta | None = None,
        last_call: timedelta | None = None,
        close: timedelta | None = None,
        heartbeat: timedelta | None = None,
    ) -> None:
        bounds = {"join": join, "last_call": last_call, "close": close, "heartbeat": heartbeat}
        # The timeouts that the caller gave; they override the defaults.
        self.given = frozenset(name for name, bound in bounds.items() if bound is not None)
        for name, bound in bounds.items():
            if bound is not None and bound <= timedelta(0):
                raise ValueError(f"{name} timeout = {bound}: expected more than nothing")
            setattr(self, name, bound or timedelta(seconds=_TIMEOUTS_S[name]))


@dataclass(repr=False, eq=False, frozen=True)
class RendezvousSettings:
    """The settings that a handler was made with.

    A node that was silent for `keep_alive_max_attempt` times `keep_alive_interval` is dead. A node
    whose connection ends is dead at once.
    """

    run_id: str
    min_nodes: int
    max_nodes: int
    timeout: RendezvousTimeout
    keep_alive_interval: timedelta
    keep_alive_max_attempt: int

    def check(self) -> None:
        """Raise ValueError for invalid settings."""
        if not self.run_id:
            raise ValueError("run_id = '': expected the job's id")
        if self.min_nodes < 1:
            raise ValueError(f"min_nodes = {self.min_nodes}: expected 1 or more")
        if self.max_nodes < self.min_nodes:
            raise ValueError(
                f"max_nodes = {self.max_nodes}: expected min_nodes ({self.min_nodes}) or more"
            )


class RendezvousBackend(ABC):
    """One value with a fencing token, stored where all nodes reach it.

    This is all that a custom backend has to implement. Calls come from a thread of the handler, one
    at a time.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The name under which the backend is registered."""

    @abstractmethod
    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the value and its token, None if there is none yet.

        It must not be older than any write that has completed. Raises RendezvousConnectionError if
        the backend is unreachable; the call is then retried.
        """

    @abstractmethod
    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Replace the value that has this token; without a token, write if there is no value yet.

        Of several writers with the same token at most one may succeed. Returns the current value,
        its token, and whether it is `state`.
        """


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
    """Return the store in which the agents of one attempt write, by a prefix of their own.

    It is in the attempt's `store`, or in the one that the user has `given`.
    """
    if given is None:
        return AgentStore(_PREFIX, store)
    fence = place.assignment.fence
    return AgentStore(f"{_PREFIX}.{run_id}.{fence.round}.{fence.attempt}", given)


class DynamicRendezvousHandler(RendezvousHandler):
    """One node of one job; its heartbeats run in the background."""

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

        `store` holds the agents' keys, with a prefix for each attempt. None: a new store is served
        for each attempt.
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
        options = RendezvousOptions(
            run_id,
            min_nodes,
            max_nodes,
            timing_of(_durations(settings)),
            local_addr,
            settings.timeout.close.total_seconds(),
        )
        name = backend.name
        membership = membership_over(options, lambda: RegisterStore(backend, name))
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
        """The settings that it was made with."""
        return self._settings

    def get_backend(self) -> str:
        """See RendezvousHandler."""
        return self._backend_name

    @property
    def use_agent_store(self) -> bool:
        """Whether workers use the store that the handler of node rank 0 serves."""
        return os.environ.get(_OPT_OUT, "0") != "1"

    def next_rendezvous(self) -> RendezvousInfo:
        """Return this node's rank in the next world, with a new store.

        The node gives up its previous rank. A node that is not needed waits for as long as the job
        runs. See RendezvousHandler for the errors.
        """
        while True:
            self._served = self._agents = None
            place = self._join()
            try:
                return self._info_of(place)
            except RuntimeError as error:  # torch's DistError: the store's host is going away
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
        """Close the job; the nodes of a world may finish, within the close timeout."""
        try:
            is_delivered = self._membership.close(True, "set_closed() was called", stays=True)
        except ElastaneError as error:
            raise_as_api(error)
        if not is_delivered:
            raise RendezvousConnectionError(
                f"job {self._settings.run_id}: no coordinator received the request to close it"
            )

    def num_nodes_waiting(self) -> int:
        """Return 1 if this node has to call `next_rendezvous` again, else 0.

        Reasons are a node that came, failed, left or died, and a job that was closed.
        """
        try:
            return int(self._membership.has_changed)
        except ElastaneError as error:
            raise_as_api(error)

    def get_run_id(self) -> str:
        """See RendezvousHandler."""
        return self._settings.run_id

    def shutdown(self) -> bool:
        """Close the job and release it; return whether that succeeded.

        If an agent's workers all succeeded, the job ends when those of all nodes have, and this
        call waits for them. A node that is in no world does not close the job.
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
    """Make a handler over a backend, with the bounds in `params`.

    Parameters are join_timeout, last_call_timeout, close_timeout, heartbeat_timeout (seconds),
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
    """Make the handler of a built-in backend."""
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
