"""Jobs whose coordinator is elected through a real Kubernetes API server, which stops and dies."""

from __future__ import annotations

import json
import os
import secrets
import signal
import time
from pathlib import Path

import pytest
from jobs import Job, newest, trains_on, until
from kube_bed import ControlPlane, shared_control_plane

from elastane.kubernetes.manifests import JOB_RIGHTS, rules_of
from elastane.protocol.log_events import EventKind

# docs/rdzv-conf.md shows the same.
RULES = [
    {
        "apiGroups": ["", "coordination.k8s.io"],
        "resources": ["configmaps", "secrets", "leases"],
        "verbs": ["get", "list", "watch", "create", "update", "delete"],
    }
]
RBAC = "/apis/rbac.authorization.k8s.io/v1"


@pytest.fixture(scope="module")
def plane() -> ControlPlane:
    return shared_control_plane()


def account(plane: ControlPlane, rules: list[dict] | None = None) -> tuple[str, str]:
    """A namespace with a service account that has these rules, and its kubeconfig."""
    space = plane.namespace()
    meta = {"name": "trainer", "namespace": space}
    plane.ask("POST", f"/api/v1/namespaces/{space}/serviceaccounts", {"metadata": meta})
    if rules:
        where = f"{RBAC}/namespaces/{space}"
        plane.ask("POST", f"{where}/roles", {"metadata": meta, "rules": rules})
        who = {"kind": "ServiceAccount", "name": "trainer", "namespace": space}
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "trainer"}
        binding = {"metadata": meta, "roleRef": role, "subjects": [who]}
        plane.ask("POST", f"{where}/rolebindings", binding)
    return space, str(plane.account("trainer", space))


def job_in(plane: ControlPlane, folder: Path, **more: object) -> Job:
    space, kubeconfig = account(plane, RULES)
    return Job(
        folder,
        **{"nnodes": "1:2", **more},
        backend="kubernetes",
        endpoint=space,
        conf=f"kubeconfig={kubeconfig}",
        options=("--max-restarts", "1"),
    )


def objects(plane: ControlPlane, job: Job) -> list[str]:
    names = "configmaps,secrets,leases.coordination.k8s.io"
    label = f"elastane.dev/rdzv-id={job.name}"
    return sorted(
        plane.kubectl("get", names, "-l", label, "-o", "name", namespace=job.endpoint).split()
    )


def test_the_host_of_the_coordinator_dies_and_the_other_takes_over(
    plane: ControlPlane, tmp_path: Path
) -> None:
    with job_in(plane, tmp_path) as job:
        lone = job.start_coordinator()
        job.wait_event(EventKind.COORDINATOR_STARTED)
        job.start("a"), job.start("b")
        job.wait_step(world=2)
        lone.send(signal.SIGKILL)
        job.wait_event(EventKind.ROUND_RESUMED)
        trains_on(job)
        holder = plane.kubectl(
            *("get", "lease", f"elastane-{job.name}.leadership"),
            *("-o", "jsonpath={.spec.holderIdentity} {.spec.leaseTransitions}"),
            namespace=job.endpoint,
        )
        assert holder[:2] in ("a_", "b_") and holder.endswith(" 2"), holder


def test_an_api_server_that_is_away_stops_no_training(plane: ControlPlane, tmp_path: Path) -> None:
    with job_in(plane, tmp_path) as job:
        job.start("a"), job.start("b")
        job.wait_step(world=2)
        plane.pause("kube-apiserver")
        # Longer than the coordinator's lease.
        gone_s = time.monotonic()
        until(lambda: time.monotonic() - gone_s > 6.0, "time passes", 10.0)
        trains_on(job)
        plane.resume("kube-apiserver")
        trains_on(job)
        plane["kube-apiserver"].kill()
        plane.start_part("kube-apiserver")
        trains_on(job)
        os.kill(newest(job.seen())[-1].pid, signal.SIGKILL)
        again = job.wait_step(world=2, fence=(1, 0))
        assert (again.round, again.attempt, again.restarts) == (1, 1, 1), "decisions are made again"


def test_an_ended_job_leaves_only_its_outcome_and_late_nodes_get_it(
    plane: ControlPlane, tmp_path: Path
) -> None:
    with job_in(plane, tmp_path, nnodes="2", steps=3) as job:
        agents = [job.start(node) for node in "ab"]
        assert [agent.wait() for agent in agents] == [0, 0]
        until(
            lambda: objects(plane, job) == [f"configmap/elastane-{job.name}.record"],
            "nothing but the outcome is left",
        )
        late = job.start("late")
        assert late.wait() == 78 and "has ended" in late.box


def test_a_missing_right_names_verb_kind_namespace_and_role(
    plane: ControlPlane, tmp_path: Path
) -> None:
    space, kubeconfig = account(plane)
    conf = f"kubeconfig={kubeconfig}"
    with Job(tmp_path, backend="kubernetes", endpoint=space, conf=conf) as job:
        refused = job.start("a", "--no-zygote")
        assert refused.wait() == 78
        assert "[kube-forbidden]" in refused.words
        assert f"get configmaps/elastane-{job.name}.record in namespace {space}" in refused.box
        assert f"kubectl -n {space} create role elastane" in refused.box


def test_a_namespace_that_does_not_exist_is_named(plane: ControlPlane, tmp_path: Path) -> None:
    conf = f"kubeconfig={plane.admin}"
    with Job(tmp_path, backend="kubernetes", endpoint="nowhere", conf=conf) as job:
        refused = job.start("a", "--no-zygote")
        assert refused.wait() == 78
        assert "kubectl create namespace nowhere" in refused.box


class Owned:
    """A job as its operator sees it: a directive and a report."""

    def __init__(self, plane: ControlPlane, space: str, name: str) -> None:
        self.plane, self.where = plane, f"/api/v1/namespaces/{space}/configmaps"
        self.name = name
        for which in ("directive", "report"):
            plane.ask("POST", self.where, {"metadata": {"name": f"{name}-{which}"}})

    def direct(self, **data: str) -> None:
        path = f"{self.where}/{self.name}-directive"
        self.plane.ask("PATCH", path, {"data": data}, kind="merge-patch+json")

    def report(self) -> dict:
        found = self.plane.ask("GET", f"{self.where}/{self.name}-report")
        return json.loads(found.get("data", {}).get("report", "{}"))

    def members(self) -> dict[str, str]:
        return {one["pod"]: one["state"] for one in self.report().get("members", [])}


def test_a_pod_that_the_operator_fences_is_cut_and_stays_out_and_the_report_says_so(
    plane: ControlPlane, tmp_path: Path
) -> None:
    name = f"run-{secrets.token_hex(4)}"
    space, kubeconfig = account(plane, rules_of(JOB_RIGHTS))
    owned = Owned(plane, space, "mnist")
    conf = f"kubeconfig={kubeconfig}"

    def pod(uid: str) -> dict[str, str]:
        token = {"ELASTANE_TOKEN": "given by the operator"}
        return {"ELASTANE_ELASTICJOB": "mnist", "ELASTANE_POD_UID": uid, **token}

    with Job(
        tmp_path, nnodes="1:2", backend="kubernetes", endpoint=space, conf=conf, name=name
    ) as job:
        leader = job.start("a", env=pod("uid-a"))
        job.wait_event(EventKind.COORDINATOR_STARTED)
        zombie = job.start("b", env=pod("uid-b"))
        job.wait_step(world=2)
        until(
            lambda: owned.members() == {"uid-a": "joined", "uid-b": "joined"},
            "the report names both",
        )
        owned.direct(fenced="uid-b")
        assert zombie.wait() == 75 and "[node-fenced]" in zombie.words
        job.wait_step(world=1)
        until(lambda: owned.members().get("uid-b") == "departed", "the report says that it is gone")
        # The report is written every so often: this one may be of before the next world.
        until(lambda: owned.report()["worldSize"] == 1, "the report has the next world")
        assert "node b departed: it is fenced" in owned.report()["incident"]
        again = job.start("b", "--no-zygote", env=pod("uid-b"))
        assert again.wait() == 75 and "[node-fenced]" in again.words
        job.start("b", env=pod("uid-c"))
        job.wait_step(world=2)
        # The agent of the leader ends; the other takes over, and knows the fenced agents.
        owned.direct(fenced="uid-b uid-a")
        assert leader.wait() == 75 and "[node-fenced]" in leader.words
        job.wait_step(world=1)
        until(lambda: owned.members().get("uid-c") == "joined", "the new leader reports")
        late = job.start("a", "--no-zygote", env=pod("uid-a"))
        assert late.wait() == 75 and "[node-fenced]" in late.words


def test_the_objects_of_a_job_belong_to_its_elasticjob(plane: ControlPlane, tmp_path: Path) -> None:
    name = f"run-{secrets.token_hex(4)}"
    space, kubeconfig = account(plane, rules_of(JOB_RIGHTS))
    owned = Owned(plane, space, "mnist")
    pod = {"ELASTANE_ELASTICJOB": "mnist", "ELASTANE_POD_UID": "uid-a", "ELASTANE_TOKEN": "x"}
    conf = f"kubeconfig={kubeconfig}"
    with Job(
        tmp_path, nnodes="1", backend="kubernetes", endpoint=space, conf=conf, name=name
    ) as job:
        job.start("a", env=pod)
        job.wait_step(world=1)
        assert len(objects(plane, job)) == 3
        until(lambda: owned.report().get("round") == 1, "the round is reported")
    # As when the ElasticJob is deleted: the garbage collector takes along what belonged to it.
    plane.ask("DELETE", f"{owned.where}/mnist-report")
    until(lambda: objects(plane, job) == [], "nothing is left")
