"""A job of an unmodified script, whose ranks show faults on request."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from jobs import PRELOAD_OPTIMIZER

from elastane.observe.events import LoggedEvent
from elastane.testing import LocalCluster

SCRIPT = Path(__file__).parent / "scripts" / "waits_for_a_culprit.py"
FLOOR_S = 2.0
# A worker that lives on after an error is ended after this.
EXIT_LIMIT_S = 6.0
# Class of the verdict, by the fault that the script shows.
CLASSES = {
    "loop": "busy",
    "sleep": "sleeps",
    "lock": "lock-held",
    "loader": "data-loader",
    "disk": "disk",
    "stop": "stopped",
    "other": "other-collective",
    "extra": "other-collective",
    "large": "other-shape",
    "small": "other-shape",
    "lingers": "raised",
}
# With the faults that end the worker: it is named by its end, and without a class.
KINDS = {
    **{kind: named for kind, named in CLASSES.items() if kind not in ("extra", "lingers")},
    "killed": "",
    "raised": "",
    "exited": "",
}
# After these the wait never ends, so the agent ends the culprit, or gloo a worker that received too
# much, and all workers restart.
ENDED = ("stop", "other", "extra", "large", "small", "killed", "raised", "exited")


class CulpritJob:
    """Nodes with some workers each; `fault` returns the culprit event about one of them."""

    def __init__(self, folder: Path, workers: int = 3, nodes: str = "a", **options: object) -> None:
        self.folder = folder
        self.names = nodes
        self.workers = workers * len(nodes)
        self.told = folder / "fault"
        os.mkfifo(folder / "slow-disk")
        given = {"nproc_per_node": workers, "max_restarts": 1000, "nnodes": str(len(nodes))}
        conf = {"hang_floor": FLOOR_S, "error_exit_limit": EXIT_LIMIT_S}
        given |= {"rdzv_conf": conf, "preload": PRELOAD_OPTIMIZER, **options}
        env = {"CULPRIT": str(self.told), "CULPRIT_LOCK_S": "6"}
        self.cluster = LocalCluster([str(SCRIPT)], folder=folder / "c", env=env, **given)

    def start(self) -> None:
        """Start all nodes, and wait until all ranks train."""
        for name in self.names:
            self.cluster.start(name)
        self.wait_steps()

    def steps(self) -> dict[int, tuple[int, int]]:
        """Return the process and the step of each rank, as it wrote them last."""
        found = {}
        for path in self.folder.glob("step-*"):
            words = path.read_text().split()
            if len(words) == 2:
                found[int(path.name.partition("-")[2])] = int(words[0]), int(words[1])
        return found

    def wait_steps(self, count: int = 40) -> None:
        """Wait until all ranks have made `count` more steps, in processes that live."""
        begun = self.steps()

        def there() -> bool:
            now = self.steps()
            alive = {pid for node in self.cluster.nodes for pid in node.workers()}
            made = {
                rank: step - begun[rank][1] if begun.get(rank, (0, 0))[0] == pid else step
                for rank, (pid, step) in now.items()
                if pid in alive
            }
            return len(made) == self.workers and min(made.values()) >= count

        self.cluster.wait(there, f"{count} more steps of {self.workers} ranks")

    def fault(self, fault: str, rank: int) -> tuple[LoggedEvent, float]:
        """Let a rank show a fault; return the event about it, and after how many seconds it came.

        That of a worker that ends is the restart of all workers, which names it as the cause.

        The job trains again when this returns.
        """
        found, took_s = self.begin_fault(fault, rank)
        self.told.unlink(missing_ok=True)
        if fault == "disk":
            with (self.folder / "slow-disk").open("wb", buffering=0) as file:
                file.write(b"x")
        self.wait_steps(20)
        return found, took_s

    def begin_fault(self, fault: str, rank: int) -> tuple[LoggedEvent, float]:
        """Let a rank show a fault; return as `fault` does, while the fault lasts."""
        kind = "culprit" if fault in CLASSES else "restart"
        before = len(self.cluster.events(kind))
        begun_s = time.monotonic()
        new = self.told.with_suffix(".new")
        new.write_text(f"{fault} {rank}")
        new.rename(self.told)
        found = self.cluster.wait_event(kind, count=before + 1)
        return found, time.monotonic() - begun_s

    def wait_still(self) -> None:
        """Wait until no rank has made a step for twice as long as a verdict needs."""
        seen: list[tuple[object, float]] = [((), 0.0)]

        def is_still() -> bool:
            now = self.steps(), time.monotonic()
            if now[0] != seen[-1][0]:
                seen.append(now)
            return now[1] - seen[-1][1] > 2 * FLOOR_S + 2.0

        self.cluster.wait(is_still, "all ranks stand still")

    def stop_worker(self, rank: int) -> LoggedEvent:
        """Stop a worker at any instant by a signal from outside; return the event about it."""
        before = len(self.cluster.events("culprit"))
        self.cluster.nodes[0].kill_worker(rank, signal.SIGSTOP)
        found = self.cluster.wait_event("culprit", count=before + 1)
        self.wait_steps()
        return found
