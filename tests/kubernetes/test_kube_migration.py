"""A cluster of TorchElastic's controller: its definition is replaced, and its jobs are kept.

A control plane of its own, without controllers: the definition is one for the whole cluster.
"""

import json
from pathlib import Path

import pytest
import yaml
from bed import binaries
from bed.controlplane import ControlPlane
from elastic_jobs import Operator
from jobs import until

SAMPLE = Path(__file__).parents[2] / "examples" / "kubernetes" / "imagenet-etcd.yaml"
# As far as the original's said anything: one version, hardly a type, no subresource.
OLD = """
apiVersion: apiextensions.k8s.io/v1beta1
kind: CustomResourceDefinition
metadata: {name: elasticjobs.elastic.pytorch.org}
spec:
  group: elastic.pytorch.org
  names: {kind: ElasticJob, listKind: ElasticJobList, plural: elasticjobs, singular: elasticjob}
  scope: Namespaced
  versions: [{name: v1alpha1, served: true, storage: true}]
  validation:
    openAPIV3Schema:
      properties:
        spec:
          properties:
            rdzvEndpoint: {type: string}
            minReplicas: {type: integer}
            maxReplicas: {type: integer}
            replicaSpecs: {type: object}
          required: [replicaSpecs]
          type: object
      type: object
"""
CORE = "/api/v1/namespaces/default"
JOBS = "/apis/elastic.pytorch.org/v1alpha1/namespaces/default/elasticjobs"


@pytest.fixture
def plane():
    binaries.need(binaries.unavailable(binaries.MINIMAL))
    if binaries.version() >= (1, 22):
        pytest.skip(
            "NOT RUN: the definition of TorchElastic's controller needs a server before 1.22"
        )
    with ControlPlane(whole=False) as made:
        definitions = "/apis/apiextensions.k8s.io/v1beta1/customresourcedefinitions"
        made.ask("POST", definitions, yaml.safe_load(OLD))
        made.kubectl("wait", "--for=condition=Established", "crd/elasticjobs.elastic.pytorch.org")
        yield made


def old_pod(job, index):
    """A pod and its Service as the controller made them."""
    labels = {
        "group-name": "elastic.pytorch.org",
        "job-name": job["metadata"]["name"],
        "replica-type": "worker",
        "replica-index": str(index),
    }
    owner = {
        "apiVersion": job["apiVersion"],
        "kind": job["kind"],
        "name": job["metadata"]["name"],
        "uid": job["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    name = f"{job['metadata']['name']}-worker-{index}"
    meta = {"name": name, "labels": labels, "ownerReferences": [owner]}
    container = job["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    spec = {"containers": [container], "restartPolicy": "Never"}
    return (
        {"kind": "Pod", "metadata": meta, "spec": spec},
        {"kind": "Service", "metadata": meta, "spec": {"clusterIP": "None", "selector": labels}},
    )


def pods(plane):
    return {
        pod["metadata"]["name"]: pod["metadata"]["uid"]
        for pod in plane.ask("GET", f"{CORE}/pods")["items"]
    }


def test_the_definition_is_replaced_and_running_jobs_are_taken_over(plane, tmp_path):
    plane.ask("POST", JOBS, yaml.safe_load(SAMPLE.read_text()))
    job = plane.ask("GET", f"{JOBS}/imagenet")
    for index in range(2):
        pod, service = old_pod(job, index)
        plane.ask("POST", f"{CORE}/pods", pod)
        plane.ask("POST", f"{CORE}/services", service)
    before = pods(plane)
    with Operator(plane, tmp_path / "operator") as operator:
        until(lambda: plane.ask("GET", f"{JOBS}/imagenet").get("status"), "its status")
        plane.kubectl("scale", "ej/imagenet", "--replicas=3")
        until(
            lambda: len(pods(plane)) == 3,
            "the pod that is missing",
        )
        after = plane.ask("GET", f"{JOBS}/imagenet")
        assert operator.part.is_alive
    assert before.items() <= pods(plane).items(), "running pods are neither replaced nor touched"
    assert after["metadata"]["uid"] == job["metadata"]["uid"]
    assert after["spec"]["replicaSpecs"]["Worker"]["replicas"] == 3
    assert "Failed" not in json.dumps(after["status"]), after["status"]
    assert not after["status"].get("restarts")
