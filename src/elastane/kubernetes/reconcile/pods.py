"""Classifies one pod: whose it is, whether it lives, how it ended, why it does not run.

Translates the reasons of kubelets, schedulers and eviction into a few classes. It decides nothing
about the job.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from elastane.kubernetes.model import Meta, Pod, since_epoch
from elastane.kubernetes.model.names import KIND, LABEL_INDEX, TEMPLATE_OF, index_in
from elastane.kubernetes.model.observed import ContainerEnd, ContainerStatus
from elastane.kubernetes.reconcile.bounds import TEXT_CHARS_MAX
from elastane.kubernetes.reconcile.settings import JobSettings

# App and OOM are failures of the program. The others come from the cluster and are no failure of
# the job: Evicted (drained or out of resources), Preempted, Shutdown (of the node), Rejected (by a
# kubelet, before any container ran).
Cause = Literal["App", "OOM", "Evicted", "Preempted", "Shutdown", "Rejected"]
Ownership = Literal["ours", "orphan", "leftover", "foreign"]
State = Literal["pending", "running", "succeeded", "failed"]

# status.reason of a failed pod. A kubelet that cannot admit a pod says OutOfcpu, NodeAffinity,
# UnexpectedAdmissionError, ...; then no container has run.
_BY_REASON: dict[str, Cause] = {
    "Evicted": "Evicted",
    "Preempting": "Preempted",
    "Preempted": "Preempted",
    "Shutdown": "Shutdown",
    "NodeShutdown": "Shutdown",
    "Terminated": "Shutdown",
    "NodeLost": "Shutdown",
}
# reason of a pod's condition DisruptionTarget (Kubernetes >= 1.25).
_BY_DISRUPTION: dict[str, Cause] = {
    "PreemptionByScheduler": "Preempted",
    "PreemptionByKubeScheduler": "Preempted",
    "EvictionByEvictionAPI": "Evicted",
    "DeletionByTaintManager": "Evicted",
    "DeletionByPodGC": "Shutdown",
    "TerminationByKubelet": "Shutdown",
}
# A variable refers to a Secret or ConfigMap that does not exist.
_LACKS_CONFIGURATION = "CreateContainerConfigError"
# Waiting reasons of a container that do not end by themselves. An invalid image name never does.
NEVER_STARTS = "InvalidImageName"
CANNOT_START = (
    "ErrImagePull",
    "ImagePullBackOff",
    "ErrImageNeverPull",
    "RegistryUnavailable",
    "ImageInspectError",
    _LACKS_CONFIGURATION,
    "CreateContainerError",
    "RunContainerError",
    NEVER_STARTS,
)
# The kubelet's reason after it was away and does not find the container any more.
_UNSEEN = "ContainerStatusUnknown"
# Reasons while a pod starts, which are not reported.
_COMING_UP = ("", "ContainerCreating", "PodInitializing")


class PodEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a pod failed. `lived_s`: from the start of its container; None if none started."""

    cause: Cause
    code: int | None
    text: str
    lived_s: float | None = None


class Hindrance(msgspec.Struct, frozen=True, kw_only=True):
    """Why a pod does not run, for the conditions and Events of its job."""

    reason: str
    message: str


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """A pod with its classification.

    `ownership`: ours; orphan (our labels, no controller); leftover (of a deleted ElasticJob of the
    same name); foreign. `restarts` counts restarts of the container in place. `is_over`: all
    containers have ended, sidecars too. `by_itself`: the worker container ended, and not by the
    deletion of the pod. `is_dead`: a kubelet reported the end of the worker container, and will not
    restart it.

    `has_started`: the worker container has started. `has_begun`: any container has started, also
    an init container. `is_outdated`: the pod was made from an older template.
    """

    meta: Meta
    ownership: Ownership
    index: int
    state: State
    node: str = ""
    is_over: bool = False
    by_itself: bool = False
    is_dead: bool = False
    ending: PodEnd | None = None
    hindrance: Hindrance | None = None
    restarts: int = 0
    has_started: bool = False
    has_begun: bool = False
    is_outdated: bool = False
    running_since_s: float | None = None
    crash: ContainerEnd | None = None

    @property
    def name(self) -> str:
        """The pod's name."""
        return self.meta.name

    @property
    def uid(self) -> str:
        """The pod's uid."""
        return self.meta.uid

    @property
    def is_leaving(self) -> bool:
        """Whether it is being deleted."""
        return self.meta.is_leaving

    @property
    def lives(self) -> bool:
        """Whether it has, or may soon have, processes of the job."""
        return self.state in ("pending", "running")

    @property
    def lacks_configuration(self) -> bool:
        """Whether its kubelet waits for a Secret or ConfigMap that the pod refers to."""
        return self.hindrance is not None and self.hindrance.reason == _LACKS_CONFIGURATION


def judge_all(
    pods: Iterable[Pod], job: Meta, settings: JobSettings, *, are_gone: bool = False
) -> list[Judged]:
    """Classify those pods that are replicas of the job, and leave out the others."""
    judged = (judge(pod, job, settings, is_gone=are_gone) for pod in pods)
    return [pod for pod in judged if pod is not None]


def judge(pod: Pod, job: Meta, settings: JobSettings, *, is_gone: bool = False) -> Judged | None:
    """Classify a pod; None if it is not a replica of the job.

    `is_gone`: the object was deleted, and this is its last state.
    """
    index = _index(pod.metadata)
    if index is None:
        return None
    worker = _worker(pod.status.container_statuses, settings.container)
    state, ending = _state(pod, worker, settings)
    running = worker.state.running if worker else None
    by_itself = _by_itself(pod.metadata, worker)
    # A kubelet does not restart a container that ended after its pod's deletion was requested.
    has_ended = state in ("succeeded", "failed") or (is_gone and not by_itself)
    return Judged(
        meta=pod.metadata,
        ownership=_ownership(pod.metadata, job),
        index=index,
        state=state,
        node=pod.spec.node_name,
        is_over=pod.status.phase in ("Succeeded", "Failed"),
        by_itself=state in ("succeeded", "failed") and by_itself,
        is_dead=has_ended and _was_seen_to_end(worker),
        ending=ending,
        hindrance=_hindrance(pod, worker) if state in ("pending", "running") else None,
        restarts=worker.restart_count if worker else 0,
        has_started=_has_started(worker),
        has_begun=any(
            _has_started(one)
            for one in (*pod.status.init_container_statuses, *pod.status.container_statuses)
        ),
        is_outdated=pod.metadata.annotations.get(TEMPLATE_OF, settings.template_of)
        != settings.template_of,
        running_since_s=since_epoch(running.started_at) if running else None,
        crash=worker.last_state.terminated if worker else None,
    )


def _index(meta: Meta) -> int | None:
    text = meta.labels.get(LABEL_INDEX, "")
    if text.isascii() and text.isdecimal() and len(text) <= 6:
        return int(text)
    return index_in(meta.name)


def _ownership(meta: Meta, job: Meta) -> Ownership:
    owner = next((one for one in meta.owner_references if one.controller), None)
    if owner is None:
        return "orphan"
    if owner.uid == job.uid:
        return "ours"
    return "leftover" if owner.kind == KIND and owner.name == job.name else "foreign"


def _worker(statuses: tuple[ContainerStatus, ...], name: str) -> ContainerStatus | None:
    for status in statuses:
        if status.name == name:
            return status
    return statuses[0] if len(statuses) == 1 else None


def _has_started(worker: ContainerStatus | None) -> bool:
    if worker is None:
        return False
    states = (worker.state, worker.last_state)
    return any(one.running or one.terminated for one in states) or worker.restart_count > 0


def _state(
    pod: Pod, worker: ContainerStatus | None, settings: JobSettings
) -> tuple[State, PodEnd | None]:
    """Return the state of the pod, by its worker container if that has a state.

    Once the worker container has ended, sidecars neither keep the pod alive nor make it fail.
    """
    phase = pod.status.phase
    ended = worker.state.terminated if worker else None
    if phase == "Succeeded" or _succeeded(pod, worker, settings):
        return "succeeded", None
    if phase == "Failed":
        return "failed", _ending(pod, ended)
    if ended is not None and not settings.restarts_in_place:
        return "failed", _ending(pod, ended)
    is_running = worker is not None and worker.state.running is not None
    return ("running" if is_running else "pending"), None


def _succeeded(pod: Pod, worker: ContainerStatus | None, settings: JobSettings) -> bool:
    """Whether the worker container ended with 0, under Always also before its last restart."""
    if worker is None or _by_cluster(pod) is not None:
        return False
    states = [worker.state.terminated]
    if settings.policy == "Always":
        states.append(worker.last_state.terminated)
    return any(one is not None and one.exit_code == 0 for one in states)


def _by_cluster(pod: Pod) -> Cause | None:
    for condition in pod.status.conditions:
        if condition.type == "DisruptionTarget" and condition.status == "True":
            return _BY_DISRUPTION.get(condition.reason, "Evicted")
    return _BY_REASON.get(pod.status.reason)


def _ending(pod: Pod, ended: ContainerEnd | None) -> PodEnd:
    ended = ended or _failed_before(pod)
    cause = _by_cluster(pod)
    if cause is None and ended is None:
        cause = "App" if pod.status.reason == "DeadlineExceeded" else "Rejected"
    if ended is None:
        said = " ".join(part for part in (pod.status.reason, pod.status.message) if part)
        return PodEnd(cause=cause or "App", code=None, text=_cut(said or "no container ran"))
    if cause is None:
        cause = "OOM" if ended.reason == "OOMKilled" else "App"
    return PodEnd(
        cause=cause,
        code=ended.exit_code,
        text=_end_text(pod, ended, cause),
        lived_s=_lived_s(ended),
    )


def _failed_before(pod: Pod) -> ContainerEnd | None:
    """Return how an init container failed, so that the worker container cannot start."""
    for status in pod.status.init_container_statuses:
        ended = status.state.terminated
        if ended is not None and ended.exit_code != 0:
            return ended
    return None


def _end_text(pod: Pod, ended: ContainerEnd, cause: Cause) -> str:
    if cause == "OOM":
        return f"out of memory: killed by the kernel (exit code {ended.exit_code}, OOMKilled)"
    if cause != "App":
        said = " ".join(part for part in (pod.status.reason, pod.status.message) if part)
        return _cut(f"{cause}, exit code {ended.exit_code}: {said}" if said else cause)
    return ending_text(ended)


def ending_text(ended: ContainerEnd) -> str:
    """Return how a container ended by itself, with the last words of its termination message.

    An agent of elastane writes the cause there. Otherwise the message is the end of the log, whose
    last line may only be a line of dashes.
    """
    text = f"exit code {ended.exit_code}"
    if ended.signal:
        text += f" (signal {ended.signal})"
    lines = [line.strip() for line in ended.message.splitlines()]
    said = next((line for line in reversed(lines) if any(map(str.isalnum, line))), "")
    return _cut(f"{text}: {said}" if said else text)


def _lived_s(ended: ContainerEnd) -> float | None:
    start, end = since_epoch(ended.started_at), since_epoch(ended.finished_at)
    return None if start is None or end is None else max(0.0, end - start)


def _hindrance(pod: Pod, worker: ContainerStatus | None) -> Hindrance | None:
    """Return why a pod does not run, if its kubelet or the scheduler reports a reason."""
    for status in (*pod.status.init_container_statuses, *((worker,) if worker else ())):
        waiting = status.state.waiting
        if waiting is not None and waiting.reason not in _COMING_UP:
            image = f"image {status.image}: " if waiting.reason in CANNOT_START[:5] else ""
            image = image if status.image and status.image not in waiting.message else ""
            return Hindrance(reason=waiting.reason, message=_cut(image + waiting.message))
    for condition in pod.status.conditions:
        if condition.type == "PodScheduled" and condition.status == "False":
            reason = condition.reason or "Unschedulable"
            return Hindrance(reason=reason, message=_cut(condition.message))
    return None


def _by_itself(meta: Meta, worker: ContainerStatus | None) -> bool:
    """Whether a pod that is being deleted had ended before its deletion was requested.

    deletionTimestamp is the time of the request plus the grace.
    """
    if not meta.is_leaving:
        return True
    ended = worker.state.terminated if worker else None
    due, end = (
        since_epoch(meta.deletion_timestamp),
        since_epoch(ended.finished_at if ended else None),
    )
    if due is None or end is None:
        return False
    return end < due - (meta.deletion_grace_period_seconds or 0)


def _was_seen_to_end(worker: ContainerStatus | None) -> bool:
    """Whether the kubelet reported how the container ended; others only set the pod's phase."""
    ended = worker.state.terminated if worker else None
    return ended is not None and ended.reason != _UNSEEN


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= TEXT_CHARS_MAX else text[: TEXT_CHARS_MAX - 3] + "..."
