"""Collects the objects of each job from the caches for `reconcile`.

Owns the kinds that the operator reads, their caches, the mapping of objects to jobs, and the
refusals of the API server. An unreadable report of another program counts as absent.

Pods on a lost node are fenced and deleted by force. So a node counts as lost only after a fresh
read: nodes and pods have separate watches, and with a delayed watch a new node would look deleted,
or a healthy one unreachable. `Nodes` owns those reads. It fails with the ApiError of a read, and
then nothing is decided. If the operator may not read nodes, all of them count as healthy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from elastane.kubernetes.client import Api, Resource, Selector
from elastane.kubernetes.client.resource import (
    CONFIGMAPS,
    NODES,
    PODS,
    ROLE_BINDINGS,
    SERVICE_ACCOUNTS,
    SERVICES,
)
from elastane.kubernetes.model import (
    ElasticJob,
    Meta,
    Observed,
    OwnedObjects,
    Pod,
    Refusal,
    SeenNode,
    SeenService,
    since_epoch,
)
from elastane.kubernetes.model.names import (
    GROUP,
    KIND,
    LABEL_JOB,
    PLURAL,
    POD_GROUP_APIS,
    POD_SELECTOR,
    TEMPLATE_KIND,
    TEMPLATE_PLURAL,
    VERSION,
    pod_group_kind,
)
from elastane.kubernetes.model.observed import (
    REPORT_KEY,
    JobReport,
    dead_in,
    directive_name,
    report_name,
)
from elastane.kubernetes.model.spec import REPLICAS_MAX
from elastane.kubernetes.operator.bounds import NODE_LOOK_S, NODES_ABSENT_MAX, PROGRESS_S
from elastane.kubernetes.operator.informer import Cache, HasMeta, Index, key_of
from elastane.protocol.unreadable import UNREADABLE

JOBS = Resource(GROUP, VERSION, PLURAL, KIND)
# Read when a job has to be made of one, and not watched.
TEMPLATES = Resource(GROUP, VERSION, TEMPLATE_PLURAL, TEMPLATE_KIND)
OURS = Selector(labels=POD_SELECTOR)
# Most clusters serve none or one of these.
POD_GROUPS = tuple(
    Resource(group=group, version=version, plural="podgroups", kind=pod_group_kind(api))
    for versions in POD_GROUP_APIS.values()
    for api in versions
    for group, version in [api.split("/")]
)
# The kinds of objects that a job owns besides its pods and services.
OWNED = (SERVICE_ACCOUNTS, ROLE_BINDINGS, CONFIGMAPS, *POD_GROUPS)
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


class KubernetesNodeStatus(msgspec.Struct, frozen=True):
    """The part of a node's status that is read: its conditions."""

    conditions: tuple[NodeCondition, ...] = ()


class KubernetesNode(msgspec.Struct, frozen=True):
    """A node."""

    metadata: Meta = Meta()
    status: KubernetesNodeStatus = KubernetesNodeStatus()


def node_state(node: KubernetesNode) -> SeenNode:
    """Return the state of a node, as decisions use it."""
    found = next((one for one in node.status.conditions if one.type == "Ready"), NodeCondition())
    since_s = since_epoch(found.last_transition_time) if found.status == "Unknown" else None
    return SeenNode(name=node.metadata.name, unreachable_since_s=since_s)


_TYPES: dict[str, Any] = {
    JOBS.kind: ElasticJob,
    "Pod": Pod,
    "Service": SeenService,
    "Node": KubernetesNode,
}


def type_of(kind: str) -> Any:
    """Return the type that objects of a kind are read as."""
    return _TYPES.get(kind, OwnedKind)


class Nodes:
    """The nodes of the cluster; `changed(name)` is called for each whose state has changed."""

    def __init__(self, changed: Callable[[str], None]) -> None:
        self._report_change = changed
        self.cache: Cache[KubernetesNode] = Cache(self._changed)
        # For each node that may be lost: when it was last read, and whether it existed.
        self._looked: dict[str, tuple[float, bool]] = {}

    def states(self, names: Iterable[str]) -> dict[str, SeenNode]:
        """Return the states of the nodes; a node is left out while its state is not known."""
        if not self.cache.synced:
            return {}
        found = {}
        for name in names:
            node = self.cache.get(f"/{name}")
            if node is not None:
                found[name] = node_state(node)
            elif self._looked.get(name, (0.0, True))[1] is False:
                found[name] = SeenNode(name=name, exists=False)
        return found

    def in_doubt(self, names: Iterable[str]) -> list[str]:
        """Return the nodes that may be lost and were not read within the last seconds."""
        if not self.cache.synced:
            return []
        return [name for name in names if self._is_in_doubt(name)]

    async def look(self, api: Api, names: Iterable[str]) -> None:
        """Read these nodes from the API server."""
        for name in names:
            node = await api.find(NODES, "", name, KubernetesNode)
            if node is not None:
                self.cache.wrote(node)
            elif (before := self.cache.get(f"/{name}")) is not None:
                self.cache.lacks(f"/{name}", before.metadata.uid)
            self._looked.pop(name, None)
            self._looked[name] = (time.monotonic(), node is not None)
            if len(self._looked) > NODES_ABSENT_MAX:
                del self._looked[next(iter(self._looked))]

    def _is_in_doubt(self, name: str) -> bool:
        node = self.cache.get(f"/{name}")
        if node is not None and node_state(node).unreachable_since_s is None:
            return False
        looked_s, was_there = self._looked.get(name, (float("-inf"), True))
        # A node that existed at its last read and is not cached was deleted since.
        is_new = node is None and was_there
        return is_new or time.monotonic() - looked_s > NODE_LOOK_S

    def _changed(self, before: KubernetesNode | None, after: KubernetesNode | None) -> None:
        if before is not None and after is not None and node_state(before) == node_state(after):
            return  # a kubelet updates its node every few minutes, mostly without a change
        one = after if after is not None else before
        assert one is not None
        self._report_change(one.metadata.name)


# Kept refusals of one job. Older ones are about names that it no longer uses.
REFUSALS_MAX = 64
# Deleted pods of one job that are kept until its directive names them, about 2 KB each. All pods of
# a job may be deleted at once, for instance when it is suspended.
GONE_MAX = REPLICAS_MAX


def job_key(one: HasMeta) -> str:
    """Return `namespace/name` of the job whose label an object carries; "" for none."""
    job = one.metadata.labels.get(LABEL_JOB, "")
    return f"{one.metadata.namespace}/{job}" if job else ""


class ClusterView:
    """The caches, and the objects of one job from all of them.

    `concerns(key)` is called at each change, `later(key, delay_s)` at one that can wait.
    """

    def __init__(
        self, concerns: Callable[[str], None], later: Callable[[str, float], None]
    ) -> None:
        self._concerns = concerns
        self._concerns_later = later
        self._any_config_changed = self._changed("ConfigMap")
        self._refused: dict[str, dict[tuple[str, str, str], Refusal]] = {}
        self._edition: dict[str, int] = {}
        self._gone: dict[str, dict[str, Pod]] = {}
        self.jobs: Cache[ElasticJob] = Cache(self._job_changed)
        self.pods: Cache[Pod] = Cache(self._changed("Pod"), self._pod_deleted)
        self.services: Cache[SeenService] = Cache(self._changed("Service"))
        config_maps: Cache[OwnedKind] = Cache(self._config_changed)
        self.owned: dict[str, Cache[OwnedKind]] = {
            one.kind: config_maps
            if one is CONFIGMAPS
            else Cache(self._changed(one.kind), serving_changed=self._any_job_changed)
            for one in OWNED
        }
        self.nodes = Nodes(self._node_changed)
        self._caches: dict[str, Cache[Any]] = {
            "ElasticJob": self.jobs,
            "Pod": self.pods,
            "Service": self.services,
            "Node": self.nodes.cache,
            **self.owned,
        }
        self._pods_of = self.pods.index(job_key)
        self._pods_on = self.pods.index(lambda pod: pod.spec.node_name)
        self._services_of = self.services.index(job_key)
        self._owned_of: dict[str, Index[OwnedKind]] = {
            kind: cache.index(job_key) for kind, cache in self.owned.items()
        }

    def cache_of(self, kind: str) -> Cache[Any]:
        """Return the cache of a kind."""
        return self._caches[kind]

    def observed(self, key: str) -> Observed | None:
        """Return the objects of a job; None if there is no such job."""
        job = self.jobs.get(key)
        if job is None:
            return None
        pods = self._pods_of[key]
        return Observed(
            job=job,
            pods=pods,
            gone=self._gone_of(job),
            services=self._services_of[key],
            objects=self._objects(key),
            nodes=self.nodes.states(_nodes_of(pods)),
            report=self._report(job),
            refused=tuple(self._refused.get(key, {}).values()),
            unserved={kind: cache.unserved for kind, cache in self.owned.items() if cache.unserved},
        )

    def nodes_in_doubt(self, key: str) -> list[str]:
        """Return the nodes of a job's pods that must be read again before a decision."""
        return self.nodes.in_doubt(_nodes_of(self._pods_of[key]))

    def refuse(self, key: str, refusal: Refusal) -> None:
        """Keep the refusal of a write for the next decision."""
        of_job = self._refused.setdefault(key, {})
        name = (refusal.verb, refusal.kind, refusal.name)
        before = of_job.pop(name, None)
        if before is not None and before.code == refusal.code:
            refusal = msgspec.structs.replace(refusal, times=before.times + 1)
        of_job[name] = refusal
        if len(of_job) > REFUSALS_MAX:
            del of_job[next(iter(of_job))]
        if refusal.verb == "create":
            # It ends no decision by an exception, and no event of the cluster follows it.
            self._concerns(key)

    def granted(self, key: str, verb: str, kind: str, name: str) -> None:
        """Drop the kept refusal of a write that succeeded."""
        self._refused.get(key, {}).pop((verb, kind, name), None)

    def forget(self, key: str) -> None:
        """Drop all that was kept of a deleted job."""
        self._refused.pop(key, None)
        self._edition.pop(key, None)
        self._gone.pop(key, None)

    def keys(self) -> list[str]:
        """Return the keys of all jobs."""
        return [key_of(job.metadata) for job in self.jobs]

    def _any_job_changed(self) -> None:
        for key in self.keys():
            self._concerns(key)

    def _objects(self, key: str) -> tuple[OwnedObjects, ...]:
        return tuple(
            OwnedObjects(kind=kind, metadata=one.metadata, data=one.data or {})
            for kind, index in self._owned_of.items()
            for one in index[key]
        )

    def _report(self, job: ElasticJob) -> JobReport | None:
        meta = job.metadata
        found = self.owned["ConfigMap"].get(f"{meta.namespace}/{report_name(meta.name)}")
        if found is None or found.metadata.controller != meta.uid:
            return None
        return _read_report(found)

    def _pod_deleted(self, pod: Pod) -> None:
        """Keep the last state of a deleted pod: only the last event of its watch has it."""
        key = job_key(pod)
        if key not in self._edition:
            return  # No job of ours, or none any more.
        gone = self._gone.setdefault(key, {})
        gone[pod.metadata.uid] = pod
        if len(gone) > GONE_MAX:
            del gone[next(iter(gone))]
        self._concerns(key)

    def _gone_of(self, job: ElasticJob) -> tuple[Pod, ...]:
        """Return the deleted pods of a job, without those that its directive names by now."""
        meta = job.metadata
        gone = self._gone.get(key_of(meta), {})
        directive = self.owned["ConfigMap"].get(f"{meta.namespace}/{directive_name(meta.name)}")
        for uid in dead_in(directive.data or {}) if directive is not None and gone else ():
            gone.pop(uid, None)
        return tuple(gone.values())

    def _job_changed(self, before: ElasticJob | None, after: ElasticJob | None) -> None:
        job = after if after is not None else before
        assert job is not None
        key = key_of(job.metadata)
        edition = job.metadata.edition if after is not None else -1
        if self._edition.get(key) != edition:
            # The API server may accept the edited spec, so refusals are dropped.
            self._refused.pop(key, None)
            self._edition[key] = edition
        self._concerns(key)

    def _changed(self, kind: str) -> Callable[[Any, Any], None]:
        def changed(before: HasMeta | None, after: HasMeta | None) -> None:
            if after is not None:
                self._appeared(kind, after.metadata, job_key(after))
            for one in (before, after):
                if one is not None and (key := job_key(one)):
                    self._concerns(key)

        return changed

    def _config_changed(self, before: OwnedKind | None, after: OwnedKind | None) -> None:
        """Delay reports that only show progress, since a thousand jobs send many."""
        if before is not None and after is not None and (key := job_key(after)):
            reports = _read_report(before), _read_report(after)
            if _is_progress(*reports):
                self._concerns_later(key, PROGRESS_S)
                return
        self._any_config_changed(before, after)

    def _appeared(self, kind: str, meta: Meta, key: str) -> None:
        refused = self._refused.get(key)
        job = self.jobs.get(key) if refused else None
        if refused and job is not None and meta.controller == job.metadata.uid:
            refused.pop(("create", kind, meta.name), None)

    def _node_changed(self, name: str) -> None:
        for pod in self._pods_on[name]:
            if key := job_key(pod):
                self._concerns(key)


def _nodes_of(pods: tuple[Pod, ...]) -> set[str]:
    return {pod.spec.node_name for pod in pods if pod.spec.node_name}


def _read_report(one: OwnedKind) -> JobReport | None:
    try:
        return msgspec.json.decode((one.data or {}).get(REPORT_KEY, ""), type=JobReport)
    except UNREADABLE:
        return None


def _is_progress(before: JobReport | None, after: JobReport | None) -> bool:
    """Whether a report differs only in its step."""
    if before is None or after is None:
        return False
    same = ("round", "world_size", "incident", "incident_at_s", "restarts")
    return all(getattr(before, name) == getattr(after, name) for name in same)
