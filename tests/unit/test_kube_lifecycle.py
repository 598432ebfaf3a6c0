"""The life of a job, with a test for each fault and missing feature of the original."""

import pytest
from kube_cluster import Cluster, spec_of

from elastane.kubernetes.model import CreatePod, DeleteJob, DeletePod


def running(replicas=2, least=1, most=4, policy="ExitCode", **more):
    """Return a job whose pods run."""
    cluster = Cluster(spec=spec_of(replicas, least, most, policy, **more))
    cluster.settle()
    return cluster


def decide(cluster):
    """Let the operator observe the cluster, decide and act."""
    cluster.relist()
    return cluster.operate()[0]


def end(cluster, index, code):
    cluster.exit(cluster.by_name(f"j-worker-{index}"), code)


def names(cluster):
    return sorted(pod.name for pod in cluster.pods.values())


def reasons(decision):
    return [event.reason for event in decision.events]


def test_missing_pods_are_created_and_reported_once():
    cluster = Cluster(spec=spec_of(3))
    decision = decide(cluster)
    assert names(cluster) == ["j-worker-0", "j-worker-1", "j-worker-2"]
    assert cluster.status.phase == "Pending"
    assert decide(cluster).actions == ()
    assert decision.status.replica_statuses["Worker"].active == 0


def test_the_first_condition_is_that_the_operator_has_seen_the_job():
    """The original controller had this condition and never set it."""
    cluster = Cluster(spec=spec_of())
    decide(cluster)
    created = cluster.status.condition("Created")
    assert (created.status, created.reason) == ("True", "ElasticJobCreated")


def test_the_job_runs_when_the_minimum_runs():
    cluster = Cluster(spec=spec_of(3, 2, 3))
    decide(cluster)
    for index, phase in enumerate(["Pending", "Running", "Running"]):
        cluster.start(cluster.by_name(f"j-worker-{index}"), "n0")
        decision = decide(cluster)
        assert cluster.status.is_("Running") == (phase == "Running")
    assert cluster.status.ready_replicas == 3
    condition = cluster.status.condition("Running")
    assert (condition.reason, condition.message) == (
        "ElasticJobRunning",
        "ElasticJob j is running.",
    )
    assert "ElasticJobRunning" in [event.reason for event in cluster.events]
    assert "ElasticJobRunning" not in reasons(decision)


# Failing: the original set Restarting, overwrote it by Running, and never ended.


def test_a_permanent_failure_ends_the_job_for_ever():
    cluster = running(3)
    end(cluster, 1, 1)
    decision = decide(cluster)
    assert cluster.status.phase == "Failed"
    assert not cluster.status.is_("Running")
    assert not cluster.status.is_("Restarting")
    assert "ElasticJobFailed" in reasons(decision)
    assert cluster.status.completion_time is not None
    before = cluster.job["status"]
    cluster.settle()
    assert cluster.status.is_("Failed")
    assert cluster.status.completion_time == before["completionTime"]


def test_a_retryable_failure_restarts_the_pod_and_shows_it():
    cluster = running(2, 1)
    end(cluster, 1, 137)
    decision = decide(cluster)
    assert cluster.status.phase == "Restarting"
    assert cluster.status.is_("Running"), "the minimum still runs"
    assert "worker 1" in cluster.status.condition("Restarting").message
    assert {"ElasticJobRestarting", "ExitedWithCode"} <= set(reasons(decision))
    cluster.settle()
    assert cluster.status.phase == "Running"
    assert cluster.status.condition("Restarting").status == "False"


def test_below_the_minimum_the_job_waits_and_says_so():
    cluster = running(2, 2)
    end(cluster, 1, 137)
    decide(cluster)
    degraded = cluster.status.condition("Degraded")
    assert degraded.reason == "BelowMinimum"
    assert degraded.message == "1 of 2 pods run, at least 2 are needed"
    assert not cluster.status.is_("Running")
    assert not cluster.status.is_("Failed")


# Succeeding: the original wanted replicas - succeeded == 0 exactly.


def test_all_pods_succeeded_is_success():
    cluster = running(2)
    end(cluster, 0, 0)
    decide(cluster)
    assert cluster.status.phase == "Running"
    assert cluster.status.condition("Running").reason == "ElasticJobFinishing"
    end(cluster, 1, 0)
    decision = decide(cluster)
    assert cluster.status.phase == "Succeeded"
    assert "ElasticJobSucceeded" in reasons(decision)
    assert cluster.status.replica_statuses["Worker"].succeeded == 2


def test_scaling_down_after_a_success_does_not_block_it():
    cluster = running(3)
    end(cluster, 2, 0)
    decide(cluster)
    cluster.edit(spec_of(2))
    decide(cluster)
    end(cluster, 0, 0)
    end(cluster, 1, 0)
    decide(cluster)
    assert cluster.status.phase == "Succeeded"


def test_once_a_pod_has_succeeded_none_is_made_and_those_that_run_may_finish():
    cluster = running(3)
    end(cluster, 0, 0)
    decide(cluster)
    cluster.ask(cluster.by_name("j-worker-0"), 30)
    cluster.exit(cluster.by_name("j-worker-1"), 137, "Evicted")
    cluster.edit(spec_of(4))
    decision = decide(cluster)
    made = [a for a in decision.actions if isinstance(a, (CreatePod, DeletePod))]
    assert not [action for action in made if "j-worker-2" in action.name]
    assert not [action for action in made if isinstance(action, CreatePod)]
    assert cluster.status.phase == "Running"
    end(cluster, 2, 0)
    decide(cluster)
    assert cluster.status.phase == "Succeeded"


def test_a_pod_that_never_started_does_not_keep_a_finished_job_waiting():
    cluster = running(2)
    cluster.edit(spec_of(3))
    decide(cluster)
    end(cluster, 0, 0)
    end(cluster, 1, 0)
    decide(cluster)
    decide(cluster)
    assert cluster.status.phase == "Succeeded"
    assert names(cluster) == ["j-worker-0", "j-worker-1"]


@pytest.mark.parametrize(("launcher", "phase"), [("elastane", "Succeeded"), ("torchrun", "Failed")])
def test_a_failure_beside_a_success(launcher, phase):
    """An agent of elastane ends with 0 if the whole job succeeded, a torchrun if its node did."""
    cluster = running(2, launcher=launcher)
    end(cluster, 0, 0)
    end(cluster, 1, 1)
    decide(cluster)
    assert cluster.status.phase == phase


# Scaling.


def test_scaling_down_deletes_the_highest_by_draining():
    cluster = running(4)
    cluster.edit(spec_of(2))
    decision = decide(cluster)
    gone = [(a.name, a.grace_s) for a in decision.actions if isinstance(a, DeletePod)]
    assert gone == [("j-worker-2", None), ("j-worker-3", None)]
    assert {"Scaled", "ScaledDown"} <= set(reasons(decision))
    assert decide(cluster).actions == (), "the original deleted again while they terminated"
    cluster.settle()
    assert (names(cluster), cluster.status.disruptions) == (["j-worker-0", "j-worker-1"], 0)


def test_scaling_up_again_waits_for_the_pod_of_that_index_to_be_gone():
    cluster = running(3)
    cluster.edit(spec_of(2))
    decide(cluster)
    cluster.edit(spec_of(3))
    assert not [a for a in decide(cluster).actions if isinstance(a, CreatePod)]
    cluster.end_deleted()
    assert [a.name for a in decide(cluster).actions if isinstance(a, CreatePod)] == ["j-worker-2"]


@pytest.mark.parametrize(("asked", "used"), [(9, 4), (1, 2), (0, 2)])
def test_scale_beyond_the_bounds_is_clamped_and_reported(asked, used):
    """The scale subresource bypasses a webhook for elasticjobs (trap 2)."""
    cluster = running(3, 2, 4)
    cluster.edit(spec_of(asked, 2, 4))
    decision = decide(cluster)
    (told,) = [event for event in decision.events if event.reason == "ReplicasOutOfRange"]
    assert f"replicas = {asked} is outside of 2 to 4: {used} are used" in told.message
    assert ("spec.suspend" in told.message) == (asked == 0)
    cluster.settle()
    assert (len(cluster.pods), cluster.status.desired_replicas) == (used, used)


def test_pending_first_spares_those_that_run():
    cluster = running(4, scaleDownPolicy="PendingFirst")
    pod = cluster.by_name("j-worker-1")
    pod.phase, pod.alive = "Pending", False
    cluster.edit(spec_of(3, scaleDownPolicy="PendingFirst"))
    decide(cluster)
    cluster.settle()
    assert names(cluster) == ["j-worker-0", "j-worker-2", "j-worker-3"]
    cluster.edit(spec_of(4, scaleDownPolicy="PendingFirst"))
    cluster.settle()
    assert names(cluster) == [f"j-worker-{index}" for index in range(4)]


def test_the_pod_that_holds_the_store_is_the_last_to_leave():
    cluster = running(3, launcher="torchrun", scaleDownPolicy="PendingFirst")
    cluster.by_name("j-worker-0").phase = "Pending"
    cluster.edit(spec_of(1, launcher="torchrun", scaleDownPolicy="PendingFirst"))
    decide(cluster)
    cluster.settle()
    assert names(cluster) == ["j-worker-0"]


# Suspending.


def test_a_suspended_job_drains_its_pods_and_keeps_its_counts():
    cluster = running(2)
    end(cluster, 1, 137)
    cluster.settle()
    cluster.edit(spec_of(2, suspend=True))
    decision = decide(cluster)
    assert {a.grace_s for a in decision.actions if isinstance(a, DeletePod)} == {None}
    assert cluster.status.phase == "Suspended"
    assert cluster.status.is_("Suspended")
    assert not cluster.status.is_("Running")
    cluster.settle()
    assert not cluster.pods
    cluster.edit(spec_of(2))
    cluster.settle()
    assert (cluster.status.failures, cluster.status.restarts) == (1, 1)
    assert (len(cluster.pods), cluster.status.phase) == (2, "Running")
    assert cluster.status.condition("Suspended").status == "False"
    assert "ElasticJobResumed" in [event.reason for event in cluster.events]


def test_a_job_that_begins_suspended_makes_nothing():
    cluster = Cluster(spec=spec_of(runPolicy={"suspend": True}))
    assert decide(cluster).actions == ()
    assert cluster.status.phase == "Suspended"
    assert cluster.status.start_time is None


# Ending.


def test_the_deadline_fires_and_ends_what_runs():
    """The original never set startTime, so its deadline never came."""
    cluster = Cluster(spec=spec_of(2, activeDeadlineSeconds=100, cleanPodPolicy="None"))
    decision = decide(cluster)
    assert decision.again_in_s == 100
    for pod in cluster.pods.values():
        cluster.start(pod, "n0")
    cluster.now_s += 99
    decide(cluster)
    assert cluster.status.phase == "Running"
    cluster.now_s += 1
    decide(cluster)
    assert cluster.status.condition("Failed").reason == "DeadlineExceeded"
    cluster.settle()
    assert not cluster.pods


def test_a_suspended_job_is_not_active():
    cluster = Cluster(spec=spec_of(2, activeDeadlineSeconds=100))
    decide(cluster)
    cluster.edit(spec_of(2, activeDeadlineSeconds=100, suspend=True))
    cluster.now_s += 99
    decide(cluster)
    cluster.edit(spec_of(2, activeDeadlineSeconds=100))
    cluster.now_s += 99
    decide(cluster)
    cluster.now_s += 99
    decide(cluster)
    assert cluster.status.phase != "Failed"


@pytest.mark.parametrize("code", [0, 1])
@pytest.mark.parametrize("spelling", ["spec", "runPolicy", "RunPolicy"])
def test_the_time_to_live_counts_from_the_end_also_after_a_failure(code, spelling):
    """The original dereferenced a completion time that only a success had."""
    more = {"ttlSecondsAfterFinished": 50}
    cluster = running(1, **(more if spelling == "spec" else {spelling: more}))
    end(cluster, 0, code)
    decision = decide(cluster)
    assert decision.again_in_s == 50
    cluster.now_s += 49
    assert not [a for a in decide(cluster).actions if isinstance(a, DeleteJob)]
    cluster.now_s += 1
    assert [a.uid for a in decide(cluster).actions if isinstance(a, DeleteJob)] == ["job00000-1"]


@pytest.mark.parametrize(
    ("policy", "left"),
    [
        ("All", []),
        ("Running", ["j-worker-0", "j-worker-1"]),
        (None, ["j-worker-0", "j-worker-1"]),
        ("None", ["j-worker-0", "j-worker-1", "j-worker-2"]),
    ],
)
def test_pods_at_the_end_are_deleted_or_kept_by_the_policy(policy, left):
    cluster = running(3, cleanPodPolicy=policy)
    cluster.exit(cluster.by_name("j-worker-0"), 1)
    cluster.exit(cluster.by_name("j-worker-1"), 1)
    decide(cluster)
    cluster.settle()
    assert names(cluster) == left
    assert cluster.status.phase == "Failed"


def test_a_job_that_is_being_deleted_gets_no_pods_any_more():
    cluster = running(2)
    cluster.ask(cluster.by_name("j-worker-0"), 30)
    cluster.delete_job()
    decision = decide(cluster)
    assert [type(action) for action in decision.actions] == [DeletePod]
    cluster.settle()
    assert (cluster.job, cluster.pods) == (None, {})


def test_pods_of_a_job_that_is_deleted_without_them_stay():
    cluster = running(2)
    cluster.job["metadata"]["finalizers"] = ["orphan"]
    cluster.delete_job()
    assert decide(cluster).actions == ()
