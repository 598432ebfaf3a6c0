"""Operators over a fake API server, and a decision simple enough to know its end by heart."""

from __future__ import annotations

import asyncio
import contextlib

from kube_fake import FakeKube

from elastane.kubernetes.client import ClusterAccess
from elastane.kubernetes.client.identity import ClientProof, FixedIdentity
from elastane.kubernetes.model import (
    CreateObject,
    CreatePod,
    Decision,
    DeletePod,
    PatchObject,
    ReportedEvent,
    read_status,
)
from elastane.kubernetes.model.names import API_VERSION, GROUP, KIND, job_labels, pod_labels
from elastane.kubernetes.operator.running import Operator, OperatorSettings

GROUP_OF_JOBS = GROUP
# A lease that runs out within a test, and not sooner on a machine that is busy; the holder stops
# after two thirds of it.
SHORT_LEASE_S = 4.5


def job(name="x", replicas=2, **spec):
    template = {"spec": {"containers": [{"name": "elasticjob-worker", "image": "train"}]}}
    worker = {"replicas": replicas, "restartPolicy": "ExitCode", "template": template}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name},
        "spec": {"replicaSpecs": {"Worker": worker}, **spec},
    }


def access(kube, token="one"):
    proof = ClientProof(authorization=f"Bearer {token}")
    return ClusterAccess(kube.url, FixedIdentity(proof), namespace="default", where="the fake")


def owner(meta):
    return [{"uid": meta.uid, "kind": KIND, "name": meta.name, "controller": True}]


def _manifest(meta, kind, name, labels, **rest):
    head = {"name": name, "labels": labels, "ownerReferences": owner(meta)}
    return {"apiVersion": "v1", "kind": kind, "metadata": head, **rest}


def decide(seen, now_s):
    """A service, a ConfigMap that says how many, and pods 0..n-1; a failed one is counted once.

    The same shape as the real one: counted in the status before it is deleted, made again after.
    """
    meta, name = seen.job.metadata, seen.job.metadata.name
    status = read_status(seen.job.status)
    replicas = seen.job.spec["replicaSpecs"]["Worker"]["replicas"]
    actions, told = [], []
    if not seen.services:
        body = _manifest(meta, "Service", name, job_labels(name), spec={"clusterIP": "None"})
        actions.append(CreateObject(kind="Service", name=name, manifest=body))
    wish = {"replicas": str(replicas)}
    directive = [one for one in seen.objects if one.kind == "ConfigMap"]
    if not directive:
        body = _manifest(meta, "ConfigMap", f"{name}-directive", job_labels(name), data=wish)
        actions.append(CreateObject(kind="ConfigMap", name=f"{name}-directive", manifest=body))
    elif directive[0].data != wish:
        patch = {"metadata": {"uid": directive[0].metadata.uid}, "data": wish}
        actions.append(PatchObject(kind="ConfigMap", name=f"{name}-directive", patch=patch))
    refused = {(one.kind, one.name) for one in seen.refused}
    there = {pod.metadata.name: pod for pod in seen.pods}
    failed = [pod for pod in seen.pods if pod.status.phase == "Failed"]
    counted = [uid for uid in status.counted if any(p.metadata.uid == uid for p in seen.pods)]
    fresh = [pod for pod in failed if pod.metadata.uid not in counted]
    told += [ReportedEvent(type="Warning", reason="Failed", message=p.metadata.name) for p in fresh]
    for pod in failed:
        actions.append(_delete(pod, "failed"))
    for index in range(replicas):
        pod = f"{name}-worker-{index}"
        taken = pod in there and there[pod].metadata.controller != meta.uid
        pod = f"{pod}-r1" if taken or ("Pod", pod) in refused else pod
        if pod not in there and ("Pod", pod) not in refused:
            body = _manifest(meta, "Pod", pod, pod_labels(name, index), spec={})
            actions.append(CreatePod(name=pod, index=index, manifest=body))
    for pod in seen.pods:
        if int(pod.metadata.labels["replica-index"]) >= replicas and pod not in failed:
            actions.append(_delete(pod, "more than is wanted"))
    phase = "Invalid" if refused else "Running"
    changed = {
        "phase": phase,
        "failures": status.failures + len(fresh),
        "counted": tuple(counted + [pod.metadata.uid for pod in fresh]),
        "replicas": len([p for p in seen.pods if p.metadata.controller == meta.uid]),
    }
    new = type(status)(**{f: getattr(status, f) for f in status.__struct_fields__} | changed)
    return Decision(status=new, actions=tuple(actions), events=tuple(told))


def _delete(pod, why):
    return DeletePod(name=pod.metadata.name, uid=pod.metadata.uid, grace_s=None, why=why)


class Running:
    """An operator that runs in a task; `kill` leaves nothing done, `stop` is SIGTERM."""

    def __init__(self, kube, token, decide=decide, **settings):
        self.kube = kube
        self.token = token
        chosen = {"identity": token, **settings}
        self.operator = Operator(access(kube, token), OperatorSettings(**chosen), decide)
        self.task = asyncio.create_task(self.operator.run())

    async def kill(self):
        """End it as SIGKILL does: none of its requests is carried out from now on."""
        self.kube.banish(self.token)
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await self.task

    async def stop(self):
        self.operator.stop()
        await self.task


@contextlib.asynccontextmanager
async def operator_over(kube, token="one", decide=decide, **settings):
    running = Running(kube, token, decide, **settings)
    try:
        yield running
    finally:
        if not running.task.done():
            await running.kill()


def play(scenario, timeout_s=60.0):
    """Run `scenario(kube)` over a fresh fake."""

    async def whole():
        async with asyncio.timeout(timeout_s), FakeKube() as kube:
            return await scenario(kube)

    return asyncio.run(whole())


def pods(kube, name="x"):
    found = kube.all("pods")
    return sorted(
        p["metadata"]["name"] for p in found if p["metadata"]["labels"]["job-name"] == name
    )


def status(kube, name="x"):
    return kube.one("elasticjobs", name, group=GROUP).get("status", {})


async def settled(kube, name="x", replicas=2):
    """Wait until a job has its pods, and its status says so."""
    wanted = [f"{name}-worker-{index}" for index in range(replicas)]
    await kube.wait(
        lambda: pods(kube, name) == wanted and status(kube, name).get("replicas") == replicas,
        f"{replicas} pods of {name}",
    )
