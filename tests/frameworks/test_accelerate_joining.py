"""Accelerate scripts with an adopted accelerator: lost workers are replaced, and nodes join."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from joining import SAMPLES, STEPS, JoiningJob

pytest.importorskip("accelerate")
SCRIPT = Path(__file__).parent / "scripts" / "joining_accelerate.py"
PRELOAD = "torch,torch.distributed,torch.optim,accelerate"
# As the script has them.
EVALUATED, SAVE_EVERY = 50, 25


class AcceleratedJob(JoiningJob):
    """A job of the script."""

    def __init__(self, folder, mode="plain", **options):
        super().__init__(SCRIPT, folder, mode, preload=PRELOAD, **options)

    def ends_well(self):
        """Let the job end; states, schedule, sizes and evaluations are those of one program."""
        super().ends_well()
        for lines in self.said().values():
            for line in lines:
                assert (line["size"], line["index"]) == (line["world"], line["rank"])
                assert line["scheduled"] == line["step"] + 1
                assert line["rate"] == pytest.approx(1e-3 * 0.9 ** (line["scheduled"] // 50))
        whole = [*range(EVALUATED)]
        evaluations = [e for lines in self.all().values() for e in lines if "evaluated" in e]
        assert evaluations
        for line in evaluations:
            if line["before"] == line["size"]:
                assert sorted(line["evaluated"]) == whole

    def checkpoint_step(self):
        """The number of steps in the newest state that is saved whole; 0 without one.

        All workers save after that step, and have saved once one of them has made another.
        """
        return self.steps() // SAVE_EVERY * SAVE_EVERY

    def tracked(self):
        """What the trackers of all workers have written."""
        return [json.loads(line) for line in (self.folder / "tracked.txt").open()]


@pytest.mark.parametrize(
    "mode", [pytest.param("plain", marks=pytest.mark.soak), "accumulate", "stream"]
)
def test_lost_workers_of_an_accelerate_script_are_replaced_in_place(tmp_path, mode):
    AcceleratedJob(tmp_path, mode).survives_the_loss_of_rank_0()


def test_rank_0_can_be_lost_while_it_evaluates_gathers_saves_and_logs(tmp_path):
    job = AcceleratedJob(tmp_path)
    job.survives_losses_of_rank_0("evaluate", "gather", "save", "log")
    by = [line["by"] for line in job.tracked()]
    assert by[-1] != by[0], "the next worker of rank 0 has opened the tracker"


def test_samples_of_a_worker_lost_in_an_epochs_last_step_are_used_without_a_scheduled_step(
    tmp_path,
):
    job = AcceleratedJob(tmp_path)
    with job.cluster as cluster:
        cluster.start("a")
        job.wait_size(3)
        job.kill_at(job.rank_0(), "last")
        job.wait_size(3)
        job.ends_well()
        assert job.missing() == 0
        lines = [line for lines in job.said().values() for line in lines]
        assert any(line["optimizer_steps"] > line["scheduled"] for line in lines)


def test_a_node_joins_a_world_of_one_accelerate_worker_and_leaves(tmp_path):
    job = AcceleratedJob(tmp_path, nproc_per_node=1)
    with job.cluster as cluster:
        cluster.start("a")
        first = job.wait_size(1)
        cluster.start("b")
        assert first < job.wait_size(2)
        cluster.node("b").stop()
        assert job.wait_size(1, count=STEPS + 1) == first
        job.ends_well()
        assert job.missing() == 0


def test_a_saved_state_continues_in_a_world_of_another_size_with_each_sample_once(tmp_path):
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    saved = AcceleratedJob(tmp_path / "1")
    second = AcceleratedJob(tmp_path / "2", "resume", nproc_per_node=2)
    with saved.cluster as cluster:
        cluster.start("a")
        cluster.wait(saved.checkpoint_step, "a checkpoint")
        cluster.node("a").kill()
    step = saved.checkpoint_step()
    place = Path("saved", "checkpoints", f"checkpoint_{step // SAVE_EVERY - 1}")
    shutil.copytree(saved.folder / place, second.folder / place)
    with second.cluster as cluster:
        cluster.start("a")
        second.wait_size(2)
        second.ends_well()
    begun = {lines[0]["step"] for lines in second.said().values()}
    assert begun == {step} and step % STEPS, "it begins in the middle of an epoch"
    seen = Counter()
    for job, mine in ((saved, lambda at: at < step), (second, lambda at: at >= step)):
        for line in (line for lines in job.all().values() for line in lines if "dealt" in line):
            if line["epoch"] == step // STEPS and mine(line["step"]):
                seen.update(line["dealt"])
    assert seen == Counter(range(SAMPLES))


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("unnamed", "SGD that steps was not named to the ElasticLoader"),
        ("unsynchronised", "reduces gradients before the last batch of a step"),
    ],
)
def test_what_a_worker_that_joins_would_do_differently_is_refused(tmp_path, mode, reason):
    job = AcceleratedJob(tmp_path, mode, nnodes="1", nproc_per_node=2, max_restarts=0)
    with job.cluster as cluster:
        node = cluster.start("a")
        assert node.wait() != 0
        assert reason in node.output


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("seed", "mode"), [(1, "plain"), (2, "accumulate"), (3, "plain")])
def test_workers_are_killed_at_random_instants_and_no_replica_or_sample_is_wrong(
    tmp_path, seed, mode
):
    job = AcceleratedJob(tmp_path, mode, nproc_per_node=2, max_restarts=100)
    job.survives_random_kills(12, seed)
