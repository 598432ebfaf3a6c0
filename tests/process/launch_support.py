"""Programs that launch, as processes of their own, and the handler of a world of one node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from process_harness import DEADLINE_S, until, worker_environment
from supervise import MARK, alive, marked

_HEAD = """
import json, os, signal, sys, time
from pathlib import Path
from elastane.elastic.launcher.api import LaunchConfig, elastic_launch
from elastane.elastic.multiprocessing import SignalException
from elastane.elastic.multiprocessing.errors import ChildFailedError

HERE = Path(os.environ["LAUNCH_FOLDER"])


def tell(what, value):
    path = HERE / what
    path.with_suffix(".part").write_text(json.dumps(value))
    path.with_suffix(".part").rename(path)


"""

_WORKER = """
import json, os, signal, sys, time
from pathlib import Path

here = Path(__file__).parent
env = {**os.environ, "PID": str(os.getpid())}
path = here / f"{env['RANK']}.{env['TORCHELASTIC_RESTART_COUNT']}.{os.getpid()}.told"
path.with_suffix(".part").write_text(json.dumps(env))
path.with_suffix(".part").rename(path)
"""
HANG = "time.sleep(600)"
# Lets programs import this module.
SUPPORT = {"PYTHONPATH": str(Path(__file__).parent)}


def worker(folder: Path, then: str = HANG) -> str:
    """Return a script of workers that report their environment and PID, and then do `then`."""
    script = folder / "worker.py"
    script.write_text(_WORKER + textwrap.dedent(then))
    return str(script)


def told(folder: Path, count: int, **wanted: str) -> list[dict[str, str]]:
    """Wait for reports of `count` workers with these variables; return them by restart and rank."""

    def now() -> list[dict[str, str]]:
        envs = [json.loads(path.read_text()) for path in folder.glob("*.told")]
        found = [env for env in envs if wanted.items() <= env.items()]
        return sorted(found, key=lambda env: (env["TORCHELASTIC_RESTART_COUNT"], env["RANK"]))

    until(lambda: len(now()) >= count, f"{count} workers with {wanted} tell")
    found = now()
    assert len(found) == count, found
    return found


def kill(env: dict[str, str]) -> None:
    """SIGKILL the worker of this report."""
    os.kill(int(env["PID"]), signal.SIGKILL)


def gone(envs: list[dict[str, str]]) -> bool:
    """Whether all workers of these reports have ended."""
    return not any(alive(int(env["PID"])) for env in envs)


class Program:
    """A program that launches, and the values that it reports by `tell(name, value)`."""

    def __init__(self, folder: Path, body: str, **env: str) -> None:
        self.folder, self.mark = folder, uuid.uuid4().hex
        script = folder / f"program-{self.mark[:6]}.py"
        script.write_text(_HEAD + textwrap.dedent(body))
        self._log = script.with_suffix(".log")
        more = {"LAUNCH_FOLDER": str(folder), MARK: self.mark, "TMPDIR": str(folder), **env}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(script)],
                env=worker_environment(**more),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def words(self) -> str:
        return self._log.read_text(errors="replace")

    def told(self, name: str) -> Any:
        path = self.folder / name
        until(lambda: path.exists() or self.process.poll() is not None, f"{name}\n{self.words}")
        assert path.exists(), f"it ended, and did not tell {name}\n{self.words}"
        return json.loads(path.read_text())

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it runs after {deadline_s} s\n{self.words}") from None

    def gone(self) -> None:
        """Wait until all processes that it started have ended."""
        until(lambda: not marked(self.mark), f"nothing is left\n{self.words}")

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(DEADLINE_S)
        for pid in marked(self.mark):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


@contextmanager
def program(folder: Path, body: str, **env: str) -> Iterator[Program]:
    one = Program(folder, body, **env)
    try:
        yield one
    finally:
        one.end()


class LocalHandler:
    """A rendezvous of one node, as another package would write it: torch's methods, no base."""

    use_agent_store = False
    backend = "local-test"

    def __init__(self, port: int = 29555) -> None:
        self.store, self.rounds, self.shutdowns, self.port = dist.HashStore(), 0, 0, port

    def next_rendezvous(self) -> Any:
        from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

        self.rounds += 1
        store = dist.PrefixStore(str(self.rounds), self.store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo("127.0.0.1", self.port))

    def get_backend(self) -> str:
        return self.backend

    def get_run_id(self) -> str:
        return "local-run"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        self.shutdowns += 1

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        self.shutdowns += 1
        return True
