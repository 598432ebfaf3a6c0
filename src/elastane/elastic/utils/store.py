"""Collective operations of several processes over a c10d store.

Keys are used once: a reused prefix finds the keys of its first use. Source:
torch.distributed.elastic.utils.store.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError

__all__ = ["barrier", "get_all", "store_timeout", "synchronize"]
_NAMED_MAX = 16
_DONE = b"1"


@contextmanager
def store_timeout(store: Any, timeout: float) -> Generator[None, None, None]:
    """Set the store's timeout to `timeout` seconds in this context, and restore it afterwards."""
    before = store.timeout
    store.set_timeout(timedelta(seconds=timeout))
    try:
        yield
    finally:
        store.set_timeout(before)


def get_all(store: Any, rank: int, prefix: str, world_size: int) -> Any:
    """Return the values of `{prefix}0` to `{prefix}{world_size - 1}`; wait for them.

    Rank 0, which may serve the store, returns when all others have their values.
    """
    values = store.multi_get([f"{prefix}{index}" for index in range(world_size)])
    last = _arrive(store, world_size, f"{prefix}/finished")
    if rank == 0:
        store.wait([last])
    return values


def synchronize(
    store: Any,
    data: bytes,
    rank: int,
    world_size: int,
    key_prefix: str,
    timeout: float = 300,
) -> list[bytes]:
    """Publish `data`, and return the data of all, in the order of ranks."""
    with store_timeout(store, timeout):
        store.set(f"{key_prefix}{rank}", data)
        values: list[bytes] = get_all(store, rank, key_prefix, world_size)
        return values


def barrier(  # noqa: PLR0913, PLR0917 - torch's signature
    store: Any,
    world_size: int,
    key_prefix: str,
    barrier_timeout: float = 300,
    rank: int | None = None,
    rank_tracing_decoder: Callable[[int], str] | None = None,
    trace_timeout: float = 10,
) -> None:
    """Return when `world_size` processes have called it; DistStoreError after the timeout.

    `barrier_timeout` is in seconds. With `rank` the error names the missing ranks: rank 0 finds
    them within `trace_timeout` seconds, and the others refer to it. `rank_tracing_decoder` returns
    a rank's name.
    """
    if rank is None and rank_tracing_decoder is not None:
        raise AssertionError("rank_tracing_decoder without rank: pass rank too")
    with store_timeout(store, barrier_timeout):
        last = _arrive(store, world_size, key_prefix)
        try:
            store.wait([last])
        except DistStoreError as error:
            if rank is None:
                raise
            missing = _missing(store, world_size, key_prefix, rank, trace_timeout)
            if missing is None:
                raise
            name = rank_tracing_decoder or str
            names = [f"<check rank 0 ({name(0)}) for missing rank info>"]
            if rank == 0:
                names = [name(one) for one in missing]
            raise DistStoreError(
                f"Timed out waiting on barrier on rank {rank}, for key prefix: {key_prefix} "
                f"(world_size={world_size}, missing_ranks=[{', '.join(names)}], "
                f"timeout={barrier_timeout})"
            ) from error


def _arrive(store: Any, world_size: int, prefix: str) -> str:
    """Count this process, and return the key that the last one sets."""
    last = f"{prefix}/last_member"
    if store.add(f"{prefix}/num_members", 1) == world_size:
        store.set(last, _DONE)
    return last


def _missing(
    store: Any, world_size: int, prefix: str, rank: int, timeout_s: float
) -> list[int] | None:
    """Return the missing ranks; [] on other ranks than 0, None if rank 0 does not answer."""
    gate = f"{prefix}/TRACING_GATE"
    store.set(f"{prefix}{rank}/TRACE", _DONE)
    if rank != 0:
        return [] if _wait_for_key(store, gate, store.timeout) else None
    missing: list[int] = []
    for one in range(1, world_size):
        # Only the first missing rank is waited for: the others have had that time too.
        timeout = timedelta(milliseconds=1) if missing else timedelta(seconds=timeout_s)
        if len(missing) < _NAMED_MAX and not _wait_for_key(store, f"{prefix}{one}/TRACE", timeout):
            missing.append(one)
    store.set(gate, _DONE)
    return missing


def _wait_for_key(store: Any, key: str, timeout: timedelta) -> bool:
    try:
        store.wait([key], timeout)
    except DistStoreError:
        return False
    return True
