"""`elastane logs --rank 0` shows what each worker printed while it was rank 0, and nothing else."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import PRELOAD_OPTIMIZER

from elastane.testing import LocalCluster

SCRIPT = Path(__file__).parent / "scripts" / "says_rank.py"
MODES = {
    "init": {},
    "in-place": {"in_place": True, "ranks_may_change": True},
    "restart": {},
}


def command(cluster: LocalCluster, *words: str) -> list[str]:
    folder = str(cluster.log_dir / cluster.job)
    return [sys.executable, "-m", "elastane", "logs", folder, *words]


def workers_of(said: str, rank: int) -> list[int]:
    """Return the processes that printed as this rank, in order; assert that no other rank did.

    A survivor may print its old rank once more while it is being regrouped.
    """
    lines, is_new = [], False
    for line in said.splitlines():
        printed = line.partition("]: ")[2]
        if line.startswith("---"):
            is_new = True
        elif not is_new or printed.startswith(f"rank {rank} of "):
            lines.append(printed)
            is_new = False
    found = [re.fullmatch(r"rank (\d+) of (\d+)", line) for line in lines]
    assert found and all(one is not None and int(one[1]) == rank for one in found), said[-2000:]
    pids = [int(one[2]) for one in found]
    return [pid for place, pid in enumerate(pids) if pid != pids[place - 1] or not place]


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("init", marks=pytest.mark.soak),
        "in-place",
        pytest.param("restart", marks=pytest.mark.soak),
    ],
)
def test_the_output_of_rank_0_is_that_of_all_workers_that_were_rank_0(tmp_path, mode):
    options = {"nnodes": "1", "nproc_per_node": 3, "max_restarts": 10, "min_workers": 1}
    options |= {"redirects": "3", "preload": PRELOAD_OPTIMIZER, **MODES[mode]}
    options["rdzv_conf"] = {"last_call": 0.1, "gather": 0.2}
    if mode == "restart":
        del options["min_workers"]
    with LocalCluster([str(SCRIPT), mode], folder=tmp_path, **options) as cluster:
        cluster.start("a")

        def says(*words: str) -> str:
            return subprocess.run(
                command(cluster, "--stdout", *words), capture_output=True, text=True, check=False
            ).stdout

        def rank_0() -> list[int]:
            said = says("--rank", "0")
            return workers_of(said, 0) if said else []

        cluster.wait(lambda: len(rank_0()) == 1, "rank 0 prints")
        with subprocess.Popen(
            command(cluster, "--stdout", "--rank", "0", "--follow"), stdout=subprocess.PIPE
        ) as following:
            assert following.stdout is not None
            assert following.stdout.readline().startswith(b"[default0 a r1.0 out]: rank 0 of ")
            for _ in range(2):
                killed = rank_0()[-1]
                os.kill(killed, signal.SIGKILL)
                cluster.wait(
                    lambda killed=killed: rank_0()[-1] != killed, "another worker is rank 0"
                )
                cluster.wait(
                    lambda killed=killed: len({*cluster.nodes[0].workers()} - {killed}) == 3,
                    "it is replaced",
                )
            marks = [line for line in says("--rank", "0").splitlines() if line.startswith("---")]
            assert len(marks) == len(rank_0()) - 1
            for line in following.stdout:
                if line == f"{marks[-1]}\n".encode():
                    break
            following.kill()
        for rank in (1, 2):
            assert workers_of(says("--rank", str(rank)), rank)
