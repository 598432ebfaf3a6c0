"""The definition of the resource is structural, complete, and agrees with the operator."""

import copy
import re

import jsonschema
import pytest
from kube_cluster import Cluster, spec_of

from elastane.kubernetes.reconcile.settings import wrong_name
from elastane.kubernetes.schema import NOT_OF_TEMPLATES, definition, template_definition

# The original's own sample, as its README shows it; only the endpoint is filled in.
IMAGENET = {
    "apiVersion": "elastic.pytorch.org/v1alpha1",
    "kind": "ElasticJob",
    "metadata": {"name": "imagenet", "namespace": "elastic-job"},
    "spec": {
        "rdzvEndpoint": "etcd-service:2379",
        "minReplicas": 1,
        "maxReplicas": 2,
        "replicaSpecs": {
            "Worker": {
                "replicas": 2,
                "restartPolicy": "ExitCode",
                "template": {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "spec": {
                        "containers": [
                            {
                                "name": "elasticjob-worker",
                                "image": "torchelastic/examples:0.2.0rc0",
                                "imagePullPolicy": "Always",
                                "args": ["--nproc_per_node=4", "main.py", "--epochs=20"],
                                "resources": {"limits": {"nvidia.com/gpu": 4}},
                            }
                        ]
                    },
                },
            }
        },
    },
}


def version():
    return definition(with_rules=False)["spec"]["versions"][0]


def schema():
    return version()["schema"]["openAPIV3Schema"]


def parts(node, path=""):
    yield path, node
    for key, inner in node.get("properties", {}).items():
        yield from parts(inner, f"{path}.{key}")
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            yield from parts(node[key], f"{path}.{key}")


def of_templates():
    return template_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


@pytest.mark.parametrize(
    ("path", "node"),
    [*parts(schema()), *parts(of_templates())],
    ids=lambda one: str(one)[:60],
)
def test_every_part_is_structural(path, node):
    """Check the rules of apiextensions.k8s.io/v1 that our schema could break."""
    assert ("type" in node) != ("x-kubernetes-int-or-string" in node), path
    allowed = {
        "type", "description", "properties", "required", "items", "additionalProperties", "enum",
        "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "default",
        "format", "anyOf", "pattern",
        "x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields",
    }  # fmt: skip
    assert set(node) <= allowed, path
    assert not ("properties" in node and "additionalProperties" in node), path
    if "default" in node:
        jsonschema.validate(node["default"], node)


@pytest.mark.parametrize("name", ["a" * 51, "a-1", "a" * 52, "1a", "a.b", "A", "a-"])
def test_a_name_is_refused_by_the_schema_where_the_operator_refuses_it(name):
    named = at(schema(), "metadata.name")
    # As the API server matches: anywhere in the text.
    fits = len(name) <= named["maxLength"] and re.search(named["pattern"], name) is not None
    assert fits == (wrong_name(name) == [])


def test_the_resource_is_what_the_original_called_it():
    made = definition()
    assert made["metadata"]["name"] == "elasticjobs.elastic.pytorch.org"
    names = made["spec"]["names"]
    assert (names["kind"], names["shortNames"]) == ("ElasticJob", ["ej"])
    assert [one["name"] for one in made["spec"]["versions"]] == ["v1alpha1"]
    assert made["apiVersion"] == "apiextensions.k8s.io/v1"


@pytest.mark.parametrize("where", ["top", "runPolicy", "RunPolicy"])
def test_manifests_of_the_original_are_valid_in_each_of_their_spellings(where):
    job = copy.deepcopy(IMAGENET)
    policy = {
        "cleanPodPolicy": "All",
        "ttlSecondsAfterFinished": 60,
        "activeDeadlineSeconds": 3600,
        "backoffLimit": 3,
        "schedulingPolicy": {"minAvailable": 1},
    }
    job["spec"] |= policy if where == "top" else {where: policy}
    jsonschema.validate(job, schema())
    known = set(schema()["properties"]["spec"]["properties"])
    assert set(job["spec"]) <= known, "what is not in the schema is pruned by the API server"


@pytest.mark.parametrize(
    "change",
    [
        {"minReplicas": 0},
        {"minReplicas": "2"},
        {"maxReplicas": 5000},
        {"cleanPodPolicy": "all"},
        {"launcher": "horovod"},
        {"backoffLimit": -1},
        {"replicaSpecs": {}},
        {"replicaSpecs": {"Worker": {"replicas": 1}}},
        {"exitCodeRules": [{"codes": [], "action": "Retry"}]},
        {"nodeQuarantine": {"failures": 0}},
        {"schedulingPolicy": {"podGroup": "Slurm"}},
        {"schedulingPolicy": {"scheduleTimeoutSeconds": 0}},
        {"managedBy": ""},
    ],
    ids=str,
)
def test_the_api_server_refuses(change):
    job = copy.deepcopy(IMAGENET)
    job["spec"] |= change
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(job, schema())


def at(node, path):
    for key in path.removeprefix(".").split("."):
        node = node["properties"][key]
    return node


def test_subresources_and_columns_point_at_existing_fields():
    scale = version()["subresources"]["scale"]
    paths = [*scale.values(), *(one["jsonPath"] for one in version()["additionalPrinterColumns"])]
    for path in paths:
        if not path.startswith(".metadata"):
            assert at(schema(), path)["type"] in ("integer", "string", "number"), path
    assert version()["subresources"]["status"] == {}


def test_replicas_is_never_absent_so_that_the_job_can_be_scaled():
    assert at(schema(), "spec.replicaSpecs.Worker.replicas")["default"] == 1


def test_a_status_is_what_the_schema_says_and_nothing_of_it_is_pruned():
    cluster = Cluster(spec=spec_of(3, nodeQuarantine={"failures": 1}))
    cluster.settle()
    pods = sorted(cluster.pods.values(), key=lambda pod: pod.name)
    cluster.exit(pods[0], 137)
    cluster.lose(pods[1].node)
    cluster.now_s += 60
    cluster.relist()
    cluster.operate()
    status = cluster.job["status"]
    jsonschema.validate(status, schema()["properties"]["status"])

    def check(value, node, path):
        if isinstance(value, dict) and "properties" in node:
            assert set(value) <= set(node["properties"]), path
            for key, inner in value.items():
                check(inner, node["properties"][key], f"{path}.{key}")
        elif isinstance(value, list):
            for inner in value:
                check(inner, node["items"], path)

    check(status, schema()["properties"]["status"], "status")
    assert {"troubles", "nodes", "fenced", "workers"} <= set(status)


def test_the_status_has_no_defaults_which_would_come_back_as_if_written():
    assert not [path for path, node in parts(at(schema(), "status")) if "default" in node]


def test_rules_between_fields_are_rendered_only_where_they_are_known():
    assert "x-kubernetes-validations" not in str(definition(with_rules=False))
    rules = definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert len(rules["properties"]["spec"]["x-kubernetes-validations"]) == 9


def test_a_template_has_the_fields_of_a_job_that_are_not_the_jobs_own():
    job, template = at(schema(), "spec"), at(of_templates(), "spec")["properties"]["job"]
    own = {*NOT_OF_TEMPLATES, "runPolicy", "RunPolicy"}
    assert {*job["properties"]} - own == {*template["properties"]}
    assert template["required"] == ["replicaSpecs"]
    assert at(of_templates(), "spec")["required"] == ["job"]


def test_every_field_of_the_spec_says_what_it_is():
    bare = [p for p, node in parts(at(schema(), "spec")) if not node.get("description")]
    leaves = [path for path in bare if not path.endswith("items") and path.count(".") <= 4]
    assert leaves == []
