"""Frameworks that only know torchrun train under `elastane run`, lose a worker, and recover.

Each script kills its rank 1 by SIGKILL in its third epoch, once, and goes on from its checkpoint.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ports import free_port

pytest.importorskip("torch")
SCRIPTS = Path(__file__).parent / "scripts"
EPOCHS = 5
DEADLINE_S = 240


def start(folder: Path, *words: str, preload: str) -> subprocess.Popen[bytes]:
    kept = ("PATH", "HOME", "VIRTUAL_ENV")
    environ = {name: os.environ[name] for name in kept if name in os.environ}
    environ |= {"TMPDIR": str(folder), "HYDRA_FULL_ERROR": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "elastane", "run", "--max-restarts", "1", "--preload", preload),
            *("--log-dir", str(folder / "logs"), *words),
        ],
        cwd=folder,
        env=environ,
        stdout=(folder / "out").open("ab"),
        stderr=subprocess.STDOUT,
    )


def ends_well(folder: Path, *agents: subprocess.Popen[bytes]) -> list[dict]:
    """Wait for the agents, and return what the scripts noted."""
    try:
        codes = [agent.wait(DEADLINE_S) for agent in agents]
    except subprocess.TimeoutExpired:
        raise AssertionError(f"still running:\n{(folder / 'out').read_text()}") from None
    finally:
        for agent in agents:
            agent.kill()
    assert codes == [0] * len(agents), (folder / "out").read_text()
    return [json.loads(line) for line in (folder / "story").read_text().splitlines()]


def recovered(story: list[dict], world: int) -> None:
    """Each epoch was trained, the first two once, by the whole world; the loss fell all along."""
    epochs = [line for line in story if line["what"] == "epoch"]
    assert [line["epoch"] for line in epochs] == list(range(EPOCHS))
    assert [line["restarts"] for line in epochs] == [0, 0, 1, 1, 1]
    assert {line["world"] for line in epochs} == {world}
    losses = [line["loss"] for line in epochs]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] / 2
    assert story[-1]["what"] == "done" and story[-1]["restarts"] == 1


LIGHTNING = "torch,torch.distributed,torch.optim,lightning"


@pytest.mark.soak
def test_lightning_with_two_devices(tmp_path: Path) -> None:
    script = str(SCRIPTS / "lightning_train.py")
    words = ("--standalone", "--nproc-per-node", "2", script, str(tmp_path), str(EPOCHS), "1", "2")
    recovered(ends_well(tmp_path, start(tmp_path, *words, preload=LIGHTNING)), 2)


@pytest.mark.soak
def test_lightning_with_two_nodes_of_one_device(tmp_path: Path) -> None:
    script = str(SCRIPTS / "lightning_train.py")
    meet = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "light")
    words = (*meet, "--nproc-per-node", "1")
    args = (script, str(tmp_path), str(EPOCHS), "2", "1")
    agents = [start(tmp_path, *words, "--node-id", node, *args, preload=LIGHTNING) for node in "ab"]
    recovered(ends_well(tmp_path, *agents), 2)


@pytest.mark.soak
def test_accelerate(tmp_path: Path) -> None:
    script = str(SCRIPTS / "accelerate_train.py")
    words = ("--standalone", "--nproc-per-node", "2", script, str(tmp_path), str(EPOCHS))
    preload = "torch,torch.distributed,torch.optim,torch._dynamo,accelerate"
    agent = start(tmp_path, *words, preload=preload)
    recovered(ends_well(tmp_path, agent), 2)


@pytest.mark.soak
def test_hydra_with_overrides_for_the_trainer(tmp_path: Path) -> None:
    overrides = (
        f"folder={tmp_path}",
        "trainer.accelerator=cpu",
        "trainer.strategy=ddp",
        "trainer.devices=2",
        f"trainer.max_epochs={EPOCHS}",
    )
    words = ("--standalone", "--nproc-per-node", "2", str(SCRIPTS / "hydra_train.py"), *overrides)
    story = ends_well(tmp_path, start(tmp_path, *words, preload=f"{LIGHTNING},hydra"))
    recovered(story, 2)
    assert {line["run"] for line in story if "run" in line} == {str(tmp_path / "outputs")}
    saved = (tmp_path / "outputs" / ".hydra" / "overrides.yaml").read_text()
    assert "trainer.strategy=ddp" in saved
