"""ElasticJobs on a real control plane: applied by kubectl, with real training in their pods."""

import json
import time

import pytest
from bed.network import SERVICE
from bed_pods import wait_log
from elastic_jobs import STOCK, steps_of
from jobs import newest, until

ONE_GPU = {"nvidia.com/gpu": "1"}


def workers(job):
    """Of each node that did a step of the newest world, its worker, by when that was born."""
    return {each.node: each.pid for each in newest(job.seen())}


def phases(job):
    return {name: pod["status"].get("phase") for name, pod in job.pods().items()}


def test_a_job_grows_and_shrinks_by_kubectl_and_is_there_when_its_operator_is_not(
    cluster, operator, make_job
):
    for name in ("a", "b", "c"):
        cluster.add(name)
    job = make_job()
    job.apply(replicas=2, low=1, high=3)
    job.wait_step(world=2)
    before = workers(job)
    operator.kill()
    job.kubectl("scale", "ej/train", "--replicas=3")
    at = newest(job.seen())[-1].step
    job.wait("no job notices", lambda seen: newest(seen)[-1].step > at + 20)
    assert len(job.pods()) == 2
    operator.start()
    job.wait_step(world=3)
    # Nobody was started again for it: those who were there went on in their processes.
    assert before.items() <= workers(job).items()
    # To more than maxReplicas: held at what the job may have, and told.
    job.kubectl("scale", "ej/train", "--replicas=9")
    job.wait_condition("Running")
    operator.stop()
    job.kubectl("scale", "ej/train", "--replicas=1")
    operator.start()
    job.wait_step(world=1)
    job.wait_pods("one pod is left", lambda pods: len(pods) == 1)
    assert before["train-worker-0"] == workers(job)["train-worker-0"]
    again = {step: fences for step, fences in steps_of(job.seen()).items() if len(fences) > 1}
    assert not again, "a drained pod leaves between two steps"


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


def seat_of(job):
    """The path of the Lease of the job's coordinator, and the name of the pod that holds it."""
    path = f"/apis/coordination.k8s.io/v1/namespaces/{job.space}/leases"
    found = job.plane.ask("GET", path)["items"]
    lease = next(each for each in found if "holderIdentity" in each["spec"])
    name = lease["metadata"]["name"]
    return f"{path}/{name}", lease["spec"]["holderIdentity"].rpartition("_")[0]


def test_a_coordinator_whose_pod_is_killed_is_followed_before_its_lease_has_run_out(
    cluster, operator, make_job
):
    cluster.add("a")
    job = make_job()
    job.apply(replicas=2, low=1, high=2)
    before = job.wait_step(world=2)
    path, holder = seat_of(job)
    cluster.tell(job.space, holder, "signal", number=9)
    # From now on nobody lives to see it run out.
    forever = {"spec": {"leaseDurationSeconds": 86_400}}
    job.plane.ask("PATCH", path, forever, kind="merge-patch+json")
    job.wait_step(world=1, fence=(before.round, before.attempt))
    assert f"pod {holder} is dead: the lease" in operator.report()
    job.wait_step(world=2)


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
    (_, holder), names = seat_of(job), sorted(job.pods())
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
    # It may live: nobody gives a seat back for it.
    assert "is dead: the lease" not in operator.report()
    # Its agent reaches the others again, before its kubelet hears that the pod is gone.
    node.heal(pods_alone=True)
    until(lambda: f"node {name} (incarnation" in cluster.report(), "the zombie is turned away")
    node.heal()
    job.wait_pods("the zombie is gone", lambda pods: lost["metadata"]["uid"] not in _uids(pods))
    job.wait_step(world=2)


def _uids(pods):
    return {pod["metadata"]["uid"] for pod in pods.values()}


def test_what_is_wrong_with_a_manifest_is_told_at_once_and_for_good(cluster, operator, make_job):
    cluster.add("a")
    image = make_job("image")
    image.apply(replicas=1, low=1, high=1, container=image.container(image="nobody/has:this"))
    name = make_job("name")
    # YAML 1.1 reads the key N as false: what the API server refuses each time.
    name.apply(replicas=1, low=1, high=1, container=name.container(env=[{"name": False}]))
    ranges = make_job("ranges")
    ranges.apply(replicas=1, low=3, high=2)
    other = make_job("other")
    with pytest.raises(AssertionError, match="replicas"):
        other.apply(replicas=-1)
    told = ranges.wait_condition("Failed", words="minReplicas")
    assert "3" in told["message"] and "2" in told["message"]
    name.wait_condition("Failed", words="env")
    until(lambda: "nobody/has:this" in json.dumps(image.get()["status"]), "the image is named")
    assert not name.pods() and not ranges.pods()


def test_jobs_side_by_side_end_and_can_be_suspended(cluster, operator, make_job):
    cluster.add("a")
    jobs = [make_job(name, steps=200) for name in ("one", "two")]
    for job in jobs:
        job.apply(replicas=1, low=1, high=1)
    for job in jobs:
        job.wait_step(world=1)
    patch = {"spec": {"suspend": True}}
    jobs[0].kubectl("patch", "ej/one", "--type=merge", "-p", json.dumps(patch))
    jobs[0].wait_condition("Suspended")
    jobs[0].wait_pods("none is left", lambda pods: not pods)
    jobs[1].wait_condition("Succeeded")
    jobs[0].kubectl("patch", "ej/one", "--type=merge", "-p", '{"spec": {"suspend": false}}')
    jobs[0].wait_condition("Succeeded")


@pytest.mark.soak
def test_a_stock_torchrun_grows_and_shrinks(cluster, operator, make_job):
    for name in ("a", "b", "c"):
        cluster.add(name)
    job = make_job(image="torchrun", script=STOCK)
    job.apply(replicas=2, low=1, high=3)
    job.wait("two train", lambda seen: _world(seen) == 2)
    job.kubectl("scale", "ej/train", "--replicas=3")
    job.wait("three train", lambda seen: _last(seen) == 3)
    job.kubectl("scale", "ej/train", "--replicas=2")
    job.wait("two train", lambda seen: _last(seen) == 2)


def _last(seen):
    return seen[-1].world


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
