"""ElasticJobs whose nodes are lost to the cluster: cut off from it, or dead."""

import json
import time

import pytest
from bed.network import SERVICE
from bed_pods import wait_log
from elastic_jobs import ONE_GPU, leadership_of, workers
from jobs import newest, until


def lasting(job):
    """Options for pods to be known by what outlives them: a service account's token does not."""
    told = json.loads(job.plane.admin.read_text())
    told["clusters"][0]["cluster"]["server"] = f"https://{SERVICE[0]}:{SERVICE[1]}"
    (job.folder / "kubeconfig").write_text(json.dumps(told))
    return ("--rdzv-conf", f"kubeconfig=/job/kubeconfig,namespace={job.space}")


@pytest.mark.parametrize("who", ["the coordinator", "another"])
def test_a_pod_behind_a_partition_is_replaced_and_does_no_step_more(
    cluster, operator, make_job, who
):
    for name in ("a", "b", "c"):
        cluster.add(name, capacity=ONE_GPU)
    job = make_job()
    container = job.container(*lasting(job), resources={"limits": ONE_GPU})
    job.apply(replicas=2, low=1, high=2, container=container)
    job.wait_step(world=2)
    (_, holder), names = leadership_of(job), sorted(job.pods())
    name = holder if who == "the coordinator" else next(one for one in names if one != holder)
    lost = job.pods()[name]
    zombie = workers(job)[name]
    node = cluster[lost["spec"]["nodeName"]]
    node.cut_off()
    job.wait_step(world=1)
    job.wait_step(world=2)
    places = {p["spec"].get("nodeName") for n, p in job.pods().items() if n != name}
    assert node.name not in places
    taken = newest(job.seen())[0].time_s
    assert all(
        each.time_s < taken for each in job.seen() if each.pid == zombie and each.node == name
    )
    # It may live, so the operator does not release its lease.
    assert "is dead: the lease" not in operator.report()
    # Its agent reaches the others again, before its kubelet hears that the pod is gone.
    node.heal(pods_alone=True)
    until(lambda: f"node {name} (incarnation" in cluster.report(), "the zombie is turned away")
    node.heal()
    job.wait_pods("the zombie is gone", lambda pods: lost["metadata"]["uid"] not in _uids(pods))
    job.wait_step(world=2)


def _uids(pods):
    return {pod["metadata"]["uid"] for pod in pods.values()}


@pytest.mark.soak
def test_a_node_that_dies_is_replaced_without_waiting_for_its_eviction(cluster, operator, make_job):
    for name in ("a", "b", "c"):
        cluster.add(name, capacity=ONE_GPU)
    job = make_job()
    job.apply(replicas=2, low=1, high=2, container=job.container(resources={"limits": ONE_GPU}))
    job.wait_step(world=2)
    node = cluster.node_of(job.space, "train-worker-0")
    died = time.monotonic()
    node.die()
    job.wait_step(world=1)
    job.wait_step(world=2)
    assert time.monotonic() - died < 120
    node.start()
    job.wait_pods("the dead one is gone", lambda pods: len(pods) == 2)
    wait_log(cluster.plane, job.space, "train-worker-1", "elastane")


def test_a_pod_that_is_killed_is_replaced_while_the_others_go_on_in_their_processes(
    cluster, operator, make_job
):
    cluster.add("a")
    job = make_job()
    job.apply(replicas=3, low=1, high=3)
    job.wait_step(world=3)
    before = workers(job)
    cluster.tell(job.space, "train-worker-1", "signal", number=9)
    after = wait_new_worker(job, 1, before)
    kept = ("train-worker-0", "train-worker-2")
    assert {n: after[n] for n in kept} == {n: before[n] for n in kept}
    job.kubectl("delete", "pod", "train-worker-2", "--wait=false")
    wait_new_worker(job, 2, after)
    status = job.get()["status"]
    assert status["restarts"] >= 1
    assert "signal 9" in job.kubectl("get", "events")


def wait_new_worker(job, index, before):
    """Wait until three train, and the worker of that pod is another one; returns all."""
    name = f"train-worker-{index}"

    def is_new(seen):
        return _world(seen) == 3 and workers(job).get(name) not in (None, before[name])

    job.wait(f"{name} trains again", is_new)
    job.wait_step(world=3)
    return workers(job)


def _world(seen):
    last = newest(seen)
    return last[0].world if last else 0
