"""What `ElasticStrategy` does not support, refused before the training begins, with the reason.

Each of these would train wrongly, or differently on a worker that joins, so none is ignored. Raises
ConfigurationError.
"""

from __future__ import annotations

from typing import Any

from elastane.errors import ConfigurationError
from elastane.lightning import package

SLUG = "elastic-strategy"
# Callbacks by the reason that they are refused for.
_CALLBACKS = {
    "GradientAccumulationScheduler": "changes the number of batches of a step",
    "BatchSizeFinder": "changes the batch size, which is that of global_batch_size=",
    "LearningRateFinder": "trains before the training, in which no worker can join",
    "StochasticWeightAveraging": "replaces schedulers, which a worker that joins has not done",
    "WeightAveraging": "exchanges the weights when it saves",
    "BaseFinetuning": "adds parameters to the optimizer, which a worker that joins has not done",
    "ModelPruning": "changes parameters in a way that a worker that joins has not done",
}


def refusal(what: str, expected: str, next_step: str) -> ConfigurationError:
    """Return the error for a use that is not supported."""
    return ConfigurationError(what, slug=SLUG, expected=expected, next_step=next_step)


def check_trainer(trainer: Any, module: Any) -> None:
    """Refuse a Trainer or LightningModule that cannot be trained in a world that changes."""
    connector = trainer._accelerator_connector
    every = trainer.reload_dataloaders_every_n_epochs
    refused = {
        "automatic_optimization=False": not module.automatic_optimization,
        "Trainer(use_distributed_sampler=False)": not connector.use_distributed_sampler,
        f"Trainer(overfit_batches={trainer.overfit_batches})": trainer.overfit_batches,
        f"Trainer(reload_dataloaders_every_n_epochs={every})": every,
        "val_check_interval as a time, which differs between workers": (
            getattr(trainer, "_val_check_time_interval", None) is not None
        ),
        "Trainer(sync_batchnorm=True)": trainer.strategy._layer_sync is not None,
    }
    for what, is_used in refused.items():
        if is_used:
            raise _unsupported(what)
    is_named = package.part("utilities.signature_utils").is_param_in_hook_signature
    if is_named(module.training_step, "dataloader_iter", explicit=True):
        raise _unsupported("training_step(dataloader_iter)")
    callbacks = package.part("callbacks")
    for callback in trainer.callbacks:
        for name, reason in _CALLBACKS.items():
            kind = getattr(callbacks, name, None)
            if kind is not None and isinstance(callback, kind):
                raise _unsupported(f"{type(callback).__name__}, which {reason}")


def check_batches(trainer: Any) -> None:
    """Refuse an epoch that ends in the middle of a step."""
    batches, accumulate = trainer.num_training_batches, trainer.accumulate_grad_batches
    if batches % accumulate:
        raise refusal(
            f"an epoch of {batches} batches (limit_train_batches={trainer.limit_train_batches})",
            f"a multiple of accumulate_grad_batches, which is {accumulate}",
            "let limit_train_batches be a multiple of accumulate_grad_batches",
        )


def _unsupported(what: str) -> ConfigurationError:
    return refusal(
        f"ElasticStrategy does not support {what}",
        "automatic optimization of one optimizer with DistributedDataParallel, and data that"
        " ElasticStrategy deals",
        'use strategy="ddp": then lost workers are not replaced until all restart at a checkpoint',
    )
