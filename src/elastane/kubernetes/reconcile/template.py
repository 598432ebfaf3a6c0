"""Mistakes in a pod template that the API server would refuse at each creation.

The schema of the definition lets a template through as it is, so they show only when the first pod
is made. This module checks the common ones; any other comes back as a refusal of the server, and
ends in the same condition.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from elastane.kubernetes.model.names import CONTAINER
from elastane.kubernetes.reconcile.validation import Wrong, shown

_TEMPLATE = "spec.replicaSpecs.Worker.template"
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
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
    if not isinstance(name, str) or not _LABEL.fullmatch(name):
        yield _wrong_template(
            f"{path}.name", name, "at most 63 of a-z, 0-9 and -, in quotes if need be"
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
