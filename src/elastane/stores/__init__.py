"""Stores: where a job keeps its durable record, its secret and the lease of its coordinator.

`protocol` says what every store promises, `registry` which ones there are, `jobs` what one job
keeps. The stores are `file`, `redis`, `etcd` (v3 and v2) and `register` (one value with a fencing
token); Kubernetes is a room of its own. Other rooms import the names below, and the modules
`registry`, `register`, `etcd` and `etcd.server`. Another package needs the same names to bring a
store (docs/custom-rendezvous.md).
"""

from elastane.stores.jobs import TOKEN_PART, Filed, JobKeys, JobNames, LeaderRecord, new_token
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
    write_expecting,
)
from elastane.stores.registry import GROUP, ConfKey, StoreBackend, StorePlace, make_store

__all__ = [
    "GROUP",
    "TOKEN_PART",
    "ConfKey",
    "ConflictError",
    "Entry",
    "Filed",
    "HeldLease",
    "Holder",
    "JobKeys",
    "JobNames",
    "LeaderRecord",
    "Lease",
    "Store",
    "StoreBackend",
    "StorePlace",
    "boot_clock",
    "check_key",
    "check_ttl",
    "check_value",
    "make_store",
    "new_token",
    "watch_by_polling",
    "write_expecting",
]
