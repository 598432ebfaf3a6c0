"""Reads a job's spec: unites the original's three spellings, fills in defaults, checks bounds.

`read` returns either settings or the faults of the manifest. Each fault has the path of the field,
its value, and the expectation. Types and bounds come from `model.spec` and are checked field by
field, so that one mistake does not hide the next. Rules between fields are here. The API server
checks fields by the schema, but not rules between fields, values that the scale subresource writes,
or fields that an older definition lacks. So everything is checked again here.

The schema accepts any pod template, so mistakes in it show only when the first pod is created. The
common ones are checked here; for any other the API server refuses the pod, which leads to the same
condition. Pure, and never raises for a user's text.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import inspect

from elastane.kubernetes.model import ElasticJob
from elastane.kubernetes.model.names import (
    CONTAINER,
    MANAGER,
    NAME_CHARS_MAX,
    NAME_PATTERN,
    is_label,
    pod_name,
)
from elastane.kubernetes.model.spec import REPLICAS_MAX, ElasticJobSpec, RestartPolicy, RunPolicy
from elastane.kubernetes.reconcile.bounds import TEXT_CHARS_MAX
from elastane.kubernetes.reconcile.exit_codes import wrong_rules

# Kubernetes' default of a container's terminationMessagePath.
TERMINATION_LOG = "/dev/termination-log"


class JobSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a job's spec, without contradictions: min <= desired <= max.

    `asked` is replicas as written, perhaps by the scale subresource, which checks no bounds.
    `container` is the name of the container that trains, `template_of` a digest of the template.
    """

    spec: ElasticJobSpec
    min: int
    max: int
    desired: int
    asked: int
    container: str
    template_of: str

    @property
    def policy(self) -> RestartPolicy:
        """The workers' restart policy."""
        return self.spec.replica_specs.Worker.restart_policy

    @property
    def restarts_in_place(self) -> bool:
        """Whether the kubelet restarts the container, and the operator does not."""
        return self.policy in ("OnFailure", "Always")

    @property
    def template(self) -> dict[str, Any]:
        """The pod as the user wrote it."""
        return self.spec.replica_specs.Worker.template

    @property
    def arguments(self) -> list[str]:
        """The user's own arguments of the container that trains."""
        for container in self.template["spec"]["containers"]:
            if container["name"] == self.container:
                return list(container.get("args") or [])
        return []

    @property
    def termination_log(self) -> str:
        """The path at which the training container writes its termination message."""
        for container in self.template["spec"]["containers"]:
            if container["name"] == self.container:
                return str(container.get("terminationMessagePath") or TERMINATION_LOG)
        return TERMINATION_LOG

    @property
    def is_suspended(self) -> bool:
        """Whether no pod may run."""
        return bool(self.spec.suspend)


class SettingsReading(msgspec.Struct, frozen=True, kw_only=True):
    """Either settings, or the faults of the spec."""

    settings: JobSettings | None
    wrong: tuple[Wrong, ...] = ()


def is_managed_elsewhere(job: ElasticJob) -> bool:
    """Whether spec.managedBy names another controller, such as kueue.x-k8s.io/multikueue."""
    named = job.spec.get("managedBy") if isinstance(job.spec, dict) else None
    return isinstance(named, str) and "/" in named and named != MANAGER


def read(job: ElasticJob) -> SettingsReading:
    """Return the settings of the job's spec, or its faults."""
    raw, contradictions = merged_policy(job.spec)
    wrong = [*wrong_name(job.metadata.name), *contradictions]
    types = wrong_types(raw)
    if types:
        return SettingsReading(settings=None, wrong=(*wrong, *types))
    spec = msgspec.convert(raw, ElasticJobSpec)
    template = spec.replica_specs.Worker.template
    wrong += [*wrong_relations(spec, job.metadata.name), *wrong_template(template)]
    if wrong:
        return SettingsReading(settings=None, wrong=tuple(wrong))
    return SettingsReading(settings=_settled(spec))


def _settled(spec: ElasticJobSpec) -> JobSettings:
    """Fill in bounds that are not given, and limit replicas to them."""
    asked = spec.replica_specs.Worker.replicas
    highest = spec.max_replicas or min(REPLICAS_MAX, max(asked, spec.min_replicas or 1))
    lowest = spec.min_replicas or max(1, min(asked, highest))
    template = spec.replica_specs.Worker.template
    containers = template["spec"]["containers"]
    known = [container["name"] for container in containers]
    return JobSettings(
        spec=spec,
        min=lowest,
        max=highest,
        desired=max(lowest, min(highest, asked)),
        asked=asked,
        container=CONTAINER if CONTAINER in known else known[0],
        template_of=hashlib.sha256(msgspec.json.encode(template, order="sorted")).hexdigest()[:16],
    )


_NAME = re.compile(NAME_PATTERN)
_SPELLINGS = ("runPolicy", "RunPolicy")
# Computed once: each call evaluates every annotation, which takes half a millisecond.
_FIELDS = msgspec.structs.fields(ElasticJobSpec)
_POLICY = [field.encode_name for field in msgspec.structs.fields(RunPolicy)]
_PLACE = re.compile(r" - at `\$(.*)`$", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")
_HOST = re.compile(r"(https?://)?(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9.])?)")
# Placeholders such as <host> in the sample manifests of TorchElastic, left as they were.
_PLACEHOLDER = re.compile(r"<[^>]*>")
_NEEDS_LAUNCHER_ELASTANE = ("elastane", "file", "kubernetes", "redis")


class Wrong(msgspec.Struct, frozen=True, kw_only=True):
    """One mistake. `reason` is that of the condition: InvalidSpec or InvalidTemplate."""

    path: str
    value: str
    expected: str
    reason: str = "InvalidSpec"

    def __str__(self) -> str:
        return f"{self.path} = {self.value}: expected {self.expected}"


def shown(value: Any) -> str:
    """Return a value as a person wrote it, at bounded length."""
    if value is msgspec.UNSET:
        return "(not set)"
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def merged_policy(raw: Any) -> tuple[dict[str, Any], list[Wrong]]:
    """Return the spec with the fields of runPolicy and RunPolicy at the top, where they belong.

    The original controller documented the fields there and read them elsewhere. If two places
    contradict each other, the spec is wrong: elastane does not guess which one is meant.
    """
    if not isinstance(raw, dict):
        return {}, [_wrong("spec", raw, "the fields of an ElasticJob")]
    made = {key: value for key, value in raw.items() if key not in _SPELLINGS}
    wrong: list[Wrong] = []
    for spelling in _SPELLINGS:
        part = raw.get(spelling)
        if part is None:
            continue
        if not isinstance(part, dict):
            wrong.append(_wrong(f"spec.{spelling}", part, "an object"))
            continue
        for key in _POLICY:
            value = part.get(key)
            if value is None:
                continue
            if made.get(key, value) not in (None, value):
                expected = (
                    f"the same as elsewhere in spec ({shown(made[key])}), or only one of them"
                )
                wrong.append(_wrong(f"spec.{spelling}.{key}", value, expected))
            made[key] = value
    return {key: value for key, value in made.items() if value is not None}, wrong


def wrong_name(name: str) -> list[Wrong]:
    """Return what is wrong with the job's name: Services, labels and host names are made of it."""
    if _NAME.fullmatch(name) and len(name) <= NAME_CHARS_MAX:
        return []
    expected = f"at most {NAME_CHARS_MAX} characters of a-z, 0-9 and -, beginning with a letter"
    return [_wrong("metadata.name", name, expected)]


def wrong_types(raw: dict[str, Any]) -> list[Wrong]:
    """Return the fields with a wrong type, or with a value out of bounds."""
    wrong = []
    for field in _FIELDS:
        path = f"spec.{field.encode_name}"
        if field.encode_name not in raw:
            if field.required:
                wrong.append(
                    _wrong(path, msgspec.UNSET, "what the job consists of, or a templateRef")
                )
            continue
        value = raw[field.encode_name]
        try:
            msgspec.convert(value, field.type)
        except msgspec.ValidationError as error:
            wrong.append(_of_msgspec(path, value, str(error)))
    return wrong


def _of_msgspec(path: str, value: Any, text: str) -> Wrong:
    """Translate `Expected `int` >= 1, got `str` - at `$.a[0]``."""
    found = _PLACE.search(text)
    for key, index in _STEP.findall(found[1] if found else ""):
        path += f".{key}" if key else f"[{index}]"
        try:
            value = value[key] if key else value[int(index)]
        except (KeyError, IndexError, TypeError):
            value = msgspec.UNSET
    expected = _PLACE.sub("", text).replace("`", "")
    missing = re.fullmatch(r"Object missing required field (\S+)", expected)
    if missing:
        return _wrong(f"{path}.{missing[1]}", msgspec.UNSET, "a value")
    expected = expected.removeprefix("Expected ").split(", got ")[0]
    if expected.startswith("Invalid enum value"):
        words = re.sub(r"\[\d+\]", "", path).split(".")
        expected = "one of " + ", ".join(choices(words[1:]))
    return _wrong(path, value, expected)


def wrong_relations(spec: ElasticJobSpec, job: str) -> list[Wrong]:
    """Return the contradictions between fields of valid types."""
    wrong = []
    lowest, highest = spec.min_replicas, spec.max_replicas
    if lowest is not None and highest is not None and lowest > highest:
        wrong.append(_wrong("spec.minReplicas", lowest, f"at most maxReplicas, which is {highest}"))
    if spec.spares and spec.launcher != "elastane":
        wrong.append(_wrong("spec.spares", spec.spares, "0, or launcher elastane"))
    if spec.managed_by and "/" not in spec.managed_by:
        what = f"a domain and a name, such as {MANAGER}"
        wrong.append(_wrong("spec.managedBy", spec.managed_by, what))
    return [*wrong, *_wrong_rendezvous(spec, job), *_wrong_rules(spec), *_wrong_group(spec)]


def _wrong_group(spec: ElasticJobSpec) -> Iterator[Wrong]:
    policy, path = spec.scheduling_policy, "spec.schedulingPolicy"
    if policy is None:
        return
    if policy.queue is not None and policy.pod_group != "Volcano":
        yield _wrong(f"{path}.queue", policy.queue, "none, or podGroup Volcano")
    timeout_s = policy.schedule_timeout_seconds
    if timeout_s is not None and policy.pod_group != "Coscheduling":
        what = "none, or podGroup Coscheduling"
        yield _wrong(f"{path}.scheduleTimeoutSeconds", timeout_s, what)
    least, most = spec.min_replicas or 1, spec.max_replicas or REPLICAS_MAX
    asked = policy.min_available
    if policy.pod_group and asked is not None and not least <= asked <= most:
        what = f"{least} to {most}, minReplicas to maxReplicas, with podGroup"
        yield _wrong(f"{path}.minAvailable", asked, what)


def _wrong_rendezvous(spec: ElasticJobSpec, job: str) -> list[Wrong]:
    backend, endpoint = spec.rdzv_backend, spec.rdzv_endpoint
    path = "spec.rdzvBackend"
    if backend in _NEEDS_LAUNCHER_ELASTANE and spec.launcher != "elastane":
        return [_wrong(path, backend, "c10d, etcd or etcd-v2, or launcher elastane")]
    if backend == "kubernetes":
        said = _wrong("spec.rdzvEndpoint", endpoint, "none, with rdzvBackend kubernetes")
        return [said] if endpoint else []
    if not endpoint:
        needs = backend in ("etcd", "etcd-v2", "file", "redis")
        what = "the endpoint of it in rdzvEndpoint, or no rdzvBackend"
        return [_wrong(path, backend, what)] if needs else []
    if backend == "file":
        absolute = endpoint.startswith("/")
        what = "an absolute path of a folder that all pods mount"
        return [] if absolute else [_wrong("spec.rdzvEndpoint", endpoint, what)]
    if all(_is_endpoint(part.strip()) for part in endpoint.split(",")):
        return []
    what = f"host:port, such as etcd-service:2379 or {pod_name(job, 0)}.{job}:29400"
    return [_wrong("spec.rdzvEndpoint", endpoint, what)]


def _is_endpoint(text: str) -> bool:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]") or host in ("http", "https"):
        host, port = text, "1"
    number = port if port.isascii() and port.isdecimal() and len(port) <= 5 else "0"
    in_range = 1 <= int(number) <= 65_535
    return in_range and not _PLACEHOLDER.search(text) and bool(_HOST.fullmatch(host))


def _wrong_rules(spec: ElasticJobSpec) -> list[Wrong]:
    if not spec.exit_code_rules:
        return []
    policy = spec.replica_specs.Worker.restart_policy
    found = [_wrong(path, value, what) for path, value, what in wrong_rules(spec.exit_code_rules)]
    if policy != "ExitCode":
        path = "spec.replicaSpecs.Worker.restartPolicy"
        found.append(_wrong(path, policy, "ExitCode, with exitCodeRules"))
    return found


def _wrong(path: str, value: Any, expected: str) -> Wrong:
    return Wrong(path=path, value=shown(value), expected=expected[:TEXT_CHARS_MAX])


def choices(path: Sequence[str]) -> tuple[str, ...]:
    """Return the values that are valid at a path such as ("replicaSpecs", "Worker", ...).

    Empty if the field is not a choice of words. The path leaves out indices of lists.
    """
    info: Any = inspect.type_info(ElasticJobSpec)
    for step in path:
        fields = getattr(_plain(info), "fields", ())
        info = next((field.type for field in fields if field.encode_name == step), None)
    found = _plain(info)
    return tuple(map(str, found.values)) if isinstance(found, inspect.LiteralType) else ()


def _plain(info: Any) -> Any:
    """Return the type without its bounds, its None and its list."""
    while True:
        if isinstance(info, inspect.Metadata):
            info = info.type
        elif isinstance(info, inspect.UnionType):
            info = next(kind for kind in info.types if not isinstance(kind, inspect.NoneType))
        elif isinstance(info, inspect.VarTupleType):
            info = info.item_type
        else:
            return info


_TEMPLATE = "spec.replicaSpecs.Worker.template"
# YAML 1.1 reads N, Y, no, on as booleans: `{name: N}`.
_QUOTE = "a string (in quotes: YAML reads N, Y, no and on as booleans, and 1 as a number)"


def wrong_template(template: dict[str, Any]) -> list[Wrong]:
    """Return what is wrong in a pod template."""
    spec = template.get("spec", msgspec.UNSET)
    if not isinstance(spec, dict):
        return [_wrong_template(f"{_TEMPLATE}.spec", spec, "the spec of a pod")]
    found = list(_wrong_metadata(template.get("metadata")))
    containers = spec.get("containers", msgspec.UNSET)
    if not isinstance(containers, list) or not containers:
        return [
            *found,
            _wrong_template(f"{_TEMPLATE}.spec.containers", containers, "at least one container"),
        ]
    for kind in ("containers", "initContainers"):
        several = spec.get(kind) or []
        if not isinstance(several, list):
            found.append(_wrong_template(f"{_TEMPLATE}.spec.{kind}", several, "a list"))
            continue
        for i, container in enumerate(several):
            found += _wrong_container(f"{_TEMPLATE}.spec.{kind}[{i}]", container)
    return found or list(_wrong_names(containers))


def _wrong_metadata(metadata: Any) -> Iterator[Wrong]:
    if metadata is None:
        return
    if not isinstance(metadata, dict):
        yield _wrong_template(f"{_TEMPLATE}.metadata", metadata, "an object")
        return
    for part in ("labels", "annotations"):
        pairs = metadata.get(part) or {}
        if not isinstance(pairs, dict):
            yield _wrong_template(f"{_TEMPLATE}.metadata.{part}", pairs, "an object")
            continue
        for key, value in pairs.items():
            if not isinstance(value, str):
                yield _wrong_template(f"{_TEMPLATE}.metadata.{part}.{key}", value, _QUOTE)


def _wrong_container(path: str, container: Any) -> Iterator[Wrong]:
    if not isinstance(container, dict):
        yield _wrong_template(path, container, "a container")
        return
    name = container.get("name", msgspec.UNSET)
    if not isinstance(name, str) or not is_label(name):
        yield _wrong_template(
            f"{path}.name", name, "at most 63 characters of a-z, 0-9 and -, in quotes if need be"
        )
    image = container.get("image", msgspec.UNSET)
    if not isinstance(image, str) or not image or image != "".join(image.split()):
        yield _wrong_template(f"{path}.image", image, "the name of an image, without spaces")
    for key in ("command", "args"):
        yield from _wrong_words(f"{path}.{key}", container.get(key))
    yield from _wrong_variables(f"{path}.env", container.get("env"))


def _wrong_words(path: str, words: Any) -> Iterator[Wrong]:
    if words is None:
        return
    if not isinstance(words, list):
        yield _wrong_template(path, words, "a list of strings")
        return
    for i, word in enumerate(words):
        if not isinstance(word, str):
            yield _wrong_template(f"{path}[{i}]", word, _QUOTE)


def _wrong_variables(path: str, variables: Any) -> Iterator[Wrong]:
    if variables is None:
        return
    if not isinstance(variables, list):
        yield _wrong_template(path, variables, "a list of name and value")
        return
    for i, variable in enumerate(variables):
        if not isinstance(variable, dict):
            yield _wrong_template(f"{path}[{i}]", variable, "name and value")
            continue
        name = variable.get("name", msgspec.UNSET)
        if not isinstance(name, str) or not name or "=" in name:
            yield _wrong_template(f"{path}[{i}].name", name, _QUOTE)
        value = variable.get("value")
        if value is not None and not isinstance(value, str):
            yield _wrong_template(f"{path}[{i}].value", value, _QUOTE)


def _wrong_names(containers: list[dict[str, Any]]) -> Iterator[Wrong]:
    names = [container["name"] for container in containers]
    if CONTAINER not in names and len(names) > 1:
        what = f"one of the containers to be named {CONTAINER}: the one that trains"
        yield _wrong_template(f"{_TEMPLATE}.spec.containers[*].name", names, what)
    for i, name in enumerate(names):
        if name in names[:i]:
            yield _wrong_template(
                f"{_TEMPLATE}.spec.containers[{i}].name", name, "a name that no other has"
            )


def _wrong_template(path: str, value: Any, expected: str) -> Wrong:
    return Wrong(path=path, value=shown(value), expected=expected, reason="InvalidTemplate")
