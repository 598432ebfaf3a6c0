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
