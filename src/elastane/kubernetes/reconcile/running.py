"""The three ways of a job that has not ended: it runs, it is suspended, it finishes."""

from __future__ import annotations

from elastane.kubernetes.model import DeletePod, since_epoch
from elastane.kubernetes.reconcile.bounds import HELD_S, TEXT_CHARS_MAX
from elastane.kubernetes.reconcile.context import DecisionContext
from elastane.kubernetes.reconcile.ledger import avoided, unfit
from elastane.kubernetes.reconcile.objects import keep_directive, keep_objects
from elastane.kubernetes.reconcile.pods import Judged
from elastane.kubernetes.reconcile.replacing import adopt, keep_pods, update
from elastane.kubernetes.reconcile.waiting import refused_template


def live(context: DecisionContext) -> None:
    """Keep the objects and pods of a job that runs."""
    _tell_bounds(context)
    _clear_others(context)
    adopt(context)
    may_create = keep_objects(context) and refused_template(context) is None
    if may_create:
        update(context)
    keep_pods(context, may_create=may_create)
    _tell_hindrances(context)
    _tell_nodes(context)


def pause(context: DecisionContext) -> None:
    """Drain the pods of a job that is suspended; counters stay, and its time does not run."""
    keep_directive(context)
    for pod in context.pods:
        if not pod.is_over and pod.uid not in context.fenced:
            context.dismiss(pod, "spec.suspend is true")


def finish(context: DecisionContext) -> None:
    """Let pods of a job that ended well finish; those that never began have nothing to do."""
    keep_directive(context)
    for pod in context.own:
        if pod.lives and not pod.has_started:
            context.dismiss(pod, "the job has ended well without it")


def _clear_others(context: DecisionContext) -> None:
    """Delete what a job of the same name left behind; its garbage collection may take a minute."""
    for pod in context.others:
        if pod.whose == "leftover" and not pod.is_leaving:
            text = "it belongs to a job of this name that is gone"
            context.act(DeletePod(name=pod.name, uid=pod.uid, grace_s=None, why=text))


def _tell_bounds(context: DecisionContext) -> None:
    settings = context.settings
    asked, used = settings.asked, settings.desired
    if asked != used:
        text = f"spec.replicaSpecs.Worker.replicas = {asked} is outside of {settings.min} to"
        text += f" {settings.max}: {used} are used"
        text += "; spec.suspend stops a job" if asked == 0 else ""
        context.tell("Warning", "ReplicasOutOfRange", text, count=1)
    if context.before.is_("Suspended"):
        context.tell("Normal", "ElasticJobResumed", "spec.suspend is false: pods are made again")
    was = context.before.desired_replicas
    if was and was != used:
        context.tell("Normal", "Scaled", f"from {was} to {used} pods")
    written = settings.template["spec"].get("restartPolicy")
    wanted = "Never" if settings.policy == "ExitCode" else settings.policy
    if written not in (None, wanted):
        text = f"restartPolicy {written} of the template is not used: {settings.policy} is"
        context.tell("Warning", "SettedPodTemplateRestartPolicy", text, count=1)


def _tell_hindrances(context: DecisionContext) -> None:
    """Say why pods do not run; the same reason of several pods is said once, with their number."""
    first: dict[tuple[str, str], list[str]] = {}
    slots = set(context.slots)
    for pod in context.own:
        if pod.hindrance is not None and not pod.is_leaving and pod.index in slots:
            key = (pod.hindrance.reason, pod.hindrance.message)
            first.setdefault(key, []).append(pod.name)
        elif pod.lives and pod.is_leaving and pod.index in slots and _is_overdue(context, pod):
            text = f"on {pod.node}, should have ended by {pod.meta.deletion_timestamp}"
            first.setdefault(("Terminating", text), []).append(pod.name)
    for (reason, message), names in first.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        text = f"{names[0]}{more}: {reason}" + (f": {message}" if message else "")
        context.wants.append((reason, text[:TEXT_CHARS_MAX]))
        context.tell("Warning", reason, text[:TEXT_CHARS_MAX], count=1)


def _is_overdue(context: DecisionContext, pod: Judged) -> bool:
    due_s = since_epoch(pod.meta.deletion_timestamp)
    if due_s is None:
        return False
    context.wake(due_s + HELD_S)
    return context.now_s >= due_s + HELD_S


def _tell_nodes(context: DecisionContext) -> None:
    known = {one.name: one for one in context.before.nodes}
    rule = context.settings.spec.node_quarantine
    for name in avoided(context):
        was = known.get(name)
        limit = rule.failures if rule else 0
        if was is None or not (was.unfit or was.failures >= limit):
            text = f"node {name} is avoided: {context.nodes[name].failures} failures of pods on it"
            context.tell("Warning", "NodeQuarantined", text)
    for name in unfit(context):
        was = known.get(name)
        if was is None or not was.unfit:
            context.tell("Warning", "NodeUnfit", f"an agent said that node {name} cannot take part")
