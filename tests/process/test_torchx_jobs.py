"""Jobs of elastane.torchx.run: where its replicas meet, and a job that survives a loss."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest
from growing import Growing
from jobs import PRELOAD_OPTIMIZER
from polling import look
from ports import free_port

pytest.importorskip("torchx", reason="pip install torchx-nightly")

from torchx.runner import get_runner
from torchx.specs import AppState, macros

from elastane.process import environment
from elastane.torchx import run

SCRIPT = Path(__file__).parent / "scripts" / "small_ddp.py"
DEADLINE_S = 90.0
FOREIGN = ("PET_", "ELASTANE_", "TORCHELASTIC_", "TORCHX_")


@pytest.mark.parametrize(
    ("variables", "host"),
    [
        # What TorchX sets on replica 0 here, and on the others.
        ({"RANK0": "localhost"}, "localhost"),
        # On replica 0 of its job on Kubernetes, whose others have its name.
        ({"RANK0": "localhost", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "this-host"),
        ({"RANK0": "train-0", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "train-0"),
        # On the main node of AWS Batch, whose others have its address.
        ({"AWS_BATCH_JOB_ID": "1"}, "this-host"),
        ({"RANK0": "10.0.0.7", "AWS_BATCH_JOB_ID": "1"}, "10.0.0.7"),
    ],
)
def test_each_replica_looks_for_replica_0_where_others_reach_it(tmp_path, variables, host):
    stub = tmp_path / "elastane"
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    [role] = run("$5", script="train.py", j="2x1").roles
    made = macros.Values(img_root="", app_id="a", replica_id="0", rank0_env="RANK0").apply(role)
    told = subprocess.run(
        [made.entrypoint, *made.args],
        env={"PATH": f"{tmp_path}:/bin", "HOSTNAME": "this-host"} | variables,
        capture_output=True, text=True, check=True, timeout=DEADLINE_S,
    ).stdout.splitlines()  # fmt: skip
    assert told[told.index("--rdzv-endpoint") + 1 :] == [f"{host}:29400", "train.py", "$5"]


@pytest.fixture
def runner(tmp_path, monkeypatch):
    """TorchX on this host, whose replicas find the `elastane` of this interpreter."""
    for name in environment.snapshot():
        if name.startswith(FOREIGN):
            monkeypatch.delenv(name)
    monkeypatch.setenv("ELASTANE_PRELOAD", PRELOAD_OPTIMIZER)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    with get_runner() as one:  # its end kills what still runs
        yield one


def test_a_job_of_two_replicas_survives_a_kill_in_place(runner, tmp_path):
    said = tmp_path / "said"
    said.mkdir()
    growing = Growing(said)
    words = ["-j", "1:2x1", "--rdzv_port", str(free_port()), "--max_restarts", "3"]
    words += ["--in_place", "True", "--script", str(SCRIPT), "--", str(said)]
    where = {"log_dir": str(tmp_path / "logs")}
    job = runner.run_component("elastane.torchx.run", words, "local_cwd", where)

    def wait(there, what):
        deadline_s = time.monotonic() + DEADLINE_S
        while (pause_s := look(there, 0.02)) is not None:
            if time.monotonic() > deadline_s or runner.status(job).is_terminal():
                logs = [log.read_text() for log in (tmp_path / "logs").rglob("std*.log")]
                pytest.fail(f"no {what}: {runner.status(job)}\n" + "\n".join(logs))
            time.sleep(pause_s)

    def of(rank: int) -> set[str]:
        """Return the processes whose last step was made as this rank of two."""
        last = {pid: lines[-1] for pid, lines in growing.lines().items() if len(lines) > 3}
        return {pid for pid, line in last.items() if (line["rank"], line["world"]) == (rank, 2)}

    wait(lambda: of(0) and of(1), "steps of two workers")
    [survivor], [lost] = of(0), of(1)
    os.kill(int(lost), signal.SIGKILL)
    seen = len(growing.lines()[survivor])
    wait(lambda: len(growing.lines()[survivor]) > seen + 3, "steps of the survivor")
    (said / "enough").touch()
    assert runner.wait(job, wait_interval=0.05).state == AppState.SUCCEEDED
    states = defaultdict(set)
    for pid in (survivor, lost):
        for line in growing.lines()[pid]:
            states[line["step"]].add(line["digest"])
    assert all(len(digests) == 1 for digests in states.values())
