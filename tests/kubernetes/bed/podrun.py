"""The life of one pod on a node: volumes, sandbox, containers, statuses, and its end."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path

from bed.apiclient import MERGE, Api, Json, Refused
from bed.container import Container, now
from bed.names import Names
from bed.podenv import Environment, NotConfigured
from bed.sandbox import Sandbox
from bed.setting import Setting
from bed.volumes import Volumes

SERVICE = ("10.96.0.1", "443")
ORPHAN_GRACE_S = 2.0


class PodRun:
    """Made when the pod is first seen on this node; `task` is its life."""

    def __init__(self, api: Api, setting: Setting, pod: Json, ip: str, names: Names) -> None:
        self.api, self.setting, self.pod, self.ip, self.names = api, setting, pod, ip, names
        meta, self.spec = pod["metadata"], pod["spec"]
        self.uid, self.name, self.namespace = meta["uid"], meta["name"], meta["namespace"]
        self.folder = setting.folder / f"{self.namespace}.{self.name}.{self.uid[:8]}"
        self.volumes = Volumes(api, pod, ip, self.folder / "volumes")
        self.sandbox: Sandbox | None = None
        before = {s["name"]: s for s in pod.get("status", {}).get("containerStatuses") or []}
        # A pod that ran here before the node died: its containers are started again.
        self.was_here = any("running" in s["state"] or s["lastState"] for s in before.values())
        self.inits = [Container(self, spec) for spec in self.spec.get("initContainers") or []]
        self.containers = [
            Container(self, c, before.get(c["name"], {}).get("restartCount", 0) + self.was_here)
            for c in self.spec["containers"]
        ]
        self.phase, self.why, self.started_at = "Pending", ("", ""), now()
        self.stopping = asyncio.Event()
        self.killing: int | None = None
        self.is_done = False
        self._since: dict[str, tuple[str, str]] = {}
        self._is_news = False
        self._reporter: asyncio.Task[None] | None = None
        self._telling: set[asyncio.Task[Json | None]] = set()
        self.task: asyncio.Task[None] | None = None
        self.ending: asyncio.Task[None] | None = None

    # ---- what containers ask

    def environment(self, of_image: dict[str, str]) -> Environment:
        server = self.api.server.rpartition(":")[2]
        host, port = SERVICE if self.sandbox else ("127.0.0.1", server)
        base = {
            "PATH": os.environ["PATH"],
            "HOME": "/root" if self.sandbox else str(self.folder),
            "HOSTNAME": self.host_name,
            "KUBERNETES_SERVICE_HOST": host,
            "KUBERNETES_SERVICE_PORT": port,
            **of_image,
        }
        return Environment(self.api, self.pod, self.ip, base)

    @property
    def host_name(self) -> str:
        return str(self.spec.get("hostname") or self.name)

    def mounts(self, container: Json) -> list[tuple[str, str, bool]]:
        own = [("hosts", "/etc/hosts"), ("resolv.conf", "/etc/resolv.conf")]
        files = [(str(self.folder / name), target, False) for name, target in own]
        return files + self.volumes.mounts(container)

    async def stopped_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self.stopping.wait()
        except TimeoutError:
            return False
        return True

    # ---- life

    async def run(self) -> None:
        policy = self.spec.get("restartPolicy", "Always")
        if self.was_here and policy == "Never":
            for container in self.containers:
                container.was_killed()
            await self._end([137])
            return
        self.report()
        if not await self._prepared():
            await self._end([137])
            return
        for container in self.inits:
            code = await container.run("Never" if policy == "Never" else "OnFailure")
            if code:
                await self._end([code])
                return
        self.phase = "Running"
        codes = await asyncio.gather(*(c.run(policy) for c in self.containers))
        await self._end(list(codes))

    async def _prepared(self) -> bool:
        """Volumes and sandbox; waits for what is missing, as kubelets do."""
        while True:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                await self.volumes.make()
                break
            except (NotConfigured, Refused, OSError) as error:
                self.tell("Warning", "FailedMount", str(error))
            if await self.stopped_within(self.setting.backoff_s):
                return False
        if self.setting.switch_pid is not None:
            self.names.write(self.folder / "hosts", self.namespace, self._own_names())
            (self.folder / "resolv.conf").write_text("")
            self.sandbox = Sandbox(self.uid, self.ip, self.setting.switch_pid)
            is_cut = not self.api.connected.is_set()
            await self.sandbox.start(self.host_name, self.volumes.memory, is_cut)
        return not self.stopping.is_set()

    def _own_names(self) -> str:
        names = [self.host_name]
        if domain := self.spec.get("subdomain"):
            full = f"{self.host_name}.{domain}.{self.namespace}.svc.cluster.local"
            names = [full, self.host_name]
        return f"{self.ip} {' '.join(names)}"

    def rename(self) -> None:
        """The names of the cluster have changed."""
        if self.sandbox is not None and not self.is_done:
            self.names.write(self.folder / "hosts", self.namespace, self._own_names())

    async def _end(self, codes: list[int]) -> None:
        self.phase = "Failed" if any(codes) or self.why[0] else "Succeeded"
        self.is_done = True
        self.report()
        if self.sandbox is not None:
            await self.sandbox.end()

    # ---- end

    def delete(self, grace_s: float) -> None:
        """The API server wants it gone; a second call, with less grace, is heard too."""
        if self.ending is None:
            self.ending = asyncio.create_task(self._delete(grace_s))

    async def _delete(self, grace_s: float) -> None:
        await self.stop(grace_s)
        if self._reporter is not None:
            await self._reporter
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}}
        await self.api.insist("DELETE", self._path, body)

    def forget(self) -> None:
        """The object is gone already, as after a forced deletion: end the processes soon."""
        self.ending = asyncio.create_task(self.stop(ORPHAN_GRACE_S))

    async def stop(self, grace_s: float) -> None:
        self.stopping.set()
        self.killing = signal.SIGTERM
        await asyncio.gather(*(c.stop(grace_s) for c in [*self.inits, *self.containers]))
        if self.task is not None:
            await self.task

    async def evict(self, reason: str, message: str) -> None:
        """End it as a node does that runs out of something: Failed, with a reason of the pod."""
        self.why = (reason, message)
        self.tell("Warning", reason, message)
        await self.stop(0)

    def remove(self) -> None:
        shutil.rmtree(self.folder / "volumes", ignore_errors=True)

    # ---- what is said

    @property
    def _path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods/{self.name}"

    def report(self) -> None:
        """Write the status soon; a node that is cut off writes it once it is connected again."""
        self._is_news = True
        if self._reporter is None or self._reporter.done():
            self._reporter = asyncio.create_task(self._write())

    async def _write(self) -> None:
        while self._is_news:
            self._is_news = False
            # Of a pod of another uid by that name, nothing is written.
            meta = {"metadata": {"uid": self.uid}, "status": self.status()}
            await self.api.insist("PATCH", f"{self._path}/status", meta, MERGE)

    def seen(self, status: Json) -> None:
        """Others write the status too, as when the node was lost: the node knows better."""
        told = {c["type"]: c["status"] for c in status.get("conditions") or []}
        if "Ready" in told and told["Ready"] != str(self._is_ready):
            self.report()

    @property
    def _is_ready(self) -> bool:
        return self.phase == "Running" and all("running" in c.state for c in self.containers)

    def status(self) -> Json:
        reason, message = self.why
        is_ready = self._is_ready
        conditions = {
            "PodScheduled": "True",
            "Initialized": str(self.phase != "Pending" or not self.inits),
            "ContainersReady": str(is_ready),
            "Ready": str(is_ready),
        }
        return {
            "phase": self.phase,
            "podIP": self.ip,
            "podIPs": [{"ip": self.ip}],
            "hostIP": "127.0.0.1",
            "startTime": self.started_at,
            "conditions": [self._condition(*each) for each in conditions.items()],
            "containerStatuses": [c.status() for c in self.containers],
            "initContainerStatuses": [c.status() for c in self.inits] or None,
            "reason": reason or None,
            "message": message or None,
        }

    def _condition(self, name: str, value: str) -> Json:
        if self._since.get(name, ("", ""))[0] != value:
            self._since[name] = (value, now())
        return {"type": name, "status": value, "lastTransitionTime": self._since[name][1]}

    def tell(self, kind: str, reason: str, message: str) -> None:
        """Have an event on the pod written."""
        about = {"apiVersion": "v1", "kind": "Pod", "name": self.name, "uid": self.uid}
        event = {
            "metadata": {"generateName": f"{self.name}.", "namespace": self.namespace},
            "involvedObject": {**about, "namespace": self.namespace},
            "type": kind, "reason": reason, "message": message, "count": 1,
            "source": {"component": "kubelet", "host": self.setting.node},
            "firstTimestamp": now(), "lastTimestamp": now(),
        }  # fmt: skip
        path = f"/api/v1/namespaces/{self.namespace}/events"
        task = asyncio.create_task(self.api.insist("POST", path, event))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)


def logs_of(folder: Path, namespace: str, name: str, container: str) -> list[Path]:
    """The logs of all starts of a container on this node, oldest first."""
    found = folder.glob(f"{namespace}.{name}.????????/{container}.*.log")
    return sorted(found, key=lambda path: path.stat().st_mtime)
