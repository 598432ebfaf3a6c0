"""One start of a container: a process, its arguments and its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from bed.parts import die_with_parent
from bed.sandbox import Sandbox

INIT = Path(__file__).parent / "programs" / "container_init.py"
AGENT = ["-m", "elastane", "run"]
LOOK_S = 0.005
NOT_STARTED = 128


@dataclass
class Start:
    """What to run, and as whom."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    log: Path
    mounts: list[tuple[str, str, bool]]
    visible: list[str]
    user: int | None = None
    read_only: bool = False


class ContainerProcess:
    """In namespaces of its own, as process 1, where its pod has a sandbox.

    `fork_server` is the socket of a process that has imported torch, whose fork it may be, or "".
    """

    def __init__(
        self, start: Start, sandbox: Sandbox | None, folder: Path, fork_server: str
    ) -> None:
        self._start, self._sandbox, self._folder = start, sandbox, folder
        self._fork_server = fork_server if start.argv[1:4] == AGENT and start.user is None else ""
        self._process: asyncio.subprocess.Process | None = None
        # As the machine sees it.
        self.pid = 0

    async def start(self) -> None:
        """OSError where the program cannot be started."""
        told = self._start
        with told.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(self._argv() if self._sandbox else told.argv),
                env=None if self._sandbox else told.env,
                cwd=None if self._sandbox else told.cwd,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self.pid = self._process.pid
        if self._sandbox:
            await self._wait_started()

    def _argv(self) -> list[str]:
        assert self._sandbox is not None
        told = self._start
        root = self._folder / "root"
        root.mkdir(parents=True, exist_ok=True)
        spec = self._folder / "start.json"
        spec.write_text(
            json.dumps(
                {
                    "root": str(root), "argv": told.argv, "env": told.env, "cwd": told.cwd,
                    "mounts": told.mounts, "visible": told.visible, "user": told.user,
                    "read_only": told.read_only,
                }
            )
        )  # fmt: skip
        words = [str(INIT), str(spec), *([self._fork_server] if self._fork_server else [])]
        return [*self._sandbox.enter(), sys.executable, "-S", "-E", *words]

    async def _wait_started(self) -> None:
        """Until the first process is the container's own program, or has ended."""
        assert self._process is not None
        while self._process.returncode is None:
            if inner := _started_child(self._process.pid) or _fork(self._folder / "start.pid"):
                self.pid = inner
                return
            await asyncio.sleep(LOOK_S)

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def send(self, signum: int) -> None:
        """To the first process of the container, as container runtimes do."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    async def wait(self) -> int:
        """How it ended: 0..127, or 128 and more for signals; nothing of it lives then."""
        assert self._process is not None
        code = await self._process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return code if code >= 0 else NOT_STARTED - code


def _started_child(outer: int) -> int:
    """The only child of a process, once it runs a program other than its parent's; else 0."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        inner = int(Path(f"/proc/{outer}/task/{outer}/children").read_text().split()[0])
        if INIT.name.encode() not in Path(f"/proc/{inner}/cmdline").read_bytes():
            return inner
    return 0


def _fork(note: Path) -> int:
    """The fork that is the container's program, once there is one; else 0."""
    with contextlib.suppress(OSError):
        return int(note.read_text())
    return 0
