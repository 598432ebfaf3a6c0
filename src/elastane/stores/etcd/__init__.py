"""etcd as a store: v3 by its JSON gateway, and v2 for servers that still speak it.

Owns the two backends. `settings` reads the command line, `gateway` speaks HTTP to one of several
endpoints, `wire` is v3's JSON, `v3` and `v2` are the two stores, `server` starts a local server.
Only `gateway` knows httpx, which is imported with the first connection.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from elastane.stores.etcd.settings import CONF_KEYS, ENDPOINT, PORT, PREFIX, read_settings
from elastane.stores.protocol import Store
from elastane.stores.registry import ConfKey, StoreBackend, StorePlace

__all__ = ["CONF_KEYS", "ETCD", "ETCD_V2", "read_settings"]


def _check(place: StorePlace, environ: Mapping[str, str]) -> StorePlace:
    read_settings(place.endpoint, place.conf)
    return place


def _make_v3(place: StorePlace) -> Store:
    from elastane.stores.etcd.v3 import EtcdV3Store

    return EtcdV3Store(read_settings(place.endpoint, place.conf))


def _make_v2(place: StorePlace) -> Store:
    from elastane.stores.etcd.v2 import EtcdV2Store

    return EtcdV2Store(read_settings(place.endpoint, place.conf))


_KEYS = (
    ConfKey("protocol", "for servers that are given without one", "http", "http, https"),
    ConfKey("cacert", "the authority of etcd's certificates", unit="PEM file"),
    ConfKey("ca_cert", "the same", unit="PEM file"),
    ConfKey("cert", "our certificate as etcd's client", unit="PEM file"),
    ConfKey("ssl_cert", "the same", unit="PEM file"),
    ConfKey("key", "its private key", unit="PEM file"),
    ConfKey("ssl_cert_key", "the same", unit="PEM file"),
    ConfKey("etcd_prefix", "below it lies a folder for each job", PREFIX),
    ConfKey("user", "name for etcd's login"),
    ConfKey("password", "its password"),
)
ETCD = StoreBackend(
    name="etcd",
    make=_make_v3,
    endpoint=ENDPOINT,
    example=f"HOST:{PORT}",
    check=_check,
    keys=_KEYS,
    default_port=PORT,
    tls=True,
    login=True,
    brings_server=True,
    late_s=3.5,  # the server's leases take whole seconds, 2 at least
)
ETCD_V2 = dataclasses.replace(ETCD, name="etcd-v2", make=_make_v2)
