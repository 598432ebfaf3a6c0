"""Trainers that compare completions of one prompt refuse groups that workers share."""

from types import SimpleNamespace

import pytest

from elastane.errors import ConfigurationError
from elastane.integrations.transformers import refuse_split_groups


def trained(**args):
    class GroupTrainer:
        def __init__(self):
            self.args = SimpleNamespace(per_device_train_batch_size=4, **args)

        def train(self, resume_from_checkpoint=None):
            return resume_from_checkpoint

    refuse_split_groups(GroupTrainer)
    return GroupTrainer().train(resume_from_checkpoint="last")


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"num_generations": None},
        {"num_generations": 4, "steps_per_generation": None},
        {"num_generations": 2, "steps_per_generation": 3},
        {"num_generations": 8, "steps_per_generation": 2},
    ],
)
def test_groups_within_each_worker_are_trained(args):
    assert trained(**args) == "last"


@pytest.mark.parametrize(
    "args",
    [
        {"num_generations": 8, "steps_per_generation": 1},
        {"num_generations": 8},
        {"num_generations": 3, "steps_per_generation": 2},
    ],
)
def test_groups_that_workers_share_are_refused_with_what_to_set(args):
    with pytest.raises(ConfigurationError) as refused:
        trained(**args)
    said = str(refused.value)
    assert "in-place-refused" in said and "GroupTrainer" in said
    assert f"to a multiple of {args['num_generations']}" in said
