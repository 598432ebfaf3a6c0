"""What a group of processes does together through a c10d store.

Keys are used once: a prefix that comes again finds what the first use left. Source:
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
    """Have the store wait for `timeout` seconds within the context, and as before after it."""
    before = store.timeout
    store.set_timeout(timedelta(seconds=timeout))
    try:
        yield
    finally:
        store.set_timeout(before)


def get_all(store: Any, rank: int, prefix: str, world_size: int) -> Any:
    """Return the values of `{prefix}0` to `{prefix}{world_size - 1}`, waiting for them.

    Rank 0, which may serve the store, returns when all have theirs.
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
    """Give `data`, and return everybody's, in the order of ranks."""
    with store_timeout(store, timeout):
        store.set(f"{key_prefix}{rank}", data)
        values: list[bytes] = get_all(store, rank, key_prefix, world_size)
        return values


def barrier(  # noqa: PLR0913, PLR0917 - the reference's signature
    store: Any,
    world_size: int,
    key_prefix: str,
    barrier_timeout: float = 300,
    rank: int | None = None,
    rank_tracing_decoder: Callable[[int], str] | None = None,
    trace_timeout: float = 10,
) -> None:
    """Return when `world_size` processes have come; DistStoreError after `barrier_timeout` seconds.

    With `rank` the error names who did not come: rank 0 finds out, within `trace_timeout` seconds,
    and the others are referred to it. `rank_tracing_decoder` gives a rank's name.
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
            told = [f"<check rank 0 ({name(0)}) for missing rank info>"]
            if rank == 0:
                told = [name(one) for one in missing]
            raise DistStoreError(
                f"Timed out waiting on barrier on rank {rank}, for key prefix: {key_prefix} "
                f"(world_size={world_size}, missing_ranks=[{', '.join(told)}], "
                f"timeout={barrier_timeout})"
            ) from error


def _arrive(store: Any, world_size: int, prefix: str) -> str:
    """Count this process in, and return the key that the last one sets."""
    last = f"{prefix}/last_member"
    if store.add(f"{prefix}/num_members", 1) == world_size:
        store.set(last, _DONE)
    return last


def _missing(
    store: Any, world_size: int, prefix: str, rank: int, timeout_s: float
) -> list[int] | None:
    """Return who did not come; [] for other ranks than 0, None where rank 0 does not answer."""
    gate = f"{prefix}/TRACING_GATE"
    store.set(f"{prefix}{rank}/TRACE", _DONE)
    if rank != 0:
        return [] if _came(store, gate, store.timeout) else None
    missing: list[int] = []
    for one in range(1, world_size):
        # Only the first that is missing is waited for: the others have had that time too.
        patience = timedelta(milliseconds=1) if missing else timedelta(seconds=timeout_s)
        if len(missing) < _NAMED_MAX and not _came(store, f"{prefix}{one}/TRACE", patience):
            missing.append(one)
    store.set(gate, _DONE)
    return missing


def _came(store: Any, key: str, patience: timedelta) -> bool:
    try:
        store.wait([key], patience)
    except DistStoreError:
        return False
    return True
