"""Write the files of this folder that are made from `elastane kubernetes install`.

    python deploy/generate.py

Run it after a change of that command. It writes the Kustomize base, the definition and the rights
of the operator's chart, and the schema of the jobs' chart's values. A test compares each file with
the output of this script.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from elastane.cli.kubernetes import NAMESPACE
from elastane.kubernetes.manifests import (
    Installation,
    Object,
    as_yaml,
    installation,
    roles_for_jobs,
)
from elastane.kubernetes.model.spec import ElasticJobSpec, WorkersSpec
from elastane.kubernetes.schema import schema_of

FOLDER = Path(__file__).parent
_NOTE = "# Made by deploy/generate.py.\n"
# For an overlay to replace: no registry has a name of this domain (RFC 2606).
IMAGE = "set-an-image.invalid/elastane"
_OPERATOR = "elastane-operator"
_RIGHTS = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding")


def files() -> dict[Path, str]:
    """Return all generated files, by their path in this folder."""
    whole = installation(Installation(namespace=NAMESPACE, image=IMAGE))
    base, chart = Path("kustomize/base"), Path("helm/elastane-operator")
    definition = _of(whole, "CustomResourceDefinition")
    parts = {
        "definition.yaml": definition,
        "namespace.yaml": _of(whole, "Namespace"),
        "rights.yaml": _of(whole, *_RIGHTS),
        "operator.yaml": _of(whole, "Service", "Deployment"),
    }
    made = {base / name: _NOTE + as_yaml(documents) for name, documents in parts.items()}
    made[base / "kustomization.yaml"] = _NOTE + as_yaml(
        [
            {
                "apiVersion": "kustomize.config.k8s.io/v1beta1",
                "kind": "Kustomization",
                "resources": list(parts),
            }
        ]
    )
    made[chart / "crds/elasticjobs.yaml"] = _NOTE + as_yaml(definition)
    everywhere = _named(whole, "ClusterRole", _OPERATOR)
    narrow = installation(Installation(namespace=NAMESPACE, image=IMAGE, watch_namespace="jobs"))
    in_one = next(one for one in _of(narrow, "Role") if one["metadata"]["namespace"] == "jobs")
    own = next(one for one in _of(narrow, "Role") if one["metadata"]["namespace"] == NAMESPACE)
    of_nodes = _named(narrow, "ClusterRole", f"{_OPERATOR}-jobs")
    rules = {"everywhere": everywhere, "jobs": in_one, "lease": own, "nodes": of_nodes}
    for name, role in rules.items():
        made[chart / f"files/rules-{name}.yaml"] = _NOTE + _bare(role["rules"])
    made[chart / "files/cluster-roles.yaml"] = _NOTE + as_yaml(roles_for_jobs())
    schema = json.dumps(job_values_schema(), indent=2)
    made[Path("helm/elastic-job/values.schema.json")] = schema + "\n"
    return made


def job_values_schema() -> dict[str, Any]:
    """Return the schema of the values of the jobs' chart, in the form that Helm checks."""
    spec = schema_of(ElasticJobSpec)["properties"]
    workers = schema_of(WorkersSpec)["properties"]
    del spec["replicaSpecs"]
    text, texts = {"type": "string"}, {"type": "array", "items": {"type": "string"}}
    words = {"type": "object", "additionalProperties": text}
    objects = {"type": "array", "items": {"type": "object"}}
    policy = workers["restartPolicy"]
    properties = {
        "global": {"type": "object"},
        "image": {"type": "string", "minLength": 1, "description": "Required."},
        "imagePullPolicy": {"enum": ["", "Always", "IfNotPresent", "Never"]},
        "command": texts,
        "args": texts,
        "nprocPerNode": {"type": ["string", "integer"]},
        "replicas": workers["replicas"],
        "restartPolicy": policy | {"enum": ["", *policy["enum"]], "default": ""},
        "spec": {
            "type": "object",
            "description": "The other fields of the spec, by their own names.",
            "additionalProperties": False,
            "properties": spec,
        },
        "gpus": {"type": "integer", "minimum": 0},
        "cpu": {"type": "string", "description": "In quotes, where it looks like a number."},
        "memory": text,
        "shm": text,
        **dict.fromkeys(("env", "volumeMounts", "volumes"), objects),
        **dict.fromkeys(("labels", "annotations", "podLabels", "podAnnotations"), words),
        "pod": {"type": "object", "not": {"required": ["containers"]}},
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "additionalProperties": False,
        "required": ["image"],
        "properties": properties,
    }


def _of(documents: list[Object], *kinds: str) -> list[Object]:
    return [one for one in documents if one["kind"] in kinds]


def _named(documents: list[Object], kind: str, name: str) -> Object:
    return next(one for one in _of(documents, kind) if one["metadata"]["name"] == name)


def _bare(rules: list[Object]) -> str:
    """Return rules as a list for a template."""
    return as_yaml([{"rules": rules}]).removeprefix("---\n")


def write() -> None:
    """Write all files."""
    for path, text in files().items():
        (FOLDER / path).parent.mkdir(parents=True, exist_ok=True)
        (FOLDER / path).write_text(text)


if __name__ == "__main__":
    write()
