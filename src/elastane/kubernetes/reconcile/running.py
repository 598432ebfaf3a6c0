"""Keeps the pods of a job that has not ended: it runs, it is suspended, or it finishes.

For a job that runs, pods are created and deleted until each wanted index has one live pod and no
other index has any. The wanted indices are 0 to replicas - 1, as in the original TorchElastic
controller, so the highest indices leave first. With PendingFirst, pods that do not run yet leave
before running ones, so the indices may have gaps.

An index never has two live pods that are not fenced. A replacement waits until the pod before it is
deleted, or fenced because its node is lost, or until its processes have ended.
"""

from __future__ import annotations

from elastane.kubernetes.model import CreatePod, DeletePod, PatchObject, since_epoch
from elastane.kubernetes.model.names import pod_name
from elastane.kubernetes.reconcile.bounds import HELD_S, TEXT_CHARS_MAX
from elastane.kubernetes.reconcile.context import (
    DecisionContext,
    refused_template,
    waits_for_refusal,
)
from elastane.kubernetes.reconcile.ledger import avoided, pause_ends_s, unfit
from elastane.kubernetes.reconcile.manifest import (
    affinity,
    backend,
    needs_access,
    owner,
    pod_manifest,
)
from elastane.kubernetes.reconcile.node_loss import is_fenced_for_all
from elastane.kubernetes.reconcile.objects import drop_group, keep_directive, keep_objects
from elastane.kubernetes.reconcile.pod_groups import group_of, put_into
from elastane.kubernetes.reconcile.pods import Judged


def live(context: DecisionContext) -> None:
    """Keep the objects and pods of a job that runs."""
    _report_bounds(context)
    _clear_others(context)
    adopt(context)
    may_create = keep_objects(context) and refused_template(context) is None
    if may_create:
        update(context)
    keep_pods(context, may_create=may_create)
    _report_hindrances(context)
    _report_nodes(context)


def pause(context: DecisionContext) -> None:
    """Drain the pods of a suspended job; its counters stay, and its deadline is stopped."""
    keep_directive(context)
    for pod in context.pods:
        if not pod.is_over and pod.uid not in context.fenced:
            context.dismiss(pod, "spec.suspend is true")
    drop_group(context)


def finish(context: DecisionContext) -> None:
    """Let the pods of a job that ended well finish; delete those that never started."""
    keep_directive(context)
    for pod in context.own:
        if pod.lives and not pod.has_started:
            context.dismiss(pod, "the job has ended well before this pod started")


def _clear_others(context: DecisionContext) -> None:
    """Delete pods of an earlier job of this name; the garbage collector may take a minute."""
    for pod in context.others:
        if pod.ownership == "leftover" and not pod.is_leaving:
            text = "it belongs to a deleted job of this name"
            context.act(DeletePod(name=pod.name, uid=pod.uid, grace_s=None, why=text))


def _report_bounds(context: DecisionContext) -> None:
    settings = context.settings
    asked, used = settings.asked, settings.desired
    if asked != used:
        text = f"spec.replicaSpecs.Worker.replicas = {asked} is outside of {settings.min} to"
        text += f" {settings.max}: {used} are used"
        text += "; spec.suspend stops a job" if asked == 0 else ""
        context.report("Warning", "ReplicasOutOfRange", text, count=1)
    if context.before.is_("Suspended"):
        context.report("Normal", "ElasticJobResumed", "spec.suspend is false: new pods are created")
    was = context.before.desired_replicas
    if was and was != used:
        context.report("Normal", "Scaled", f"from {was} to {used} pods")
    written = settings.template["spec"].get("restartPolicy")
    wanted = "Never" if settings.policy == "ExitCode" else settings.policy
    if written not in (None, wanted):
        text = f"restartPolicy {written} of the template is ignored; the job's is {settings.policy}"
        context.report("Warning", "SettedPodTemplateRestartPolicy", text, count=1)


def _report_hindrances(context: DecisionContext) -> None:
    """Report why pods do not run: each reason once, with the number of its pods."""
    first: dict[tuple[str, str], list[str]] = {}
    slots = set(context.slots)
    for pod in context.own:
        if pod.hindrance is not None and not pod.is_leaving and pod.index in slots:
            key = (pod.hindrance.reason, pod.hindrance.message)
            first.setdefault(key, []).append(pod.name)
        elif pod.lives and pod.is_leaving and pod.index in slots and _is_held(context, pod):
            text = f"on {pod.node}, should have ended by {pod.meta.deletion_timestamp}"
            first.setdefault(("Terminating", text), []).append(pod.name)
    for (reason, message), names in first.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        text = f"{names[0]}{more}: {reason}" + (f": {message}" if message else "")
        context.shortfalls.append((reason, text[:TEXT_CHARS_MAX]))
        context.report("Warning", reason, text[:TEXT_CHARS_MAX], count=1)


def _report_nodes(context: DecisionContext) -> None:
    known = {one.name: one for one in context.before.nodes}
    rule = context.settings.spec.node_quarantine
    for name in avoided(context):
        was = known.get(name)
        limit = rule.failures if rule else 0
        if was is None or not (was.unfit or was.failures >= limit):
            text = f"node {name} is avoided: {context.nodes[name].failures} failures of pods on it"
            context.report("Warning", "NodeQuarantined", text)
    for name in unfit(context):
        was = known.get(name)
        if was is None or not was.unfit:
            context.report(
                "Warning", "NodeUnfit", f"an agent said that node {name} cannot take part"
            )


def keep_pods(context: DecisionContext, *, may_create: bool) -> None:
    """Create and delete pods until they match the wanted indices."""
    slots = set(context.slots)
    by_index: dict[int, list[Judged]] = {}
    for pod in context.pods:
        by_index.setdefault(pod.index, []).append(pod)
        if pod.index not in slots and pod.uid not in context.fenced:
            _scale_away(context, pod)
    for index in context.slots:
        there = by_index.get(index, [])
        if _needs_one(context, there) and may_create:
            _create(context, index, there)


def update(context: DecisionContext) -> None:
    """Replace pods of an older template: those that never started, others under RollingUpdate.

    A pod without a started container holds no state, and may be unable to start. Under
    RollingUpdate the others are drained one at a time. The next one is drained once all wanted pods
    run and the job has admitted the last one, so that the training state always has holders.
    """
    slots = set(context.slots)
    staying = [p for p in context.own if p.index in slots and p.lives and not p.is_leaving]
    outdated = [pod for pod in staying if pod.is_outdated]
    for pod in outdated:
        if not pod.has_begun:
            context.dismiss(pod, "the template was edited before it started")
            context.report(
                "Normal", "Outdated", f"{pod.name} never started: replaced by a newer one"
            )
    rolls = context.settings.spec.update_strategy == "RollingUpdate"
    if not (rolls and outdated and _is_complete(context, staying)):
        return
    last = outdated[-1]
    context.dismiss(last, "the template was edited, updateStrategy RollingUpdate")
    text = f"{last.name} drains and is replaced by a newer one; {len(outdated) - 1} are left"
    context.report("Normal", "RollingUpdate", text)


def _is_complete(context: DecisionContext, staying: list[Judged]) -> bool:
    """Whether all wanted pods run and are in the job's world, and no pod is being deleted."""
    settled = all(pod.state == "running" for pod in staying) and len(staying) == len(context.slots)
    if not settled or any(pod.lives and pod.is_leaving for pod in context.own):
        return False
    if backend(context.job, context.settings) != "kubernetes":
        return True  # Other backends send no report.
    report = context.seen.report
    members = report.members if report is not None else ()
    inside = {one.pod for one in members if one.state == "joined" and one.rank >= 0}
    return inside.issuperset(pod.uid for pod in staying)


def adopt(context: DecisionContext) -> None:
    """Adopt pods with the job's labels and without a controller."""
    for pod in context.pods:
        if pod.ownership == "orphan" and not pod.is_leaving:
            meta = {"uid": pod.uid, "ownerReferences": [owner(context.job)]}
            context.act(PatchObject(kind="Pod", name=pod.name, patch={"metadata": meta}))
            context.report("Normal", "Adopted", f"{pod.name} belongs to the job now")


def _scale_away(context: DecisionContext, pod: Judged) -> None:
    if pod.lives and not pod.is_leaving:
        text = f"{pod.name} leaves: {context.settings.desired} pods are wanted"
        context.report("Normal", "ScaledDown", text)
    # A pod that is to be deleted may just have succeeded; its success is counted first.
    if pod.state != "succeeded" or pod.uid in context.counted:
        context.dismiss(pod, f"{context.settings.desired} pods are wanted")


def _needs_one(context: DecisionContext, there: list[Judged]) -> bool:
    """Whether to create a pod of the index of `there`; delete surplus and ended pods of it."""
    own = [pod for pod in there if pod.uid not in context.fenced]
    alive = [pod for pod in own if pod.lives]
    staying = sorted(
        (pod for pod in alive if not pod.is_leaving),
        key=lambda pod: (pod.state != "running", pod.meta.creation_timestamp or "", pod.name),
    )
    for pod in staying[1:]:
        context.dismiss(pod, f"{staying[0].name} has the same index")
    if alive:
        return False
    unfenced = [
        p for p in there if p.uid in context.fenced and not is_fenced_for_all(context, p.uid)
    ]
    for pod in own:
        if pod.state in ("failed", "succeeded") and pod.uid in context.counted:
            context.dismiss(pod, "it has ended, and is replaced")
    return not unfenced


def _create(context: DecisionContext, index: int, there: list[Judged]) -> None:
    name = _free_name(context, index, there)
    pause_s = pause_ends_s(context, index)
    if pause_s is not None:
        early = context.early_ends[index]
        context.wake(pause_s)
        text = f"{pod_name(context.job.name, index)} ended early {early.quick} times in a row"
        again = f"created again at {early.not_before}"
        context.shortfalls.append(("BackOff", f"{text} ({early.why}): {again}"))
        context.report("Warning", "BackOff", text, count=1)
    elif name is not None and not waits_for_refusal(context, "Pod", name):
        manifest = pod_manifest(
            context.job,
            context.settings,
            index,
            name=name,
            avoid=affinity(avoided(context), unfit(context)),
            account=context.job.name if needs_access(context.job, context.settings) else "",
        )
        if group := group_of(context):
            put_into(manifest, group, context.job.name)
        context.act(CreatePod(name=name, index=index, manifest=manifest))


def _free_name(context: DecisionContext, index: int, there: list[Judged]) -> str | None:
    """Return the name of the next pod of an index; None if the pod has to wait for its name.

    A fenced pod keeps its name until its node comes back, a held one until its finalizer is
    removed. The job does not wait for these: the next pod takes another name.
    """
    taken = {pod.name for pod in context.others}
    name = pod_name(context.job.name, index)
    if name in taken:
        text = f"pod {name} exists and does not belong to the job; next: delete or rename it"
        context.shortfalls.append(("NameTaken", text))
        context.report("Warning", "NameTaken", text, count=1)
        return None
    for pod in there:
        if pod.uid not in context.fenced and not _is_held(context, pod):
            return None
    taken |= {pod.name for pod in there}
    count = 0
    while pod_name(context.job.name, index, count) in taken:
        count += 1
    return pod_name(context.job.name, index, count)


def _is_held(context: DecisionContext, pod: Judged) -> bool:
    """Whether a pod is deleted and should have ended long ago; otherwise look again then."""
    due_s = since_epoch(pod.meta.deletion_timestamp)
    if due_s is None:
        return False
    context.wake(due_s + HELD_S)
    return context.now_s >= due_s + HELD_S


def wanted_slots(context: DecisionContext) -> list[int]:
    """Return the wanted indices, in ascending order."""
    settings = context.settings
    if settings.spec.scale_down_policy == "HighestIndex":
        return list(range(settings.desired))
    places: dict[int, int] = dict.fromkeys(
        (index for index, early in context.early_ends.items() if early.waiting), 1
    )
    for pod in context.own:
        if not pod.is_leaving and pod.ownership in ("ours", "orphan"):
            place = 1 if pod.state == "pending" else 0
            places[pod.index] = min(place, places.get(pod.index, 1))
    if backend(context.job, settings) == "c10d" and 0 in places:
        places[0] = -1  # Index 0 serves the store, without which the others lose their world.
    kept = sorted(places, key=lambda index: (places[index], index))[: settings.desired]
    free = 0
    while len(kept) < settings.desired:
        if free not in kept:
            kept.append(free)
        free += 1
    return sorted(kept)
