"""Pods of lost nodes are fenced and replaced; an index never has two pods that are not fenced."""

import pytest
from kube_cluster import Cluster, spec_of

from elastane.kubernetes.model import CreatePod, DeletePod, PatchObject
from elastane.kubernetes.model.observed import JobReport, MemberReport


def running(replicas=2, **more):
    cluster = Cluster(spec=spec_of(replicas, 1, 4, **more))
    cluster.settle()
    return cluster


def decide(cluster):
    cluster.relist()
    return cluster.operate()[0]


def lose(cluster, name="j-worker-1"):
    pod = cluster.by_name(name)
    cluster.lose(pod.node)
    return pod


def test_a_pod_of_a_lost_node_is_fenced_before_anything_else():
    cluster = running()
    pod = lose(cluster)
    assert decide(cluster).again_in_s == 10
    assert not cluster.fenced
    cluster.now_s += 10
    decision = decide(cluster)
    assert cluster.status.fenced == (pod.uid,)
    assert cluster.fenced == {pod.uid}
    assert [type(action) for action in decision.actions] == [PatchObject]
    assert "NodeLost" in [event.reason for event in decision.events]
    status = cluster.status
    assert (status.ready_replicas, status.replicas) == (1, 1), "it counts no more"
    assert status.phase == "Restarting"


def test_its_replacement_waits_for_no_name_and_no_eviction():
    """Traps 6 and 7: no controller evicts the pod, and its name is Terminating for ever."""
    cluster = running()
    pod = lose(cluster)
    cluster.ask(pod, 30)
    cluster.now_s += 10
    decide(cluster)
    decision = decide(cluster)
    made = [action for action in decision.actions if isinstance(action, CreatePod)]
    assert [action.name for action in made] == ["j-worker-1-r1"]
    assert made[0].manifest["metadata"]["labels"]["replica-index"] == "1"
    assert made[0].manifest["spec"]["hostname"] == "j-worker-1"
    forced = [action for action in decision.actions if isinstance(action, DeletePod)]
    assert [(action.uid, action.grace_s) for action in forced] == [(pod.uid, 0)]


def test_the_next_replacement_takes_the_plain_name_again():
    cluster = running()
    lose(cluster)
    cluster.now_s += 10
    cluster.settle()
    pod = cluster.by_name("j-worker-1-r1")
    cluster.exit(pod, 137)
    cluster.settle()
    assert cluster.by_name("j-worker-1") is not None
    assert cluster.by_name("j-worker-1-r1") is None


def test_a_zombie_stays_fenced_when_it_is_gone_from_the_api_server():
    """Trap 8: the process behind the partition continued for 13 s."""
    cluster = running()
    pod = lose(cluster)
    cluster.now_s += 10
    cluster.settle()
    assert pod.uid not in cluster.pods
    assert cluster.zombies[pod.uid].alive
    assert pod.uid in cluster.fenced


def test_the_fence_outlives_the_directive():
    cluster = running()
    pod = lose(cluster)
    cluster.now_s += 10
    cluster.settle()
    del cluster.objects["ConfigMap", "j-directive"]
    cluster.settle()
    assert pod.uid in cluster.fenced


def test_a_pod_is_not_deleted_by_force_while_the_directive_does_not_fence_it():
    cluster = running()
    lose(cluster)
    cluster.now_s += 10
    decide(cluster)
    cluster.objects["ConfigMap", "j-directive"]["data"]["fenced"] = ""
    decision = decide(cluster)
    assert [type(action) for action in decision.actions] == [PatchObject]


def test_a_node_that_was_deleted_is_lost_at_once():
    cluster = running()
    cluster.remove_node(cluster.by_name("j-worker-1").node)
    decide(cluster)
    assert len(cluster.fenced) == 1


def said(cluster, pod, state, age_s=0.0):
    members = (MemberReport(pod=pod.uid, state=state),)
    return JobReport(at_s=cluster.now_s - age_s, members=members)


def test_a_pod_that_the_job_has_lost_as_well_is_lost_at_once():
    cluster = running()
    pod = lose(cluster)
    cluster.now_s += 1
    cluster.report = said(cluster, pod, "departed")
    decide(cluster)
    assert cluster.fenced == {pod.uid}


def test_a_report_from_before_the_loss_of_the_node_is_ignored():
    cluster = running()
    pod = cluster.by_name("j-worker-1")
    cluster.report = said(cluster, pod, "departed", age_s=5)
    lose(cluster)
    decide(cluster)
    assert not cluster.fenced


def test_a_pod_that_the_job_still_has_is_not_lost_because_the_control_plane_is_cut_off():
    cluster = running()
    pod = lose(cluster)
    for _ in range(10):
        cluster.now_s += 25
        cluster.report = said(cluster, pod, "joined")
        decide(cluster)
    assert not cluster.fenced
    cluster.now_s += 31
    decide(cluster)
    assert cluster.fenced == {pod.uid}, "the coordinator is silent"


def test_if_all_nodes_are_unreachable_the_control_plane_counts_as_cut_off():
    cluster = running(3)
    for name in list(cluster.nodes):
        cluster.lose(name)
    cluster.now_s += 299
    decide(cluster)
    assert not cluster.fenced
    cluster.now_s += 1
    decide(cluster)
    assert len(cluster.fenced) == 3


def test_the_only_node_of_a_job_is_lost_as_any_other():
    cluster = running(1)
    lose(cluster, "j-worker-0")
    cluster.now_s += 10
    decide(cluster)
    assert len(cluster.fenced) == 1


def test_a_node_that_is_back_in_time_was_not_lost():
    cluster = running()
    pod = lose(cluster)
    cluster.now_s += 9
    decide(cluster)
    cluster.heal(pod.node)
    cluster.now_s += 60
    assert decide(cluster).actions == ()
    assert not cluster.fenced


@pytest.mark.parametrize(("seconds", "patience_s"), [(0, 0), (60, 60)])
def test_the_user_sets_how_long_a_lost_node_is_awaited(seconds, patience_s):
    cluster = running(nodeLostSeconds=seconds)
    lose(cluster)
    cluster.now_s += patience_s
    decide(cluster)
    assert len(cluster.fenced) == 1


def test_a_lost_node_uses_nothing_of_the_limit():
    cluster = running(backoffLimit=0)
    lose(cluster)
    cluster.now_s += 10
    cluster.settle()
    status = cluster.status
    assert (status.failures, status.disruptions, status.restarts) == (0, 1, 1)
    assert status.phase == "Running"


def test_pods_of_lost_nodes_do_not_keep_a_job_from_ending():
    cluster = running(3)
    lose(cluster, "j-worker-2")
    cluster.now_s += 10
    decide(cluster)
    cluster.exit(cluster.by_name("j-worker-0"), 0)
    cluster.exit(cluster.by_name("j-worker-1"), 0)
    cluster.settle()
    assert cluster.status.phase == "Succeeded"
    assert {pod.name for pod in cluster.pods.values()} == {"j-worker-0", "j-worker-1"}


def test_a_node_that_is_lost_after_the_end_leaks_no_pod_and_changes_no_count():
    cluster = running(2)
    lost = lose(cluster)
    cluster.exit(cluster.by_name("j-worker-0"), 1)
    decide(cluster)
    assert cluster.status.phase == "Failed"
    assert lost.asked_s is not None
    cluster.now_s += 10
    cluster.settle()
    assert lost.uid not in cluster.pods
    assert cluster.status.disruptions == 0


def test_a_suspended_job_gives_up_pods_of_lost_nodes():
    cluster = running(2)
    lose(cluster)
    cluster.edit(spec_of(2, 1, 4, suspend=True))
    cluster.now_s += 10
    cluster.settle()
    assert not cluster.pods


def test_a_pod_that_a_foreign_finalizer_holds_does_not_block_its_replacement():
    cluster = running()
    pod = cluster.by_name("j-worker-1")
    pod.phase, pod.code, pod.alive = "Failed", 137, False
    pod.asked_s, pod.grace_s = cluster.now_s, 30
    decide(cluster)
    cluster.now_s += 39
    assert not [a for a in decide(cluster).actions if isinstance(a, CreatePod)]
    cluster.now_s += 1
    made = [a.name for a in decide(cluster).actions if isinstance(a, CreatePod)]
    assert made == ["j-worker-1-r1"]


def test_fences_are_bounded_and_the_oldest_that_are_gone_go_first():
    cluster = running()
    cluster.job["status"]["fenced"] = [f"old-{i}" for i in range(300)]
    cluster.settle()
    fenced = cluster.status.fenced
    assert len(fenced) == 256
    assert fenced[-1] == "old-299"
