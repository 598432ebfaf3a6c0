"""How ElasticJobs end on a real control plane: exit codes, policies, limits, what is left behind.

Most of their pods do not train: each is a shell with a script of one line.
"""

import json

import pytest
from jobs import until

# All kinds of objects that a job may have.
CORE_KINDS = ("pods", "services", "configmaps", "secrets", "serviceaccounts")
OTHER_KINDS = (
    "coordination.k8s.io/v1/namespaces/{}/leases",
    "rbac.authorization.k8s.io/v1/namespaces/{}/roles",
    "rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings",
)


def said(job, script, **more):
    """A container that runs a line of shell; what is injected are its arguments, unread."""
    return job.container(image="shell", command=["sh", "-c", script], **more)


def begin(make_job, name, script, replicas=1, **spec):
    job = make_job(name)
    # A shell as process 1 ignores SIGTERM.
    pod = {"terminationGracePeriodSeconds": 1}
    job.apply(replicas, replicas, replicas, container=said(job, script), pod=pod, **spec)
    return job


def end_of(job):
    """Wait until it ended: Succeeded or Failed."""

    def ended():
        return [
            kind for kind in ("Succeeded", "Failed") if job.condition(kind).get("status") == "True"
        ]

    until(ended, f"the end of {job.name}")
    return ended()[0]


ONCE = "if mkdir /job/once; then exit {code}; fi; sleep 0.2; exit 0"


@pytest.mark.parametrize(
    ("policy", "codes"),
    [
        ("ExitCode", {0: "Succeeded", 1: "Failed", 137: "Succeeded", 255: "Succeeded"}),
        ("Never", {0: "Succeeded", 1: "Failed", 139: "Failed"}),
        ("OnFailure", {0: "Succeeded", 1: "Succeeded", 139: "Succeeded"}),
    ],
)  # fmt: skip
def test_an_exit_code_means_what_the_policy_says(cluster, operator, make_job, policy, codes):
    """Each pod ends with its code the first time, and well the second."""
    cluster.add("a")
    jobs = {
        code: begin(make_job, f"code-{code}", ONCE.format(code=code), restartPolicy=policy)
        for code in codes
    }
    assert {code: end_of(job) for code, job in jobs.items()} == codes
    for code, job in jobs.items():
        if codes[code] == "Failed":
            assert str(code) in json.dumps(job.condition("Failed")), job.get()["status"]


def test_limits_end_a_job_and_say_so(cluster, operator, make_job):
    cluster.add("a")
    spent = begin(make_job, "spent", "exit 137", backoffLimit=2)
    late = begin(make_job, "late", "exec sleep 1000", activeDeadlineSeconds=3)
    brief = begin(make_job, "brief", "exit 0", ttlSecondsAfterFinished=2)
    clean = begin(make_job, "clean", "exit 0", cleanPodPolicy="All")
    kept = begin(make_job, "kept", "exit 0", runPolicy={"cleanPodPolicy": "None"})
    assert end_of(spent) == "Failed"
    assert "backoffLimit" in spent.condition("Failed")["message"]
    assert end_of(late) == "Failed"
    assert late.condition("Failed")["reason"] == "DeadlineExceeded"
    late.wait_pods("none of it runs on", lambda pods: not pods)
    assert end_of(kept) == "Succeeded"
    assert end_of(clean) == "Succeeded"
    clean.wait_pods("all are deleted", lambda pods: not pods)
    assert len(kept.pods()) == 1
    until(lambda: not brief.exists(), "it is deleted")
    brief.wait_pods("with its pods", lambda pods: not pods)


def test_what_the_cluster_takes_away_is_no_failure_of_the_job(cluster, operator, make_job):
    cluster.add("a")
    job = begin(make_job, "taken", "exec sleep 1000", replicas=2, backoffLimit=0)
    job.wait_pods("both run", _running(2))
    first = _uids(job)
    cluster.tell(job.space, "taken-worker-0", "evict", message="the node was low on memory")
    job.wait_pods("it is made again", lambda pods: _running(2)(pods) and _uids(job) != first)
    second = _uids(job)
    job.kubectl("delete", "pod", "taken-worker-1", "--wait=false")
    job.wait_pods("it is made again", lambda pods: _running(2)(pods) and not second <= _uids(job))
    status = job.get()["status"]
    assert status["disruptions"] == 2, status
    assert not status.get("failures"), status
    cluster.tell(job.space, "taken-worker-1", "out_of_memory")
    assert end_of(job) == "Failed"
    told = {worker["index"]: worker for worker in job.get()["status"]["workers"]}
    assert told[1]["reason"] == "OOM"


def test_a_job_that_is_deleted_leaves_nothing_behind(cluster, operator, make_job, control_plane):
    cluster.add("a")
    job = begin(make_job, "gone", "exec sleep 1000", replicas=3)
    job.wait_pods("all run", _running(3))
    job.kubectl("delete", "ej/gone", "--wait=true", "--timeout=90s")
    kinds = [f"/api/v1/namespaces/{job.space}/{kind}" for kind in CORE_KINDS]
    kinds += [f"/apis/{kind.format(job.space)}" for kind in OTHER_KINDS]

    def left():
        made = (one for kind in kinds for one in control_plane.ask("GET", kind)["items"])
        return [one for one in made if "gone" in one["metadata"]["name"]]

    until(lambda: not left(), "all is gone", 90)


def _running(count):
    def are(pods):
        return sum(p["status"].get("phase") == "Running" for p in pods.values()) == count

    return are


def _uids(job):
    return {pod["metadata"]["uid"] for pod in job.pods().values()}


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
