"""Leases of every store: one holder, increasing terms, expiry, renewal, release."""

from __future__ import annotations

import asyncio
import time

import pytest
from store_harness import Harness, asynchronous, until

from elastane.errors import ConfigurationError, LeaseLostError
from elastane.protocol.limits import LEASE_MARGIN
from elastane.stores.protocol import Holder

TTL_S = 0.4
# Where a lease must not run out while the test does something: this host may be busy.
LONG_TTL_S = 2.0
# How much later than the store a busy test may notice.
LATE_S = 20.0


@asynchronous
async def test_a_free_lease_is_taken_at_once_by_one_client(harness: Harness) -> None:
    clients = [harness.client() for _ in range(6)]
    leases = await asyncio.gather(
        *(client.lease("leadership", str(i).encode(), 5.0) for i, client in enumerate(clients))
    )
    held = [(i, lease) for i, lease in enumerate(leases) if lease]
    assert len(held) == 1
    index, lease = held[0]
    assert lease.held()
    assert 0 < lease.remaining_s() < 5.0
    expected = Holder(str(index).encode(), lease.term)
    assert [await client.holder("leadership") for client in clients] == [expected] * 6


@asynchronous
async def test_a_lease_that_was_never_taken_has_no_holder(harness: Harness) -> None:
    assert await harness.client().holder("leadership") is None


@asynchronous
async def test_a_holder_that_renews_keeps_the_lease_from_others(harness: Harness) -> None:
    holder, other = harness.client(), harness.client()
    lease = await holder.lease("leadership", b"holder", LONG_TTL_S)
    assert lease is not None
    term, end = lease.term, time.monotonic() + 1.5 * LONG_TTL_S
    while time.monotonic() < end:
        await lease.renew()
        assert await other.lease("leadership", b"other", LONG_TTL_S) is None
        await asyncio.sleep(LONG_TTL_S / 20)
    assert lease.held()
    assert lease.term == term


@asynchronous
async def test_a_silent_holder_stops_before_another_takes_the_lease(harness: Harness) -> None:
    holder, other = harness.client(), harness.client()
    lease = await holder.lease("leadership", b"holder", TTL_S)
    assert lease is not None
    begun = time.monotonic()
    # The margin is for clocks of two hosts. This test has one clock.
    assert lease.remaining_s() <= TTL_S * (1 - LEASE_MARGIN)

    async def take():
        found = await other.lease("leadership", b"other", 60.0)
        # Asked afterwards: on a busy host the lease may run out between a question and the taking.
        assert not (found and lease.held()), "two clients hold the lease"
        return found

    second = await until(take, "the lease runs out")
    assert TTL_S * 0.9 <= time.monotonic() - begun < TTL_S + harness.late_s + LATE_S
    assert not lease.held()
    assert lease.remaining_s() <= 0
    assert second.term > lease.term
    assert await harness.client().holder("leadership") == Holder(b"other", second.term)
    with pytest.raises(LeaseLostError):
        await lease.renew()
    assert not lease.held()
    assert second.held()


@asynchronous
async def test_a_late_renewal_succeeds_while_no_other_took_the_lease(harness: Harness) -> None:
    lease = await harness.client().lease("leadership", b"holder", LONG_TTL_S)
    assert lease is not None
    term = lease.term

    async def ran_out() -> bool:
        return lease.remaining_s() < -LONG_TTL_S * 0.2

    await until(ran_out, "the lease has run out for others too")
    await lease.renew()
    assert lease.held()
    assert lease.term >= term
    assert await harness.client().lease("leadership", b"other", TTL_S) is None


@asynchronous
async def test_a_released_lease_is_free_at_once_and_terms_grow(harness: Harness) -> None:
    one, other = harness.client(), harness.client()
    terms = []
    for turn in range(12):
        lease = await (one if turn % 2 else other).lease("leadership", b"x", 60.0)
        assert lease is not None, "a released lease was not free"
        terms.append(lease.term)
        await lease.release()
        assert not lease.held()
        assert await other.holder("leadership") is None
    assert terms == sorted(set(terms))


@asynchronous
async def test_a_release_by_a_deposed_holder_does_not_end_the_next_lease(harness: Harness) -> None:
    one, other = harness.client(), harness.client()
    first = await one.lease("leadership", b"1", TTL_S)
    assert first is not None
    second = await until(lambda: other.lease("leadership", b"2", 60.0), "the lease runs out")
    await first.release()
    assert await one.holder("leadership") == Holder(b"2", second.term)
    await second.renew()


@asynchronous
async def test_end_lease_frees_a_lease_at_once(harness: Harness) -> None:
    one, other = harness.client(), harness.client()
    first = await one.lease("leadership", b"1", 60.0)
    await other.end_lease("leadership", first.term)
    assert await other.holder("leadership") is None
    second = await other.lease("leadership", b"2", 60.0)
    assert second is not None and second.term > first.term
    with pytest.raises(LeaseLostError):
        await first.renew()


@asynchronous
async def test_end_lease_of_another_term_changes_no_lease(harness: Harness) -> None:
    one, other = harness.client(), harness.client()
    await other.end_lease("leadership", 1)
    first = await one.lease("leadership", b"1", 60.0)
    await first.release()
    await other.end_lease("leadership", first.term)
    second = await one.lease("leadership", b"2", 60.0)
    for term in (first.term, second.term + 1):
        await other.end_lease("leadership", term)
    assert await other.holder("leadership") == Holder(b"2", second.term)
    await second.renew()
    assert await other.lease("leadership", b"3", 60.0) is None


@asynchronous
async def test_leases_of_two_keys_are_independent(harness: Harness) -> None:
    store = harness.client()
    assert await store.lease("a/leadership", b"x", 60.0)
    assert await store.lease("b/leadership", b"x", 60.0)
    assert await store.lease("a/leadership", b"x", 60.0) is None


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), float("inf")])
@asynchronous
async def test_an_invalid_ttl_is_refused(harness: Harness, ttl_s: float) -> None:
    with pytest.raises(ConfigurationError, match="store-ttl"):
        await harness.client().lease("leadership", b"x", ttl_s)
