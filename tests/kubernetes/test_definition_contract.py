"""What a current API server makes of the definition: rules in CEL, strict fields, apply, scale.

The server is `crd-apiserver`, upstream's server of custom resources alone, from the folder in
ELASTANE_CRD_APISERVER, with the etcd beside it. It is not a part of `make kubernetes`: the complete
control plane of the other tests is of 1.20, which has no rules and no strict fields.
"""

import json
import os
import urllib.error
from pathlib import Path

import pytest
from bed.controlplane import ETCD, ControlPlane
from kube_pods import spec_of

from elastane.kubernetes.schema import definition

FOLDER = os.environ.get("ELASTANE_CRD_APISERVER", "")
JOBS = "/apis/elastic.pytorch.org/v1alpha1/namespaces/default/elasticjobs"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


class ResourceServer(ControlPlane):
    """etcd and crd-apiserver; no pods, rights, namespaces or scheduler."""

    def __enter__(self):
        made = super().__enter__()
        self.ask("POST", DEFINITIONS, definition())
        self.wait("the resource", self._serves_jobs)
        return made

    def _serves_jobs(self):
        try:
            return self.ask("GET", JOBS)["items"] == []
        except (AssertionError, urllib.error.URLError):
            return False

    def _program(self, name):
        return str(Path(FOLDER) / name.replace("kube-apiserver", "crd-apiserver"))

    def _apiserver(self):
        crt, key = self.certificates.pair("kube-apiserver")
        return [
            f"--etcd-servers={ETCD}", f"--secure-port={self.port}", "--bind-address=127.0.0.1",
            "--permit-port-sharing", f"--client-ca-file={self.certificates.authority}",
            f"--tls-cert-file={crt}", f"--tls-private-key-file={key}",
        ]  # fmt: skip


@pytest.fixture(scope="module")
def server():
    if not FOLDER:
        pytest.skip("NOT RUN: ELASTANE_CRD_APISERVER names no folder with crd-apiserver and etcd")
    with ResourceServer(whole=False) as made:
        yield made


def manifest(name, **spec):
    return {
        "apiVersion": "elastic.pytorch.org/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": name},
        "spec": spec_of(3, 2, 4, **spec),
    }


def dry(server, **spec):
    path = f"{JOBS}?dryRun=All&fieldValidation=Strict"
    return server.ask("POST", path, manifest("tried", **spec))


REFUSED = [
    ({"minReplicas": 5}, "minReplicas is at most maxReplicas"),
    ({"spares": 1, "launcher": "torchrun"}, "spares need launcher elastane"),
    ({"managedBy": "kueue"}, "managedBy is a domain and a name"),
    ({"schedulingPolicy": {"podGroup": "KAI"}}, "supported values"),
    ({"schedulingPolicy": {"queue": "a"}}, "queue needs podGroup Volcano"),
    (
        {"schedulingPolicy": {"podGroup": "Kubernetes", "scheduleTimeoutSeconds": 9}},
        "scheduleTimeoutSeconds needs podGroup Coscheduling",
    ),
    (
        {"schedulingPolicy": {"podGroup": "Volcano", "minAvailable": 5}},
        "between minReplicas and maxReplicas",
    ),
    (
        {"schedulingPolicy": {"podGroup": "Volcano", "minAvailable": 1}},
        "between minReplicas and maxReplicas",
    ),
    ({"schedulingPolicy": {"podgroup": "Volcano"}}, "unknown field"),
    ({"suspended": True}, "unknown field"),
]
TAKEN = [
    {},
    {"managedBy": "kueue.x-k8s.io/multikueue"},
    {"schedulingPolicy": {"minAvailable": 9}},
    {"schedulingPolicy": {"podGroup": "Volcano", "queue": "a", "minAvailable": 3}},
    {"schedulingPolicy": {"podGroup": "Coscheduling", "scheduleTimeoutSeconds": 9}},
    {"schedulingPolicy": {"podGroup": "Kubernetes"}},
    {"runPolicy": {"suspend": True, "schedulingPolicy": {"podGroup": "Volcano"}}},
]


def test_rules_and_unknown_fields(server):
    for spec, words in REFUSED:
        with pytest.raises(AssertionError, match=words):
            dry(server, **spec)
    for spec in TAKEN:
        got = dry(server, **spec)["spec"]
        assert {key: got[key] for key in spec} == spec


def test_the_controller_of_a_job_cannot_be_changed(server):
    plain, kueue = manifest("plain"), manifest("kueue", managedBy="kueue.x-k8s.io/multikueue")
    for one in (plain, kueue):
        server.ask("POST", JOBS, one)
    for name, managed_by in (
        ("plain", "kueue.x-k8s.io/multikueue"),
        ("kueue", "elastane.dev/operator"),
        ("kueue", None),
    ):
        patch = {"spec": {"managedBy": managed_by}}
        with pytest.raises(AssertionError, match="managedBy cannot be changed"):
            server.ask("PATCH", f"{JOBS}/{name}", patch, "merge-patch+json")
    for name in ("plain", "kueue"):
        # Kueue and users suspend a job, whichever controller manages it.
        patch = {"spec": {"suspend": True}}
        got = server.ask("PATCH", f"{JOBS}/{name}", patch, "merge-patch+json")
        assert got["spec"]["suspend"] is True


def test_server_side_apply_scale_and_status(server):
    def apply(manager, one):
        path = f"{JOBS}/{one['metadata']['name']}?fieldManager={manager}&fieldValidation=Strict"
        return server.ask("PATCH", path, one, "apply-patch+yaml")

    apply("person", manifest("applied", schedulingPolicy={"podGroup": "Volcano"}))
    whole = {"apiVersion": "elastic.pytorch.org/v1alpha1", "kind": "ElasticJob"}
    part = {**whole, "metadata": {"name": "applied"}, "spec": {"suspend": True}}
    assert apply("queue", part)["spec"]["schedulingPolicy"] == {"podGroup": "Volcano"}
    with pytest.raises(AssertionError, match="conflict"):
        apply("person", manifest("applied", suspend=False))
    # A manager that applies no field any more gives it up: the job runs.
    got = apply("queue", {**part, "spec": {}})
    assert "suspend" not in got["spec"]
    scale = server.ask("GET", f"{JOBS}/applied/scale")
    scale["spec"]["replicas"] = 4
    server.ask("PUT", f"{JOBS}/applied/scale", scale)
    status = {"status": {"phase": "Running", "replicas": 2}, "spec": {"minReplicas": 1}}
    got = server.ask("PATCH", f"{JOBS}/applied/status", status, "merge-patch+json")
    assert got["status"] == {"phase": "Running", "replicas": 2}
    assert got["spec"]["replicaSpecs"]["Worker"]["replicas"] == 4
    assert got["spec"]["minReplicas"] == 2
    assert json.loads(server._open("GET", "/version"))["minor"] >= "25"
