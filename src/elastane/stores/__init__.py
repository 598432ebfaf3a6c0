"""Stores: where a job keeps its durable record, its secret and the lease of its coordinator.

`protocol` says what every store promises, `registry` which ones there are, `jobs` what one job
keeps. The stores are `file`, `etcd` (v3 and v2), `register` (one value with a fencing token) and
`memory` (tests); Kubernetes is a room of its own. What is imported here is what another package
needs to bring a store (docs/custom-rendezvous.md).
"""

from elastane.stores.protocol import (
    ConflictError,
    Entry,
    HeldLease,
    Holder,
    Lease,
    Store,
    boot_clock,
    check_key,
    check_ttl,
    check_value,
    watch_by_polling,
)
from elastane.stores.registry import ConfKey, StoreBackend, StorePlace

__all__ = [
    "ConfKey",
    "ConflictError",
    "Entry",
    "HeldLease",
    "Holder",
    "Lease",
    "Store",
    "StoreBackend",
    "StorePlace",
    "boot_clock",
    "check_key",
    "check_ttl",
    "check_value",
    "watch_by_polling",
]
