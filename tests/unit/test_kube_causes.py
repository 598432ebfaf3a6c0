"""The cause of a pod's end is kept; a pod that started before its rendezvous is replaced."""

from types import SimpleNamespace

import pytest
from kube_cluster import Cluster, spec_of

from elastane.agent.ending import report_end
from elastane.kubernetes.model.observed import ContainerEnd
from elastane.kubernetes.reconcile.bounds import FIRST_START_LIVED_S, FIRST_START_S
from elastane.kubernetes.reconcile.pods import ending_text
from elastane.protocol.effects import Exit
from elastane.protocol.model import Cause, Failure, Outcome

ETCD = {"rdzvEndpoint": "etcd:2379"}


def begun(policy="ExitCode", **more):
    """Return a job whose two pods have just started."""
    cluster = Cluster(spec=spec_of(2, 1, 2, policy, **more))
    decide(cluster), start(cluster)
    return cluster


def decide(cluster):
    cluster.relist()
    return cluster.operate()[0]


def start(cluster):
    for pod in list(cluster.pods.values()):
        cluster.start(pod, "n0")
    return decide(cluster)


def fail(cluster, code=1, lived_s=3.0, name="j-worker-1"):
    """Let a pod fail, and let pass what delays its replacement."""
    cluster.now_s += lived_s
    cluster.exit(cluster.by_name(name), code)
    return decide(cluster)


def phase_after(cluster, **failure):
    fail(cluster, **failure)
    return cluster.status.phase


def late():
    cluster = begun(**ETCD)
    cluster.now_s += FIRST_START_S
    cluster.by_name("j-worker-1").started_s = cluster.now_s
    return phase_after(cluster)


def test_a_job_that_starts_before_its_etcd_trains_once_that_is_up():
    cluster = begun(**ETCD)
    told = []
    for _ in range(4):
        told += [one.reason for one in fail(cluster).events]
        for _ in range(3):
            cluster.end_deleted()
            cluster.now_s += decide(cluster).again_in_s or 0
        start(cluster)
    assert told.count("FirstStart") == 4
    status = cluster.status
    assert (status.phase, status.failures, status.restarts) == ("Running", 0, 4)


@pytest.mark.parametrize(
    ("what", "fails"),
    [
        ("a rendezvous of ours", lambda: phase_after(begun())),
        ("late", late),
        ("it had worked", lambda: phase_after(begun(**ETCD), lived_s=FIRST_START_LIVED_S)),
        ("a wrong command", lambda: phase_after(begun(**ETCD), code=2)),
        ("Never", lambda: phase_after(begun("Never", **ETCD))),
        (
            "a rule",
            lambda: phase_after(begun(exitCodeRules=[{"codes": [1], "action": "Fail"}], **ETCD)),
        ),
    ],
)
def test_any_other_failure_with_a_permanent_code_still_ends_the_job(what, fails):
    assert fails() == "Failed", what


def test_the_cause_of_a_replaced_pod_is_in_the_status():
    cluster = begun()
    cluster.by_name("j-worker-1").said = "worker of rank 1 ended with exit code 1: ValueError: x"
    decision = fail(cluster, 137)
    cluster.settle()
    cause = "exit code 137: worker of rank 1 ended with exit code 1: ValueError: x"
    assert cluster.status.last_failure.cause == f"j-worker-1 on n0: {cause}"
    assert f"j-worker-1: {cause}" in [one.message for one in decision.events]


def test_the_cause_of_a_restarted_container_is_in_the_status():
    cluster = begun("OnFailure")
    pod = cluster.by_name("j-worker-1")
    pod.said = "RuntimeError: boom"
    fail(cluster, 3)
    assert cluster.status.last_failure.cause == "j-worker-1 on n0: exit code 3: RuntimeError: boom"


def test_a_line_of_dashes_at_the_end_of_a_log_is_not_a_cause():
    message = "Traceback\n  failed (exitcode: 1)\n\n============\n"
    assert ending_text(ContainerEnd(exit_code=1, message=message)).endswith("failed (exitcode: 1)")
    assert ending_text(ContainerEnd(exit_code=1, message="═══\n")) == "exit code 1"


def test_a_pods_status_has_the_end_of_the_log_unless_the_template_says_otherwise():
    def worker(**more):
        spec = spec_of()
        spec["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0] |= more
        cluster = Cluster(spec=spec)
        decide(cluster)
        made = cluster.by_name("j-worker-0").manifest["spec"]["containers"][0]
        variables = {one["name"]: one.get("value") for one in made["env"]}
        return made["terminationMessagePolicy"], variables["ELASTANE_TERMINATION_LOG"]

    assert worker() == ("FallbackToLogsOnError", "/dev/termination-log")
    own = {"terminationMessagePolicy": "File", "terminationMessagePath": "/tmp/why"}
    assert worker(**own) == ("File", "/tmp/why")


def agent_ends(path, outcome):
    config = SimpleNamespace(
        environment={"ELASTANE_TERMINATION_LOG": str(path)},
        report_file="",
        logs=SimpleNamespace(has_files=False),
    )
    report_end(config, Exit(code=outcome.exit_code, outcome=outcome, reason=outcome.reason))


def failed(message="ValueError: boom\nat train.py:3"):
    failure = Failure(local_rank=0, rank=0, pid=1, exit_code=1, age_s=0.0, message=message)
    cause = Cause(kind="worker", what="worker of rank 0 ended", failure=failure)
    reason = "worker of rank 0 ended; no restarts are allowed"
    return Outcome(ok=False, reason=reason, exit_code=1, cause=cause)


def test_an_agent_leaves_the_cause_in_one_line_for_its_kubelet(tmp_path, capsys):
    path = tmp_path / "termination-log"
    path.write_text("of before, and longer than what comes\n" * 50)
    agent_ends(path, failed())
    expected = "worker of rank 0 ended; no restarts are allowed: ValueError: boom at train.py:3\n"
    assert path.read_text() == expected
    agent_ends(path, failed("x" * 10_000))
    assert len(path.read_text()) < 4096


@pytest.mark.parametrize("path", ["missing/why", "missing", "."])
def test_a_file_that_cannot_be_written_changes_nothing(tmp_path, capsys, path):
    agent_ends(tmp_path / path, failed())
    assert "root cause" in capsys.readouterr().err
    assert not (tmp_path / "missing").exists(), "only a kubelet makes it"


def test_a_job_that_ended_well_leaves_no_cause(tmp_path):
    path = tmp_path / "termination-log"
    path.write_text("")
    agent_ends(path, Outcome(ok=True, reason="all workers succeeded"))
    assert path.read_text() == ""
