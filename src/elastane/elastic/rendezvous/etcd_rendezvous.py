"""The oldest handler named `etcd`, under the names by which old code imports it.

It uses the same engine as every built-in backend: an election in etcd. It does not use the v2 API.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from elastane.elastic.rendezvous._configure import RendezvousOptions, membership_over
from elastane.elastic.rendezvous.api import RendezvousHandler, RendezvousParameters
from elastane.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousSettings,
    RendezvousTimeout,
)
from elastane.elastic.rendezvous.etcd_store import EtcdClient, etcd_client
from elastane.options.rendezvous import timing_of

__all__ = [
    "EtcdRendezvous",
    "EtcdRendezvousHandler",
    "EtcdRendezvousRetryImmediately",
    "EtcdRendezvousRetryableFailure",
    "create_rdzv_handler",
]

_TIMEOUT_S = 600
_LAST_CALL_S = 30
_BEAT_S, _BEATS_MISSED = 1.0, 3


class EtcdRendezvousRetryableFailure(Exception):
    """Kept for code that names it; elastane retries internally and never raises it."""


class EtcdRendezvousRetryImmediately(Exception):
    """Kept for code that names it; elastane retries internally and never raises it."""


class EtcdRendezvous:
    """The job, and its place in etcd. Nothing is read or written before a handler joins."""

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        client: EtcdClient,
        prefix: str,
        run_id: str,
        num_min_workers: int,
        num_max_workers: int,
        timeout: int,
        last_call_timeout: int,
    ) -> None:
        self.client = client
        self.prefix = prefix
        self.settings = RendezvousSettings(
            run_id,
            num_min_workers,
            num_max_workers,
            RendezvousTimeout(
                join=timedelta(seconds=timeout), last_call=timedelta(seconds=last_call_timeout)
            ),
            timedelta(seconds=_BEAT_S),
            _BEATS_MISSED,
        )


class EtcdRendezvousHandler(DynamicRendezvousHandler):
    """A handler for an EtcdRendezvous."""

    def __init__(self, rdzv_impl: EtcdRendezvous, local_addr: str | None) -> None:
        settings, client, prefix = rdzv_impl.settings, rdzv_impl.client, rdzv_impl.prefix
        options = RendezvousOptions(
            settings.run_id,
            settings.min_nodes,
            settings.max_nodes,
            timing_of(
                {
                    "join_timeout_s": settings.timeout.join.total_seconds(),
                    "last_call_max_s": settings.timeout.last_call.total_seconds(),
                }
            ),
            local_addr,
        )
        membership = membership_over(options, client.opener(prefix))
        node = local_addr or socket.getfqdn()
        super().__init__(node, settings, "etcd", None, membership)


def create_rdzv_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Make a handler for the etcd at `params.endpoint`.

    Parameters are timeout, last_call_timeout (seconds), etcd_prefix, and the connection to etcd:
    protocol, cacert, cert, key.
    """
    impl = EtcdRendezvous(
        etcd_client(params, "etcd"),
        params.get("etcd_prefix", "/torchelastic/p2p"),
        params.run_id,
        params.min_nodes,
        params.max_nodes,
        params.get_as_int("timeout", _TIMEOUT_S) or _TIMEOUT_S,
        params.get_as_int("last_call_timeout", _LAST_CALL_S) or _LAST_CALL_S,
    )
    return EtcdRendezvousHandler(impl, params.local_addr)
