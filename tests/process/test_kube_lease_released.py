"""The operator gives back the Lease of a coordinator whose pod is dead, and touches no other."""

import pytest
from kube_operators import GROUP_OF_JOBS, job, operator_over, play, pods

from elastane.kubernetes.reconcile import reconcile
from elastane.kubernetes.store.objects import lease_of

LEASES = "coordination.k8s.io"
FAILED = {
    "phase": "Failed",
    "containerStatuses": [
        {"name": "elasticjob-worker", "state": {"terminated": {"exitCode": 137}}},
    ],
}


def lease_name(kube):
    return lease_of("x-" + kube.one("elasticjobs", "x", group=GROUP_OF_JOBS)["metadata"]["uid"][:8])


def lease(kube):
    return kube.one("leases", lease_name(kube), group=LEASES)


def uid_of(kube, pod):
    return kube.one("pods", pod)["metadata"]["uid"]


async def with_a_holder(kube, running, holder):
    """Make a job of two pods whose coordinator is in the one of uid `holder(kube)`."""
    kube.create("elasticjobs", job(), group=GROUP_OF_JOBS)
    await kube.wait(lambda: len(pods(kube)) == 2, "two pods")
    await kube.wait(running.operator.session.synced.is_set)
    notes = {"elastane.dev/pod-uid": holder(kube), "elastane.dev/term": "7"}
    spec = {"holderIdentity": "x-worker-1_ab", "leaseDurationSeconds": 3, "leaseTransitions": 4}
    body = {"metadata": {"name": lease_name(kube), "annotations": notes}, "spec": spec}
    kube.create("leases", body, group=LEASES)


async def killed(kube):
    """End x-worker-1, and wait until the operator has acted on it."""
    old = uid_of(kube, "x-worker-1")
    kube.patch("pods", "x-worker-1", {"status": FAILED}, subresource="status")
    await kube.wait(lambda: len(pods(kube)) == 2 and uid_of(kube, "x-worker-1") != old, "a new pod")


def test_the_lease_of_a_dead_pod_is_released_and_otherwise_unchanged():
    async def scenario(kube):
        async with operator_over(kube, decide=reconcile) as running:
            await kube.wait(lambda: running.operator.session)
            await with_a_holder(kube, running, lambda kube: uid_of(kube, "x-worker-1"))
            await killed(kube)
            found = lease(kube)
            assert "holderIdentity" not in found["spec"]
            assert found["spec"]["leaseTransitions"] == 4
            assert found["metadata"]["annotations"]["elastane.dev/term"] == "7"

    play(scenario)


def test_the_next_holder_can_read_which_agents_are_dead():
    async def scenario(kube):
        said = []

        def note(request):
            if request.method == "PATCH" and request.path.endswith(lease_name(kube)):
                said.append(kube.one("configmaps", "x-directive")["data"].get("dead", ""))

        async with operator_over(kube, decide=reconcile) as running:
            await kube.wait(lambda: running.operator.session)
            await with_a_holder(kube, running, lambda kube: uid_of(kube, "x-worker-1"))
            dead = uid_of(kube, "x-worker-1")
            kube.wrote = note
            await killed(kube)
            assert said == [dead]

    play(scenario)


@pytest.mark.parametrize("holder", ["x-worker-0", "nobody of us", ""])
def test_the_lease_of_another_holder_is_not_changed(holder):
    async def scenario(kube):
        def uid(kube):
            return uid_of(kube, holder) if holder in pods(kube) else holder

        async with operator_over(kube, decide=reconcile) as running:
            await kube.wait(lambda: running.operator.session)
            await with_a_holder(kube, running, uid)
            before = lease(kube)
            await killed(kube)
            assert lease(kube) == before

    play(scenario)


@pytest.mark.parametrize("fault", [{"status": 403}, {"status": 500}])
def test_a_lease_that_cannot_be_released_delays_no_other_action(fault):
    async def scenario(kube):
        async with operator_over(kube, decide=reconcile) as running:
            await kube.wait(lambda: running.operator.session)
            await with_a_holder(kube, running, lambda kube: uid_of(kube, "x-worker-1"))
            for method in ("GET", "PATCH"):
                kube.inject(method, r"/leases/.*leadership", times=10**6, **fault)
            await killed(kube)

    play(scenario)
