"""With deterministic=True a job ends bitwise equal after any departures and arrivals.

Its digest log has each step once, although rank 0 changes, and `elastane verify-run` finds it equal
to that of a job of one worker.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from growing import Growing
from jobs import PRELOAD_COMPILER

from elastane.testing import LocalCluster
from elastane.worker.digest_log import read_digest_log

SCRIPT = Path(__file__).parent / "scripts" / "deterministic_train.py"
DEADLINE_S = 120.0


class Changing:
    """A local cluster that trains with deterministic=True."""

    def __init__(self, folder: Path, **env: str) -> None:
        self.folder = folder
        (folder / "said").mkdir()
        self.told = Growing(folder / "said")
        script = [str(SCRIPT), str(folder / "said"), "0", "0.03"]
        options = {"nnodes": "1:5", "nproc_per_node": 1, "max_restarts": 1000, "tee": "0"}
        options["preload"] = PRELOAD_COMPILER
        options["rdzv_conf"] = {"last_call": 0.3, "crash_loop": 0}
        env["ELASTANE_DIGEST_LOG"] = str(folder / "a" / "digests.jsonl")
        self.cluster = LocalCluster(script, folder=folder / "c", env=env, **options)
        self.names: list[str] = []

    def start(self, *names: str) -> None:
        for name in names:
            self.cluster.start(name)
        self.names += names
        self.settle()

    def drop(self, name: str, how: str) -> None:
        """Remove a node by "kill" or "stop"."""
        getattr(self.cluster.node(name), how)()
        self.names.remove(name)
        self.settle()

    def settle(self, steps: int = 3) -> None:
        """Wait until all expected workers have made some steps in one world."""
        begun = {path: len(lines) for path, lines in self.told.lines().items()}
        size = len(self.names)

        def there() -> bool:
            new = [
                lines
                for path, lines in self.told.lines().items()
                if len(lines) >= begun.get(path, 0) + steps
            ]
            return sum(lines[-1]["world"] == size for lines in new) == size

        self.cluster.wait(there, f"steps of a world of {size}")

    def ends(self) -> dict:
        """End the job; return the common result of the last world's workers."""
        (self.folder / "said" / "enough").touch()
        nodes = self.cluster.nodes
        self.cluster.wait(lambda: not any(node.is_alive for node in nodes), "all agents end")
        finals = [json.loads(path.read_text()) for path in (self.folder / "said").glob("*.final")]
        assert len(finals) == len(self.names)
        assert all(found == finals[0] for found in finals), finals
        return finals[0]

    def undisturbed(self, steps: int) -> dict:
        """Run a job of one for `steps` steps without a launcher; its digest log is in b."""
        folder = self.folder / "b"
        folder.mkdir()
        variables = {**os.environ, "ELASTANE_DIGEST_LOG": str(folder / "digests.jsonl")}
        command = [sys.executable, str(SCRIPT), str(folder), str(steps), "0"]
        subprocess.run(command, check=True, env=variables, timeout=DEADLINE_S)
        (final,) = folder.glob("*.final")
        return json.loads(final.read_text())

    def same_as_undisturbed(self) -> None:
        found = self.ends()
        assert found == self.undisturbed(found["steps"])
        logs = [read_digest_log(self.folder / each) for each in "ab"]
        assert [*logs[0].lines] == [*logs[1].lines] == [*range(found["steps"])]
        command = [sys.executable, "-m", "elastane", "verify-run", *map(str, self._trails())]
        told = subprocess.check_output(command, text=True, timeout=DEADLINE_S)
        assert f"the same: all {found['steps']} steps" in told

    def _trails(self) -> list[Path]:
        return [self.folder / "a", self.folder / "b" / "digests.jsonl"]


def test_kills_an_arrival_and_a_departure_change_no_bit(tmp_path):
    job = Changing(tmp_path)
    with job.cluster:
        job.start("a", "b", "c")
        by_rank = {ls[-1]["rank"]: int(pid) for pid, ls in job.told.lines().items() if ls}
        nodes = job.cluster.nodes
        job.cluster.wait(
            lambda: all(node.workers() for node in nodes), "the agents name their workers"
        )
        next(node for node in nodes if by_rank[0] in node.workers()).kill_worker()
        job.settle()
        job.drop("b", "kill")
        job.start("b")
        job.drop("a", "stop")
        job.same_as_undisturbed()


@pytest.mark.soak
def test_slow_workers_with_fewer_shards_change_no_bit_as_others_come_and_go(tmp_path):
    job = Changing(tmp_path, SLOW_WORKERS="1")
    with job.cluster:
        job.start("a", "b", "c")
        for name in ("d", "e"):
            job.settle(50)
            job.start(name)
        job.settle(50)
        job.cluster.node("c").kill_worker()
        job.settle(50)
        job.drop("a", "kill")
        job.settle(50)
        lines = [line for each in job.told.lines().values() for line in each]
        worlds: dict[int, list[int]] = {}
        for line in lines:
            worlds.setdefault(line["step"], []).append(line["shards"])
        assert any(max(each) > min(each) + 1 for each in worlds.values()), "all were alike"
        job.same_as_undisturbed()


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2])
def test_20_changes_of_membership_at_random_change_no_bit(tmp_path, seed):
    rng = random.Random(seed)
    job = Changing(tmp_path)
    with job.cluster:
        job.start("a", "b")
        for _ in range(20):
            away = sorted(set("abcde") - set(job.names))
            kinds = (
                ["worker"] + ["arrive"] * 2 * bool(away) + ["kill", "stop"] * (len(job.names) > 1)
            )
            kind = rng.choice(kinds)
            print(kind, job.names)
            if kind == "arrive":
                job.start(rng.choice(away))
            elif kind == "worker":
                job.cluster.node(rng.choice(job.names)).kill_worker()
                job.settle()
            else:
                job.drop(rng.choice(job.names), kind)
        job.same_as_undisturbed()
