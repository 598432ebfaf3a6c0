"""Write the files that are made of the types of an ElasticJob and of the operator's rights.

    python deploy/generate.py

Run it (`make format` does) after a change of either. It writes the Kustomize base, the definition
and the rights of the operator's chart, the schema of the jobs' chart's values, and the tables of
fields and rights in docs/kubernetes*.md. A test compares each file with the output of this script.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec

from elastane.cli.kubernetes import NAMESPACE
from elastane.kubernetes.manifests import (
    JOB_RIGHTS,
    NODE_RIGHTS,
    RIGHTS,
    Installation,
    Object,
    Right,
    as_yaml,
    installation,
    roles_for_jobs,
)
from elastane.kubernetes.model.spec import ElasticJobSpec, RunPolicy, WorkersSpec
from elastane.kubernetes.schema import schema_of

FOLDER = Path(__file__).parent
_NOTE = "# Made by deploy/generate.py.\n"
# For an overlay to replace: no registry has a name of this domain (RFC 2606).
IMAGE = "set-an-image.invalid/elastane"
_OPERATOR = "elastane-operator"
_RIGHTS = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding")
_DOCS = Path("../docs")
_FIELDS_HEAD = "| field | type | default | meaning |\n|---|---|---|---|\n"
_RIGHTS_HEAD = "| API group | resources | verbs | what for |\n|---|---|---|---|\n"


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
    for one in definition:
        plural = one["spec"]["names"]["plural"]
        made[chart / f"crds/{plural}.yaml"] = _NOTE + as_yaml([one])
    everywhere = _named(whole, "ClusterRole", _OPERATOR)
    narrow = installation(Installation(namespace=NAMESPACE, image=IMAGE, watch_namespace="jobs"))
    in_one = next(one for one in _of(narrow, "Role") if one["metadata"]["namespace"] == "jobs")
    own = next(one for one in _of(narrow, "Role") if one["metadata"]["namespace"] == NAMESPACE)
    of_nodes = _named(narrow, "ClusterRole", f"{_OPERATOR}-jobs")
    rules = {"everywhere": everywhere, "jobs": in_one, "lease": own, "nodes": of_nodes}
    for name, role in rules.items():
        made[chart / f"files/rules-{name}.yaml"] = _NOTE + _bare(role["rules"])
    # A chart can read no file outside of its folder.
    made[chart / "files/alerts.yaml"] = _NOTE + (FOLDER / "alerts.yaml").read_text()
    made[chart / "files/cluster-roles.yaml"] = _NOTE + as_yaml(roles_for_jobs())
    schema = json.dumps(job_values_schema(), indent=2)
    made[Path("helm/elastic-job/values.schema.json")] = schema + "\n"
    return made | pages()


def pages() -> dict[Path, str]:
    """Return the pages of docs whose tables are made here, with these tables."""
    rights = (rights_table(JOB_RIGHTS), rights_table((*RIGHTS, *NODE_RIGHTS)))
    tables = {
        _DOCS / "kubernetes-reference.md": (_FIELDS_HEAD, (fields_table(),)),
        _DOCS / "kubernetes-operate.md": (_RIGHTS_HEAD, rights),
    }
    return {path: _with_tables(path, *parts) for path, parts in tables.items()}


def _with_tables(path: Path, head: str, tables: tuple[str, ...]) -> str:
    """Return the page with its tables of this head replaced, in their order."""
    left = iter(tables)
    text = (FOLDER / path).read_text("utf-8")
    made = re.sub(rf"{re.escape(head)}(\|.*\n)*", lambda _: head + next(left), text)
    assert next(left, None) is None, f"{path} has fewer tables than are made for it"
    return made


def fields_table() -> str:
    """Return the rows of all fields of a spec; a star marks those of runPolicy."""
    rows = []
    policy = {field.encode_name for field in msgspec.structs.fields(RunPolicy)}
    properties = schema_of(ElasticJobSpec)["properties"]
    for name in sorted(properties, key=policy.__contains__):
        if name == "replicaSpecs":
            rows += _fields_of(schema_of(WorkersSpec), "replicaSpecs.Worker.")
            continue
        schema = properties[name]
        rows.append(_field_row(f"`{name}`" + (" *" if name in policy else ""), schema))
        if "properties" in schema:
            rows += _fields_of(schema, f"{name}.")
        elif "properties" in schema.get("items", {}):
            rows += _fields_of(schema["items"], f"{name}[].")
    return "".join(rows)


def _fields_of(schema: Object, prefix: str) -> list[str]:
    return [_field_row(f"`{prefix}{name}`", part) for name, part in schema["properties"].items()]


def _field_row(name: str, schema: Object) -> str:
    default = schema.get("default", "")
    shown = "" if default == "" or isinstance(default, list) else f"`{default}`"
    meaning = schema.get("description", "").replace("|", "\\|")
    return f"| {name} | {_type_of(schema)} | {shown} | {meaning} |\n"


def _type_of(schema: Object) -> str:
    if "enum" in schema:
        return ", ".join(f"`{one}`" for one in schema["enum"])
    if "x-kubernetes-int-or-string" in schema:
        return "number or text"
    low, high = schema.get("minimum"), schema.get("maximum")
    if schema["type"] == "integer":
        top = f" to {high}" if high is not None and high < 1_000_000 else " and more"
        return f"{low}{top}" if low is not None else "number"
    kinds = {"string": "text", "boolean": "true, false", "array": "list", "object": "object"}
    return kinds[schema["type"]]


def rights_table(rights: tuple[Right, ...]) -> str:
    """Return a row for each right."""
    rows = []
    for group, resources, verbs, why in rights:
        shown = ", ".join(f"`{one}`" for one in resources)
        rows.append(f"| {group or 'core'} | {shown} | {', '.join(verbs)} | {why} |\n")
    return "".join(rows)


def job_values_schema() -> dict[str, Any]:
    """Return the schema of the values of the jobs' chart, in the form that Helm checks."""
    spec = schema_of(ElasticJobSpec)["properties"]
    workers = schema_of(WorkersSpec)["properties"]
    # The chart gives the first, and is a template itself.
    del spec["replicaSpecs"], spec["templateRef"]
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
        "metricsPort": {"type": "integer", "minimum": 0, "maximum": 65535},
        "podMonitor": {"type": "boolean"},
        "gpus": {"type": "integer", "minimum": 0},
        "cpu": {"type": "string", "description": "In quotes, where it looks like a number."},
        "memory": text,
        "shm": text,
        **dict.fromkeys(("env", "volumeMounts", "volumes"), objects),
        **dict.fromkeys(("labels", "annotations", "podLabels", "podAnnotations"), words),
        "monitorLabels": words,
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
