"""Workers that share one GPU: over gloo, and over NCCL where it is 2.30 or later.

`make gpu` runs these, and the suites of recovery in place with their tensors on the GPU.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import statistics
from pathlib import Path

import pytest
import torch
from gpu_jobs import GpuJob, figures

GPUS = len([*Path("/dev").glob("nvidia[0-9]*")])
DEVICE = os.environ.get("GPU_TESTS_ON", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cuda" and GPUS < 1,
        reason="needs an NVIDIA GPU; GPU_TESTS_ON=cpu tries the tests",
    ),
]


def nccl() -> tuple[int, int]:
    """The version that is loaded; torch tells the one that it was compiled with."""
    found = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(found))
    except OSError:
        return 0, 0
    return found.value // 10_000, found.value // 100 % 100


BACKENDS = [
    "gloo",
    pytest.param(
        "nccl",
        marks=pytest.mark.skipif(nccl() < (2, 30), reason="needs NCCL 2.30 or later"),
    ),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("script", [(), ("compile",)], ids=["eager", "compiled"])
def test_killed_workers_cost_no_step_and_replicas_stay_equal(tmp_path, backend, script):
    if backend == "nccl" and script:
        pytest.skip("compiled code calls the same collectives")
    kills = 5 if script else 20
    job = GpuJob(tmp_path, 3, *script, backend=backend)
    rng, pauses = random.Random(3), []
    with job.cluster:
        job.cluster.start("a")
        before = job.wait_steps(3, 3)
        for _ in range(kills):
            dead, at_s = job.kill_one(rng.randrange(3))
            after = job.wait_steps(3, 3)
            assert before - {dead} < after and dead not in after
            pauses.append(job.pause_s(at_s))
            before = after
        job.ends()
    worst = f"worst {max(pauses):.2f} s, {kills} kills"
    figures(f"pause {backend} {'compiled' if script else 'eager'}",
            f"median {statistics.median(pauses):.2f} s, {worst}")  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_kernel_that_never_ends_is_killed_and_replaced(tmp_path, backend):
    conf = {"hang_floor": 3.0}
    job = GpuJob(tmp_path, 3, backend=backend, rdzv_conf=conf)
    with job.cluster:
        job.cluster.start("a")
        before = job.wait_steps(5, 3)
        by_rank = {lines[-1]["rank"]: pid for pid, lines in job.lines().items()}
        (job.folder / f"{by_rank[1]}.hang").touch()
        job.cluster.wait_event("replacement")
        after = job.wait_steps(5, 3)
        assert before - {by_rank[1]} < after and by_rank[1] not in after
        assert "it hung" in job.cluster.events("replacement")[-1].data["cause"]
        job.ends()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stopped_worker_is_killed_and_replaced(tmp_path, backend):
    job = GpuJob(tmp_path, 3, backend=backend, rdzv_conf={"hang_floor": 3.0})
    with job.cluster:
        node = job.cluster.start("a")
        before = job.wait_steps(5, 3)
        stopped = node.kill_worker(2, number=signal.SIGSTOP)
        after = job.wait_steps(5, 3)
        assert before - {stopped} < after and stopped not in after
        job.ends()


def test_a_replacement_finds_the_memory_of_the_dead_free(tmp_path):
    """Each holds a quarter of the GPU: while a dead one's were taken, no replacement had room."""
    whole = torch.cuda.mem_get_info()[1] / 2**30 if DEVICE == "cuda" else 4
    job = GpuJob(tmp_path, 3, f"hold={whole * 0.27:.2f}")
    with job.cluster:
        job.cluster.start("a")
        before = job.wait_steps(3, 3)
        for _ in range(5):
            dead, _ = job.kill_one(1)
            after = job.wait_steps(3, 3)
            assert before - {dead} < after
            before = after
        assert not [e for e in job.cluster.events("worker-exited") if e.data.get("exit_code") == 1]
        job.ends()


def test_all_workers_killed_continue_from_the_snapshot_of_the_last_step(tmp_path):
    job = GpuJob(tmp_path, 2, f"save={tmp_path / 'store'}", env={"ELASTANE_LOG_LEVEL": "info"})
    with job.cluster:
        node = job.cluster.start("a")
        job.wait_steps(5, 2)
        for _ in range(3):
            for pid in node.workers():
                os.kill(pid, signal.SIGKILL)
            job.wait_steps(5, 2)
        restored = [line for lines in job.lines("restored").values() for line in lines[:1]]
        again = [line for line in restored if line["step"]]
        assert len(again) == 6 and all(line["where"] for line in again), restored
        (job.folder / "enough").touch()
        job.cluster.wait(lambda: not node.is_alive, "the agent ends")
    committed = {}
    for lines in job.lines().values():
        for line in lines:
            committed.setdefault((line["round"], line["step"]), set()).add(line["digest"])
    assert all(len(found) == 1 for found in committed.values())
    # The restored state is the one committed at that step.
    by_step = {(step, d) for (_, step), found in committed.items() for d in found}
    assert all((line["step"] - 1, line["digest"]) in by_step for line in again)


@pytest.mark.parametrize("backend", BACKENDS)
def test_arrivals_and_leaves_at_boundaries(tmp_path, backend):
    job = GpuJob(tmp_path, 1, backend=backend, nnodes="1:3")
    with job.cluster:
        for size, name in enumerate("abc", 1):
            job.cluster.start(name)
            job.wait_steps(3, size)
        job.cluster.node("a").stop()
        job.wait_steps(3, 2)
        job.cluster.node("b").kill()
        job.wait_steps(3, 1)
        job.cluster.start("a")
        job.wait_steps(3, 2)
        job.ends()


def test_a_preloaded_module_may_ask_for_devices(tmp_path):
    """Many packages call `torch.cuda.is_available()` as they are imported; forks still use CUDA."""
    (tmp_path / "asks.py").write_text(
        "import torch\nFOUND = torch.cuda.is_available(), torch.cuda.device_count()\n"
    )
    env = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    job = GpuJob(tmp_path, 2, preload="torch,asks", env=env)
    with job.cluster:
        job.cluster.start("a")
        job.wait_steps(3, 2)
        assert not job.cluster.events("zygote-fallback")
        job.ends()
