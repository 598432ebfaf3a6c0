"""What an unmodified script with Lightning's Fabric reduces, gathers and saves after losses."""

import pytest
from loss_jobs import LossJob

pytest.importorskip("lightning")


def run(tmp_path_factory, mode, **options):
    """Run the script, and compare the weights of its workers after each step."""
    job = LossJob(
        tmp_path_factory.mktemp, "fabric_losses.py", mode, nproc_per_node=4,
        preload="torch,torch.distributed,torch.optim,lightning,torchmetrics", **options,
    )  # fmt: skip
    by_step = {}
    for path in job.folder.glob("*.digests"):
        for line in path.read_text().splitlines():
            step, digest = line.split()
            by_step.setdefault(step, set()).add(digest)
    assert by_step and all(len(states) == 1 for states in by_step.values()), by_step
    return job


@pytest.fixture(scope="module")
def asking(tmp_path_factory):
    """A job of four workers, of which one is left."""
    return run(tmp_path_factory, "asks", ranks_may_change=True)


def test_a_reduction_of_a_collection_is_over_the_workers_that_are_left(asking):
    said = asking.said
    assert said["mean"] == {"rank": pytest.approx(5 / 3), "one": 1.0}
    assert said["in place"] == said["mean"]["rank"]


def test_an_evaluation_after_a_loss_has_all_samples_and_training_as_many_steps_as_before(asking):
    said = asking.said
    assert (said["size"], said["evaluated"], said["trained"]) == (3, 24, 18)


def test_a_gather_that_a_loss_interrupts_is_made_again_with_its_gradient(asking):
    said = asking.said
    assert said["gathered"] == [1.0, 3.0]
    assert said["gradient"] == 6.0


def test_a_save_that_the_loss_of_rank_0_interrupts_is_made_by_another_worker(asking):
    assert asking.said["step"] == 3


def test_the_next_rank_0_prints_and_continues_the_log(asking):
    assert "printed by 2" in asking.output
    rows = (asking.folder / "log" / "version_0" / "metrics.csv").read_text().split()
    assert rows == ["loss,step", *(f"{step}.0,{step}" for step in (1, 2, 3, 4))]


def test_a_script_with_fabric_that_keeps_its_size_has_right_means(tmp_path_factory):
    assert run(tmp_path_factory, "keeps").said == {
        "mean": pytest.approx(8 / 3), "fabric": pytest.approx(8 / 3),
        "metric": pytest.approx(8 / 3), "size": 4, "count": 8,
    }  # fmt: skip


def test_a_sum_of_counts_and_a_size_that_was_asked_before_it_restart_all(tmp_path_factory):
    job = run(tmp_path_factory, "counts", ranks_may_change=True, max_restarts=1)
    assert "the script sums counts itself" in job.output
    assert "ask for the size after the sum" in job.output


def test_another_worker_goes_first_alone_if_the_first_is_lost(tmp_path_factory):
    # Rank 0 is lost before the last step: its script's end restarts nobody.
    seen = run(tmp_path_factory, "first", ranks_may_change=True).said["seen"]
    assert seen[:2] == [["0", "False", "False"], ["1", "True", "False"]], "what rank 0 has left"
    assert sorted(seen[2:]) == [["2", "False", "True"], ["3", "False", "True"]]
