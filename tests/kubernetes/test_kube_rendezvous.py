"""Plain pods, without an operator, meet through the API server by their service account."""

import json
import secrets

from bed_pods import create, pod, state, wait_log, wait_pod
from elastic_jobs import PRELOAD, prepare
from jobs import SCRIPT, Job, newest, until

from elastane.protocol.log_events import EventKind

RBAC = "/apis/rbac.authorization.k8s.io/v1"


def allow(plane, space):
    """What docs/rdzv-conf.md says that the service account needs."""
    meta = {"name": "trainer", "namespace": space}
    verbs = ["get", "list", "watch", "create", "update", "delete"]
    rule = {
        "apiGroups": ["", "coordination.k8s.io"],
        "resources": ["configmaps", "secrets", "leases"],
    }
    where = f"{RBAC}/namespaces/{space}"
    plane.ask("POST", f"{where}/roles", {"metadata": meta, "rules": [{**rule, "verbs": verbs}]})
    who = {"kind": "ServiceAccount", "name": "default", "namespace": space}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "trainer"}
    binding = {"metadata": meta, "roleRef": role, "subjects": [who]}
    plane.ask("POST", f"{where}/rolebindings", binding)


def trainer(name, job):
    """A pod that runs `elastane run` as an image's entry point would."""
    mounts = {
        "volumeMounts": [{"name": "job", "mountPath": "/job"}],
        "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
    }
    return pod(
        name,
        *("--rdzv-backend", "kubernetes", "--rdzv-id", job.name, "--nnodes", "1:2"),
        *("--nproc-per-node", "1", "--log-dir", "/job/logs", "--preload", PRELOAD),
        *(str(SCRIPT), "/job/steps", "100000"),
        image="elastane",
        container=mounts,
        volumes=[{"name": "job", "hostPath": {"path": str(job.folder)}}],
    )


def test_pods_elect_a_coordinator_and_lose_it_and_train_on(
    control_plane, cluster, namespace, tmp_path
):
    plane = control_plane
    cluster.add("a")
    job = Job(prepare(tmp_path / "job"), name=f"run-{secrets.token_hex(4)}")
    create(plane, namespace, trainer("early", job))
    got = wait_pod(plane, namespace, "early", lambda got: "terminated" in state(got))
    assert state(got)["terminated"]["exitCode"] == 78
    said = wait_log(plane, namespace, "early", "kube-forbidden")
    assert "create role elastane" in said
    allow(plane, namespace)
    create(plane, namespace, trainer("one", job), trainer("two", job))
    job.wait_step(world=2)
    leader = job.events(EventKind.COORDINATOR_STARTED)[-1].node
    listens = plane.kubectl(
        *("get", "configmap", f"elastane-{job.name}.coordinator", "-o", "json"), namespace=namespace
    )
    assert "value" in json.loads(listens)["binaryData"]
    cluster.tell(namespace, leader, "signal", number=9)
    job.wait_step(world=1)
    assert {step.node for step in newest(job.seen())} == {"one", "two"} - {leader}
    taken = job.events(EventKind.COORDINATOR_STARTED)[-1].node
    until(lambda: taken in {"one", "two"} - {leader}, "the other has the leader")
