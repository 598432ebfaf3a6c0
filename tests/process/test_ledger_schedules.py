"""Real jobs under schedules of faults: every sample is in exactly one committed step of each epoch.

The simulated 10,000 schedules are in tests/numerics.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from jobs import PRELOAD as PRELOAD_TORCH

from elastane.testing import FaultPlan, LocalCluster

SCRIPT = Path(__file__).parent / "scripts" / "ledger_steps.py"
KINDS = ("kill-worker", "kill-worker", "kill-node", "kill-agent", "stop-node", "add-node")
HANGS = ("stop-worker", "pause-node")
# Kills a worker, then a node.
SEED = 35
WORLD_MAX, BATCH, STEP_S = 5, 300, 0.05
# What the script comes to import.
PRELOAD = f"{PRELOAD_TORCH},torch.optim,elastane.worker.job"


def played(folder: Path, plan: FaultPlan, seed: int, epochs: int, nodes: int) -> list[str]:
    """Play one schedule to the end of its job; return the injected faults."""
    said = folder / "said"
    said.mkdir()
    options = {"nnodes": f"1:{WORLD_MAX}", "nproc_per_node": 1, "max_restarts": 1000}
    options |= {"preload": PRELOAD, "tee": "0", "rdzv_conf": "crash_loop=0,gather=0.2,last_call=1"}
    script = [str(SCRIPT), str(said), str(epochs), str(BATCH), str(STEP_S)]
    with LocalCluster(script, folder=folder / "c", **options) as cluster:
        for number in range(nodes):
            cluster.start(f"node-{number}")
        world = said / "world"
        cluster.wait(lambda: world.exists() and world.read_text() == str(nodes), "a step of all")
        told = plan.run(cluster)
        ended = cluster.wait_event("job-ended", deadline_s=90.0)
        assert ended.data["ok"] is True, cluster.story()
        found = [json.loads(path.read_text()) for path in said.glob("*.counts")]
        print("\n".join(told))
        assert found and all(one == {"missing": 0, "doubled": 0} for one in found), (found, told)
    return told


@pytest.mark.parametrize("seed", [SEED, pytest.param(8, marks=pytest.mark.soak)])
def test_a_schedule_of_faults_loses_and_doubles_no_sample(tmp_path, seed):
    plan = FaultPlan.random(seed, 2.5, 0.8, KINDS, back_s=0.5)
    told = played(tmp_path, plan, seed, epochs=1, nodes=2)
    assert any("kill" in line or "stop" in line for line in told)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 200))
def test_100_schedules_of_kills_hangs_leaves_and_arrivals_lose_and_double_no_sample(tmp_path, seed):
    """Training takes longer than the faults."""
    plan = FaultPlan.random(seed, 12.0, 1.0, (*KINDS, *HANGS), back_s=0.5)
    played(tmp_path, plan, seed, epochs=12, nodes=random.Random(seed).randint(1, 3))
