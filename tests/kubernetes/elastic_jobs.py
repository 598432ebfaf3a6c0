"""Real training in ElasticJobs: an operator as a process, jobs applied by kubectl, steps on disk.

with Operator(plane, folder) as operator, ElasticJob(folder, plane=plane, space=namespace) as job:
    job.apply(replicas=2, low=1, high=3)
    job.wait_step(world=2)
    job.kubectl("scale", "ej/train", "--replicas=3")
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bed.controlplane import ControlPlane
from bed.parts import Part

sys.path.append(str(Path(__file__).parents[1] / "process"))

from jobs import SCRIPT, Job, Step, newest, until

from elastane.kubernetes.manifests import as_yaml, roles_for_jobs
from elastane.kubernetes.model.names import PLURAL, TEMPLATE_PLURAL

IN_PLACE = Path(__file__).parent / "scripts" / "kube_steps.py"
STOCK = SCRIPT.with_name("torchrun_steps.py")
PRELOAD = "torch,torch.distributed"
ONE_GPU = {"nvidia.com/gpu": "1"}
VERB = [sys.executable, "-m", "elastane", "kubernetes"]
Json = dict[str, Any]
JOBS = "/apis/elastic.pytorch.org/v1alpha1/namespaces/{}/elasticjobs"
ROLES = roles_for_jobs()
_ROLES = "/apis/rbac.authorization.k8s.io/v1/clusterroles"
_DEFINITION = (
    "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/elasticjobs.elastic.pytorch.org"
)
# What each control plane had after the definition and the roles were applied.
_installed: dict[ControlPlane, list[tuple[str, str]]] = {}


class Operator:
    """`elastane kubernetes operator`, which may be killed and started again."""

    def __init__(self, plane: ControlPlane, folder: Path, kubeconfig: Path | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.plane, self.kubeconfig = plane, kubeconfig or plane.admin
        self.part = Part("operator", folder)

    def __enter__(self) -> Self:
        install_definition(self.plane)
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        # Gracefully: else the next one waits for the lease to run out.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.stop()
        self.part.kill()

    def start(self) -> None:
        self.part.start([*VERB, "operator", "--kubeconfig", str(self.kubeconfig)])

    def report(self) -> str:
        return self.part.tail(80)

    def kill(self) -> None:
        """As by the kernel: nothing that it was about to do is done."""
        self.part.kill()

    def stop(self) -> None:
        """As by Kubernetes: SIGTERM, and it ends by itself."""
        self.part.send(signal.SIGTERM)
        assert self.part.process is not None
        self.part.process.wait(90)


def older_server(plane: ControlPlane) -> list[str]:
    """The option of `crd` and `install` for a server before 1.25, which knows no CEL."""
    version = plane.ask("GET", "/version")
    return (
        ["--without-rules"]
        if (version["major"], int(version["minor"].rstrip("+"))) < ("1", 25)
        else []
    )


def install_definition(plane: ControlPlane) -> None:
    """Apply what `elastane kubernetes crd` prints, and wait until it is served.

    And the roles that `install` makes for jobs, one of which their pods are bound to. A test may
    have changed or deleted any of them since they were applied: then they are applied again.
    """
    if plane in _installed and _installed[plane] == _found(plane):
        return
    done = Part("crd", plane.folder)
    done.start([*VERB, "crd", *older_server(plane)])
    assert done.process is not None
    assert done.process.wait(60) == 0, done.tail()
    plane.kubectl("apply", "-f", str(done.log))
    made = [f"crd/{plural}.elastic.pytorch.org" for plural in (PLURAL, TEMPLATE_PLURAL)]
    plane.kubectl("wait", "--for=condition=Established", *made)
    plane.kubectl("apply", "-f", "-", given=as_yaml(ROLES))
    done.log.unlink()
    _installed[plane] = _found(plane)


def _found(plane: ControlPlane) -> list[tuple[str, str]]:
    """Return the uid and the content of the definition and of each role that there is."""
    found = []
    for path in (_DEFINITION, *(f"{_ROLES}/{role['metadata']['name']}" for role in ROLES)):
        with contextlib.suppress(AssertionError):
            made = plane.ask("GET", path)
            content = made["rules"] if path.startswith(_ROLES) else made["spec"]
            found.append((made["metadata"]["uid"], json.dumps(content)))
    return found


@dataclass
class ElasticJob(Job):
    """One job, whose pods write their steps into its folder, which is a volume of theirs."""

    plane: ControlPlane = None  # type: ignore[assignment]
    space: str = ""
    image: str = "elastane"
    script: Path = IN_PLACE

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.kubectl("delete", f"ej/{self.name}", "--ignore-not-found", "--wait=false")

    def kubectl(self, *argv: str, given: str = "") -> str:
        return self.plane.kubectl(*argv, given=given, namespace=self.space)

    # ---- manifests

    def container(self, *before: str, **more: Any) -> Json:
        options = {
            "elastane": ["--log-dir=/job/logs", "--preload", PRELOAD, "--shutdown-timeout=5"],
            "torchrun": ["--max-restarts=9"],
        }
        said = [*options.get(self.image, []), "--nproc-per-node=1", *before]
        env = [
            {"name": "OMP_NUM_THREADS", "value": "1"},
            {"name": "PYTHONUNBUFFERED", "value": "1"},
            {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        ]
        return {
            "name": "elasticjob-worker",
            "image": self.image,
            "args": [*said, str(self.script), "/job/steps", str(self.steps)],
            "env": env,
            "volumeMounts": [{"name": "job", "mountPath": "/job"}],
            **more,
        }

    def manifest(self, replicas: int, low: int, high: int, **spec: Any) -> Json:
        """As of the original; `spec` are more of its fields, `container` and `pod` of the pod's."""
        policy = spec.pop("restartPolicy", "ExitCode")
        pod = {
            "containers": [spec.pop("container", None) or self.container()],
            "volumes": [{"name": "job", "hostPath": {"path": str(self.folder)}}],
            "terminationGracePeriodSeconds": 30,
            **spec.pop("pod", {}),
        }
        worker = {"replicas": replicas, "restartPolicy": policy, "template": {"spec": pod}}
        if self.image == "torchrun":
            spec.setdefault("launcher", "torchrun")
        return {
            "apiVersion": "elastic.pytorch.org/v1alpha1",
            "kind": "ElasticJob",
            "metadata": {"name": self.name},
            "spec": {
                "minReplicas": low,
                "maxReplicas": high,
                "replicaSpecs": {"Worker": worker},
                **spec,
            },
        }

    def apply(self, replicas: int = 2, low: int = 1, high: int = 3, **spec: Any) -> None:
        self.kubectl(
            "apply", "-f", "-", given=json.dumps(self.manifest(replicas, low, high, **spec))
        )

    # ---- what is there

    # Each kubectl takes 0.2 s of processor time, so what is looked at often is asked directly.

    def get(self) -> Json:
        return self.plane.ask("GET", f"{JOBS.format(self.space)}/{self.name}")

    def exists(self) -> bool:
        jobs = self.plane.ask("GET", JOBS.format(self.space))["items"]
        return self.name in {job["metadata"]["name"] for job in jobs}

    def reasons(self) -> set[str]:
        """Return the reasons of the Events of its namespace."""
        events = self.plane.ask("GET", f"/api/v1/namespaces/{self.space}/events")["items"]
        return {event["reason"] for event in events}

    def pods(self) -> dict[str, Json]:
        path = f"/api/v1/namespaces/{self.space}/pods?labelSelector=job-name%3D{self.name}"
        return {pod["metadata"]["name"]: pod for pod in self.plane.ask("GET", path)["items"]}

    def condition(self, kind: str) -> Json:
        told = self.get().get("status", {}).get("conditions", [])
        return next((each for each in told if each["type"] == kind), {})

    def wait_condition(self, kind: str, status: str = "True", words: str = "") -> Json:
        def found() -> bool:
            told = self.condition(kind)
            return told.get("status") == status and words in json.dumps(told)

        until(found, f"condition {kind}={status} with {words!r} of {self.name}")
        return self.condition(kind)

    def wait_pods(self, what: str, is_so: Callable[[dict[str, Json]], object]) -> dict[str, Json]:
        until(lambda: is_so(self.pods()), f"{what} of {self.name}")
        return self.pods()

    def seen(self) -> list[Step]:
        if self.image != "torchrun":
            return super().seen()
        try:
            lines = (self.folder / "steps").read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [_stock_step(line) for line in lines if line.endswith("\n")]

    def story(self) -> str:
        """All that a person would look at."""
        told = []
        for argv in (
            ("get", f"ej/{self.name}", "-o", "yaml"),
            ("get", "pods,services,configmaps,leases", "-o", "wide"),
            ("get", "events", "--sort-by=.lastTimestamp"),
        ):
            try:
                told.append(f"---- kubectl {' '.join(argv)}\n{self.kubectl(*argv)}")
            except AssertionError as error:
                told.append(str(error))
        events = [f"{e.time} {e.source} {e.node} {e.kind}: {e.reason}" for e in self.all_events()]
        return "\n".join(
            [*told, "---- events", *events[-60:], "---- steps", *map(str, self.seen()[-6:])]
        )

    def all_events(self) -> list[Any]:
        """Of every rendezvous id that the job had."""
        from elastane.observe.events import read_events

        folders = (self.folder / "logs").glob("*/")
        return [event for folder in folders for event in read_events(folder)]


def _stock_step(line: str) -> Step:
    """A line of torchrun_steps.py; what is a fence elsewhere is the number of restarts there."""
    words = line.split()
    rank, step, world, restarts = map(int, words[:4])
    return Step(rank, step, world, restarts, restarts, 0, words[4], int(words[5]), float(words[6]))


def leadership_of(job: ElasticJob) -> tuple[str, str]:
    """The path of the Lease of the job's coordinator, and the name of the pod that holds it."""
    path = f"/apis/coordination.k8s.io/v1/namespaces/{job.space}/leases"
    found = job.plane.ask("GET", path)["items"]
    lease = next(each for each in found if "holderIdentity" in each["spec"])
    name = lease["metadata"]["name"]
    return f"{path}/{name}", lease["spec"]["holderIdentity"].rpartition("_")[0]


def workers(job: ElasticJob) -> dict[str, int]:
    """Of each node that did a step of the newest world, its worker, by when that was born."""
    return {each.node: each.pid for each in newest(job.seen())}


def steps_of(seen: list[Step]) -> dict[int, set[tuple[int, int]]]:
    """Of each committed step, in which fences it was committed."""
    found: dict[int, set[tuple[int, int]]] = {}
    for each in seen:
        found.setdefault(each.step, set()).add((each.round, each.attempt))
    return found


def prepare(folder: Path) -> Path:
    """A folder that pods of any user may write to."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chmod(folder, 0o777)
    return folder
