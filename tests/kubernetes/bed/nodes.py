"""Nodes of a control plane: process kubelets, and their faults.

with ControlPlane() as plane, Cluster(plane, apart=True) as cluster:
    cluster.add("n0", capacity={"nvidia.com/gpu": "8"})
    plane.kubectl("apply", "-f", "-", given=manifest)
    cluster["n0"].cut_off()
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bed import network
from bed.controlplane import ControlPlane
from bed.network import Network
from bed.parts import die_with_parent
from bed.setting import Image, Setting

sys.path.append(str(Path(__file__).parents[2] / "process"))

import warm_start

_TESTS = Path(__file__).parents[1]
_CHECKOUT = Path(__file__).parents[3]
IMAGES = {
    "python": Image([sys.executable]),
    "shell": Image(),
    "elastane": Image([sys.executable, "-m", "elastane", "run"]),
    "torchrun": Image([sys.executable, "-m", "torch.distributed.run"]),
}


class Node:
    """One process kubelet."""

    def __init__(self, setting: Setting, log: Path) -> None:
        self.setting, self.log = setting, log
        self.name = setting.node
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Bring the node up, or up again after it died."""
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bed.kubelet", self.setting.told()],
                cwd=_TESTS,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509
            )
        assert self._heard() == "ready"

    def _heard(self) -> Any:
        assert self.process is not None and self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the kubelet of {self.name} has ended:\n{self.tail()}"
        told = json.loads(line)
        assert "ok" in told, f"{self.name}: {told['error']}"
        return told["ok"]

    def tell(self, what: str, **more: object) -> Any:
        assert self.process is not None and self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": what, **more}) + "\n")
        self.process.stdin.flush()
        return self._heard()

    def die(self) -> None:
        """Take its power away: the kubelet and all processes of its pods end at once."""
        if self.process is None:
            return
        pids = []
        if not self.setting.is_apart and self.process.poll() is None:
            with contextlib.suppress(AssertionError, OSError):
                pids = self.tell("all_pids")
        self.process.kill()
        self.process.wait(10)
        # Those in namespaces of their own end with the kubelet; of others, only the first process.
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self.process = None

    def cut_off(self) -> None:
        """Cut the network of its pods and its kubelet; its processes continue."""
        self.tell("cut", is_cut=True)

    def heal(self, *, pods_alone: bool = False) -> None:
        """Restore the network; `pods_alone`: the kubelet stays cut off."""
        self.tell("cut", is_cut=False, pods_alone=pods_alone)

    def tail(self, lines_max: int = 30) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join([f"---- kubelet {self.name}", *text.splitlines()[-lines_max:]])


class Cluster:
    """A control plane's nodes; with `apart`, each pod has namespaces and an address of its own."""

    def __init__(self, plane: ControlPlane, *, apart: bool = False) -> None:
        self.plane, self.apart = plane, apart
        self.nodes: dict[str, Node] = {}
        self.images = dict(IMAGES)
        self.folder = plane.folder / f"nodes-{os.urandom(3).hex()}"
        self.visible = sorted({str(_CHECKOUT), sys.prefix, sys.base_prefix})
        self.network: Network | None = None
        self._numbers = 0

    def __enter__(self) -> Self:
        self.folder.mkdir()
        if self.apart:
            self.network = Network(self.folder, self.plane.port)
            self.network.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for node in self.nodes.values():
            node.die()
            with contextlib.suppress(AssertionError, OSError):
                self._forget(node.name)
        if self.network is not None:
            self.network.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __getitem__(self, name: str) -> Node:
        return self.nodes[name]

    def _forget(self, name: str) -> None:
        """Remove a node, and its pods, which no kubelet would ever report as gone."""
        listed = self.plane.ask("GET", f"/api/v1/pods?fieldSelector=spec.nodeName%3D{name}")
        for pod in listed["items"]:
            meta = pod["metadata"]
            path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
            with contextlib.suppress(AssertionError):
                self.plane.ask("DELETE", path, {"gracePeriodSeconds": 0})
        self.plane.ask("DELETE", f"/api/v1/nodes/{name}")

    def add(
        self,
        name: str,
        capacity: dict[str, str] | None = None,
        labels: dict[str, str] | None = None,
    ) -> Node:
        """A new node, up; its name is there until the cluster ends."""
        self._numbers += 1
        certificates = self.plane.certificates
        crt, key = certificates.pair("kubelet", "system:node:bed", ("system:nodes",))
        setting = Setting(
            node=name,
            number=self._numbers,
            kubeconfig=str(self.plane.admin),
            root=str(self.folder),
            certificate=(str(crt), str(key)),
            switch_pid=self.network.switch_pid if self.network else None,
            capacity=capacity or {},
            labels=labels or {},
            images={name: dataclasses.replace(image) for name, image in self.images.items()},
            visible=self.visible,
            fork_server=warm_start.serve_containers() if self.apart else "",
        )
        node = Node(setting, self.folder / f"{name}.log")
        node.start()
        self.nodes[name] = node
        return node

    def node_of(self, namespace: str, pod: str) -> Node:
        got = self.plane.ask("GET", f"/api/v1/namespaces/{namespace}/pods/{pod}")
        return self.nodes[got["spec"]["nodeName"]]

    def tell(self, namespace: str, pod: str, what: str, **more: object) -> Any:
        """Send a command about a pod to its node: signal, out_of_memory, evict, pids, rotate."""
        return self.node_of(namespace, pod).tell(what, namespace=namespace, pod=pod, **more)

    def report(self) -> str:
        """What a person would look at first when a test has failed."""
        said = [node.tail() for node in self.nodes.values()]
        for log in sorted(self.folder.glob("*/*/*.log")):
            lines = log.read_text(errors="replace").splitlines()[-25:]
            said.append("\n".join([f"---- {log.relative_to(self.folder)}", *lines]))
        return "\n".join(said)


def unavailable() -> str:
    """Why nodes whose pods are apart cannot be had here, or an empty string."""
    if shutil.which("nsenter") is None or shutil.which("ip") is None:
        return "missing: ip or nsenter: apt-get install iproute2 util-linux"
    if os.geteuid() != 0:
        return "namespaces need root"
    return network.unavailable()
