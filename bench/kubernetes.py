"""ElasticJobs: 100 pods made on a real API server, 1,000 idle jobs, a coordinator's pod killed.

`created`: from `kubectl apply` until all pods of the job exist, on the control plane of the tests
(etcd and kube-apiserver on this machine).

`resident`: from the operator's start until it has decided on every one of 1,000 jobs with 20,000
pods and is idle; its CPU seconds, imports included, and its memory. The tests' own API server
serves them from memory in its own process; its pods are as large as real ones.

`coordinator`: a job of three pods on three nodes of the tests' control plane, from SIGKILL of the
coordinator's pod until the others complete a step in the next world.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.agent_cost import cpu_seconds, resident_bytes
from bench.harness import Sample
from bench.report import BenchResult, machine, spell, write_json

TESTS = Path(__file__).parents[1] / "tests"
sys.path += [str(TESTS / "shared"), str(TESTS / "kubernetes"), str(TESTS / "process")]

CAP_S = 300.0
JOBS, PODS_OF_A_JOB = 1000, 20
PODS = 100
# The other content of a pod of a real cluster (managed fields, volumes): 2.9 KB.
PADDING = "x" * 1200
VERB = (sys.executable, "-m", "elastane", "kubernetes")
NOW_S = 1_790_000_000.0


def until(condition: Callable[[], Any], what: str, pause_s: float = 0.01) -> None:
    """Wait until the condition holds."""
    deadline_s = time.monotonic() + CAP_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise SystemExit(f"bench: not within {CAP_S:g} s: {what}")
        time.sleep(pause_s)


@contextmanager
def operator(kubeconfig: Path, *words: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start an operator; yield it and the port of its probes."""
    log = kubeconfig.with_name(f"operator-{time.monotonic_ns()}.log")
    with log.open("wb") as out:
        command = [
            *VERB,
            "operator",
            "--kubeconfig",
            str(kubeconfig),
            "--metrics-port",
            "0",
            *words,
        ]
        process = subprocess.Popen(command, stderr=out)
    try:
        until(lambda: "port" in log.read_text(), f"port of the operator\n{log.read_text()}")
        line = next(line for line in log.read_text().splitlines() if "on port" in line)
        yield process, int(line.split()[-1])
    finally:
        process.kill()
        process.wait()


def figures(port: int) -> dict[str, float]:
    """Return the operator's metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    split = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in split}


# A job of 100 pods, on a real API server.


def created(pods: int) -> float:
    """Return the seconds from kubectl apply until the last pod was created."""
    from bed.controlplane import ControlPlane

    with ExitStack() as stack:
        plane = stack.enter_context(ControlPlane())
        crd = subprocess.run([*VERB, "crd"], capture_output=True, text=True, check=True).stdout
        plane.kubectl("apply", "-f", "-", given=crd)
        plane.kubectl("wait", "--for=condition=Established", "crd/elasticjobs.elastic.pytorch.org")
        namespace = plane.namespace()
        _, port = stack.enter_context(operator(plane.admin))
        until(lambda: figures(port)["elastane_operator_leader"] == 1, "the lease")
        words = ("render", "--name", "big", "--image", "none", "--replicas", str(pods), "train.py")
        job = subprocess.run([*VERB, *words], capture_output=True, text=True, check=True).stdout
        at_s = time.monotonic()
        plane.kubectl("apply", "-f", "-", given=job, namespace=namespace)
        name = 'elastane_writes_total{code="2xx",what="CreatePod"}'
        until(lambda: figures(port).get(name) == pods, f"{pods} pods")
        return time.monotonic() - at_s


# A thousand idle jobs.


def settle(objects: Any, name: str, pods: int) -> None:
    """Make a job and all its objects, as the operator would leave them."""
    import msgspec
    from kube_fake_store import Where
    from kube_operators import job

    from elastane.kubernetes.model import (
        CreateObject,
        CreatePod,
        ElasticJob,
        Observed,
        OwnedObjects,
        Pod,
        SeenService,
        as_wire,
    )
    from elastane.kubernetes.operator.view import BY_KIND, OwnedKind
    from elastane.kubernetes.operator.view import JOBS as KIND
    from elastane.kubernetes.reconcile import reconcile

    at = Where(KIND.group, KIND.plural, "default", name)
    body = objects.create(at, job(name, replicas=pods))
    seen: dict[str, list[Any]] = {"Pod": [], "Service": []}
    owned: list[OwnedObjects] = []
    for _ in range(4):
        observed = Observed(
            job=msgspec.convert(body, ElasticJob),
            pods=tuple(msgspec.convert(one, Pod) for one in seen["Pod"]),
            services=tuple(msgspec.convert(one, SeenService) for one in seen["Service"]),
            objects=tuple(owned),
        )
        decision = reconcile(observed, NOW_S)
        status = {"status": as_wire(decision.status)}
        body = objects.patch(Where(at.group, at.plural, "default", name, "status"), status)
        for action in decision.actions:
            if isinstance(action, CreateObject):
                one = create(objects, action.kind, action.manifest)
                if action.kind == "Service":
                    seen["Service"].append(one)
                else:
                    held = msgspec.convert(one, OwnedKind)
                    owned.append(
                        OwnedObjects(kind=action.kind, metadata=held.metadata, data=held.data or {})
                    )
            elif isinstance(action, CreatePod):
                seen["Pod"].append(create(objects, "Pod", running(action.manifest)))
    assert not decision.actions and BY_KIND


def create(objects: Any, kind: str, manifest: dict[str, Any]) -> dict[str, Any]:
    from kube_fake_store import Where

    from elastane.kubernetes.operator.view import BY_KIND

    resource = BY_KIND[kind]
    made: dict[str, Any] = objects.create(
        Where(resource.group, resource.plural, "default"), manifest
    )
    return made


def running(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return a running pod, in the size of a real one."""
    stamp = "2026-09-21T14:13:20Z"
    status = {
        "phase": "Running",
        "podIP": "10.0.0.1",
        "conditions": [
            {"type": kind, "status": "True", "lastTransitionTime": stamp}
            for kind in ("Initialized", "Ready", "ContainersReady", "PodScheduled")
        ],
        "containerStatuses": [
            {
                "name": "elasticjob-worker",
                "image": "registry.example.org/team/train:2026-09",
                "imageID": "sha256:" + 64 * "0",
                "ready": True,
                "restartCount": 0,
                "state": {"running": {"startedAt": stamp}},
            }
        ],
    }
    manifest["metadata"]["managedFields"] = [{"manager": "kubelet", "fieldsV1": {"f": PADDING}}]
    return {**manifest, "spec": {**manifest["spec"], "nodeName": "node-1"}, "status": status}


async def serve(jobs: int, pods: int) -> None:
    """Run the API server with these objects; print its address."""
    from kube_fake import FakeKube

    async with FakeKube() as kube:
        ready = [{"type": "Ready", "status": "True"}]
        node = {"metadata": {"name": "node-1"}, "status": {"conditions": ready}}
        kube.create("nodes", node, namespace="")
        for number in range(jobs):
            settle(kube.objects, f"job-{number}", pods)
        kube.objects.compact()
        print(kube.url, flush=True)
        await asyncio.Event().wait()


def kubeconfig_of(url: str, folder: Path) -> Path:
    made = folder / "kubeconfig"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": "bench"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "c",
    }
    made.write_text(json.dumps(config))
    return made


def resident(jobs: int, pods: int) -> tuple[float, float, float, float]:
    """Return CPU seconds, wall seconds, megabytes and writes of an operator that is idle."""
    command = [sys.executable, "-m", "bench.kubernetes", "--serve", str(jobs), str(pods)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        stack.callback(server.wait)
        stack.callback(server.kill)
        assert server.stdout is not None
        kubeconfig = kubeconfig_of(server.stdout.readline().strip(), folder)
        at_s = time.monotonic()
        process, port = stack.enter_context(operator(kubeconfig))
        done = 'elastane_reconciles_total{result="done"}'

        def settled() -> bool:
            told = figures(port)
            return told.get(done, 0) >= jobs and told["elastane_queue_depth"] == 0

        # Each check costs the operator a count of all pods.
        until(settled, f"{jobs} jobs decided on", pause_s=0.5)
        wall_s = time.monotonic() - at_s
        told = figures(port)
        writes = sum(count for name, count in told.items() if "writes_total" in name)
        megabytes = resident_bytes(process.pid) / 1e6
        return cpu_seconds(process.pid), wall_s, megabytes, writes


# The coordinator's pod, killed.


def coordinator_kills(kills: int) -> list[float]:
    """Return for each kill the seconds to the next step of the others."""
    from bed.controlplane import ControlPlane
    from bed.nodes import Cluster
    from elastic_jobs import ElasticJob, Operator, prepare
    from jobs import newest

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        plane = stack.enter_context(ControlPlane())
        cluster = stack.enter_context(Cluster(plane, apart=True))
        stack.enter_context(Operator(plane, folder / "operator"))
        for name in ("a", "b", "c"):
            cluster.add(name)
        job = ElasticJob(
            prepare(folder / "train"), name="train", plane=plane, space=plane.namespace()
        )
        stack.enter_context(job)
        job.steps = 10**6
        job.apply(replicas=3, low=1, high=3)
        found = []
        for _ in range(kills):
            until(lambda: three_train(job), "three that train")
            before = newest(job.seen())[0]
            holder = job.plane.kubectl(
                *("get", "lease", "-o", "jsonpath={.items[0].spec.holderIdentity}"),
                namespace=job.space,
            )
            at_s = time.time()
            cluster.tell(job.space, holder.rpartition("_")[0], "signal", number=9)
            fence = (before.round, before.attempt)
            until(lambda old=fence: fence_of(newest(job.seen())[0]) > old, "the next world")
            found.append(min(step.time_s for step in newest(job.seen())) - at_s)
        return found


def three_train(job: Any) -> bool:
    """Return whether three pods exist, and each made some steps in the newest world."""
    from jobs import newest

    last = newest(job.seen())
    told = {rank: sum(step.rank == rank for step in last) for rank in range(3)}
    return len(job.pods()) == 3 and min(told.values()) >= 50


def fence_of(step: Any) -> tuple[int, int]:
    return (step.round, step.attempt)


def told(row: str, reach: str, result: BenchResult, what: Callable[[float], str] = spell) -> None:
    """Print a row: the median, and the range of several samples."""
    seconds = result.seconds
    text = what(seconds[len(seconds) // 2])
    if len(seconds) > 1:
        text += f" ({what(seconds[0])} to {what(seconds[-1])})"
    print(f"| {row} | {reach} | {', '.join([text, *result.notes()])} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pods", type=int, default=PODS)
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument("--rows", default="created,resident,coordinator")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--serve", nargs=2, type=int, metavar=("JOBS", "PODS"))
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(*args.serve))
        return 0
    print("| what | reach | measured |\n|---|---|---|")
    about, measured = machine(), {name: BenchResult() for name in args.rows.split(",")}
    if result := measured.get("created"):
        result.samples = [Sample(created(args.pods)) for _ in range(args.reps)]
        told(f"`kubectl apply` to all pods of a {args.pods}-pod job created", "3 s", result)
    if result := measured.get("resident"):
        cpu_s, wall_s, megabytes, writes = resident(args.jobs, PODS_OF_A_JOB)
        note = f"{wall_s:.1f} s in all, {megabytes:.0f} MB, {writes:.0f} writes"
        result.samples = [Sample(cpu_s, note=note)]
        row = f"{args.jobs} jobs, {args.jobs * PODS_OF_A_JOB} pods: start to reconciled"
        told(row, "2 CPU s, 150 MB", result, lambda seconds: f"{seconds:.2f} CPU s")
    if result := measured.get("coordinator"):
        result.samples = [Sample(seconds) for seconds in coordinator_kills(args.kills)]
        told("the pod killed that holds the coordinator, to the others' next step", "", result)
    write_json("kubernetes", about, {name: {"operator": one} for name, one in measured.items()})
    print(f"\n{about}\nload at the end: {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
