"""A Trainer that resumes after its last step makes no further one, with a fake Trainer."""

from types import SimpleNamespace

import pytest

from elastane.integrations.transformers import end_at_last_step


@pytest.fixture
def trainer():
    """Return the class of a Trainer of three steps to an epoch, which evaluates after them."""

    class Trainer:
        """Looks at its number of steps after each step, as that of Transformers does."""

        def __init__(self, at):
            self.state = SimpleNamespace(global_step=at, max_steps=4)
            self.control = SimpleNamespace(should_training_stop=False)
            self.evaluations = 0

        def _run_epoch(self, *, num_update_steps_per_epoch):
            for _ in range(num_update_steps_per_epoch):
                self.state.global_step += 1
                self.control.should_training_stop = self.state.global_step >= 4
                if self.control.should_training_stop:
                    break
            self.evaluations += 1

    end_at_last_step(Trainer)
    return Trainer


@pytest.mark.parametrize(("at", "steps", "ends"), [(4, 4, True), (3, 4, True), (0, 3, False)])
def test_an_epoch_behind_the_last_step_has_none_and_is_evaluated(trainer, at, steps, ends):
    resumed = trainer(at)
    resumed._run_epoch(num_update_steps_per_epoch=3)
    assert resumed.state.global_step == steps and resumed.evaluations == 1
    assert resumed.control.should_training_stop is ends
