"""Jobs whose workers share the GPUs of this machine, and what their workers logged."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from pathlib import Path

from growing import Growing

from elastane.testing import LocalCluster

SCRIPTS = Path(__file__).parent / "scripts"
# gloo copies through the host, so that workers may share a GPU. NCCL 2.30 and later lets them, too.
SHARED_NCCL = {
    "GPU_BACKEND": "nccl",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "2",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
}


class GpuJob:
    """One node of some workers, each with the GPU of its local rank, modulo their number."""

    def __init__(
        self, folder: Path, workers: int, *script: str, backend: str = "gloo", **options: object
    ) -> None:
        self.folder = folder / "said"
        self.folder.mkdir()
        self._logged = Growing(self.folder)
        env = SHARED_NCCL if backend == "nccl" else {"GPU_BACKEND": backend}
        command = [str(SCRIPTS / "gpu_train.py"), str(self.folder), *script]
        options = {"nnodes": "1", "nproc_per_node": workers, "max_restarts": 1000, **options}
        if workers > 1:
            options.setdefault("min_workers", 1)
        # A worker that dies often is replaced at once.
        conf = {"crash_loop": 0, "last_call": 0.5, **dict(options.pop("rdzv_conf", {}))}
        options["rdzv_conf"] = conf
        options |= {"tee": "0", "env": {**env, **dict(options.pop("env", {}))}}
        self.cluster = LocalCluster(command, folder=folder / "c", **options)

    def lines(self, what: str = "committed") -> dict[int, list[dict]]:
        """What each process logged, by its pid."""
        logged = self._logged.lines()
        return {int(pid): [x for x in ls if x["what"] == what] for pid, ls in logged.items()}

    def wait_steps(self, count: int, world: int) -> set[int]:
        """Wait until the members of a world have each made some more steps; returns their pids."""
        before = {pid: len(lines) for pid, lines in self.lines().items()}
        found: set[int] = set()

        def there() -> bool:
            found.clear()
            for pid, lines in self.lines().items():
                if len(lines) >= before.get(pid, 0) + count and lines[-1]["world"] == world:
                    found.add(pid)
            return len(found) == world

        self.cluster.wait(there, f"{count} steps of a world of {world}")
        return found

    def ends(self) -> None:
        """Let it end, and require that the replicas were equal after every step."""
        (self.folder / "enough").touch()
        nodes = self.cluster.nodes
        self.cluster.wait(lambda: not any(node.is_alive for node in nodes), "all agents end")
        assert self.cluster.events("job-ended")[-1].data["ok"] is True
        self.require_equal_replicas()

    def require_equal_replicas(self) -> None:
        """Require one digest for each step, on all workers that logged it."""
        digests = defaultdict(set)
        for lines in self.lines().values():
            for line in lines:
                digests[line["step"]].add(line["digest"])
        assert digests and all(len(found) == 1 for found in digests.values()), digests
        assert sorted(digests) == [*range(max(digests) + 1)]

    def pause_s(self, since_s: float) -> float:
        """Return the time from an instant to the first later step of the slowest survivor."""
        firsts = [
            next((line["at_s"] for line in lines if line["at_s"] > since_s), None)
            for lines in self.lines().values()
            if lines and lines[0]["at_s"] < since_s
        ]
        return max(each for each in firsts if each is not None) - since_s

    def kill_one(self, number: int) -> tuple[int, float]:
        """Kill a worker; returns its pid and the instant."""
        [node] = self.cluster.nodes
        at_s = time.monotonic()
        return node.kill_worker(number), at_s


def figures(name: str, text: str) -> None:
    """Append a measured figure to the file that GPU_FIGURES names, if any."""
    path = os.environ.get("GPU_FIGURES")
    if path:
        with open(path, "a") as file:
            file.write(f"{name}: {text}\n")
