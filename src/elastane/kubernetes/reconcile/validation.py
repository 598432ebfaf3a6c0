"""The faults of a manifest: each has the path of the field, its value, and the expectation.

Types and bounds come from `model.spec`, field by field, so that one mistake does not hide the next.
Rules between fields are here. The API server checks some of it by the schema, but neither between
fields, nor what the scale subresource writes, nor by an older definition. So all of it is checked
again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import inspect

from elastane.kubernetes.model.names import NAME_CHARS_MAX, NAME_PATTERN, pod_name
from elastane.kubernetes.model.spec import ElasticJobSpec, RunPolicy
from elastane.kubernetes.reconcile.bounds import TEXT_CHARS_MAX
from elastane.kubernetes.reconcile.rules import wrong_rules

_NAME = re.compile(NAME_PATTERN)
_SPELLINGS = ("runPolicy", "RunPolicy")
# Asked once: each answer evaluates every annotation anew, in half a millisecond.
_FIELDS = msgspec.structs.fields(ElasticJobSpec)
_POLICY = [field.encode_name for field in msgspec.structs.fields(RunPolicy)]
_PLACE = re.compile(r" - at `\$(.*)`$", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")
_HOST = re.compile(r"(https?://)?(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9.])?)")
# How the original's samples are filled in.
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

    The original documented them there and read them elsewhere. Two places that contradict each
    other are a mistake of the user's: neither is guessed to be the one that is meant.
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
    expected = f"at most {NAME_CHARS_MAX} of a-z, 0-9 and -, beginning with a letter"
    return [_wrong("metadata.name", name, expected)]


def wrong_types(raw: dict[str, Any]) -> list[Wrong]:
    """Return the fields that are not of their type, or out of their bounds."""
    wrong = []
    for field in _FIELDS:
        path = f"spec.{field.encode_name}"
        if field.encode_name not in raw:
            if field.required:
                wrong.append(_wrong(path, msgspec.UNSET, "what the job consists of"))
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
    """Return what fields of right types say against one another."""
    wrong = []
    lowest, highest = spec.min_replicas, spec.max_replicas
    if lowest is not None and highest is not None and lowest > highest:
        wrong.append(_wrong("spec.minReplicas", lowest, f"at most maxReplicas, which is {highest}"))
    if spec.spares and spec.launcher != "elastane":
        wrong.append(_wrong("spec.spares", spec.spares, "0, or launcher elastane"))
    return [*wrong, *_wrong_rendezvous(spec, job), *_wrong_rules(spec)]


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

    Empty where the field is no choice of words. Items of lists are not steps of the path.
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
