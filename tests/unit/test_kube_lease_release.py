"""The operator releases the Lease of a coordinator whose pod is dead, and no other."""

import pytest
from kube_cluster import Cluster, spec_of

from elastane.kubernetes.model import ReleaseLease
from elastane.kubernetes.store.objects import lease_of


def ran(policy="ExitCode", **more):
    cluster = Cluster(spec=spec_of(2, 1, 2, policy, **more))
    cluster.settle()
    return cluster


def freed(cluster):
    """Return the releases of the next decisions, until nothing changes."""
    done_before = len(cluster.actions)
    cluster.settle()
    return [one for one in cluster.actions[done_before:] if isinstance(one, ReleaseLease)]


@pytest.mark.parametrize(
    ("policy", "reason"),
    [("ExitCode", ""), ("Never", ""), ("ExitCode", "NodeShutdown"), ("OnFailure", "Evicted")],
)
def test_a_pod_whose_container_was_seen_to_end_holds_nothing_any_more(policy, reason):
    cluster = ran(policy)
    pod = cluster.by_name("j-worker-1")
    cluster.exit(pod, 137, reason)
    once = ReleaseLease(lease=lease_of("j-job00000"), pods={pod.uid: "j-worker-1"})
    assert freed(cluster) == [once]


def test_the_holder_is_found_among_many_pods_that_end_at_once():
    cluster = ran()
    for name in ("j-worker-0", "j-worker-1"):
        cluster.exit(cluster.by_name(name), 137)
    (once,) = freed(cluster)
    assert sorted(once.pods.values()) == ["j-worker-0", "j-worker-1"]


def by_the_control_plane(cluster, pod):
    """Let the pod garbage collector set a pod to failed, without a report of a kubelet."""
    cluster.exit(pod, 137, "NodeLost")
    pod.code = None


def unseen(cluster, pod):
    pod.ended_as = "ContainerStatusUnknown"
    cluster.exit(pod, 137)


def partitioned(cluster, pod):
    cluster.lose(pod.node)


def unplugged(cluster, pod):
    cluster.remove_node(pod.node)


def deleted(cluster, pod):
    cluster.ask(pod, 30)


def by_force(cluster, pod):
    cluster.ask(pod, 0)


@pytest.mark.parametrize(
    "fate", [by_the_control_plane, unseen, partitioned, unplugged, deleted, by_force]
)
def test_a_pod_that_may_live_keeps_its_lease_until_it_expires(fate):
    cluster = ran()
    fate(cluster, cluster.by_name("j-worker-1"))
    cluster.now_s += 60
    assert freed(cluster) == []


def test_a_pod_that_its_kubelet_restarts_may_lead_again():
    cluster = ran("OnFailure")
    cluster.exit(cluster.by_name("j-worker-1"), 137)
    assert freed(cluster) == []


@pytest.mark.parametrize("more", [{"launcher": "torchrun"}, {"rdzvEndpoint": "etcd:2379"}])
def test_a_job_without_a_kubernetes_lease_releases_none(more):
    cluster = ran(**more)
    cluster.exit(cluster.by_name("j-worker-1"), 137)
    assert freed(cluster) == []


def test_the_lease_is_that_of_the_rendezvous_which_the_users_arguments_name():
    spec = spec_of(2, 1, 2)
    worker = spec["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    worker["args"] = ["--rdzv-id=mine", "train.py"]
    cluster = Cluster(spec=spec)
    cluster.settle()
    cluster.exit(cluster.by_name("j-worker-1"), 137)
    assert [one.lease for one in freed(cluster)] == ["elastane-mine.leadership"]


def dead(cluster):
    """Return the dead pods in the directive."""
    return cluster.objects["ConfigMap", "j-directive"]["data"]["dead"].split()


def test_the_directive_names_dead_pods_also_after_their_deletion():
    cluster = ran()
    assert dead(cluster) == []
    pod = cluster.by_name("j-worker-1")
    cluster.exit(pod, 137)
    cluster.settle()
    assert cluster.by_name("j-worker-1").uid != pod.uid and dead(cluster) == [pod.uid]
    second = cluster.by_name("j-worker-0")
    cluster.exit(second, 137)
    cluster.settle()
    assert dead(cluster) == [pod.uid, second.uid]


@pytest.mark.parametrize("fate", [by_the_control_plane, unseen, partitioned, deleted])
def test_a_pod_that_may_be_alive_is_not_called_dead(fate):
    cluster = ran()
    fate(cluster, cluster.by_name("j-worker-1"))
    cluster.now_s += 60
    cluster.settle()
    assert dead(cluster) == []


def test_the_directive_keeps_the_newest_of_the_dead_pods_that_are_gone():
    cluster = ran()
    old = [f"old-{i:03}" for i in range(100)]
    cluster.objects["ConfigMap", "j-directive"]["data"]["dead"] = " ".join(old)
    pod = cluster.by_name("j-worker-1")
    cluster.exit(pod, 137)
    cluster.settle()
    assert dead(cluster) == [*old[37:], pod.uid]
    count = len(cluster.actions)
    cluster.settle()
    assert len(cluster.actions) == count


def suspended(policy="ExitCode"):
    """Return a job that was just suspended: its pods were asked to leave and still run."""
    cluster = ran(policy)
    uids = sorted(cluster.pods)
    cluster.edit(spec_of(2, 1, 2, policy, suspend=True))
    cluster.relist()
    cluster.operate()
    return cluster, uids


def leave(cluster):
    """Let kubelets end the pods, with the reports of the watch."""
    uids = list(cluster.pods)
    cluster.end_deleted()
    for uid in uids:
        cluster.deliver(uid)
    cluster.operate()


@pytest.mark.parametrize("policy", ["ExitCode", "OnFailure", "Always", "Never"])
def test_pods_that_a_suspended_job_lost_are_dead_for_the_next_coordinator(policy):
    cluster, uids = suspended(policy)
    assert cluster.dead == []
    leave(cluster)
    assert sorted(cluster.dead) == uids
    cluster.edit(spec_of(2, 1, 2, policy))
    cluster.relist()
    cluster.operate()
    assert sorted(cluster.dead) == uids and len(cluster.pods) == 2
    cluster.settle()
    assert sorted(cluster.dead) == uids


def test_all_pods_of_a_large_job_are_named_dead():
    cluster = Cluster(spec=spec_of(200, 1, 200))
    cluster.settle()
    uids = sorted(cluster.pods)
    cluster.edit(spec_of(200, 1, 200, suspend=True))
    cluster.relist()
    cluster.operate()
    leave(cluster)
    assert sorted(cluster.dead) == uids


def test_a_pod_deleted_by_force_while_its_node_cannot_be_reached_is_not_dead():
    cluster, (reached, unreached) = suspended()
    cluster.lose(cluster.pods[unreached].node)
    cluster.ask(cluster.pods[unreached], 0)
    assert unreached in cluster.zombies
    cluster.deliver(unreached)
    leave(cluster)
    assert cluster.dead == [reached]


def test_a_container_that_a_kubelet_may_have_restarted_is_not_dead_with_its_pod():
    """The container crashed before its pod was deleted by force, so a new one may run."""
    cluster = ran("OnFailure")
    pod = cluster.by_name("j-worker-1")
    pod.code, pod.phase = 137, "Unknown"
    pod.finished_s = cluster.now_s - 60
    cluster.ask(pod, 0)
    cluster.deliver(pod.uid)
    cluster.operate()
    assert cluster.dead == []


@pytest.mark.parametrize("policy", ["ExitCode", "Never", "OnFailure", "Always"])
def test_a_deleted_pod_whose_container_ended_is_dead_whatever_its_phase_was(policy):
    """The watch may end before the kubelet has set the phase of the pod as well."""
    cluster = ran(policy)
    pod = cluster.by_name("j-worker-1")
    cluster.ask(pod, 30)
    pod.code, pod.phase = 143, "Unknown"
    pod.finished_s = cluster.now_s + 5
    cluster.ask(pod, 0)
    cluster.deliver(pod.uid)
    cluster.operate()
    assert cluster.dead == [pod.uid]


def test_the_end_of_a_pod_that_no_watch_reported_is_unknown():
    cluster, _ = suspended()
    cluster.end_deleted()
    cluster.relist()
    cluster.operate()
    assert cluster.dead == []
