"""A job's spec, read: the original's three spellings made one, defaults filled in, bounds kept.

`read` gives either settings that can be acted upon, or what is wrong, each with the path of the
field, its value and what was expected. Pure, and never raises for what a user wrote.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from elastane.kubernetes.model import ElasticJob
from elastane.kubernetes.model.names import CONTAINER
from elastane.kubernetes.model.spec import REPLICAS_MAX, ElasticJobSpec, RestartPolicy
from elastane.kubernetes.reconcile.template import wrong_template
from elastane.kubernetes.reconcile.validation import (
    Wrong,
    merged_policy,
    wrong_name,
    wrong_relations,
    wrong_types,
)

# Kubernetes' default of a container's terminationMessagePath.
TERMINATION_LOG = "/dev/termination-log"


class JobSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a job's spec says, in a form that cannot contradict itself: min <= desired <= max.

    `asked` is replicas as written, perhaps by the scale subresource, which knows no bounds.
    `container` is the name of the one that trains, `template_of` a digest of the template.
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
        """Where the container that trains leaves its last words, for its kubelet."""
        for container in self.template["spec"]["containers"]:
            if container["name"] == self.container:
                return str(container.get("terminationMessagePath") or TERMINATION_LOG)
        return TERMINATION_LOG

    @property
    def is_suspended(self) -> bool:
        """Whether no pod may run."""
        return bool(self.spec.suspend)


class SettingsReading(msgspec.Struct, frozen=True, kw_only=True):
    """Either settings, or what is wrong."""

    settings: JobSettings | None
    wrong: tuple[Wrong, ...] = ()


def read(job: ElasticJob) -> SettingsReading:
    """Return what the job's spec says."""
    raw, wrong = merged_policy(job.spec)
    wrong = [*wrong_name(job.metadata.name), *wrong, *wrong_types(raw)]
    if not wrong:
        spec = msgspec.convert(raw, ElasticJobSpec)
        template = spec.replica_specs.Worker.template
        wrong = [*wrong_relations(spec, job.metadata.name), *wrong_template(template)]
        if not wrong:
            return SettingsReading(settings=_settled(spec))
    return SettingsReading(settings=None, wrong=tuple(wrong))


def _settled(spec: ElasticJobSpec) -> JobSettings:
    """Fill in bounds that are not given, and hold replicas between them."""
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
