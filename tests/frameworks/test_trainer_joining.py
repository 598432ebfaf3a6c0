"""Hugging Face Trainers whose lost workers are replaced, and that nodes join and leave."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from joining import SAMPLES, STEPS, JoiningJob

pytest.importorskip("transformers")
SCRIPT = Path(__file__).parent / "scripts" / "joining_trainer.py"
PRELOAD = "torch,torch.distributed,torch.optim,transformers.trainer"
# As the script has them; EPOCHS are those of a short job.
EVALUATED, EPOCHS, SAVE_EVERY = 50, 8, 25


class TrainerJob(JoiningJob):
    """A job of the script."""

    def __init__(self, folder, mode="plain", **options):
        super().__init__(SCRIPT, folder, mode, preload=PRELOAD, **options)

    def lines(self, word):
        """All lines that have a word."""
        return [line for lines in self.all().values() for line in lines if word in line]

    def ends_well(self):
        """Let the job end; states, schedule, sizes and progress are those of one program."""
        super().ends_well()
        for line in self.lines("world"):
            assert (line["size"], line["index"]) == (line["world"], line["rank"])
        for line in self.lines("made"):
            # Neither the schedule nor the number of steps depends on the world.
            expected = 1e-3 * (1 - line["made"] / line["max_steps"])
            assert line["rate"] == pytest.approx(expected)
        for line in self.lines("digest"):
            assert line["global_step"] in (line["step"], line["step"] + 1)
        ends = self.lines("ended")
        assert ends and len({(line["ended"], line["patience"]) for line in ends}) == 1
        assert self.lines("evaluated")[-1]["evaluated"] == EVALUATED

    def logged(self):
        """What workers of rank 0 have logged."""
        return [json.loads(line) for line in (self.folder / "logged.txt").open()]


@pytest.mark.parametrize("mode", [pytest.param("plain", marks=pytest.mark.soak), "tokens"])
def test_lost_workers_of_a_trainer_are_replaced_in_place(tmp_path, mode):
    TrainerJob(tmp_path, mode).survives_the_loss_of_rank_0()


def test_rank_0_of_a_trainer_can_be_lost_while_it_evaluates_saves_and_logs(tmp_path):
    job = TrainerJob(tmp_path)
    job.survives_losses_of_rank_0("evaluate", "save", "log")
    by = [line["by"] for line in job.logged()]
    assert by[-1] != by[0], "the next worker of rank 0 logs"


def test_samples_of_a_worker_lost_in_a_trainers_last_update_are_used_without_a_further_step(
    tmp_path,
):
    job = TrainerJob(tmp_path, "short")
    with job.cluster as cluster:
        cluster.start("a")
        job.wait_size(3)
        job.kill_at(job.rank_0(), "last")
        job.ends_well()
        assert job.missing() == 0
    ends = job.lines("ended")
    assert {(line["ended"], line["rate"]) for line in ends} == {(EPOCHS * STEPS, 0.0)}
    assert max(line["optimizer_steps"] for line in job.lines("digest")) > EPOCHS * STEPS


def test_a_trainer_over_a_stream_replaces_workers_lost_in_an_update_and_in_an_epochs_last(tmp_path):
    job = TrainerJob(tmp_path, "stream")
    with job.cluster as cluster:
        cluster.start("a")
        left = job.wait_size(3)
        for place in ("train", "last"):
            lost = job.rank_0()
            job.kill_at(lost, place)
            left -= {lost}
            assert left < job.wait_size(3), place
            left = job.wait_size(3)
        job.ends_well()
        assert job.missing() == 0
        assert len(cluster.events("replacement")) == 2


def test_a_node_joins_a_world_of_one_trainer_and_leaves(tmp_path):
    job = TrainerJob(tmp_path, nproc_per_node=1)
    with job.cluster as cluster:
        cluster.start("a")
        first = job.wait_size(1)
        cluster.start("b")
        assert first < job.wait_size(2)
        cluster.node("b").stop()
        assert job.wait_size(1, count=STEPS + 1) == first
        job.ends_well()
        assert job.missing() == 0


def test_a_trainers_checkpoint_continues_in_a_world_of_another_size_to_the_same_end(tmp_path):
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    saved = TrainerJob(tmp_path / "1", "short")
    second = TrainerJob(tmp_path / "2", "resume", nproc_per_node=2)
    with saved.cluster as cluster:
        cluster.start("a")
        # All workers save after that step, and have saved once one of them has made another.
        cluster.wait(lambda: saved.steps() >= SAVE_EVERY, "a checkpoint")
        cluster.node("a").kill()
    step = saved.steps() // SAVE_EVERY * SAVE_EVERY
    place = Path("checkpoints", f"checkpoint-{step}")
    shutil.copytree(saved.folder / place, second.folder / place)
    with second.cluster as cluster:
        cluster.start("a")
        second.ends_well()
    assert {lines[0]["step"] for lines in second.said().values()} == {step}
    assert step % STEPS, "it begins in the middle of an epoch"
    ends = second.lines("ended")
    assert {(line["ended"], line["rate"]) for line in ends} == {(EPOCHS * STEPS, 0.0)}
    seen = {epoch: Counter() for epoch in range(EPOCHS)}
    for job, mine in ((saved, lambda at: at < step), (second, lambda at: at >= step)):
        for line in job.lines("dealt"):
            if mine(line["step"]):
                seen[line["epoch"]].update(line["dealt"])
    assert all(counts == Counter(range(SAMPLES)) for counts in seen.values())


def test_data_in_another_order_than_the_samplers_is_refused(tmp_path):
    job = TrainerJob(tmp_path, "grouped", nnodes="1", nproc_per_node=2, max_restarts=0)
    with job.cluster as cluster:
        node = cluster.start("a")
        assert node.wait() != 0
        assert "train_sampling_strategy='group_by_length'" in node.output


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("seed", "mode"), [(1, "plain"), (2, "tokens"), (3, "stream")])
def test_workers_of_a_trainer_are_killed_at_random_and_no_replica_or_sample_is_wrong(
    tmp_path, seed, mode
):
    job = TrainerJob(tmp_path, mode, nproc_per_node=2, max_restarts=100)
    job.survives_random_kills(12, seed)
