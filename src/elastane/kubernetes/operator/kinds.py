"""The kinds that the operator looks at, and what of each it reads beyond `model`'s types."""

from __future__ import annotations

from typing import Any

import msgspec

from elastane.kubernetes.client import Resource, Selector
from elastane.kubernetes.client.resource import (
    CONFIGMAPS,
    NODES,
    PODS,
    ROLE_BINDINGS,
    SERVICE_ACCOUNTS,
    SERVICES,
)
from elastane.kubernetes.model import ElasticJob, Meta, Pod, SeenNode, SeenService, since_epoch
from elastane.kubernetes.model.names import GROUP, KIND, PLURAL, POD_SELECTOR, VERSION

JOBS = Resource(GROUP, VERSION, PLURAL, KIND)
OURS = Selector(labels=POD_SELECTOR)
# What a job owns beside its pods and services.
OWNED = (SERVICE_ACCOUNTS, ROLE_BINDINGS, CONFIGMAPS)
RESOURCES = (JOBS, PODS, SERVICES, *OWNED, NODES)
BY_KIND = {one.kind: one for one in RESOURCES}


class OwnedKind(msgspec.Struct, frozen=True):
    """An object of a kind of OWNED; `data` is a ConfigMap's."""

    metadata: Meta = Meta()
    data: dict[str, str] | None = None


class NodeCondition(msgspec.Struct, frozen=True, rename="camel"):
    """One of a node's conditions."""

    type: str = ""
    status: str = ""
    last_transition_time: str | None = None


class KubernetesNodeSpec(msgspec.Struct, frozen=True):
    """Of a node's spec: whether it takes new pods."""

    unschedulable: bool = False


class KubernetesNodeStatus(msgspec.Struct, frozen=True):
    """Of a node's status: how it is."""

    conditions: tuple[NodeCondition, ...] = ()


class KubernetesNode(msgspec.Struct, frozen=True):
    """A node."""

    metadata: Meta = Meta()
    spec: KubernetesNodeSpec = KubernetesNodeSpec()
    status: KubernetesNodeStatus = KubernetesNodeStatus()


def node_state(node: KubernetesNode) -> SeenNode:
    """Return what a decision is to know of a node."""
    found = next((one for one in node.status.conditions if one.type == "Ready"), NodeCondition())
    since_s = since_epoch(found.last_transition_time) if found.status == "Unknown" else None
    return SeenNode(
        name=node.metadata.name,
        # A node that has just registered has no condition yet, and nothing against it.
        ready=found.status in ("True", ""),
        unreachable_since_s=since_s,
        cordoned=node.spec.unschedulable,
    )


_TYPES: dict[str, Any] = {
    JOBS.kind: ElasticJob,
    "Pod": Pod,
    "Service": SeenService,
    "Node": KubernetesNode,
}


def type_of(kind: str) -> Any:
    """Return the type that objects of a kind are read as."""
    return _TYPES.get(kind, OwnedKind)
