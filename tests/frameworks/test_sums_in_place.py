"""A framework's sum of what a script has divided by the world size, as a worker is lost."""

import pytest
from loss_jobs import LossJob


@pytest.mark.parametrize(
    ("mode", "package"), [("accelerate", "accelerate"), ("fabric", "lightning")]
)
def test_a_sum_is_not_made_again_without_a_part_that_was_divided(tmp_path_factory, mode, package):
    pytest.importorskip(package)
    job = LossJob(
        tmp_path_factory.mktemp, "framework_sums.py", mode, nproc_per_node=3, max_restarts=1,
        ranks_may_change=True, preload=f"torch,torch.distributed,{package}",
    )  # fmt: skip
    assert (job.folder / "sums").read_text().split() == ["1.000"] * 3


def test_accelerate_has_right_gradients_and_another_worker_goes_first_alone(tmp_path_factory):
    """A size that the script keeps belongs to no count of fewer workers: all restart."""
    pytest.importorskip("accelerate")
    job = LossJob(
        tmp_path_factory.mktemp, "accelerate_counts.py", nproc_per_node=3, max_restarts=1,
        ranks_may_change=True, preload="torch,torch.distributed,torch.optim,accelerate",
    )  # fmt: skip
    assert "the script sums counts itself" in job.output
    assert job.said["gradients"] == [1.0, 1.0]
    seen = job.said["seen"]
    assert seen[:2] == [["0", "False", "False"], ["1", "True", "False"]], "what rank 0 has left"
    assert seen[2:] == [["2", "False", "True"]]
