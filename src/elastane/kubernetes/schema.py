"""The definitions of ElasticJob and ElasticJobTemplate (CustomResourceDefinition v1), of the types.

The schema is a structural one: each field has one type, without references. It is derived from the
types that the operator decodes with, so the API server and the operator refuse the same values.
Rules between fields are in CEL, which Kubernetes knows since 1.25, and are left out for an older
server. The operator always checks them. Pure; fails only for a type that no schema can express,
which is a bug of elastane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import NODEFAULT, inspect

from elastane.kubernetes.model import names
from elastane.kubernetes.model.spec import (
    ElasticJobSpec,
    ElasticJobTemplateSpec,
    RunPolicy,
)
from elastane.kubernetes.model.status import JobStatus

Schema = dict[str, Any]

# The fields of metadata that a definition may restrict: the same bounds as `settings.wrong_name`.
_NAME = {"type": "string", "maxLength": names.NAME_CHARS_MAX, "pattern": f"^{names.NAME_PATTERN}$"}
# (expression, message) about spec. Fields that are not set are not compared.
_RULES = (
    ("has(self.replicaSpecs) || has(self.templateRef)", "replicaSpecs or a templateRef is needed"),
    (
        "!has(self.minReplicas) || !has(self.maxReplicas) || self.minReplicas <= self.maxReplicas",
        "minReplicas is at most maxReplicas",
    ),
    (
        "!has(self.spares) || self.spares == 0 || self.launcher == 'elastane'",
        "spares need launcher elastane",
    ),
    (
        "!has(self.exitCodeRules) || size(self.exitCodeRules) == 0"
        " || (has(self.replicaSpecs) && self.replicaSpecs.Worker.restartPolicy == 'ExitCode')",
        "exitCodeRules need restartPolicy ExitCode",
    ),
    (
        "!has(self.managedBy) || self.managedBy.contains('/')",
        "managedBy is a domain and a name, such as kueue.x-k8s.io/multikueue",
    ),
    (
        "has(self.managedBy) == has(oldSelf.managedBy)"
        " && (!has(self.managedBy) || self.managedBy == oldSelf.managedBy)",
        "managedBy cannot be changed",
    ),
    (
        "!has(self.schedulingPolicy) || !has(self.schedulingPolicy.queue)"
        " || (has(self.schedulingPolicy.podGroup) && self.schedulingPolicy.podGroup == 'Volcano')",
        "schedulingPolicy.queue needs podGroup Volcano",
    ),
    (
        "!has(self.schedulingPolicy) || !has(self.schedulingPolicy.scheduleTimeoutSeconds)"
        " || (has(self.schedulingPolicy.podGroup)"
        " && self.schedulingPolicy.podGroup == 'Coscheduling')",
        "schedulingPolicy.scheduleTimeoutSeconds needs podGroup Coscheduling",
    ),
    (
        "!has(self.schedulingPolicy) || !has(self.schedulingPolicy.podGroup)"
        " || !has(self.schedulingPolicy.minAvailable)"
        " || (self.schedulingPolicy.minAvailable >= 1"
        " && (!has(self.minReplicas) || self.schedulingPolicy.minAvailable >= self.minReplicas)"
        " && (!has(self.maxReplicas) || self.schedulingPolicy.minAvailable <= self.maxReplicas))",
        "schedulingPolicy.minAvailable of a pod group is between minReplicas and maxReplicas",
    ),
)
# Name, type, path, priority (above 0: only with -o wide).
_COLUMNS = (
    ("State", "string", ".status.phase", 0),
    ("Ready", "integer", ".status.readyReplicas", 0),
    ("Desired", "integer", ".spec.replicaSpecs.Worker.replicas", 0),
    ("Min", "integer", ".spec.minReplicas", 0),
    ("Max", "integer", ".spec.maxReplicas", 0),
    ("World", "integer", ".status.worldSize", 0),
    ("Step", "integer", ".status.step", 0),
    ("Restarts", "integer", ".status.restarts", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Round", "integer", ".status.round", 1),
    ("Steps/s", "number", ".status.stepsPerSecond", 1),
    ("Outdated", "integer", ".status.outdated", 1),
    ("Incident", "string", ".status.lastIncident.cause", 1),
    ("Endpoint", "string", ".spec.rdzvEndpoint", 1),
    ("Template", "string", ".spec.templateRef.name", 1),
)
_WORKER = ".spec.job.replicaSpecs.Worker"
_TEMPLATE_COLUMNS = (
    ("Replicas", "integer", f"{_WORKER}.replicas", 0),
    ("Min", "integer", ".spec.job.minReplicas", 0),
    ("Max", "integer", ".spec.job.maxReplicas", 0),
    ("Description", "string", ".spec.description", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Image", "string", f"{_WORKER}.template.spec.containers[0].image", 1),
    ("Overridable", "string", ".spec.overridable", 1),
)
# Fields of a job's spec that no template has: they are of the job itself.
NOT_OF_TEMPLATES = ("managedBy", "suspend", "templateRef")


def definitions(*, with_rules: bool = True) -> list[Schema]:
    """Return the manifests of all definitions.

    `with_rules`: with rules between fields (CEL), which Kubernetes knows since 1.25.
    """
    return [definition(with_rules=with_rules), template_definition()]


def definition(*, with_rules: bool = True) -> Schema:
    """Return the manifest of the definition of ElasticJob; `with_rules` as for `definitions`."""
    version = _version(_whole(with_rules), _COLUMNS)
    version["subresources"] = {
        "status": {},
        "scale": {
            "specReplicasPath": ".spec.replicaSpecs.Worker.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        },
    }
    return _definition(names.KIND, names.PLURAL, "ej", version)


def template_definition() -> Schema:
    """Return the manifest of the definition of ElasticJobTemplate.

    It has no rules between fields: what contradicts in a template is reported by the jobs of it.
    """
    spec = schema_of(ElasticJobTemplateSpec)
    for name in NOT_OF_TEMPLATES:
        del spec["properties"]["job"]["properties"][name]
    schema = {
        "description": "A template of ElasticJobs, for those who run a platform to offer.",
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": spec,
        },
    }
    version = _version(schema, _TEMPLATE_COLUMNS)
    return _definition(names.TEMPLATE_KIND, names.TEMPLATE_PLURAL, "ejt", version)


def _definition(kind: str, plural: str, short: str, version: Schema) -> Schema:
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{names.GROUP}"},
        "spec": {
            "group": names.GROUP,
            "scope": "Namespaced",
            # Explicit, since this definition may replace TorchElastic's, which has the value true.
            "preserveUnknownFields": False,
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": [short],
            },
            "versions": [version],
        },
    }


def _version(schema: Schema, columns: Sequence[tuple[str, str, str, int]]) -> Schema:
    return {
        "name": names.VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path} | ({"priority": place} if place else {})
            for name, kind, path, place in columns
        ],
    }


def _whole(with_rules: bool) -> Schema:
    spec = schema_of(ElasticJobSpec)
    # The operator makes them of the template where a job names one.
    spec["required"].remove("replicaSpecs")
    if not spec["required"]:
        del spec["required"]
    for spelling in ("runPolicy", "RunPolicy"):
        spec["properties"][spelling] = schema_of(RunPolicy)
    if with_rules:
        spec["x-kubernetes-validations"] = [
            {"rule": rule, "message": message} for rule, message in _RULES
        ]
    return {
        "description": "A training job whose number of pods may change while it runs.",
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object", "properties": {"name": _NAME}},
            "spec": spec,
            # The API server would write a default into each status, as if the operator had set it.
            "status": _without_defaults(schema_of(JobStatus)),
        },
    }


def _without_defaults(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {key: _without_defaults(part) for key, part in schema.items() if key != "default"}
    return schema


def schema_of(kind: Any) -> Schema:
    """Return the structural schema of a type."""
    return _schema(inspect.type_info(kind))


def _schema(info: inspect.Type) -> Schema:
    for kind, maker in _MAKERS.items():
        if isinstance(info, kind):
            return maker(info)
    raise AssertionError(f"no structural schema says {info}")


def _union(info: inspect.UnionType) -> Schema:
    kinds = [kind for kind in info.types if not isinstance(kind, inspect.NoneType)]
    if len(kinds) == 2:
        return {
            "x-kubernetes-int-or-string": True,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
        }
    return _schema(kinds[0])


def _struct(info: inspect.StructType) -> Schema:
    properties = {field.encode_name: _field(field) for field in info.fields}
    made: Schema = {"type": "object", "properties": properties}
    required = [field.encode_name for field in info.fields if field.required]
    if required:
        made["required"] = required
    doc = (info.cls.__doc__ or "").strip().split("\n\n")[0]
    return {"description": " ".join(doc.split())} | made if doc else made


def _field(field: inspect.Field) -> Schema:
    made = _schema(field.type)
    if field.default not in (NODEFAULT, None, "", ()):
        made["default"] = field.default
    return made


def _mapping(info: inspect.DictType) -> Schema:
    if isinstance(info.value_type, inspect.AnyType):
        return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {"type": "object", "additionalProperties": _schema(info.value_type)}


def _bounds(info: Any) -> Schema:
    what = "Items" if isinstance(info, inspect.VarTupleType) else "Length"
    pairs = {
        "minimum": getattr(info, "ge", None),
        "maximum": getattr(info, "le", None),
        f"min{what}": getattr(info, "min_length", None),
        f"max{what}": getattr(info, "max_length", None),
    }
    return {key: value for key, value in pairs.items() if value is not None}


_MAKERS: dict[type[inspect.Type], Callable[[Any], Schema]] = {
    inspect.Metadata: lambda info: _schema(info.type) | (info.extra_json_schema or {}),
    inspect.UnionType: _union,
    inspect.StructType: _struct,
    inspect.DictType: _mapping,
    inspect.LiteralType: lambda info: {"type": "string", "enum": list(info.values)},
    inspect.VarTupleType: lambda info: (
        {"type": "array", "items": _schema(info.item_type)} | _bounds(info)
    ),
    inspect.BoolType: lambda info: {"type": "boolean"},
    inspect.IntType: lambda info: {"type": "integer"} | _bounds(info),
    inspect.FloatType: lambda info: {"type": "number"},
    inspect.StrType: lambda info: {"type": "string"} | _bounds(info),
}
