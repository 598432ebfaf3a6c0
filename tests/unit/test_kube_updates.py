"""An edited template: which pods it replaces and when, and the status of the others."""

import copy

import pytest
from kube_cluster import Cluster, spec_of

from elastane.kubernetes.model import DeletePod
from elastane.kubernetes.reconcile.bounds import STARTLESS_S

ROLLING = {"updateStrategy": "RollingUpdate"}


def of_image(image, **more):
    spec = copy.deepcopy(spec_of(3, 1, 4, **more))
    spec["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["image"] = image
    return spec


def running(**more):
    cluster = Cluster(spec=of_image("a:1", **more))
    cluster.settle()
    return cluster


def decide(cluster):
    cluster.relist()
    return cluster.operate()[0]


def images(cluster):
    pods = sorted(cluster.pods.values(), key=lambda pod: pod.index)
    return [pod.manifest["spec"]["containers"][0]["image"] for pod in pods]


def stuck(waiting="ImagePullBackOff", **more):
    """Return a job without any container that can start."""
    cluster = Cluster(spec=of_image("typo:1", **more))
    decide(cluster)
    for pod in cluster.pods.values():
        pod.waiting, pod.node = waiting, "n0"
    decide(cluster)
    return cluster


@pytest.mark.parametrize("waiting", ["ImagePullBackOff", "CreateContainerConfigError", ""])
def test_a_corrected_template_reaches_pods_that_never_started(waiting):
    cluster = stuck(waiting)
    cluster.edit(of_image("right:1"))
    decide(cluster)
    cluster.end_deleted()
    decide(cluster)
    assert images(cluster) == ["right:1"] * 3
    cluster.settle()
    status = cluster.status
    assert (status.phase, status.restarts, status.failures) == ("Running", 0, 0)


def test_the_time_to_start_begins_again_with_an_edit_of_the_template():
    cluster = stuck()
    cluster.now_s += STARTLESS_S - 1
    cluster.edit(of_image("typo:2"))
    decide(cluster)
    cluster.now_s += 5  # The old pods may still be there, and cannot start.
    decide(cluster)
    assert cluster.status.phase == "Pending"
    cluster.end_deleted()
    decide(cluster)
    for pod in cluster.pods.values():
        pod.waiting, pod.node = "ErrImagePull", "n0"
    decide(cluster)
    cluster.now_s += STARTLESS_S - 1
    decide(cluster)
    assert cluster.status.phase == "Pending"
    cluster.now_s += 1
    decide(cluster)
    assert cluster.status.condition("Failed").reason == "InvalidTemplate"


def test_an_edit_of_something_else_gives_no_more_time():
    cluster = stuck()
    cluster.now_s += STARTLESS_S
    cluster.edit(of_image("typo:1", nodeLostSeconds=11))
    decide(cluster)
    assert cluster.status.phase == "Failed"


def test_pods_that_started_are_left_alone_and_counted_as_outdated():
    cluster = running()
    cluster.edit(of_image("a:2"))
    assert not [one for one in decide(cluster).actions if isinstance(one, DeletePod)]
    assert cluster.status.outdated == 3
    cluster.exit(cluster.by_name("j-worker-1"), 137)
    cluster.settle()
    assert images(cluster) == ["a:1", "a:2", "a:1"]
    assert cluster.status.outdated == 2


def test_a_pod_whose_init_container_started_has_begun():
    cluster = stuck()
    pod = cluster.by_name("j-worker-0")
    pod.init_started_s = cluster.now_s
    cluster.edit(of_image("right:1"))
    gone = [one.name for one in decide(cluster).actions if isinstance(one, DeletePod)]
    assert gone == ["j-worker-1", "j-worker-2"]


def test_a_roll_drains_one_pod_at_a_time_and_waits_until_the_job_has_its_successor():
    cluster = running(**ROLLING)
    cluster.edit(of_image("a:2", **ROLLING))
    drained = []
    for expected in (2, 1, 0):
        cluster.tell_who_is_in()
        gone = [one for one in decide(cluster).actions if isinstance(one, DeletePod)]
        assert [one.name for one in gone] == [f"j-worker-{expected}"]
        assert gone[0].grace_s is None, "it drains"
        drained += gone
        for _ in range(3):
            assert not [a for a in decide(cluster).actions if isinstance(a, DeletePod)]
            cluster.end_deleted()
            decide(cluster)
            for pod in list(cluster.pods.values()):
                cluster.start(pod, "n1")
            cluster.tell_who_is_in(without=[expected])
    assert images(cluster) == ["a:2"] * 3
    cluster.tell_who_is_in()
    decide(cluster)
    status = cluster.status
    assert (status.outdated, status.restarts, status.failures, status.disruptions) == (0, 0, 0, 0)


def test_a_roll_stops_at_a_template_whose_pods_do_not_start():
    cluster = running(**ROLLING)
    cluster.edit(of_image("typo:1", **ROLLING))
    cluster.tell_who_is_in()
    decide(cluster)
    cluster.end_deleted()
    decide(cluster)
    cluster.by_name("j-worker-2").waiting = "ErrImagePull"
    for _ in range(5):
        cluster.now_s += 100
        cluster.tell_who_is_in()
        assert not [one for one in decide(cluster).actions if isinstance(one, DeletePod)]
    assert images(cluster) == ["a:1", "a:1", "typo:1"]


def test_without_reports_a_roll_goes_by_the_pods_alone():
    more = ROLLING | {"rdzvEndpoint": "etcd:2379"}
    cluster = running(**more)
    cluster.edit(of_image("a:2", **more))
    cluster.settle()
    assert images(cluster) == ["a:2"] * 3


def test_a_roll_waits_for_pods_that_are_missing():
    cluster = running(**ROLLING)
    cluster.exit(cluster.by_name("j-worker-0"), 137)
    cluster.edit(of_image("a:2", **ROLLING))
    cluster.tell_who_is_in()
    actions = decide(cluster).actions
    assert [one.name for one in actions if isinstance(one, DeletePod)] == ["j-worker-0"]
