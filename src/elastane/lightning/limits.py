"""Refuses what `ElasticStrategy` does not support before the training begins, with the reason.

Each of these would train wrongly, or differently on a worker that joins, so none is ignored. Raises
ConfigurationError.
"""

from __future__ import annotations

from typing import Any

from elastane.errors import ConfigurationError
from elastane.integrations.weight_copies import weight_copy
from elastane.lightning import package

SLUG = "elastic-strategy"
# Callbacks by the reason that they are refused for.
_CALLBACKS = {
    "GradientAccumulationScheduler": "changes the number of batches of a step",
    "BatchSizeFinder": "changes the batch size, which is that of global_batch_size=",
    "LearningRateFinder": "trains before the training, in which no worker can join",
    "StochasticWeightAveraging": "replaces schedulers, which a worker that joins has not done;"
    " WeightAveraging averages the weights as well",
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
    kind = package.weight_averaging()
    for averaging in averages(trainer):
        if type(averaging).on_load_checkpoint is not kind.on_load_checkpoint:
            raise _unsupported(f"on_load_checkpoint() of a {type(averaging).__name__}")


def averages(trainer: Any) -> list[Any]:
    """Return the callbacks of the kind WeightAveraging, EMAWeightAveraging among them."""
    kind = package.weight_averaging()
    return [each for each in trainer.callbacks if kind is not None and isinstance(each, kind)]


def check_copies(trainer: Any) -> None:
    """Refuse copies of the weights that their owner does not save: nothing hands them over."""
    module = trainer.lightning_module
    callback = package.part("callbacks").Callback
    own = {"_parameters", "_buffers", "_modules", "_trainer"}
    owners: list[tuple[Any, Any, tuple[str, ...]]] = [
        (module, package.part("core.hooks").CheckpointHooks, ("on_save_checkpoint",))
    ]
    owners += [(each, callback, ("state_dict", "on_save_checkpoint")) for each in trainer.callbacks]
    for owner, base, hooks in owners:
        if any(getattr(type(owner), name) is not getattr(base, name) for name in hooks):
            continue
        attributes = [(name, each) for name, each in vars(owner).items() if name not in own]
        if name := weight_copy(attributes, module):
            kind, hook = type(owner).__name__, hooks[0]
            raise refusal(
                f"{kind}.{name} holds a copy of the model's weights, which {kind} does not save:"
                " a worker that joins would not get it",
                f"averages of weights that {kind}.{hook}() returns, or that are a submodule",
                f"write {hook}() and its counterpart for loading, or use"
                " lightning.pytorch.callbacks.WeightAveraging",
            )


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
        "training with DistributedDataParallel, and data that ElasticStrategy deals",
        'use strategy="ddp": then lost workers are not replaced until all restart at a checkpoint',
    )
