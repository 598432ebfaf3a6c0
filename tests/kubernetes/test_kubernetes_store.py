"""The Kubernetes store against a real API server, where other clients change its objects.

What it promises as a store is in tests/conformance.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from kube_bed import shared_control_plane

from elastane.errors import LeaseLostError
from elastane.kubernetes.store.settings import KubernetesSettings
from elastane.kubernetes.store.store import KubernetesStore

LEASES = "/apis/coordination.k8s.io/v1/namespaces"


class Place:
    """A namespace, its store's clients, and direct access to its objects."""

    def __init__(self) -> None:
        self.plane = shared_control_plane()
        self.space = self.plane.namespace()

    def store(self, **more: object) -> KubernetesStore:
        settings = KubernetesSettings(self.space, kubeconfig=str(self.plane.admin))
        return KubernetesStore(settings, **more)

    def lease(self, method: str = "GET", body: object = None) -> dict:
        path = f"{LEASES}/{self.space}/leases/elastane-j.leadership"
        return self.plane.ask(method, path, body, kind="merge-patch+json" if body else "json")


def placed(test: Callable[[Place], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        async def bounded() -> None:
            async with asyncio.timeout(60):
                await test(Place())

        asyncio.run(bounded())

    run.__name__ = test.__name__
    return run


@placed
async def test_a_lease_looks_as_kubernetes_users_expect(place):
    store = place.store()
    lease = await store.lease("j/leadership", b"node-a", 4.0)
    first = place.lease()["spec"]
    await lease.renew()
    spec = place.lease()["spec"]
    assert spec["holderIdentity"].startswith("node-a_")
    assert (spec["leaseDurationSeconds"], spec["leaseTransitions"]) == (4, 1)
    assert spec["acquireTime"] == first["acquireTime"] and spec["renewTime"] > first["renewTime"]
    await lease.release()
    assert "holderIdentity" not in place.lease()["spec"]
    again = await store.lease("j/leadership", b"node-a", 4.0)
    assert place.lease()["spec"]["leaseTransitions"] == 2
    await store.end_lease("j/leadership", again.term)  # by another process, after its death
    assert await store.lease("j/leadership", b"node-b", 4.0)
    assert place.lease()["spec"]["leaseTransitions"] == 3
    await store.close()


@placed
async def test_a_deleted_lease_is_created_again_by_its_holder_with_its_term(place):
    store, other = place.store(), place.store()
    lease = await store.lease("j/leadership", b"a", 30.0)
    term = lease.term
    place.lease("DELETE")
    await lease.renew()
    assert lease.held() and lease.term == term
    assert (await other.holder("j/leadership")).term == term
    assert await other.lease("j/leadership", b"b", 30.0) is None
    await store.close(), await other.close()


@placed
async def test_terms_grow_over_the_deletion_of_a_lease_and_the_old_holder_is_deposed(place):
    store, other = place.store(), place.store()
    lease = await store.lease("j/leadership", b"a", 30.0)
    await lease.renew()
    place.lease("DELETE")
    second = await other.lease("j/leadership", b"b", 30.0)
    assert second is not None and second.term > lease.term
    with pytest.raises(LeaseLostError):
        await lease.renew()
    await store.close(), await other.close()


@placed
async def test_an_edit_of_a_lease_by_another_client_does_not_depose_its_holder(place):
    store = place.store()
    lease = await store.lease("j/leadership", b"a", 30.0)
    place.lease("PATCH", {"metadata": {"labels": {"mine": "too"}}})
    await lease.renew()
    assert lease.held()
    place.lease("PATCH", {"spec": {"holderIdentity": "somebody"}})
    with pytest.raises(LeaseLostError):
        await lease.renew()
    await store.close()


@placed
async def test_a_silent_holder_is_judged_only_by_the_candidates_clock(place):
    now_s = [1000.0]
    store, other = place.store(), place.store(clock=lambda: now_s[0])
    lease = await store.lease("j/leadership", b"a", 4.0)
    assert await other.lease("j/leadership", b"b", 4.0) is None
    now_s[0] += 3.9
    assert await other.lease("j/leadership", b"b", 4.0) is None
    await lease.renew()
    now_s[0] += 3.9
    assert await other.lease("j/leadership", b"b", 4.0) is None, "it was renewed since"
    now_s[0] += 4.0
    second = await other.lease("j/leadership", b"b", 4.0)
    assert second is not None and second.term > lease.term
    await store.close(), await other.close()


@placed
async def test_an_emptied_config_map_is_an_empty_value(place):
    store = place.store()
    written = await store.compare_and_set("j/record", b"x", 0)
    path = f"/api/v1/namespaces/{place.space}/configmaps/elastane-j.record"
    place.plane.ask("PATCH", path, {"binaryData": None}, kind="merge-patch+json")
    found = await store.get("j/record")
    assert found.value == b"" and found.version > written.version
    await store.close()


@placed
async def test_a_purge_goes_by_the_job_and_leaves_its_namesakes(place):
    store, other = place.store(), place.store()
    for key in ("j/record", "j/token", "jj/record", "j", "J/record"):
        await store.compare_and_set(key, b"x", 0)
    await store.lease("j/leadership", b"a", 30.0)
    await other.purge("j")
    left = [
        key for key in ("j/record", "j/token", "jj/record", "j", "J/record") if await other.get(key)
    ]
    assert left == ["jj/record", "J/record"]
    assert await other.holder("j/leadership") is None
    await store.close(), await other.close()
