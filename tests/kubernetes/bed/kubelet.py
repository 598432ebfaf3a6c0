"""A kubelet whose containers are processes of this machine: one node of a real control plane.

    python -m bed.kubelet SETTING      (JSON of bed.setting.Setting; started by bed.nodes)

It registers its node, renews its Lease, runs the pods that the scheduler binds to it, reports
true statuses and serves `kubectl logs`. It obeys commands, among them faults, which are lines of
JSON on its standard input. It ends with all of its pods when that closes or it is killed.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import sys
from pathlib import Path
from typing import Any

from bed.apiclient import MERGE, Api, Json, Refused
from bed.container import now
from bed.logserver import serve_logs
from bed.names import Names
from bed.podrun import PodRun
from bed.sandbox import in_network
from bed.setting import Image, Setting

RENEW_S = 1.0
LEASE_S = 40
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
_INFO = (
    *("machineID", "systemUUID", "bootID", "kernelVersion", "osImage", "containerRuntimeVersion"),
    *("kubeletVersion", "kubeProxyVersion", "operatingSystem", "architecture"),
)


class Kubelet:
    """One node."""

    def __init__(self, api: Api, setting: Setting) -> None:
        self.api, self.setting = api, setting
        self.pods: dict[str, PodRun] = {}
        self.names = Names()
        self.port = 0
        self.addresses = 0
        self._ending: set[Any] = set()

    async def run(self) -> None:
        self.setting.folder.mkdir(parents=True, exist_ok=True)
        self.port = await serve_logs(self.setting, self.pods)
        await self._register()
        say({"ok": "ready"})
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._heartbeats())
            tasks.create_task(self._pods())
            tasks.create_task(self._endpoints())
            tasks.create_task(self._commands())

    # ---- the node

    async def _register(self) -> None:
        labels = {"kubernetes.io/hostname": self.setting.node, **self.setting.labels}
        node = {"metadata": {"name": self.setting.node, "labels": labels}}
        # One of that name is there already when the node comes back.
        await self.api.insist("POST", "/api/v1/nodes", node)
        await self._node_status()

    async def _node_status(self) -> None:
        defaults = {"cpu": "64", "memory": "64Gi", "pods": "500", "ephemeral-storage": "100Gi"}
        capacity = defaults | self.setting.capacity
        times = {"lastHeartbeatTime": now(), "lastTransitionTime": now()}
        status = {
            "capacity": capacity,
            "allocatable": capacity,
            "addresses": [
                {"type": "InternalIP", "address": "127.0.0.1"},
                {"type": "Hostname", "address": self.setting.node},
            ],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self.port}},
            "conditions": [{"type": "Ready", "status": "True", "reason": "Bed"} | times],
            "nodeInfo": dict.fromkeys(_INFO, "") | {"kubeletVersion": "v1.20.2-bed"},
        }
        await self.api.insist(
            "PATCH", f"/api/v1/nodes/{self.setting.node}/status", {"status": status}, MERGE
        )

    async def _heartbeats(self) -> None:
        loop, written_s = asyncio.get_running_loop(), 0.0
        while True:
            if loop.time() - written_s > 5:
                await self._node_status()
                written_s = loop.time()
            await self._renew()
            await asyncio.sleep(RENEW_S)

    async def _renew(self) -> None:
        node = self.setting.node
        at = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        lease = {
            "metadata": {"name": node},
            "spec": {"holderIdentity": node, "leaseDurationSeconds": LEASE_S, "renewTime": at},
        }
        try:
            await self.api.ask("PATCH", f"{LEASES}/{node}", lease, MERGE)
        except Refused:
            await self.api.insist("POST", LEASES, lease)
        except OSError:
            pass  # The next one will tell.

    # ---- pods

    async def _pods(self) -> None:
        mine = f"fieldSelector=spec.nodeName%3D{self.setting.node}"
        async for kind, told in self.api.follow("/api/v1/pods", mine):
            if kind == "LISTED":
                there = {pod["metadata"]["uid"] for pod in told}
                for uid in self.pods.keys() - there:
                    self._gone(uid)
                for pod in told:
                    self._seen(pod)
            elif kind == "DELETED":
                self._gone(told["metadata"]["uid"])
            elif kind in ("ADDED", "MODIFIED"):
                self._seen(told)

    def _seen(self, pod: Json) -> None:
        meta = pod["metadata"]
        run = self.pods.get(meta["uid"])
        if run is None:
            is_over = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
            run = PodRun(self.api, self.setting, pod, self._address(), self.names)
            self.pods[run.uid] = run
            if is_over:
                run.is_done = True
            else:
                run.task = asyncio.create_task(run.run())
                run.task.add_done_callback(_loudly)
        run.pod["metadata"]["labels"] = meta.get("labels")
        if run.task is not None:
            run.seen(pod.get("status") or {})
        if meta.get("deletionTimestamp"):
            run.delete(float(meta.get("deletionGracePeriodSeconds") or 0))

    def _gone(self, uid: str) -> None:
        if (run := self.pods.pop(uid, None)) is not None:
            if not run.is_done:
                run.forget()
                self._ending.add(run.ending)
            run.remove()

    def _address(self) -> str:
        self.addresses += 1
        return f"10.244.{self.setting.number}.{self.addresses % 253 + 2}"

    async def _endpoints(self) -> None:
        async for kind, told in self.api.follow("/api/v1/endpoints"):
            if kind == "LISTED":
                self.names.listed(told)
            elif kind != "BOOKMARK":
                self.names.changed(kind, told)
            for run in self.pods.values():
                run.rename()

    # ---- commands

    async def _commands(self) -> None:
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            told = json.loads(line)
            try:
                answer: Json = {"ok": await getattr(self, f"do_{told.pop('do')}")(**told)}
            except (OSError, KeyError, AssertionError) as error:
                answer = {"error": repr(error)}
            say(answer)
        raise SystemExit(0)

    def _run_of(self, namespace: str, pod: str) -> PodRun:
        found = [r for r in self.pods.values() if (r.namespace, r.name) == (namespace, pod)]
        assert found, f"no pod {namespace}/{pod} on {self.setting.node}"
        return found[-1]

    async def do_cut(self, is_cut: bool, pods_alone: bool = False) -> None:
        """Partition the node from all others and from the API server, or heal it.

        `pods_alone`: of what is healed; the kubelet stays as it was.
        """
        boxes = [run.sandbox for run in self.pods.values() if not run.is_done and run.sandbox]
        if is_cut:
            self.api.connected.clear()
        lines = [f"link set {box.device} {'down' if is_cut else 'up'}" for box in boxes]
        if lines and self.setting.switch_pid is not None:
            await in_network(self.setting.switch_pid, *lines)
        if not (is_cut or pods_alone):
            self.api.connected.set()

    async def do_image(self, name: str, image: Json) -> None:
        """Have an image from now on."""
        self.setting.images[name] = Image(**image)

    async def do_signal(self, namespace: str, pod: str, number: int) -> None:
        """Send a signal to the first process of each container."""
        for container in self._run_of(namespace, pod).containers:
            container.kill(number)

    async def do_out_of_memory(self, namespace: str, pod: str) -> None:
        for container in self._run_of(namespace, pod).containers:
            container.out_of_memory()

    async def do_evict(self, namespace: str, pod: str, message: str) -> None:
        await self._run_of(namespace, pod).evict("Evicted", message)

    async def do_pids(self, namespace: str, pod: str) -> dict[str, int]:
        """The first process of each container, as this machine numbers it."""
        containers = self._run_of(namespace, pod).containers
        return {c.name: c.process.pid for c in containers if c.process and c.process.is_alive}

    async def do_all_pids(self) -> list[int]:
        runs = self.pods.values()
        every = [c.process for run in runs for c in [*run.inits, *run.containers]]
        return [process.pid for process in every if process and process.is_alive]

    async def do_rotate(self, namespace: str, pod: str) -> None:
        await self._run_of(namespace, pod).volumes.rotate()


def _loudly(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        print(f"a pod's life ended by {error!r}", file=sys.stderr, flush=True)
        sys.excepthook(type(error), error, error.__traceback__)


def say(answer: Json) -> None:
    print(json.dumps(answer), flush=True)


async def main(setting: Setting) -> None:
    api = Api(Path(setting.kubeconfig))
    await Kubelet(api, setting).run()


if __name__ == "__main__":
    asyncio.run(main(Setting.heard(sys.argv[1])))
