"""The state that a joining worker needs to continue at the same place of Lightning's loop.

All workers wait at one place of the program: where the training loop draws the next batch of a new
step. There the position is in the loop's progress objects and in a few attributes of the Trainer.
With these, the states of a checkpoint and the random streams, a worker that joins continues like
the others. Its values that are logged for an epoch begin with zero: the others keep what they have.

Reads private names of Lightning, of the versions in `package`. Fails with ConfigurationError for
states that are not plain data.
"""

from __future__ import annotations

from typing import Any

import torch

from elastane.checkpoint.registered import RandomStreams, RegisteredObjects, restore_streams
from elastane.comms.state import flatten
from elastane.lightning import limits, package
from elastane.lightning.dealt_loader import DealtLoader

# Parts of a Lightning checkpoint that are handed over by other means, or equal by construction.
_ELSEWHERE = (
    *("state_dict", "optimizer_states", "loops"),
    *("hparams_name", "hyper_parameters", "hparams_type"),
    *("datamodule_hparams_name", "datamodule_hyper_parameters", "datamodule_hparams_type"),
    # Of WeightAveraging.
    *("current_model_state", "averaging_state"),
)
# Attributes of a ModelCheckpoint that decide about its next save and are not in its state.
_OF_SAVES = (
    *("dirpath", "_last_global_step_saved", "_last_checkpoint_saved"),
    "_defer_save_until_validation",
)
_OF_LOGS = ("_first_loop_iter", "_current_fx")
_METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_OF_VALUES = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph"),
    *("add_dataloader_idx", "dataloader_idx", "metric_attribute"),
)


class TrainerProgress:
    """The state of one Trainer in `fit`, as `synchrony.newcomers.SharedState` asks for it."""

    def __init__(self, trainer: Any, loader: DealtLoader) -> None:
        self._trainer = trainer
        self._loader = loader
        self._objects = RegisteredObjects()
        self._objects.add({"model": trainer.lightning_module})
        self._objects.add({f"optimizer {n}": each for n, each in enumerate(trainer.optimizers)})
        averages = limits.averages(trainer)
        self._objects.add({f"average {n}": a._average_model for n, a in enumerate(averages)})

    def check(self) -> None:
        """Raise ConfigurationError for a state that cannot be handed over."""
        flatten(self.state())

    def state(self) -> dict[str, Any]:
        """Return the state, with the tensors that are in use."""
        trainer = self._trainer
        saved = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        progress = saved["loops"]["fit_loop"]
        progress["state_dict"].pop("combined_loader", None)  # It is `data` below.
        logs = trainer._logger_connector
        return {
            "objects": self._objects.state(),
            "gradients": self._gradients(),
            "checkpoint": {k: v for k, v in saved.items() if k not in _ELSEWHERE},
            "progress": progress,
            "fetched": trainer.fit_loop._data_fetcher.fetched,
            "should_stop": trainer.should_stop,
            "saves": [_read(each, _OF_SAVES) for each in self._saves()],
            "versions": versions(trainer),
            "logs": _read(logs, _OF_LOGS) | {name: dict(getattr(logs, name)) for name in _METRICS},
            "values": [_described(results) for results in self._results()],
            "streams": RandomStreams().packed(),
            "data": self._loader.state_dict(),
        }

    def load(self, state: Any) -> None:
        """Accept the state of another worker, whose tensors are in place already."""
        trainer = self._trainer
        self._objects.load(state["objects"])
        self._load_gradients(state["gradients"])
        for callback, own in zip(self._saves(), state["saves"], strict=True):
            vars(callback).update(own)
        set_versions(trainer, state["versions"])
        self._load_checkpoint(state["checkpoint"])
        _load_progress(trainer.fit_loop, state["progress"], "")
        trainer.fit_loop._data_fetcher.fetched = state["fetched"]
        trainer.should_stop = state["should_stop"]
        vars(trainer._logger_connector).update(state["logs"])
        for results, values in zip(self._results(), state["values"], strict=True):
            self._prepare(results, values)
        self._loader.load_state_dict(state["data"])
        restore_streams(state["streams"])

    def _gradients(self) -> dict[str, Any]:
        """Return the gradients that a training_step with manual optimization has left.

        They are equal on all members, as each manual_backward() reduces them.
        """
        module = self._trainer.lightning_module
        if module.automatic_optimization:
            return {}
        parameters = module.named_parameters()
        return {name: each.grad for name, each in parameters if each.grad is not None}

    def _load_gradients(self, gradients: dict[str, Any]) -> None:
        for name, parameter in self._trainer.lightning_module.named_parameters():
            parameter.grad = gradients.get(name)

    def _load_checkpoint(self, part: dict[str, Any]) -> None:
        """Let callbacks, schedulers and hooks take their parts, as when a checkpoint is loaded."""
        trainer, call = self._trainer, package.part("trainer.call")
        module, data, precision = (
            trainer.lightning_module,
            trainer.datamodule,
            trainer.precision_plugin,
        )
        saved = dict(part, state_dict=module.state_dict(), loops={})
        saved["optimizer_states"] = [each.state_dict() for each in trainer.optimizers]
        call._call_lightning_module_hook(trainer, "on_load_checkpoint", saved)
        if data is not None and (name := type(data).__qualname__) in saved:
            call._call_lightning_datamodule_hook(trainer, "load_state_dict", saved[name])
        averages = limits.averages(trainer)
        for callback in trainer.callbacks:
            if callback not in averages:  # Their state is one of the objects.
                callback.on_load_checkpoint(trainer, module, saved)
        call._call_callbacks_load_state_dict(trainer, saved)
        precision.on_load_checkpoint(saved)
        if (name := type(precision).__qualname__) in saved:
            precision.load_state_dict(saved[name])
        for config, own in zip(trainer.lr_scheduler_configs, saved["lr_schedulers"], strict=True):
            config.scheduler.load_state_dict(own)

    def _saves(self) -> list[Any]:
        return [*self._trainer.checkpoint_callbacks]

    def _results(self) -> list[Any]:
        """Return the collections of logged values, of training and of validation."""
        loop = self._trainer.fit_loop.epoch_loop
        return [loop._results, loop.val_loop._results]

    def _prepare(self, results: Any, values: list[list[Any]]) -> None:
        """Give a collection the values of another worker by name, in its order, without amounts.

        At the end of an epoch the workers sum each value in this order.
        """
        kinds: Any = package.part("trainer.connectors.logger_connector.result")
        prepared = {}
        for key, fields, reduction, sync, is_tensor, has_reset in values:
            metric = results.get(key)
            if metric is None:
                meta = kinds._Metadata(**fields, reduce_fx=getattr(torch, reduction))
                meta.sync = kinds._Sync(fn=self._trainer.strategy.reduce, **sync)
                metric = kinds._ResultMetric(meta, is_tensor)
                if not is_tensor:
                    metric.value = self._metric(fields["metric_attribute"])
            metric.reset()
            metric.has_reset = has_reset
            prepared[key] = metric
        results.clear()
        results.update(prepared)

    def _metric(self, attribute: str) -> Any:
        found = self._trainer.lightning_module
        for name in attribute.split("."):
            found = getattr(found, name)
        return found


def versions(trainer: Any) -> list[Any]:
    """Return the version of each logger that counts its versions."""
    return [each.version for each in trainer.loggers if hasattr(each, "_version")]


def set_versions(trainer: Any, known: list[Any]) -> None:
    """Let loggers write where those of another worker do, if they ever write."""
    loggers = [each for each in trainer.loggers if hasattr(each, "_version")]
    for logger, version in zip(loggers, known, strict=True):
        logger._version = version


def _read(owner: Any, names: tuple[str, ...]) -> dict[str, Any]:
    found = {name: getattr(owner, name) for name in names if hasattr(owner, name)}
    return {k: v if v is None or isinstance(v, bool | int) else str(v) for k, v in found.items()}


def _described(results: Any) -> list[list[Any]]:
    """Describe a collection of logged values, without the amounts."""
    described = []
    for key, metric in results.items():
        meta, sync = metric.meta, metric.meta.sync
        fields = {name: getattr(meta, name) for name in _OF_VALUES}
        how = {"_should": sync.should, "rank_zero_only": sync.rank_zero_only}
        reduction = meta.reduce_fx.__name__
        described.append([key, fields, reduction, how, metric.is_tensor, metric.has_reset])
    return described


def _load_progress(loop: Any, state: dict[str, Any], prefix: str) -> None:
    """Set the progress of a loop and of those in it, without the marks of a restart.

    Lightning's load_state_dict() also marks each loop as restarting: then a loop finishes or skips
    what was interrupted. Here nothing was.
    """
    kind: Any = package.part("loops")._Loop
    loop._load_from_state_dict(state, prefix)
    for name, inner in vars(loop).items():
        if isinstance(inner, kind):
            _load_progress(inner, state, f"{prefix}{name}.")
