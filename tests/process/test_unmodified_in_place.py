"""Ordinary DDP scripts under --in-place: survivors keep their processes and agree on weights."""

import contextlib
import json
import os
import random
import signal
from collections import defaultdict
from pathlib import Path

import pytest
from jobs import PRELOAD_COMPILER
from recorded_jobs import RecordedJob

from elastane.testing import LocalCluster

SCRIPT = Path(__file__).parent / "scripts" / "unmodified_ddp.py"


class Unmodified(RecordedJob):
    """A cluster that runs the script, and its workers' records of each step."""

    def __init__(self, folder: Path, *args: str, **options: object) -> None:
        super().__init__(folder)
        script = [str(SCRIPT), str(self.folder), *args]
        options = {"nnodes": "1", "nproc_per_node": 4, "min_workers": 1, **options}
        self.cluster = LocalCluster(
            script, folder=folder / "c", in_place=True, preload=PRELOAD_COMPILER, **options
        )

    def restarted(self) -> set[int]:
        """Wait until all workers have restarted, and return those of the next world."""
        lost = self.cluster.wait_event("restart")
        world = self.cluster.world()

        def is_next() -> bool:
            nonlocal world
            world = self.cluster.world()
            is_newer = world.fence > (lost.round, lost.attempt)
            return is_newer and len(world.pids) == len(world.nodes)

        self.cluster.wait(is_next, "the agents name the workers of the next world")
        return {pid for pids in world.pids.values() for pid in pids}

    def ends_alike(self, survivors: set[int]) -> None:
        """End the job; assert that survivors had one state and one world size after each step."""
        (self.folder / "enough").touch()
        self.cluster.wait(lambda: not self.cluster.node("a").is_alive, "the agent ends")
        assert self.cluster.events("job-ended")[-1].data["ok"] is True, self.cluster.story()
        by_step = defaultdict(set)
        for pid in survivors:
            for line in self.said()[pid]:
                by_step[line["step"]].add((line["digest"], line["world"]))
        differing = {step: states for step, states in by_step.items() if len(states) > 1}
        assert by_step and not differing, differing


def kill(pids: set[int]) -> None:
    """Kill processes with SIGKILL."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("seed", "mode"), [(1, "ordinary"), (2, "static")])
def test_survivors_of_an_unmodified_script_continue_with_equal_weights(tmp_path, seed, mode):
    choose = random.Random(seed)
    job = Unmodified(tmp_path, mode, ranks_may_change=True)
    with job.cluster as cluster:
        cluster.start("a")
        cluster.wait_world(nodes=1)
        left = {*cluster.world().pids["a"]}
        job.wait_steps(left, 4)
        for count in choose.choice([(1, 1), (2,)]):
            lost = {*choose.sample(sorted(left), count)}
            kill(lost)
            left -= lost
            job.wait_steps(left, len(left))
        job.ends_alike(left)
        assert not cluster.events("restart") and not cluster.events("replacement")


def test_a_script_that_keeps_its_size_sees_it_until_its_end_and_means_stay_right(tmp_path):
    job = Unmodified(tmp_path, "sum", nproc_per_node=3, max_restarts=0)
    with job.cluster as cluster:
        cluster.start("a")
        cluster.wait_world(nodes=1)
        pids = {*cluster.world().pids["a"]}
        cluster.wait(lambda: cluster.events("incident"), "the worker of rank 1 is lost in its sum")
        left = pids - {cluster.events("worker-exited")[0].data["pid"]}
        job.wait_steps(left, 3)
        job.ends_alike(left)
        assert not cluster.events("restart")
        lines = [line for pid in left for line in job.said()[pid]]
        assert {line["mean"] for line in lines} == {1.0}
        assert {(line["rank"], line["world"]) for line in lines} == {(0, 3), (2, 3)}
        saved = {file.name for file in (job.folder / "dcp").glob("*.distcp")}
        assert saved == {"__0_0.distcp", "__1_0.distcp"}, "each survivor saves its part"


def test_twin_modules_keep_their_gradients_and_counts_their_scale_as_a_worker_is_lost(tmp_path):
    script = [str(SCRIPT.with_name("twin_modules.py")), str(tmp_path)]
    options = {"nnodes": "1", "nproc_per_node": 3, "min_workers": 1, "max_restarts": 0}
    with LocalCluster(
        script, folder=tmp_path / "c", in_place=True, preload=PRELOAD_COMPILER, **options
    ) as cluster:
        node = cluster.start("a")
        cluster.wait(lambda: not node.is_alive, "the agent ends")
        assert cluster.events("job-ended")[-1].data["ok"] is True, cluster.story()
    said = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 2)]
    assert [each["gradients"] for each in said] == [[0.0] * 6] * 2
    assert [each["trained"] for each in said] == [[[24, 24]] * 6] * 2
    # Counts of each class are exact in an evaluation.
    assert [each["evaluated"] for each in said] == [[[24, 24]] * 3 + [[24, 16]] * 3] * 2


@pytest.mark.parametrize(
    ("mode", "may_change", "reason"),
    [
        ("sum", True, "allreduce (sum) was interrupted"),
        ("gather", False, "its buffers are for 2 workers"),
        ("muon", True, "the optimizer DealtOut calls allreduce (sum) in its step"),
        ("ratio", False, "the evaluation sums 9 floats and as many counts"),
    ],
)
def test_collectives_without_a_meaning_for_fewer_workers_restart_all(
    tmp_path, mode, may_change, reason
):
    job = Unmodified(tmp_path, mode, nproc_per_node=2, max_restarts=1, ranks_may_change=may_change)
    with job.cluster as cluster:
        node = cluster.start("a")
        cluster.wait(lambda: len(job.said()) == 4, "two workers, and two more after the restart")
        job.ends_alike(job.restarted())
        assert reason in node.output and "[in-place-restart]" in node.output


@pytest.mark.parametrize(
    ("mode", "lost", "reason"),
    [
        ("ordinary", 0, "the worker of rank 0 is lost, and no other would save and log"),
        ("by hand", 1, "the script sums floats without DistributedDataParallel"),
    ],
)
def test_values_that_a_script_may_have_kept_restart_all(tmp_path, mode, lost, reason):
    job = Unmodified(tmp_path, mode, nproc_per_node=3, max_restarts=1)
    with job.cluster as cluster:
        node = cluster.start("a")
        first = cluster.wait_world(nodes=1)
        job.wait_steps({*first.pids["a"]}, 3)
        node.kill_worker(lost)
        cluster.wait(lambda: len(job.said()) == 6, "three workers, and three after the restart")
        again = job.restarted()
        job.wait_steps(again, 3)
        job.ends_alike(again)
        assert reason in node.output and "add --ranks-may-change" in node.output


def test_the_loss_of_local_rank_0_restarts_all_since_scripts_save_on_each_node(tmp_path):
    job = Unmodified(tmp_path, "ordinary", nnodes="2", nproc_per_node=2, max_restarts=1)
    with job.cluster as cluster:
        cluster.start("a"), cluster.start("b")
        first = cluster.wait_world(nodes=2)
        job.wait_steps({*first.pids["a"], *first.pids["b"]}, 4)
        lost = first.nodes[1]
        cluster.node(lost).kill_worker(0)
        cluster.wait(lambda: len(job.said()) == 8, "four workers, and four after the restart")
        again = job.restarted()
        job.wait_steps(again, 4)
        job.ends_alike(again)
        assert "the worker of local rank 0 on a node is lost" in cluster.node(lost).output


def test_the_loss_of_rank_0_in_its_last_save_restarts_all_though_ranks_may_change(tmp_path):
    job = Unmodified(tmp_path, "last save", nproc_per_node=2, max_restarts=1, ranks_may_change=True)
    with job.cluster as cluster:
        node = cluster.start("a")
        cluster.wait_world(nodes=1)
        job.wait_steps({*cluster.world().pids["a"]}, 2)
        (job.folder / "enough").touch()
        cluster.wait(lambda: len(job.said()) == 4, "two workers, and two more after the restart")
        job.ends_alike(job.restarted())
        assert "the worker of rank 0 was lost after the last step" in node.output
        assert (job.folder / "model.pt").exists()


def test_after_the_end_of_the_group_only_the_loss_of_a_worker_that_may_save_restarts_all(tmp_path):
    job = Unmodified(tmp_path, "end", nproc_per_node=2, max_restarts=1)
    with job.cluster as cluster:
        cluster.start("a")
        cluster.wait_world(nodes=1)
        pids = {*cluster.world().pids["a"]}
        job.wait_steps(pids, 2)
        job.ends_alike(pids)
        assert len(cluster.events("restart")) == 1, cluster.story()
        ends = [event.reason for event in cluster.events("worker-exited")]
        for lost in ("SIGKILL", "SIGSEGV"):
            assert [end for end in ends if f"{lost}, after its program had ended well" in end], ends
        assert (job.folder / "model.pt").exists()


def test_a_script_that_fails_and_destroys_its_group_does_not_wait_for_the_others(tmp_path):
    job = Unmodified(tmp_path, "fails", nproc_per_node=2, max_restarts=0)
    with job.cluster as cluster:
        node = cluster.start("a")
        cluster.wait(lambda: cluster.events("worker-exited"), "the worker of rank 1 fails")
        left = {*job.said()} - {cluster.events("worker-exited")[0].data["pid"]}
        job.wait_steps(left, 2)
        job.ends_alike(left)
        assert "ValueError: a fault of the script" in node.output


def test_a_call_that_torch_refuses_fails_the_script_and_loses_no_worker(tmp_path):
    job = Unmodified(tmp_path, "refused", nproc_per_node=2, max_restarts=0)
    with job.cluster as cluster:
        node = cluster.start("a")
        assert node.wait() != 0
        assert "RuntimeError: Invalid scalar type" in node.output
        assert "lost a peer" not in node.output and "all workers restart" not in node.output


def test_survivors_continue_after_a_refused_call_whose_error_the_script_has_caught(tmp_path):
    job = Unmodified(tmp_path, "caught", max_restarts=0)
    with job.cluster as cluster:
        cluster.start("a")
        cluster.wait_world(nodes=1)
        *left, another, lost = cluster.world().pids["a"]
        cluster.wait((job.folder / "caught").exists, "rank 0 has caught what rank 1 has not called")
        kill({lost})
        cluster.wait(lambda: cluster.events("workers-regrouped"), "the survivors meet")
        (job.folder / "regrouped").touch()
        job.wait_steps({*left, another}, 4)
        kill({another})  # at any place of a step
        job.wait_steps({*left}, 4)
        job.ends_alike({*left})
        assert not cluster.events("restart")


@pytest.mark.soak
def test_a_program_that_ends_before_the_others_restarts_all_with_what_they_wait_in(tmp_path):
    job = Unmodified(tmp_path, "returns", nproc_per_node=2, max_restarts=1)
    with job.cluster as cluster:
        node = cluster.start("a")
        cluster.wait(lambda: len(job.said()) == 4, "two workers, and two more after the restart")
        job.ends_alike(job.restarted())
        assert "has called destroy_process_group(), after" in node.output
        assert "and another waits in allreduce (max)" in node.output


@pytest.mark.parametrize(
    ("mode", "call"),
    [
        ("group", "new_group([0])"),
        ("spawn", "torch.multiprocessing.spawn()"),
        ("rpc", "torch.distributed.rpc.init_rpc()"),
        ("join", "torch.distributed.algorithms.join, as model.join() makes it"),
    ],
)
def test_calls_that_not_all_workers_share_are_refused_with_the_call_and_a_remedy(
    tmp_path, mode, call
):
    job = Unmodified(tmp_path, mode, nproc_per_node=2)
    with job.cluster as cluster:
        node = cluster.start("a")
        assert node.wait() != 0
        assert f"{call}: not possible with --in-place" in node.output
        assert "start the script without --in-place" in node.output


@pytest.mark.parametrize("mode", ["fsdp", "tensor"])
def test_parameters_that_are_sharded_over_the_workers_are_refused(tmp_path, mode):
    script = str(SCRIPT.parent / "sharded.py")
    cluster = LocalCluster(
        [script, mode], folder=tmp_path, in_place=True, preload=PRELOAD_COMPILER, nnodes="1",
        nproc_per_node=2, min_workers=1, max_restarts=3,
    )  # fmt: skip
    with cluster:
        node = cluster.start("a")
        assert node.wait() != 0
        assert "of FSDP or tensor parallelism: not possible with --in-place" in node.output
        assert "start the script without --in-place" in node.output
        assert not cluster.events("restart"), "no other attempt could succeed"


def test_an_asynchronous_save_by_all_workers_is_refused_at_its_first_call(tmp_path):
    job = Unmodified(tmp_path, "async save", nproc_per_node=2)
    with job.cluster as cluster:
        node = cluster.start("a")
        assert node.wait() != 0
        assert "async_save(): not possible with --in-place" in node.output
        assert "no_dist=True" in node.output and "in-place-refused" in node.output
