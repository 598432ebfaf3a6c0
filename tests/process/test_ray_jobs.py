"""Jobs of `elastane ray` on a Ray cluster of this machine: a node is lost, a script fails."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from growing import Growing
from process_harness import until
from supervise import alive

pytest.importorskip("ray", reason="pip install 'elastane[ray]'")

import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastane.process import environment

SCRIPT = Path(__file__).parent / "scripts" / "small_ddp.py"
FOREIGN = ("PET_", "ELASTANE_", "TORCHELASTIC_", "RAY_")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head without room for an agent, and two nodes with room for one each."""
    one = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        one.nodes_for_agents = [one.add_node(num_cpus=1) for _ in range(2)]
        yield one
    finally:
        one.shutdown()


@contextmanager
def program(cluster: Any, folder: Path, *words: object) -> Iterator[subprocess.Popen[bytes]]:
    """Run `elastane ray` with these words; its output goes to FOLDER/said."""
    env = {k: v for k, v in environment.snapshot().items() if not k.startswith(FOREIGN)}
    with (folder / "said").open("wb") as said:
        job = subprocess.Popen(
            [sys.executable, "-m", "elastane", "ray", "--log-dir", folder / "logs", *words],
            env={**env, "RAY_ADDRESS": cluster.address},
            cwd=folder, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
        )  # fmt: skip
        try:
            yield job
        finally:
            job.kill()
            job.wait()


def wait(job: subprocess.Popen[bytes], folder: Path, there: Callable[[], object]) -> None:
    said = folder / "said"
    until(lambda: there() or job.poll() is not None, "it comes", 120)
    assert there(), said.read_text()


@pytest.mark.soak
def test_a_job_survives_the_loss_of_a_ray_node(cluster, tmp_path):
    growing = Growing(tmp_path)
    words = ("--nnodes", "1:2", "--in-place", "--ranks-may-change", "--max-restarts", "3")
    with program(cluster, tmp_path, *words, SCRIPT, tmp_path) as job:

        def of_world(size: int) -> set[str]:
            """The processes whose last four steps were made in a world of this size."""
            lines = growing.lines()
            return {pid for pid in lines if {one["world"] for one in lines[pid][-4:]} == {size}}

        wait(job, tmp_path, lambda: len(of_world(2)) == 2)
        pair = of_world(2)
        cluster.remove_node(cluster.nodes_for_agents.pop(), allow_graceful=False)
        wait(job, tmp_path, lambda: of_world(1) & pair)
        [survivor] = of_world(1) & pair
        assert alive(int(survivor))
        cluster.nodes_for_agents.append(cluster.add_node(num_cpus=1))
        (tmp_path / "enough").touch()
        assert job.wait(120) == 0, (tmp_path / "said").read_text()
    states = defaultdict(set)
    for pid in pair:
        for line in growing.lines()[pid]:
            states[line["step"]].add(line["digest"])
    assert all(len(digests) == 1 for digests in states.values())
    until(lambda: not any(alive(int(pid)) for pid in growing.lines()), "no worker is left", 60)


@pytest.mark.soak
def test_the_agent_of_a_node_that_ray_drains_leaves_by_its_deadline(cluster, tmp_path):
    growing = Growing(tmp_path)
    words = ("--nnodes", "1:2", "--in-place", "--ranks-may-change")
    with program(cluster, tmp_path, *words, SCRIPT, tmp_path) as job:

        def worlds() -> list[int]:
            """The size of each process's last world."""
            return [lines[-1]["world"] for lines in growing.lines().values() if lines]

        wait(job, tmp_path, lambda: worlds() == [2, 2])
        drained = cluster.nodes_for_agents.pop()
        drain = ["--address", cluster.address, "--node-id", drained.node_id]
        drain += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
        ray_program = Path(sys.executable).with_name("ray")
        subprocess.run([ray_program, "drain-node", *drain, "--deadline-remaining-seconds", "60"],
                       check=True, stdin=subprocess.DEVNULL, timeout=60)  # fmt: skip
        left = "the agent on .* ended with exit code 143"
        wait(job, tmp_path, lambda: re.search(left, (tmp_path / "said").read_text()))
        wait(job, tmp_path, lambda: 1 in worlds())
        (tmp_path / "enough").touch()
        assert job.wait(120) == 0, (tmp_path / "said").read_text()
    assert "Ray drains the node" in (tmp_path / "said").read_text()
    assert "of the budget used" not in (tmp_path / "said").read_text()
    cluster.remove_node(drained, allow_graceful=False)
    cluster.nodes_for_agents.append(cluster.add_node(num_cpus=1))


@pytest.mark.soak
def test_a_failed_script_and_a_signal_end_the_job_with_their_codes(cluster, tmp_path):
    (tmp_path / "fails.py").write_text("import sys\nsys.exit(3)\n")
    with program(cluster, tmp_path, "--nnodes", "2", "fails.py") as job:
        assert job.wait(120) == 1, (tmp_path / "said").read_text()
    growing = Growing(tmp_path)
    with program(cluster, tmp_path, "--nnodes", "2", SCRIPT, tmp_path) as job:
        wait(job, tmp_path, lambda: len(growing.lines()) == 2)
        job.send_signal(signal.SIGTERM)
        assert job.wait(120) == 128 + signal.SIGTERM, (tmp_path / "said").read_text()
    assert not any(alive(int(pid)) for pid in growing.lines())


@pytest.mark.soak
def test_an_agent_starts_on_the_node_that_no_other_job_uses(cluster, tmp_path):
    class OtherJob:  # Ray sends a class in a function to its node; it has no module of tests.
        pass

    (tmp_path / "script.py").touch()
    ray.init(address=cluster.address)
    try:
        first = next(one for one in ray.nodes() if one["Alive"] and one["Resources"].get("CPU"))
        there = NodeAffinitySchedulingStrategy(first["NodeID"], soft=False)
        other = ray.remote(OtherJob).options(num_cpus=1, scheduling_strategy=there).remote()
        ray.get(other.__ray_ready__.remote())
        with program(cluster, tmp_path, "--nnodes", "1", "script.py") as job:
            assert job.wait(60) == 0, (tmp_path / "said").read_text()
    finally:
        ray.shutdown()
