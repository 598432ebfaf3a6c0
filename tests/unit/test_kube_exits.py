"""The meaning of pods' ends: exit codes under each policy, and ends that are no failure."""

import msgspec
import pytest
from kube_cluster import Cluster, spec_of

from elastane.errors import ExitCode
from elastane.kubernetes.model import ElasticJob, Meta, Pod
from elastane.kubernetes.model.spec import ExitCodeRule
from elastane.kubernetes.reconcile.bounds import BACKOFF_MAX_S
from elastane.kubernetes.reconcile.exit_codes import documented, ruled
from elastane.kubernetes.reconcile.pods import judge
from elastane.kubernetes.reconcile.settings import read


def ran(policy="ExitCode", **more):
    """Return a job with two running pods."""
    cluster = Cluster(spec=spec_of(2, 1, 2, policy, **more))
    cluster.settle()
    return cluster


def end(cluster, code, reason="", name="j-worker-1"):
    """End a pod, and let the operator decide about it."""
    cluster.now_s += 5
    cluster.exit(cluster.by_name(name), code, reason)
    cluster.relist()
    return cluster.operate()[0]


# Exit code: (elastane, torchrun) under ExitCode, by the documentation. "fail": the job has
# failed; "count": a new pod, counted; "free": a new pod, not counted.
CODES = {
    1: ("fail", "fail"),
    2: ("fail", "fail"),
    3: ("fail", "fail"),
    69: ("count", "fail"),
    75: ("count", "fail"),
    78: ("fail", "fail"),
    127: ("fail", "fail"),
    128: ("count", "count"),
    130: ("count", "count"),
    # The original's code took 134, 139 and 255 for permanent.
    134: ("count", "count"),
    137: ("count", "count"),
    138: ("count", "count"),
    139: ("count", "count"),
    143: ("free", "count"),
    255: ("count", "count"),
}


@pytest.mark.parametrize("launcher", ["elastane", "torchrun"])
@pytest.mark.parametrize("code", CODES)
def test_the_documented_meaning_of_an_exit_code(code, launcher):
    cluster = ran(launcher=launcher)
    old = cluster.by_name("j-worker-1").uid
    end(cluster, code)
    expected = CODES[code][launcher == "torchrun"]
    status = cluster.status
    assert status.is_("Failed") == (expected == "fail")
    assert status.failures == (expected != "free")
    if expected == "fail":
        failed = status.condition("Failed")
        assert failed.reason == "PodFailed"
        assert f"j-worker-1 on {cluster.pods[old].node}: exit code {code}" in failed.message
    else:
        cluster.settle()
        assert cluster.by_name("j-worker-1").uid != old
        assert (cluster.status.phase, cluster.status.restarts) == ("Running", 1)


def test_every_exit_code_of_elastane_is_decided():
    decided = {code: documented(code, "elastane") for code in ExitCode if code}
    assert decided == {
        ExitCode.WORKER_FAILED: "Fail",
        ExitCode.USAGE: "Fail",
        ExitCode.NODE_UNFIT: "Retry",
        ExitCode.TRY_AGAIN: "Retry",
        ExitCode.CONFIGURATION: "Fail",
        ExitCode.DRAINED: "Ignore",
    }


@pytest.mark.parametrize("code", [1, 137, 255])
def test_under_never_any_failure_ends_the_job(code):
    cluster = ran("Never")
    end(cluster, code)
    assert cluster.status.phase == "Failed"


@pytest.mark.parametrize("policy", ["ExitCode", "OnFailure", "Never", "Always"])
@pytest.mark.parametrize("reason", ["Evicted", "Preempting", "NodeShutdown", "Terminated"])
def test_pods_that_the_cluster_takes_away_are_no_failure_under_any_policy(policy, reason):
    cluster = ran(policy, backoffLimit=0)
    decision = end(cluster, 137, reason)
    status = cluster.status
    assert (status.failures, status.disruptions, status.restarts) == (0, 1, 1)
    assert any(one.reason.startswith("Pod") for one in decision.events)
    cluster.settle()
    assert cluster.status.phase == "Running"
    assert len(cluster.pods) == 2


@pytest.mark.parametrize("policy", ["ExitCode", "Never", "OnFailure", "Always"])
def test_a_pod_that_another_client_deletes_is_replaced_and_no_failure(policy):
    cluster = ran(policy, backoffLimit=0)
    cluster.ask(cluster.by_name("j-worker-0"), 30)
    cluster.relist()
    decision, _ = cluster.operate()
    assert "PodDeleted" in [one.reason for one in decision.events]
    assert cluster.status.condition("Running").status == "True"
    cluster.settle()
    assert len(cluster.pods) == 2
    assert (cluster.status.failures, cluster.status.disruptions) == (0, 1)


def test_a_pod_that_failed_before_it_was_deleted_has_failed():
    cluster = ran(backoffLimit=5)
    pod = cluster.by_name("j-worker-1")
    cluster.exit(pod, 139)
    pod.asked_s, pod.grace_s = cluster.now_s + 60, 30
    cluster.relist()
    cluster.operate()
    assert cluster.status.failures == 1


def test_how_a_pod_ends_that_is_being_deleted_is_no_failure():
    cluster = ran("Never")
    pod = cluster.by_name("j-worker-1")
    cluster.ask(pod, 30)
    cluster.now_s += 5
    cluster.exit(pod, 1)
    cluster.relist()
    cluster.operate()
    assert (cluster.status.failures, cluster.status.phase) == (0, "Restarting")


RULES = (
    ExitCodeRule(codes=(3, "10-12"), action="Retry"),
    ExitCodeRule(codes=("1-20",), action="Ignore"),
    ExitCodeRule(codes=("130-255",), action="Fail"),
)


@pytest.mark.parametrize(
    ("code", "action"),
    [(3, "Retry"), (10, "Retry"), (12, "Retry"), (13, "Ignore"), (1, "Ignore"), (20, "Ignore"),
     (21, None), (129, None), (130, "Fail"), (255, "Fail")],
)  # fmt: skip
def test_the_first_rule_that_names_the_code_counts(code, action):
    assert ruled(code, RULES) == action


@pytest.mark.parametrize(
    ("action", "failures", "phase"),
    [("Retry", 1, "Running"), ("Ignore", 0, "Running"), ("Fail", 1, "Failed")],
)
@pytest.mark.parametrize("code", [7, 137, 143])
def test_a_users_rule_comes_before_the_documentation(code, action, failures, phase):
    cluster = ran(exitCodeRules=[{"codes": [code], "action": action}])
    end(cluster, code)
    cluster.settle()
    assert (cluster.status.failures, cluster.status.phase) == (failures, phase)


def test_an_old_list_that_is_served_once_more_counts_nothing_twice():
    cluster = ran()
    pod = cluster.by_name("j-worker-1")
    end(cluster, 137)
    for _ in range(3):
        cluster.settle()
        cluster.seen_pods[pod.uid] = pod
        cluster.operate()
    assert (cluster.status.failures, cluster.status.restarts) == (1, 1)


def test_the_memory_of_deleted_pods_is_bounded():
    cluster = ran()
    cluster.job["status"]["counted"] = [f"old-{i}" for i in range(100)]
    cluster.settle()
    assert cluster.status.counted == tuple(f"old-{i}" for i in range(68, 100))


def test_the_limit_allows_its_number_of_failures_and_not_one_more():
    cluster = ran(backoffLimit=2)
    for failures in (1, 2):
        end(cluster, 137)
        cluster.settle()
        assert (cluster.status.failures, cluster.status.phase) == (failures, "Running")
    end(cluster, 137)
    failed = cluster.status.condition("Failed")
    assert failed.reason == "BackoffLimitExceeded"
    assert failed.message == "3 failures; backoffLimit allows 2"


def test_no_limit_is_no_limit_but_pods_that_end_quickly_wait_longer_each_time():
    cluster = ran()
    pauses = []
    # The first of them had run for long before.
    for _ in range(8):
        begun_s = cluster.now_s + 5
        decision = end(cluster, 137)
        while cluster.by_name("j-worker-1") is None or cluster.by_name("j-worker-1").is_over:
            due_s = decision.again_in_s or 0
            cluster.now_s += due_s if due_s <= BACKOFF_MAX_S else 0  # Later ones are no pauses.
            cluster.end_deleted()
            cluster.relist()
            decision, _ = cluster.operate()
        pauses.append(round(cluster.now_s - begun_s))
        cluster.start(cluster.by_name("j-worker-1"), "n1")
    assert pauses == [0, 0, 10, 20, 40, 80, 160, 300]
    # One that has run for long is not held to be one of a series.
    cluster.now_s += 700
    cluster.relist()
    cluster.operate()
    assert not cluster.status.early_ends


def test_a_pause_is_reported_with_its_end_and_its_cause():
    cluster = ran()
    for _ in range(3):
        end(cluster, 137)
        cluster.end_deleted()
        cluster.relist()
        decision, _ = cluster.operate()
        pod = cluster.by_name("j-worker-1")
        if pod:
            cluster.start(pod, "n1")
    degraded = cluster.status.condition("Degraded")
    assert degraded.reason == "BackOff"
    text = "j-worker-1 ended early 2 times in a row (App): created again at 2001-"
    assert text in degraded.message
    assert 0 < decision.again_in_s <= 11
    assert ("Warning", "BackOff") in [(one.type, one.reason) for one in decision.events]


def test_restarts_in_place_are_counted_as_the_kubelet_tells_their_sum():
    cluster = ran("OnFailure", backoffLimit=4)
    pod = cluster.by_name("j-worker-0")
    for restarts in (1, 3):
        pod.restarts, pod.last_code = restarts, 1
        for _ in range(3):
            cluster.relist()
            cluster.operate()
        assert (cluster.status.failures, cluster.status.restarts) == (restarts, restarts)
    # The pod is replaced: what it counted stays, and a new pod counts from the beginning.
    end(cluster, 137, "Evicted", name="j-worker-0")
    cluster.settle()
    assert (cluster.status.failures, cluster.status.restarts) == (3, 4)
    cluster.by_name("j-worker-0").restarts = 2
    cluster.by_name("j-worker-0").last_code = 1
    cluster.relist()
    cluster.operate()
    assert cluster.status.condition("Failed").reason == "BackoffLimitExceeded"


def test_always_is_over_once_the_job_has_succeeded_and_pods_do_not_restart_for_ever():
    cluster = ran("Always", cleanPodPolicy="None")
    for pod in cluster.pods.values():
        pod.restarts, pod.last_code = 1, 0
    cluster.relist()
    cluster.operate()
    cluster.settle()
    assert cluster.status.phase == "Succeeded"
    assert cluster.status.failures == 0
    assert not [pod for pod in cluster.pods.values() if pod.phase == "Running"]


def judged(status, policy="ExitCode", **meta):
    job = ElasticJob(metadata=Meta(name="j", uid="u"), spec=spec_of(policy=policy))
    meta = {"name": "j-worker-0", "uid": "p", "labels": {"replica-index": "0"}} | meta
    pod = msgspec.convert({"metadata": meta, "status": status}, Pod)
    return judge(pod, job.metadata, read(job).settings)


def container(name="elasticjob-worker", code=None, **more):
    state = {"running": {}} if code is None else {"terminated": {"exitCode": code} | more}
    return {"name": name, "state": state}


def test_out_of_memory_is_named_and_is_the_programs():
    killed = container(code=137, reason="OOMKilled")
    ending = judged({"phase": "Failed", "containerStatuses": [killed]}).ending
    assert (ending.cause, ending.code) == ("OOM", 137)
    assert ending.text == "out of memory: killed by the kernel (exit code 137, OOMKilled)"


def test_out_of_memory_is_reported_and_counted():
    cluster = ran()
    cluster.by_name("j-worker-1").ended_as = "OOMKilled"
    decision = end(cluster, 137)
    told = [event.message for event in decision.events if event.reason == "PodOOM"]
    assert told == [
        "j-worker-1 on n1: out of memory: killed by the kernel (exit code 137, OOMKilled)"
    ]
    assert cluster.status.failures == 1
    worker = next(one for one in cluster.status.workers if one.index == 1)
    assert worker.reason == "OOM"


@pytest.mark.parametrize(
    ("reason", "cause"),
    [("PreemptionByScheduler", "Preempted"), ("EvictionByEvictionAPI", "Evicted"),
     ("DeletionByTaintManager", "Evicted"), ("TerminationByKubelet", "Shutdown"),
     ("SomethingNew", "Evicted")],
)  # fmt: skip
def test_newer_clusters_say_by_a_condition_that_they_take_a_pod_away(reason, cause):
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason}
    status = {
        "phase": "Failed",
        "conditions": [condition],
        "containerStatuses": [container(code=143)],
    }
    assert judged(status).ending.cause == cause


@pytest.mark.parametrize("reason", ["OutOfcpu", "NodeAffinity", "UnexpectedAdmissionError", ""])
def test_a_pod_that_no_kubelet_took_has_not_failed(reason):
    ending = judged({"phase": "Failed", "reason": reason, "message": "no room"}).ending
    assert (ending.cause, ending.code) == ("Rejected", None)


def test_the_worker_speaks_for_the_pod_and_sidecars_do_not():
    logs = container("logs")
    assert judged({"phase": "Running", "containerStatuses": [container(code=0), logs]}).state == (
        "succeeded"
    )
    assert judged({"phase": "Running", "containerStatuses": [logs, container(code=3)]}).state == (
        "failed"
    )
    failed_sidecar = [container(code=0), container("logs", code=1)]
    assert judged({"phase": "Failed", "containerStatuses": failed_sidecar}).state == "succeeded"
    done_sidecar = [container(), container("logs", code=0)]
    assert judged({"phase": "Running", "containerStatuses": done_sidecar}).state == "running"


def test_the_exit_code_of_a_failed_init_container_is_reported():
    init = [{"name": "fetch", "state": {"terminated": {"exitCode": 6, "message": "no data"}}}]
    ending = judged({"phase": "Failed", "initContainerStatuses": init}).ending
    assert (ending.cause, ending.code, ending.text) == ("App", 6, "exit code 6: no data")


def test_the_last_line_of_the_termination_message_is_reported():
    ended = container(code=1, signal=0, message="Traceback\n  File\nValueError: lr is nan\n")
    ending = judged({"phase": "Failed", "containerStatuses": [ended]}).ending
    assert ending.text == "exit code 1: ValueError: lr is nan"


@pytest.mark.parametrize(
    ("owners", "whose"),
    [
        ([], "orphan"),
        ([{"uid": "u", "kind": "ElasticJob", "name": "j", "controller": True}], "ours"),
        ([{"uid": "old", "kind": "ElasticJob", "name": "j", "controller": True}], "leftover"),
        ([{"uid": "x", "kind": "ReplicaSet", "name": "j", "controller": True}], "foreign"),
    ],
)
def test_to_whom_a_pod_belongs(owners, whose):
    assert judged({"phase": "Running"}, ownerReferences=owners).ownership == whose
