"""An operator may be killed after every write of a history, and two may run at once."""

import pytest
from kube_operators import (
    GROUP_OF_JOBS,
    SHORT_LEASE_S,
    Running,
    job,
    operator_over,
    play,
    pods,
    settled,
    status,
)
from msgspec.structs import replace

from elastane.errors import LeaseLostError
from elastane.kubernetes.reconcile import reconcile

FAILED = {
    "phase": "Failed",
    "containerStatuses": [
        {"name": "elasticjob-worker", "state": {"terminated": {"exitCode": 137}}},
    ],
}
# The history below has 22: the last case is of an operator that lives through it.
WRITES = 23


async def history(kube, reached):
    """Play a job of three pods: one fails, then the job is scaled to four and down to two."""
    wanted = job(replicas=3, minReplicas=1, maxReplicas=4)
    kube.create("elasticjobs", wanted, group=GROUP_OF_JOBS)
    await reached(lambda: len(pods(kube)) == 3)
    failed = kube.one("pods", "x-worker-1")["metadata"]["uid"]
    kube.patch("pods", "x-worker-1", {"status": FAILED}, subresource="status")
    await reached(lambda: len(pods(kube)) == 3 and uid_of(kube, "x-worker-1") != failed)
    for replicas in (4, 2):
        worker = {"replicaSpecs": {"Worker": {"replicas": replicas}}}
        kube.patch("elasticjobs", "x", {"spec": worker}, group=GROUP_OF_JOBS)
        await reached(lambda wanted=replicas: len(pods(kube)) == wanted)
    await reached(lambda: status(kube).get("replicas") == 2)


def uid_of(kube, pod):
    found = [one for one in kube.all("pods") if one["metadata"]["name"] == pod]
    return found[0]["metadata"]["uid"] if found else None


def doubled(kube):
    """Pods that were created while another of their index lived."""
    alive, found = {}, []
    for event in kube.objects.history:
        if event.plural != "pods":
            continue
        meta = event.after["metadata"]
        index = meta["labels"]["replica-index"]
        if event.change == "ADDED" and alive.get(index):
            found.append(meta["name"])
        if event.change == "ADDED":
            alive[index] = meta["uid"]
        if event.change == "DELETED" and alive.get(index) == meta["uid"]:
            del alive[index]
    return found


def kill_after(kube, number):
    """Kill the operator after the write with this number; the next operator continues.

    That is the same as a kill before the next write: a killed process has no memory,
    whatever answer it got.
    """
    writes = 0

    def count(request):
        nonlocal writes
        if request.token == "one" and request.where.plural not in ("leases", "events"):
            writes += 1
            if writes == number:
                kube.banish("one")

    kube.wrote = count


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, marks=() if number % 3 == 1 else pytest.mark.soak)
        for number in range(1, WRITES + 1)
    ],
)
def test_after_a_kill_at_any_write_the_next_operator_has_the_same_result(number):
    async def scenario(kube):
        kill_after(kube, number)
        first = Running(kube, "one", reconcile)
        successor = None

        async def reached(condition):
            nonlocal successor
            await kube.wait(lambda: condition() or "one" in kube.banished)
            if successor is None and "one" in kube.banished:
                await first.kill()
                kube.delete("leases", "elastane-operator", group="coordination.k8s.io")
                successor = Running(kube, "two", reconcile)
            await kube.wait(condition)

        await history(kube, reached)
        await (successor or first).kill()
        assert doubled(kube) == []
        assert pods(kube) == ["x-worker-0", "x-worker-1"]
        assert status(kube)["restarts"] == 1, "the failure was counted once"
        assert status(kube)["failures"] == 1
        assert len(kube.all("services")) == 1
        assert kube.one("configmaps", "x-directive")["data"]["replicas"] == "2"

    play(scenario)


def test_two_operators_act_one_at_a_time():
    async def scenario(kube):
        async with operator_over(kube, "one") as one, operator_over(kube, "two") as two:
            await kube.wait(lambda: one.operator.session or two.operator.session)
            first, second = (one, two) if one.operator.session else (two, one)
            kube.create("elasticjobs", job(), group=GROUP_OF_JOBS)
            await settled(kube)
            assert second.operator.session is None
            assert second.operator.not_ready() == [], "it is ready to take over"
            await first.stop()
            worker = {"replicaSpecs": {"Worker": {"replicas": 3}}}
            kube.patch("elasticjobs", "x", {"spec": worker}, group=GROUP_OF_JOBS)
            await settled(kube, replicas=3)
            assert second.operator.session is not None
        assert doubled(kube) == []

    play(scenario)


def leader(*running):
    return next((one for one in running if one.operator.session is not None), None)


def test_a_killed_operator_is_replaced_once_its_lease_has_expired():
    async def scenario(kube):
        lease = {"lease_s": SHORT_LEASE_S}
        async with (
            operator_over(kube, "one", **lease) as one,
            operator_over(kube, "two", **lease) as two,
        ):
            kube.create("elasticjobs", job(), group=GROUP_OF_JOBS)
            await settled(kube)
            first = await kube.wait(lambda: leader(one, two))
            await first.kill()
            kube.delete("pods", "x-worker-0")
            await settled(kube)
            assert leader(one, two) is not first

    play(scenario)


def test_an_operator_that_cannot_renew_stops_before_another_may_act():
    async def scenario(kube):
        async with operator_over(kube, "one", lease_s=SHORT_LEASE_S) as one:
            await kube.wait(lambda: leader(one))
            for method in ("GET", "PATCH"):
                kube.inject(method, "/leases/", hang=True, times=10**6)
            with pytest.raises(LeaseLostError):
                await one.task
            assert leader(one) is None

    play(scenario)


def test_an_operator_whose_lease_was_taken_does_nothing_more():
    async def scenario(kube):
        async with operator_over(kube, "one") as one:
            kube.create("elasticjobs", job(), group=GROUP_OF_JOBS)
            await settled(kube)
            taken = {"spec": {"holderIdentity": "another", "leaseDurationSeconds": 60}}
            kube.patch("leases", "elastane-operator", taken, group="coordination.k8s.io")
            with pytest.raises(LeaseLostError):
                await one.task
            writes = len(kube.writes)
            kube.delete("pods", "x-worker-0")
            assert len(kube.writes) == writes

    play(scenario)


def test_no_write_is_made_without_the_lease():
    """A process that was suspended does not write either, even before its timers run."""

    async def scenario(kube):
        async with operator_over(kube, "one") as one:
            await kube.wait(lambda: leader(one) and leader(one).operator.session.synced.is_set())
            one.operator.elector._lease.deposed("nobody")
            kube.create("elasticjobs", job(), group=GROUP_OF_JOBS)
            with pytest.raises(LeaseLostError):
                await one.task
            assert kube.writes == []

    play(scenario)


def test_a_pod_is_deleted_only_if_it_is_still_the_one_that_was_decided_on():
    async def scenario(kube):
        kube.create("elasticjobs", job(), group=GROUP_OF_JOBS)
        async with operator_over(kube, "one") as one:
            await settled(kube)
            await kube.wait(lambda: leader(one))
            # Its successor has the name, and the operator has not heard of it.
            kube.silent = {"pods"}
            labels = kube.one("pods", "x-worker-1")["metadata"]["labels"]
            kube.delete("pods", "x-worker-1")
            young = kube.create("pods", {"metadata": {"name": "x-worker-1", "labels": labels}})
            view = one.operator.session.view
            stale = view.pods.get("default/x-worker-1")
            status = type(stale.status)(phase="Failed")
            view.pods._objects["default/x-worker-1"] = stale = replace(stale, status=status)
            view._pods_of._groups["default/x"]["default/x-worker-1"] = stale
            one.operator.session.queue.add("default/x")
            await kube.wait(lambda: ("DELETE", "pods", "x-worker-1") in kube.writes)
            await one.operator.session.queue.wait_returned(10, all_ready=True)
            assert uid_of(kube, "x-worker-1") == young["metadata"]["uid"]

    play(scenario)
