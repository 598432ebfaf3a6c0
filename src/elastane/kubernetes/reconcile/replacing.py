"""Pods made and deleted, so that each wanted index has one live pod and no other index has any.

An index never has two live pods that are not fenced: a pod that is being deleted is waited for,
unless its node is lost (then it is fenced) or its processes have ended.
"""

from __future__ import annotations

from elastane.kubernetes.model import CreatePod, PatchObject, since_epoch
from elastane.kubernetes.model.names import pod_name
from elastane.kubernetes.reconcile.bounds import HELD_S
from elastane.kubernetes.reconcile.context import Draft
from elastane.kubernetes.reconcile.injection import backend, needs_access
from elastane.kubernetes.reconcile.ledger import avoided, pause_ends_s, unfit
from elastane.kubernetes.reconcile.manifest import affinity, owner, pod_manifest
from elastane.kubernetes.reconcile.node_loss import is_fenced_for_all
from elastane.kubernetes.reconcile.pods import Judged
from elastane.kubernetes.reconcile.waiting import waits_for_refusal


def keep_pods(draft: Draft, *, may_create: bool) -> None:
    """Bring the pods to what is wanted."""
    slots = set(draft.slots)
    by_index: dict[int, list[Judged]] = {}
    for pod in draft.pods:
        by_index.setdefault(pod.index, []).append(pod)
        if pod.index not in slots and pod.uid not in draft.fenced:
            _scale_away(draft, pod)
    for index in draft.slots:
        there = by_index.get(index, [])
        if _needs_one(draft, index, there) and may_create:
            _create(draft, index, there)


def update(draft: Draft) -> None:
    """Replace pods that were made of an older template, as far as that costs nothing or is wanted.

    A pod of which no container ever started has nothing to lose, and may never start. Others are
    drained under RollingUpdate, one at a time: the next one leaves once all wanted pods run and
    the job has taken in the last one, so what workers hold in memory always has holders.
    """
    slots = set(draft.slots)
    staying = [p for p in draft.own if p.index in slots and p.lives and not p.is_leaving]
    outdated = [pod for pod in staying if pod.is_outdated]
    for pod in outdated:
        if not pod.has_begun:
            draft.dismiss(pod, "the template was edited before it started")
            draft.tell("Normal", "Outdated", f"{pod.name} never started: replaced by a newer one")
    rolls = draft.settings.spec.update_strategy == "RollingUpdate"
    if not (rolls and outdated and _is_complete(draft, staying)):
        return
    last = outdated[-1]
    draft.dismiss(last, "the template was edited, updateStrategy RollingUpdate")
    text = f"{last.name} drains and is replaced by a newer one; {len(outdated) - 1} are left"
    draft.tell("Normal", "RollingUpdate", text)


def _is_complete(draft: Draft, staying: list[Judged]) -> bool:
    """Whether all wanted pods run, no other one is still leaving, and the job has them all."""
    settled = all(pod.state == "running" for pod in staying) and len(staying) == len(draft.slots)
    if not settled or any(pod.lives and pod.is_leaving for pod in draft.own):
        return False
    if backend(draft.job, draft.settings) != "kubernetes":
        return True  # Nobody reports.
    report = draft.seen.report
    members = report.members if report is not None else ()
    inside = {one.pod for one in members if one.state == "joined" and one.rank >= 0}
    return inside.issuperset(pod.uid for pod in staying)


def adopt(draft: Draft) -> None:
    """Take over pods that carry the job's labels and that nobody controls."""
    for pod in draft.pods:
        if pod.whose == "orphan" and not pod.is_leaving:
            meta = {"uid": pod.uid, "ownerReferences": [owner(draft.job)]}
            draft.act(PatchObject(kind="Pod", name=pod.name, patch={"metadata": meta}))
            draft.tell("Normal", "Adopted", f"{pod.name} belongs to the job now")


def _scale_away(draft: Draft, pod: Judged) -> None:
    if pod.lives and not pod.is_leaving:
        text = f"{pod.name} leaves: {draft.settings.desired} pods are wanted"
        draft.tell("Normal", "ScaledDown", text)
    # One that was asked to leave may have ended well before that was carried out.
    if pod.state != "succeeded" or pod.uid in draft.counted:
        draft.dismiss(pod, f"{draft.settings.desired} pods are wanted")


def _needs_one(draft: Draft, index: int, there: list[Judged]) -> bool:
    """Whether a pod of the index is to be made; deletes what stands in its place."""
    own = [pod for pod in there if pod.uid not in draft.fenced]
    living = [pod for pod in own if pod.lives]
    staying = sorted(
        (pod for pod in living if not pod.is_leaving),
        key=lambda pod: (pod.state != "running", pod.meta.creation_timestamp or "", pod.name),
    )
    for pod in staying[1:]:
        draft.dismiss(pod, f"{staying[0].name} is of the same index")
    if living:
        return False
    unfenced = [p for p in there if p.uid in draft.fenced and not is_fenced_for_all(draft, p.uid)]
    for pod in own:
        if pod.state in ("failed", "succeeded") and pod.uid in draft.counted:
            draft.dismiss(pod, "it has ended, and is replaced")
    return not unfenced


def _create(draft: Draft, index: int, there: list[Judged]) -> None:
    name = _free_name(draft, index, there)
    pause_s = pause_ends_s(draft, index)
    if pause_s is not None:
        trouble = draft.troubles[index]
        draft.wake(pause_s)
        text = f"{pod_name(draft.job.name, index)} ended early {trouble.quick} times in a row"
        draft.wants.append(
            ("BackOff", f"{text} ({trouble.why}): made again at {trouble.not_before}")
        )
        draft.tell("Warning", "BackOff", text, count=1)
    elif name is not None and not waits_for_refusal(draft, "Pod", name):
        manifest = pod_manifest(
            draft.job,
            draft.settings,
            index,
            name=name,
            avoid=affinity(avoided(draft), unfit(draft)),
            account=draft.job.name if needs_access(draft.job, draft.settings) else "",
        )
        draft.act(CreatePod(name=name, index=index, manifest=manifest))


def _free_name(draft: Draft, index: int, there: list[Judged]) -> str | None:
    """Return the name of the next pod of an index, or None: its name will be free soon.

    A fenced pod keeps its name until its node comes back, a held one for as long as somebody
    holds it: these are not waited for.
    """
    taken = {pod.name for pod in draft.others}
    name = pod_name(draft.job.name, index)
    if name in taken:
        text = f"there is a pod {name} that is not the job's: it has to go"
        draft.wants.append(("NameTaken", text))
        draft.tell("Warning", "NameTaken", text, count=1)
        return None
    for pod in there:
        if pod.uid not in draft.fenced and not _is_held(draft, pod):
            return None
    taken |= {pod.name for pod in there}
    count = 0
    while pod_name(draft.job.name, index, count) in taken:
        count += 1
    return pod_name(draft.job.name, index, count)


def _is_held(draft: Draft, pod: Judged) -> bool:
    due_s = since_epoch(pod.meta.deletion_timestamp)
    if due_s is None:
        return False
    draft.wake(due_s + HELD_S)
    return draft.now_s >= due_s + HELD_S
