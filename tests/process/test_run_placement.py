"""The CPUs and the devices of workers."""

from __future__ import annotations

from pathlib import Path

import pytest
from supervise import agent

from elastane.process.numa import bind
from elastane.process.topology import read_topology

PLACES = """
names = ("RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "LOCAL_WORLD_SIZE")
tell("env", " ".join(os.environ[name] for name in names))
import sys
tell("args", " ".join(sys.argv[1:]))
tell("cpus", sorted(os.sched_getaffinity(0)))
"""


@pytest.mark.parametrize("start", ["--no-zygote", "--preload"])
def test_each_worker_sees_one_device_as_its_local_rank_0(tmp_path: Path, start: str) -> None:
    words = ("--no-zygote",) if start == "--no-zygote" else ("--preload", "json")
    options = (*words, "--virtual-local-rank", "--nproc-per-node", "2", "--redirects", "3")
    script = {"body": PLACES, "args": ("--device=${local_rank}",)}
    with agent(tmp_path, *options, **script, CUDA_VISIBLE_DEVICES="5, GPU-7f") as one:
        assert one.wait() == 0, one.err
        assert [one.told(f"env.{rank}.0") for rank in (0, 1)] == ["0 0 5 2", "1 0 GPU-7f 2"]
        # The macro and the folders have the real one.
        assert [one.told(f"args.{rank}.0") for rank in (0, 1)] == ["--device=0", "--device=1"]
        assert len(list(one.job_dir().glob("round_1/attempt_0/rank_*/stdout.log"))) == 2


def test_too_few_devices_are_refused_before_anything_starts(tmp_path: Path) -> None:
    options = ("--virtual-local-rank", "--nproc-per-node", "2")
    with agent(tmp_path, *options, body=PLACES, CUDA_VISIBLE_DEVICES="5") as one:
        assert one.wait() == 78
        assert "[no-device-for-worker]" in one.err
        assert not list(tmp_path.glob("env.*"))


@pytest.mark.parametrize("start", ["--no-zygote", "--preload"])
def test_bound_workers_run_on_their_own_cores_from_their_first_line_on(
    tmp_path: Path, start: str
) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": ""}
    there = read_topology(environ)
    if len({there.cores[cpu] for cpu in min(there.nodes.values(), key=min)}) < 2:
        pytest.skip("a machine of one core has nothing to divide")
    words = ("--no-zygote",) if start == "--no-zygote" else ("--preload", "json")
    options = (*words, "--numa-binding", "exclusive", "--nproc-per-node", "2")
    with agent(tmp_path, *options, body=PLACES, **environ) as one:
        assert one.wait() == 0, one.err
        bound = bind(there, "exclusive", 2)
        assert bound[0].isdisjoint(bound[1])
        for rank in (0, 1):
            assert one.told(f"cpus.{rank}.0") == str(sorted(bound[rank]))
        assert not one.events("zygote-fallback"), "a fork can be bound as well as a new process"
