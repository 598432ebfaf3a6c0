"""The files of docs/schedulers.md start jobs of two nodes from each scheduler's variables."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import yaml
from ports import free_port

from elastane.process import environment

ROOT = Path(__file__).parents[2]
SKYPILOT = ROOT / "examples" / "skypilot.yaml"
KUBEFLOW = ROOT / "examples" / "kubeflow.yaml"
PAGE = (ROOT / "docs" / "schedulers.md").read_text("utf-8")
DEADLINE_S = 90.0
FOREIGN = ("PET_", "ELASTANE_", "TORCHELASTIC_", "SLURM")
# A program without torch: which node has which rank.
TRAIN = """\
import os, pathlib
e = os.environ
words = [e["WORLD_SIZE"], e["GROUP_RANK"], e["TORCHELASTIC_RUN_ID"], e["NODE"]]
pathlib.Path("rank-" + e["RANK"]).write_text(" ".join(words))
"""


def start(command: str, folder: Path, variables: dict[str, str]) -> subprocess.Popen[str]:
    """Start the command of one node as a scheduler does, with this interpreter's `elastane`."""
    kept = {k: v for k, v in environment.snapshot().items() if not k.startswith(FOREIGN)}
    kept["PATH"] = f"{Path(sys.executable).parent}:{kept['PATH']}"
    return subprocess.Popen(
        ["bash", "-c", command], cwd=folder, env=kept | {"ELASTANE_PRELOAD": "json"} | variables,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def ranks_of(command: str, folder: Path, nodes: list[dict[str, str]]) -> list[list[str]]:
    """Run the job, one worker on each of two nodes; return what each rank wrote."""
    (folder / "train.py").write_text(TRAIN)
    agents = [
        start(command, folder, {"NODE": str(number), **variables})
        for number, variables in enumerate(nodes)
    ]
    try:
        said = [agent.communicate(timeout=DEADLINE_S)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], said
    return [(folder / f"rank-{rank}").read_text().split() for rank in range(2)]


def skypilot(rank: int) -> dict[str, str]:
    """Return SkyPilot 0.14.1's variables for the commands of a task on one of two nodes."""
    return {
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "1",
        "SKYPILOT_TASK_ID": "sky-2026-11-28-14-00-00-000000_train_1",
        "ELASTANE_TOKEN": "secret",
    }


def trainer(rank: int, port: int) -> dict[str, str]:
    """Return the variables of Kubeflow Trainer v2.3 in one of two pods, and the pod's name."""
    return {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": str(rank),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(port),
        "ELASTANE_NODE_ID": f"digits-node-0-{rank}",
    }


def test_nodes_of_a_skypilot_task_meet_at_the_first_one(tmp_path):
    command = yaml.safe_load(SKYPILOT.read_text())["run"].replace(":29400", f":{free_port()}")
    ranks = ranks_of(command, tmp_path, [skypilot(0), skypilot(1)])
    job = skypilot(0)["SKYPILOT_TASK_ID"]
    assert ranks == [["2", "0", job, "0"], ["2", "1", job, "1"]]


def test_a_skypilot_task_gives_each_node_its_own_flags(tmp_path):
    (tmp_path / "elastane").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "elastane").chmod(0o755)
    command = yaml.safe_load(SKYPILOT.read_text())["run"]
    variables = {**skypilot(1), "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8"}
    variables["PATH"] = f"{tmp_path}:/usr/bin:/bin"
    told, _ = start(command, tmp_path, variables).communicate(timeout=DEADLINE_S)
    words = told.splitlines()
    flags = dict(zip(words[1:-1:2], words[2:-1:2], strict=True))
    assert (words[0], words[-1]) == ("run", "train.py")
    assert flags == {
        "--nnodes": "2",
        "--nproc-per-node": "1",
        "--node-rank": "1",
        "--node-id": "node-1",
        "--rdzv-endpoint": "10.0.0.7:29400",
        "--rdzv-id": variables["SKYPILOT_TASK_ID"],
        "--max-restarts": "100",
    }


def test_pods_of_the_kubeflow_runtime_meet_at_the_first_one(tmp_path):
    runtime, job = yaml.safe_load_all(KUBEFLOW.read_text())
    [replicated] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    [container] = replicated["template"]["spec"]["template"]["spec"]["containers"]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    # Kubernetes replaces $(NAME) by the container's variable; the job's args take their place.
    words = container["command"] + job["spec"]["trainer"]["args"]
    command = re.sub(r"\$\((\w+)\)", r"$\1", " ".join(words))
    port = free_port()
    ranks = ranks_of(command, tmp_path, [trainer(0, port), trainer(1, port)])
    assert [words[:2] + words[3:] for words in ranks] == [["2", "0", "0"], ["2", "1", "1"]]


def test_pods_of_the_runtime_that_kubeflow_brings_need_no_flag(tmp_path):
    job = yaml.safe_load(re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1])
    assert job["spec"]["runtimeRef"]["name"] == "torch-distributed"
    job = job["spec"]["trainer"]
    port = free_port()
    command = shlex.join(job["command"] + job["args"])
    ranks = ranks_of(command, tmp_path, [trainer(0, port), trainer(1, port)])
    assert [words[:2] + words[3:] for words in ranks] == [["2", "0", "0"], ["2", "1", "1"]]
