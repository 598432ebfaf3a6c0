"""`elastane chaos` on a real job: the faults are logged as events, and the job continues."""

import os
import subprocess
import sys

import pytest

from elastane.testing import LocalCluster

SCRIPT = """\
import pathlib, sys, time
while not pathlib.Path(sys.argv[1], "done").exists():
    time.sleep(0.02)
"""


@pytest.fixture
def runtime(tmp_path):
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    return folder


def chaos(runtime, *words):
    env = {**os.environ, "XDG_RUNTIME_DIR": str(runtime)}
    return subprocess.run(
        [sys.executable, "-m", "elastane", "chaos", *words],
        capture_output=True, text=True, timeout=120, check=False, env=env,
    )  # fmt: skip


def test_faults_are_logged_as_events_and_the_job_continues(tmp_path, runtime):
    (tmp_path / "work.py").write_text(SCRIPT)
    options = {"preload": "json", "nproc_per_node": 2, "nnodes": "1:2", "max_restarts": 100}
    script = [str(tmp_path / "work.py"), str(tmp_path)]
    env = {"XDG_RUNTIME_DIR": str(runtime)}
    with LocalCluster(script, folder=tmp_path / "c", env=env, **options) as cluster:
        cluster.start("a"), cluster.start("b")
        cluster.wait_event("workers-started", count=2)  # A fault of a worker needs one.
        plan = ["--kill-worker", "--kill-node", "--seed", "4", "--every", "0.7", "--duration", "5"]
        done = chaos(runtime, cluster.job, *plan)
        assert done.returncode == 0, done.stdout + done.stderr
        # The last node of this machine is kept.
        assert [node.is_alive for node in cluster.nodes].count(True) == 1
        faults = cluster.events("fault-injected")
        told = [line.split(" s: ")[1] for line in done.stdout.splitlines() if " s: kill" in line]
        assert [fault.reason for fault in faults] == told
        assert {fault.data["fault"] for fault in faults} == {"kill-worker", "kill-node"}
        assert {fault.source for fault in faults} == {"chaos"}
        assert "goodput" in done.stdout and f"elastane explain {cluster.job}" in done.stdout
        assert chaos(runtime, cluster.job, "--every", "0").returncode == 2
        other = chaos(runtime, "no-such-job")
        assert other.returncode == 2 and f"one of {cluster.job}" in other.stderr
        (tmp_path / "done").touch()
        cluster.wait_done()


def test_a_node_that_is_cut_off_is_given_up_for_its_silence_and_comes_back(tmp_path, runtime):
    (tmp_path / "work.py").write_text(SCRIPT)
    options = {"preload": "json", "nproc_per_node": 1, "nnodes": "1:2", "max_restarts": 0}
    script = [str(tmp_path / "work.py"), str(tmp_path)]
    env = {"XDG_RUNTIME_DIR": str(runtime)}
    with LocalCluster(script, folder=tmp_path / "c", env=env, **options) as cluster:
        cluster.start("a")
        alone = cluster.wait_world(nodes=1)
        cluster.start("b")
        both = cluster.wait_world(nodes=2, after=alone)
        plan = ["--partition", "--every", "1", "--duration", "1", "--seed", "3"]
        done = chaos(runtime, cluster.job, *plan)
        assert done.returncode == 0, done.stdout + done.stderr
        [fault] = cluster.events("fault-injected")
        assert fault.data["fault"] == "partition" and fault.reason.endswith(" for 10 s")
        departed = cluster.wait_event("node-departed")
        assert (departed.node, departed.reason.partition(" for")[0]) == ("b", "silent")
        cluster.wait_world(nodes=2, after=both)
        (tmp_path / "done").touch()
        cluster.wait_done()


def test_a_job_that_ends_by_a_fault_gives_exit_code_1(tmp_path, runtime):
    (tmp_path / "work.py").write_text(SCRIPT)
    options = {"preload": "json", "nproc_per_node": 1, "nnodes": "1", "max_restarts": 0}
    script = [str(tmp_path / "work.py"), str(tmp_path)]
    env = {"XDG_RUNTIME_DIR": str(runtime)}
    with LocalCluster(script, folder=tmp_path / "c", env=env, **options) as cluster:
        cluster.start("a")
        cluster.wait_event("workers-started")
        done = chaos(runtime, cluster.job, "--seed", "1", "--every", "0.5", "--duration", "2")
        assert done.returncode == 1, done.stdout + done.stderr
        assert cluster.node("a").wait() == 1
