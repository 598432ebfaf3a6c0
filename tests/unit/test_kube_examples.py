"""The sample manifests are valid for the API server, the operator and the launchers."""

import ast
import re
from pathlib import Path

import jsonschema
import msgspec
import pytest
import yaml

from elastane.kubernetes.model import CreatePod, ElasticJob, Observed
from elastane.kubernetes.reconcile import reconcile
from elastane.kubernetes.schema import definition
from elastane.options.build import build
from elastane.options.parser import parse

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
SAMPLES = sorted(FOLDER.glob("*.yaml"))
SCHEMA = definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
KUBECONFIG = """
clusters: [{name: c, cluster: {server: "https://kube:6443"}}]
contexts: [{name: c, context: {cluster: c}}]
current-context: c
"""
NOW_S = 1_800_000_000.0


def documents():
    for path in SAMPLES:
        for document in yaml.safe_load_all(path.read_text()):
            yield path.stem, document


JOBS = [(name, one) for name, one in documents() if one["kind"] == "ElasticJob"]
# Their images' entry point is torch's own launcher, or its predecessor.
OF_TORCH = [(name, one) for name, one in JOBS if name.endswith("-etcd")]
OTHERS = [(name, one) for name, one in documents() if one["kind"] != "ElasticJob"]


def decided(job, **spec):
    whole = {**job, "spec": job["spec"] | spec}
    whole["metadata"] = job["metadata"] | {"uid": "0123456789", "namespace": "ns"}
    seen = Observed(job=msgspec.convert(whole, ElasticJob))
    return reconcile(seen, NOW_S)


def arguments(job):
    actions = decided(job, suspend=False).actions
    pod = next(one for one in actions if isinstance(one, CreatePod)).manifest
    (container,) = pod["spec"]["containers"]
    return container["args"]


def test_all_that_the_guide_speaks_of_is_there():
    shown = set(re.findall(r"\(([\w-]+\.yaml)\)", (FOLDER / "README.md").read_text()))
    assert shown == {path.name for path in SAMPLES}
    assert len(JOBS) == 9


@pytest.mark.parametrize(("name", "job"), JOBS, ids=[name for name, _ in JOBS])
def test_a_sample_is_valid_and_nothing_of_it_is_pruned(name, job):
    jsonschema.validate(job, SCHEMA)

    def check(value, node, path):
        if node.get("x-kubernetes-preserve-unknown-fields") or not isinstance(value, dict):
            return
        for key, inner in value.items():
            assert key in node["properties"], f"{path}.{key}"
            check(inner, node["properties"][key], f"{path}.{key}")

    check(job["spec"], SCHEMA["properties"]["spec"], "spec")
    assert name.startswith(job["metadata"]["name"])


@pytest.mark.parametrize(("name", "job"), JOBS, ids=[name for name, _ in JOBS])
def test_a_sample_becomes_its_pods(name, job):
    decision = decided(job)
    assert "Failed" not in {one.type for one in decision.status.conditions}, decision.status
    pods = [action for action in decision.actions if isinstance(action, CreatePod)]
    assert len(pods) == job["spec"]["replicaSpecs"]["Worker"]["replicas"]
    warned = [told for told in decision.events if told.type == "Warning"]
    assert not warned


@pytest.mark.parametrize(("name", "job"), JOBS, ids=[name for name, _ in JOBS])
def test_elastane_run_takes_the_arguments_of_a_sample(name, job, tmp_path, monkeypatch):
    """It accepts the arguments of all samples, also of those for torchrun."""
    (tmp_path / "train.py").write_text("")
    (tmp_path / "kubeconfig").write_text(KUBECONFIG)
    monkeypatch.chdir(tmp_path)
    words = arguments(job)
    place = next(i for i, word in enumerate(words) if not word.startswith("-"))
    assert words[place].endswith(".py"), "an option of the launcher lacks its value"
    environ = {"KUBECONFIG": str(tmp_path / "kubeconfig")}
    words = [*words[:place], "train.py", *words[place + 1 :]]
    config = build(parse(words, environ), environ)
    bounds = (config.spec.min_nodes, config.spec.max_nodes)
    assert bounds == (job["spec"]["minReplicas"], job["spec"]["maxReplicas"])


@pytest.mark.parametrize(("name", "job"), OF_TORCH, ids=[name for name, _ in OF_TORCH])
def test_torchs_own_launcher_takes_the_arguments_of_its_samples(name, job):
    """The launch itself is not tested, since torch's etcd package is not installed here."""
    from torch.distributed.run import parse_args

    said = parse_args(arguments(job))
    assert (said.rdzv_backend, said.rdzv_endpoint) == ("etcd", "etcd-service:2379")
    assert said.rdzv_id == f"{job['metadata']['name']}-01234567"


@pytest.mark.parametrize(("name", "one"), OTHERS, ids=[f"{n}-{o['kind']}" for n, o in OTHERS])
def test_objects_beside_the_job_in_a_sample_are_complete(name, one):
    assert {"apiVersion", "kind", "metadata"} <= set(one)
    for key, text in one.get("data", {}).items():
        if key.endswith(".py"):
            ast.parse(text, f"{name}: {key}")


def test_mounts_of_a_sample_are_among_its_volumes():
    for name, job in JOBS:
        pod = job["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]
        volumes = {one["name"] for one in pod.get("volumes", [])}
        mounts = {m["name"] for c in pod["containers"] for m in c.get("volumeMounts", [])}
        assert mounts == volumes, name


def test_no_sample_can_be_pulled_by_accident():
    for name, job in JOBS:
        pod = job["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]
        assert all(c["image"].startswith("registry.example/") for c in pod["containers"]), name


def test_the_gang_gets_a_group_whose_minimum_is_that_of_the_job():
    [job] = [one for name, one in JOBS if name == "gang"]
    actions = decided(job).actions
    [group] = [one.manifest for one in actions if getattr(one, "kind", "").startswith("PodGroup")]
    assert group["spec"] == {"minMember": job["spec"]["minReplicas"], "queue": "default"}
