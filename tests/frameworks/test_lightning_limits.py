"""What `ElasticStrategy` refuses before a training, without one."""

from types import SimpleNamespace

import pytest
import torch

from elastane.errors import ConfigurationError
from elastane.integrations.weight_copies import weight_copy

lightning = pytest.importorskip("lightning")

from elastane.lightning import limits  # noqa: E402 - it needs Lightning


class Net(lightning.LightningModule):
    """A model."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(3, 2)


class Average(lightning.Callback):
    """Holds a copy of the weights."""

    def __init__(self, module):
        self.weights = {name: each.clone() for name, each in module.state_dict().items()}


class SavedAverage(Average):
    """The same, in its state."""

    def state_dict(self):
        return self.weights


def check(module, *callbacks):
    limits.check_copies(SimpleNamespace(lightning_module=module, callbacks=callbacks))


def test_a_callback_that_does_not_save_its_copy_of_the_weights_is_refused():
    module = Net()
    with pytest.raises(ConfigurationError, match=r"Average\.weights holds a copy"):
        check(module, Average(module))
    check(module, SavedAverage(module))


def test_a_module_that_does_not_save_its_copy_of_the_weights_is_refused():
    module = Net()
    check(module)
    vars(module)["hidden"] = [torch.optim.swa_utils.AveragedModel(module.net)]
    with pytest.raises(ConfigurationError, match=r"Net\.hidden holds a copy"):
        check(module)


def test_the_weights_themselves_and_other_tensors_are_no_copy():
    model = torch.nn.Linear(3, 2)
    known = {
        "own": [*model.parameters()],
        "outputs": [torch.zeros(3, 2)],
        "counts": torch.zeros(2, 3).int(),
    }
    assert weight_copy(known.items(), model) is None


def test_callbacks_that_change_what_a_new_worker_has_not_seen_are_refused():
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        callbacks=[lightning.pytorch.callbacks.StochasticWeightAveraging(1e-2)],
    )  # fmt: skip
    trainer.strategy._layer_sync = None
    with pytest.raises(ConfigurationError, match="StochasticWeightAveraging"):
        limits.check_trainer(trainer, Net())
