"""One container of a pod: pulled, started, started again, and what its status says."""

from __future__ import annotations

import asyncio
import datetime as dt
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from bed.apiclient import Json, Refused
from bed.podenv import NotConfigured, expand
from bed.process import NOT_STARTED, ContainerProcess, Start

if TYPE_CHECKING:
    from bed.podrun import PodRun

BACKOFF_MAX_S = 30.0
KILLED = 137


def now() -> str:
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Container:
    """One container, which its pod runs; it reports every change to the pod by `report`."""

    def __init__(self, pod: PodRun, spec: Json, restarts: int = 0) -> None:
        self.pod, self.spec, self.restarts = pod, spec, restarts
        self.name: str = spec["name"]
        self.image: str = spec.get("image", "")
        self.state: Json = {"waiting": {"reason": "ContainerCreating"}}
        self.last: Json = {}
        self.process: ContainerProcess | None = None
        # Why it ends, where the process itself cannot know: OOMKilled.
        self.why_killed = ""
        self.starts = 0

    @property
    def log(self) -> Path:
        return self.pod.folder / f"{self.name}.{self.restarts}.log"

    async def run(self, policy: str) -> int:
        """Run it as the restart policy says; the exit code that it ends with for good."""
        back_s = 0.0
        while not self.pod.stopping.is_set():
            started_at = now()
            code = await self._once()
            if code is None:
                break
            self.state = self._ended(code, started_at)
            if self.pod.stopping.is_set() or policy == "Never":
                return code
            if policy == "OnFailure" and code == 0:
                return code
            self.last = self.state
            why = {"reason": "CrashLoopBackOff", "message": f"back-off {back_s:g}s restarting"}
            self.state = {"waiting": why}
            self.pod.report()
            await self.pod.stopped_within(back_s)
            back_s = min(max(back_s * 2, self.pod.setting.backoff_s), BACKOFF_MAX_S)
            self.restarts += 1
        if "terminated" not in self.state:
            self.state = self.last or self._ended(KILLED, now())
        return int(self.state["terminated"]["exitCode"])

    async def _once(self) -> int | None:
        """One start; None where the pod is stopped before it."""
        if not await self._pulled():
            return None
        if (start := await self._configured()) is None:
            return None
        self.starts += 1
        folder = self.pod.folder / f"{self.name}.{self.starts}"
        fork_server = self.pod.setting.fork_server
        self.process = ContainerProcess(start, self.pod.sandbox, folder, fork_server)
        self.why_killed = ""
        try:
            await self.process.start()
        except OSError as error:
            with self.log.open("a") as log:
                print(f"the container cannot start: {error}", file=log)
            return NOT_STARTED
        self.state = {"running": {"startedAt": now()}}
        if self.pod.killing is not None:
            self.process.send(self.pod.killing)
        self.pod.report()
        return await self.process.wait()

    async def _pulled(self) -> bool:
        """Wait for the image as long as there is none of that name."""
        back_s = self.pod.setting.pull_backoff_s
        reasons = ("ErrImagePull", "ImagePullBackOff")
        for turn in range(10**6):
            if self.image in self.pod.setting.images:
                return True
            text = f'pull of image "{self.image}" failed: not found'
            self.state = {"waiting": {"reason": reasons[min(turn, 1)], "message": text}}
            self.pod.report()
            self.pod.tell("Warning", "Failed", f"Failed to pull: {text}")
            if await self.pod.stopped_within(back_s):
                return False
            back_s = min(back_s * 2, BACKOFF_MAX_S)
        return False

    async def _configured(self) -> Start | None:
        while True:
            try:
                return await self._start()
            except (NotConfigured, OSError, Refused) as error:
                why = {"reason": "CreateContainerConfigError", "message": str(error)}
                self.state = {"waiting": why}
                self.pod.report()
                self.pod.tell("Warning", "Failed", f"Error: {error}")
            if await self.pod.stopped_within(self.pod.setting.backoff_s):
                return None

    async def _start(self) -> Start:
        image = self.pod.setting.images[self.image]
        env = await self.pod.environment(image.env).of(self.spec)
        command = self.spec.get("command") or image.entrypoint
        argv = [expand(word, env) for word in [*command, *(self.spec.get("args") or [])]]
        if not argv:
            raise NotConfigured(f"image {self.image!r} has no entrypoint, and there is no command")
        context = {
            **self.pod.spec.get("securityContext", {}),
            **self.spec.get("securityContext", {}),
        }
        return Start(
            argv=argv,
            env=env,
            cwd=self.spec.get("workingDir") or ("/" if self.pod.sandbox else str(self.pod.folder)),
            log=self.log,
            mounts=self.pod.mounts(self.spec) if self.pod.sandbox else [],
            visible=self.pod.setting.visible,
            user=context.get("runAsUser"),
            read_only=bool(context.get("readOnlyRootFilesystem")),
        )

    def _ended(self, code: int, started_at: str) -> Json:
        reason = self.why_killed or ("Completed" if code == 0 else "Error")
        if code == NOT_STARTED:
            reason = "StartError"
        ended: Json = {"exitCode": code, "reason": reason}
        if code > NOT_STARTED and not self.why_killed:
            ended["signal"] = code - NOT_STARTED
        if self.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError" and code:
            ended["message"] = self.log.read_text(errors="replace")[-2048:]
        times = {"startedAt": started_at, "finishedAt": now()}
        return {"terminated": ended | times | {"containerID": f"process://{self.pod.uid}"}}

    def was_killed(self) -> None:
        """Set the state of a container whose node died, so that no kubelet saw its end."""
        self.state = self._ended(KILLED, now())

    def kill(self, signum: int, why: str = "") -> None:
        if self.process is not None:
            self.why_killed = why
            self.process.send(signum)

    def out_of_memory(self) -> None:
        """End as when the kernel finds that it took more memory than it may."""
        self.kill(signal.SIGKILL, "OOMKilled")

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL once the time of grace is over."""
        self.kill(signal.SIGTERM)
        ends = asyncio.get_running_loop().time() + grace_s
        while self.process is not None and self.process.is_alive:
            if asyncio.get_running_loop().time() >= ends:
                self.kill(signal.SIGKILL)
            await asyncio.sleep(0.01)

    def status(self) -> Json:
        is_up = "running" in self.state
        return {
            "name": self.name,
            "image": self.image,
            "imageID": self.image if self.starts else "",
            "restartCount": self.restarts,
            "ready": is_up,
            "started": is_up,
            "state": self.state,
            "lastState": self.last,
        }
