"""A job's pod group has the job's minimum, and all of its living pods; or the job says why not."""

import pytest
from kube_cluster import Cluster, spec_of

from elastane.kubernetes.model import CreateObject, CreatePod, DeleteObject, PatchObject, Refusal
from elastane.kubernetes.model.names import POD_GROUP_APIS, pod_group_kind

KIND = {name: pod_group_kind(versions[0]) for name, versions in POD_GROUP_APIS.items()}
OLD_NATIVE = pod_group_kind("scheduling.k8s.io/v1alpha2")
NEWER = [pod_group_kind(f"scheduling.k8s.io/{version}") for version in ("v1beta1", "v1alpha3")]


def spec(replicas=4, least=2, most=8, group="Volcano", **policy):
    policy = {"podGroup": group, **policy} if group else policy
    return spec_of(replicas, least, most, schedulingPolicy=policy)


def ran(**given):
    cluster = Cluster(spec=spec(**given))
    cluster.settle()
    return cluster


def group(cluster, name="Volcano"):
    return cluster.objects[KIND[name], "j"]


def of(kind, actions):
    return [one for one in actions if isinstance(one, kind)]


def kinds(cluster):
    return {kind for kind, _ in cluster.objects if kind.startswith("PodGroup")}


def living(cluster):
    return [pod.manifest for pod in cluster.pods.values() if not pod.is_over]


@pytest.mark.parametrize(
    ("name", "api", "made"),
    [
        ("Coscheduling", "scheduling.x-k8s.io/v1alpha1", {"minMember": 2}),
        ("Volcano", "scheduling.volcano.sh/v1beta1", {"minMember": 2}),
        (
            "Kubernetes",
            "scheduling.k8s.io/v1beta1",
            {"schedulingPolicy": {"gang": {"minCount": 2}}},
        ),
    ],
)
def test_a_group_has_the_minimum_of_the_job_and_comes_before_its_pods(name, api, made):
    cluster = Cluster(spec=spec(group=name))
    decision, _ = cluster.operate()
    found = next(one for one in of(CreateObject, decision.actions) if one.kind == KIND[name])
    manifest = found.manifest
    assert (manifest["apiVersion"], manifest["kind"], found.name) == (api, "PodGroup", "j")
    assert manifest["spec"] == made
    assert manifest["metadata"]["ownerReferences"][0]["uid"] == "job00000-1"
    place = decision.actions.index(found)
    assert all(place < decision.actions.index(pod) for pod in of(CreatePod, decision.actions))


def test_each_scheduler_finds_the_group_of_a_pod_where_it_looks():
    (first, *_) = living(ran(group="Coscheduling"))
    assert first["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] == "j"
    assert "schedulerName" not in first["spec"], "the plugin may be in any scheduler"
    (first, *_) = living(ran(group="Volcano"))
    assert first["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == "j"
    assert first["spec"]["schedulerName"] == "volcano"
    (first, *_) = living(ran(group="Kubernetes"))
    assert first["spec"]["schedulingGroup"] == {"podGroupName": "j"}
    (first, *_) = living(ran(group=None, minAvailable=2))
    assert not set(first["spec"]) & {"schedulingGroup", "schedulerName"}


def test_a_scheduler_that_the_template_names_stays():
    given = spec()
    given["replicaSpecs"]["Worker"]["template"]["spec"]["schedulerName"] = "mine"
    cluster = Cluster(spec=given)
    cluster.settle()
    assert {pod["spec"]["schedulerName"] for pod in living(cluster)} == {"mine"}


def test_the_fields_of_a_scheduler_reach_its_group():
    given = spec(queue="research", minAvailable=3)
    given["replicaSpecs"]["Worker"]["template"]["spec"]["priorityClassName"] = "high"
    cluster = Cluster(spec=given)
    cluster.settle()
    wanted = {"minMember": 3, "queue": "research", "priorityClassName": "high"}
    assert group(cluster)["spec"] == wanted
    cluster = ran(group="Coscheduling", scheduleTimeoutSeconds=90)
    wanted = {"minMember": 2, "scheduleTimeoutSeconds": 90}
    assert group(cluster, "Coscheduling")["spec"] == wanted


def test_a_group_follows_the_minimum_and_never_exceeds_the_wanted_pods():
    cluster = ran(minAvailable=4, queue="a")
    assert group(cluster)["spec"]["minMember"] == 4
    cluster.edit(spec(replicas=3, minAvailable=4))
    cluster.settle()
    assert group(cluster)["spec"] == {"minMember": 3}, "the queue is removed as well"
    cluster.edit(spec(replicas=8, least=5))
    cluster.settle()
    assert group(cluster)["spec"]["minMember"] == 5
    made = [one for one in of(CreateObject, cluster.actions) if one.kind == KIND["Volcano"]]
    assert len(made) == 1


def test_a_lost_pod_is_replaced_into_the_group_which_stays_as_it_is():
    cluster = ran()
    before = group(cluster)
    cluster.lose("n1")
    cluster.now_s += 60
    cluster.settle()
    assert group(cluster) == before
    named = {
        pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] for pod in living(cluster)
    }
    assert named == {"j"}


@pytest.mark.parametrize("name", sorted(KIND))
def test_without_the_api_no_pod_is_made_and_the_job_says_what_is_missing(name):
    cluster = Cluster(spec=spec(group=name))
    versions = POD_GROUP_APIS[name]
    cluster.unserved = {pod_group_kind(api): "podgroups: 404: not found" for api in versions}
    decision, _ = cluster.operate()
    assert not of(CreatePod, decision.actions)
    running = cluster.status.condition("Running")
    assert (running.status, running.reason) == ("False", "PodGroupUnavailable")
    assert f"next: install {versions[0]}, " in running.message
    assert "PodGroupUnavailable" in [event.reason for event in decision.events]
    assert decision.again_in_s is not None
    cluster.unserved = {}
    cluster.settle()
    assert cluster.status.phase == "Running"
    assert kinds(cluster) == {KIND[name]}


def test_the_pods_of_a_running_job_stay_where_the_api_is_removed():
    cluster = ran()
    cluster.unserved = {KIND["Volcano"]: "404"}
    for _ in range(2):
        decision, _ = cluster.operate()
        assert not decision.actions
    assert len(living(cluster)) == 4
    assert cluster.status.condition("Degraded").reason == "PodGroupUnavailable"


def test_a_group_of_that_name_that_a_person_made_is_reported_and_left_alone():
    cluster = Cluster(spec=spec())
    taken = Refusal(kind=KIND["Volcano"], name="j", code=409, message="exists", at_s=cluster.now_s)
    cluster.refused = (taken,)
    decision, _ = cluster.operate()
    assert not of(CreatePod, decision.actions)
    assert cluster.status.condition("Degraded").reason == "NameTaken"


@pytest.mark.parametrize("later", ["Coscheduling", None])
def test_an_edit_of_the_kind_waits_until_no_pod_lives(later):
    cluster = ran()
    cluster.edit(spec(group=later))
    cluster.relist()
    decision, _ = cluster.operate()
    (told,) = [event for event in decision.events if event.reason == "PodGroupKept"]
    assert "set spec.suspend to true" in told.message
    # A replacement in another group than its siblings' would never be scheduled.
    cluster.exit(cluster.by_name("j-worker-3"), 137)
    cluster.settle()
    assert kinds(cluster) == {KIND["Volcano"]}
    assert all(
        "scheduling.k8s.io/group-name" in one["metadata"]["annotations"] for one in living(cluster)
    )
    for suspend in (True, False):
        cluster.edit({**spec(group=later), "suspend": suspend})
        cluster.settle()
    assert kinds(cluster) == ({KIND[later]} if later else set())
    assert len(living(cluster)) == 4
    assert not any(
        "scheduling.k8s.io/group-name" in one["metadata"]["annotations"] for one in living(cluster)
    )


def test_the_group_of_a_suspended_job_goes_after_its_last_pod_and_comes_back():
    cluster = ran()
    cluster.edit({**spec(), "suspend": True})
    cluster.relist()
    decision, _ = cluster.operate()
    assert not of(DeleteObject, decision.actions), "its pods still drain"
    cluster.settle()
    assert kinds(cluster) == set()
    cluster.edit(spec())
    cluster.settle()
    assert kinds(cluster) == {KIND["Volcano"]}


def test_the_group_of_a_job_that_has_ended_goes():
    cluster = ran()
    for pod in list(cluster.pods.values()):
        cluster.exit(pod, 0)
    cluster.settle()
    assert cluster.status.phase == "Succeeded"
    assert kinds(cluster) == set()


def test_pods_wait_for_the_end_of_a_group_that_is_being_deleted():
    cluster = ran()
    group(cluster)["metadata"]["deletionTimestamp"] = "2001-09-09T01:46:40Z"
    cluster.edit(spec(replicas=5))
    cluster.relist()
    decision, _ = cluster.operate()
    assert not of(CreatePod, decision.actions)
    del cluster.objects[KIND["Volcano"], "j"]
    cluster.settle()
    assert len(living(cluster)) == 5


def test_the_newest_served_version_is_used_and_an_unchangeable_group_is_left():
    cluster = Cluster(spec=spec(group="Kubernetes"))
    cluster.unserved = dict.fromkeys(NEWER, "404")
    cluster.settle()
    assert kinds(cluster) == {OLD_NATIVE}
    cluster.edit(spec(group="Kubernetes", replicas=6, least=4))
    cluster.settle()
    assert cluster.status.phase == "Running"
    assert not [one for one in of(PatchObject, cluster.actions) if one.kind == OLD_NATIVE]
    assert cluster.objects[OLD_NATIVE, "j"]["spec"]["schedulingPolicy"]["gang"] == {"minCount": 2}


def test_a_job_of_another_controller_is_left_alone():
    cluster = Cluster(spec={**spec_of(2), "managedBy": "kueue.x-k8s.io/multikueue"})
    # Kueue writes the status that another cluster's operator wrote there.
    cluster.job["status"] = {"phase": "Running", "replicas": 2}
    cluster.relist()
    decision, _ = cluster.operate()
    assert (decision.status, decision.actions, decision.events) == (None, (), ())
    cluster.delete_job()
    cluster.relist()
    assert cluster.operate()[0].actions == ()
    assert cluster.job["status"] == {"phase": "Running", "replicas": 2}


@pytest.mark.parametrize("named", [None, "elastane.dev/operator"])
def test_a_job_of_this_controller_is_managed(named):
    more = {"managedBy": named} if named else {}
    cluster = Cluster(spec=spec_of(2, **more))
    cluster.settle()
    assert cluster.status.phase == "Running"
