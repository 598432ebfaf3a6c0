"""The Hugging Face Trainer, with workers that join in place and exact data: `ElasticTrainer`.

Under `elastane run --in-place` a Trainer shrinks in any case (`integrations.transformers`). An
`ElasticTrainer` deals its training data by an ElasticBatchSampler, or by an ElasticStream if they
have no length. Before each update its workers pass a boundary, where new ones receive a survivor's
state. The number of updates, the schedule and the epochs follow from `global_batch_size`, not from
the world. It overrides private methods of the Trainer, whose versions `integrations.transformers`
checks. Fails with ConfigurationError for settings with which a worker that joins would train
differently.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from elastane.checkpoint.registered import RandomStreams, restore_streams
from elastane.data import sources
from elastane.data.sampler import ElasticBatchSampler
from elastane.data.sources import ShardSource
from elastane.data.stream import ElasticStream
from elastane.errors import ConfigurationError
from elastane.integrations.weight_copies import weight_copy
from elastane.process import environment
from elastane.worker.elastic_loader import ElasticLoader, group_of_process
from elastane.worker.framework_hooks import trainer_callback

__all__ = ["ElasticTrainer", "ElasticTrainerMixin", "ScalarCallback"]

SLUG = "elastic-trainer"
# In each checkpoint: the position in the training data.
POSITION_FILE = "elastane_data.json"
_callbacks: Any = importlib.import_module("transformers.trainer_callback")
_trainer: Any = importlib.import_module("transformers.trainer")
# Stands for a checkpoint in `_run_epoch` of a worker that has joined: its state is in place.
_JOINED = "the state of another worker"
_KINDS = ("NO", "MULTI_CPU", "MULTI_GPU")


class ElasticTrainerMixin:
    """Lets workers join a Trainer in place; put it before the class of the Trainer.

        class MyElasticTrainer(ElasticTrainerMixin, MyTrainer): ...

        trainer = MyElasticTrainer(model, args, train_dataset=data, global_batch_size=512)
        trainer.train()

    `global_batch_size`: the samples of an update over all workers and all
    `gradient_accumulation_steps`, in every world; `per_device_train_batch_size` is not used.
    Each sample of an epoch is used once. Without a launcher, and under others, the world does not
    change.
    """

    args: Any
    state: Any
    control: Any
    model: Any
    accelerator: Any
    optimizer: Any
    callback_handler: Any

    def __init__(self, *args: Any, global_batch_size: int, **kwargs: Any) -> None:
        self._global_batch_size = global_batch_size
        self._elastic: TrainerLoader | None = None
        # The number of the update's samples in the current batch; 0: it is a stand-in.
        self.current_samples = 0
        # The factor of the current batch's loss, asked for when its gradient is computed.
        self._factor: Callable[[], float] = _one
        # The world size over which the items of the current update were counted, and the same while
        # a loss is computed that is divided by their number.
        self._counted_size = 1
        self._size_of_loss: int | None = None
        # Weight and number of samples of the batches that were drawn and not computed.
        self._portions: deque[tuple[float, int]] = deque()
        # The epochs of the loader, and the one that comes next if it has begun.
        self._walk: Iterator[int] | None = None
        self._next_epoch: int | None = None
        # Whether this worker has joined in the epoch that comes next.
        self._has_joined = False
        # When the training began, on the first of its workers; rates are over the time since.
        self._began_s = 0.0
        base: Any = super()
        base.__init__(*args, **kwargs)
        _check(self.args, self.accelerator)
        self.callback_handler.on_epoch_begin = self._unless_skipped(
            self.callback_handler.on_epoch_begin
        )

    # The data.

    def get_train_dataloader(self) -> Any:
        """Return the loader of the training data, which deals them to the current world."""
        trainer: Any = self
        dataset, args = trainer.train_dataset, self.args
        collate = trainer.data_collator
        if _trainer.is_datasets_available() and isinstance(dataset, _trainer.datasets.Dataset):
            dataset = trainer._remove_unused_columns(dataset, description="Training")
        else:
            collate = trainer._get_collator_with_removed_columns(collate, description="Training")
        order = {
            "seed": args.seed if args.data_seed is None else args.data_seed,
            "shuffle": args.train_sampling_strategy != "sequential",
        }
        source = _source_of(dataset)
        if source is None:
            loader: Any = self._loader_of(dataset, collate, order)
        else:
            _check_stream(args)
            loader = ElasticStream(source, self._global_batch_size, collate_fn=collate, **order)
        self._elastic = TrainerLoader(loader, dataset, args.gradient_accumulation_steps)
        return self._elastic

    def _loader_of(self, dataset: Any, collate: Any, order: dict[str, Any]) -> Any:
        """Return the DataLoader of a dataset with a length."""
        args = self.args
        sampler = ElasticBatchSampler(
            len(dataset), self._global_batch_size, drop_last=args.dataloader_drop_last, **order
        )
        return DataLoader(
            dataset,
            batch_sampler=sampler,
            collate_fn=collate,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            prefetch_factor=args.dataloader_prefetch_factor,
        )

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the samples of an update."""
        return self._global_batch_size

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Draw the batches of an update; workers join before the first one."""
        base: Any = super()
        loader = self._elastic
        if loader is None:
            return base.get_batch_samples(epoch_iterator, num_batches, device)
        if self.state.global_step < 2:  # Callbacks have seen one step.
            self._check_copies()
        batches: list[Any] = []
        self._portions.clear()
        for _ in range(num_batches):
            batch = next(epoch_iterator, None)
            if batch is None:
                # The end of a stream: the Trainer would ask up to max_steps times for another.
                self.control.should_epoch_stop = True
                break
            batches.append(batch)
            self._portions.append((loader.weight, loader.samples))
        counted = [
            batch if samples else _without_labels(batch)
            for batch, (_, samples) in zip(batches, self._portions, strict=True)
        ]
        items = base._get_num_items_in_batch(counted, device)
        self._counted_size = self.args.world_size
        return batches, items

    def _check_copies(self) -> None:
        """Refuse copies of the weights in callbacks: a worker that joins would have its own."""
        for callback in self.callback_handler.callbacks:
            if name := weight_copy(vars(callback).items(), self.model):
                raise _refused(
                    f"{type(callback).__name__}.{name}, which holds a copy of the model's weights"
                    " that nothing hands to a worker that joins",
                    "an average of the weights that is a submodule of the model",
                )

    # A step.

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator; its backward pass weights the loss of each batch."""
        base: Any = super()
        base.create_accelerator_and_postprocess()
        kind = type(self.accelerator)
        self.accelerator.__class__ = _with_size(kind, lambda: self._size_of_loss)
        backward = self.accelerator.backward

        def weighted(loss: torch.Tensor, **kwargs: Any) -> None:
            backward(loss * self._factor(), **kwargs)

        self.accelerator.backward = weighted

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Compute a batch, with the weight of its share of the update."""
        base: Any = super()
        if self._portions:
            weight, self.current_samples = self._portions.popleft()
            self._factor = self._factor_of(weight, self.current_samples, num_items_in_batch)
            self._size_of_loss = None if num_items_in_batch is None else self._counted_size
        try:
            return base.training_step(model, inputs, num_items_in_batch)
        finally:
            self._factor = _one
            self._size_of_loss = None

    def _factor_of(self, weight: float, samples: int, num_items: Any) -> Callable[[], float]:
        """Return a function for the factor that makes the gradient the mean over the update."""
        trainer: Any = self
        is_scaled = trainer.loss_is_scaled_for_ga
        if is_scaled is None:
            is_scaled = trainer.compute_loss_func is not None or (
                trainer.model_accepts_loss_kwargs and num_items is not None
            )
        if not is_scaled:
            # The Trainer divides by this number, and the weight is over all batches of an update.
            batches = float(trainer.current_gradient_accumulation_steps)
            return lambda: weight * batches
        if num_items is None or not self.args.average_tokens_across_devices:
            raise _refused(
                "a loss that is divided by the items of one worker alone",
                "average_tokens_across_devices=True and data with labels, or a mean loss",
            )
        # The loss is a sum over the items of all workers, times the size of the world in which they
        # were counted. If a worker is lost since, the survivors' losses count for its items.
        return _one if samples else _zero

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, model: Any, *args: Any, **kwargs: Any
    ) -> None:
        base: Any = super()
        self._make_further_updates(model)
        base._maybe_log_save_evaluate(tr_loss, grad_norm, model, *args, **kwargs)

    def _make_further_updates(self, model: Any) -> None:
        """After the last update of an epoch, train on the samples that lost workers had left.

        Such an update counts neither as a step nor for the schedule, which do not depend on losses.
        """
        trainer: Any = self
        args, loader = self.args, self._elastic
        while loader is not None and loader.has_further():
            many = args.gradient_accumulation_steps
            batches, items = self.get_batch_samples(iter(loader), many, args.device)
            trainer.current_gradient_accumulation_steps = many
            for number, inputs in enumerate(batches, 1):
                is_last = number == many
                self.accelerator.gradient_state._set_sync_gradients(is_last)
                delayed = self.accelerator.no_sync(model=model)
                with contextlib.nullcontext() if is_last else delayed:
                    self.training_step(model, inputs, items)
            if args.max_grad_norm > 0:
                trainer._clip_grad_norm(model)
            self.optimizer.step()
            model.zero_grad()

    # The loop.

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train; see Trainer.train. A worker that joins takes the state of the others."""
        base: Any = super()
        if self._is_joining:
            resume_from_checkpoint = None
        try:
            return base.train(resume_from_checkpoint, *args, **kwargs)
        finally:
            walk: Any = self._walk
            if walk is not None:
                walk.close()
            if self._elastic is not None:
                self._elastic.close()

    def _init_training_state(
        self, max_steps: int, updates: int, epochs: int, checkpoint: Any, trial: Any
    ) -> Any:
        base: Any = super()
        begun = base._init_training_state(max_steps, updates, epochs, checkpoint, trial)
        if checkpoint is not None:
            loader = self._load_position(Path(checkpoint))
            # The Trainer takes max_steps for the length of a stream.
            return loader.epoch, loader.steps_done_in_epoch * self.args.gradient_accumulation_steps
        return begun

    def _load_position(self, checkpoint: Path) -> TrainerLoader:
        assert self._elastic is not None, "the loader is made before the state"
        path = checkpoint / POSITION_FILE
        if not path.exists():
            raise _refused(
                f"the checkpoint {checkpoint} without {POSITION_FILE}",
                "a checkpoint of an ElasticTrainer, or none",
            )
        self._elastic.load_state_dict(json.loads(path.read_text()))
        if self._elastic.steps_done != self.state.global_step:
            raise _refused(
                f"{POSITION_FILE} of {checkpoint} is at step {self._elastic.steps_done}",
                f"step {self.state.global_step}, as in its trainer_state.json",
            )
        return self._elastic

    def _run_epoch(self, **kwargs: Any) -> None:
        base: Any = super()
        loader, epoch = self._elastic, kwargs["epoch"]
        assert loader is not None, "the loader is made before the loop"
        if self._walk is None:
            self._began_s = kwargs["start_time"]
            loader.track(**self._tracked())
            self._walk = loader.epochs(_EPOCHS_MAX)
        self._check_copies()
        if self._next_epoch is None:
            self._has_joined = loader.is_joining
            self._next_epoch = next(self._walk)
        if epoch < self._next_epoch:
            return  # It was made by the others before this worker has joined.
        if self._has_joined:
            many = self.args.gradient_accumulation_steps
            kwargs.update(
                epochs_trained=epoch,
                resume_from_checkpoint=_JOINED,
                steps_trained_in_current_epoch=loader.steps_done_in_epoch * many,
            )
        self._next_epoch, self._has_joined = None, False
        base._run_epoch(**{**kwargs, "start_time": self._began_s})

    def _finalize_training(self, trial: Any, samples: int, start_time: float) -> Any:
        base: Any = super()
        return base._finalize_training(trial, samples, self._began_s or start_time)

    def _unless_skipped(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        """Return the callbacks' start of an epoch, but for epochs that others have made."""

        def on_epoch_begin(args: Any, state: Any, control: Any) -> Any:
            return control if self._has_joined else begin(args, state, control)

        return on_epoch_begin

    @property
    def _is_joining(self) -> bool:
        group = group_of_process()
        return group is not None and not group.has_joined

    def _tracked(self) -> dict[str, Any]:
        trainer: Any = self
        named = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": trainer.lr_scheduler,
            "progress": _Progress(self),
        }
        if self.accelerator.scaler is not None:
            named["scaler"] = self.accelerator.scaler
        return named

    # Evaluation and saving.

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        base: Any = super()
        # Before the loop a worker that joins is alone.
        return {} if self._is_joining else base._evaluate(*args, **kwargs)

    def _save_rng_state(self, output_dir: str) -> None:
        base: Any = super()
        base._save_rng_state(output_dir)
        if self._elastic is not None and self.args.should_save:
            position = json.dumps(self._elastic.state_dict())
            (Path(output_dir) / POSITION_FILE).write_text(position)

    def _load_rng_state(self, checkpoint: Any) -> None:
        base: Any = super()
        if checkpoint != _JOINED:
            base._load_rng_state(checkpoint)


_EPOCHS_MAX = 1 << 62


def _one() -> float:
    return 1.0


def _zero() -> float:
    return 0.0


def _with_size(kind: Any, fixed: Callable[[], int | None]) -> Any:
    """Return a class of accelerators whose world size is `fixed()`, if that is not None.

    A Trainer multiplies the loss by it and may gather metrics before the backward pass, in which a
    worker may be lost: then it is not known from the accelerator by which size it has multiplied.
    """

    def num_processes(self: Any) -> int:
        size: int = fixed() or kind.num_processes.fget(self)
        return size

    return type(kind.__name__, (kind,), {"num_processes": property(num_processes)})


class ElasticTrainer(ElasticTrainerMixin, _trainer.Trainer):  # type: ignore[misc]
    """A Trainer whose workers join in place; see ElasticTrainerMixin."""


ScalarCallback = trainer_callback(_callbacks.TrainerCallback)


class TrainerLoader(ElasticLoader):
    """The training data of an ElasticTrainer."""

    def __init__(self, loader: Any, dataset: Any, accumulate: int) -> None:
        super().__init__(loader, accumulate=accumulate)
        self.dataset = dataset

    @property
    def is_joining(self) -> bool:
        """Whether this worker has not joined the others."""
        return self._group is not None and not self._group.has_joined

    @property
    def steps_done(self) -> int:
        """The number of steps that are committed, from the start of epoch 0."""
        return self._cursor.next_step

    @property
    def steps_done_in_epoch(self) -> int:
        """The number of committed steps of the current epoch."""
        return self._cursor.steps_done_in_epoch

    def has_further(self) -> bool:
        """Commit the current step; return whether the epoch has a further one."""
        self._finish_step()
        return self._epoch == self._cursor.epoch and self._cursor.is_further

    def close(self) -> None:
        """End the worker processes of the loader."""
        self._feed.close()

    def _lets_join(self) -> bool:
        # The others would be in the middle of `_maybe_log_save_evaluate`.
        return not self._cursor.is_further

    def _naming(self, name: str) -> str:
        if name == "average":
            return "make the average of the weights a submodule of the model"
        return f"let the Trainer create the {name}, or give it to the constructor"


class _Progress:
    """The progress of a Trainer, without the weights, as a state for other workers."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the Trainer, its callbacks and its random streams."""
        trainer = self._trainer
        return {
            "state": json.dumps(dataclasses.asdict(trainer.state)),
            "control": json.dumps(dataclasses.asdict(trainer.control)),
            "callbacks": json.dumps([each.state()["attributes"] for each in self._exported()]),
            "loss": float(trainer._tr_loss),
            "numbers": {name: getattr(trainer, name) for name in self._numbers()},
            "streams": RandomStreams().packed(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Accept the state of another worker."""
        trainer = self._trainer
        for name, value in json.loads(state["state"]).items():
            if name not in ("is_local_process_zero", "is_world_process_zero"):
                setattr(trainer.state, name, value)
        for name, value in json.loads(state["control"]).items():
            setattr(trainer.control, name, value)
        for callback, values in zip(self._exported(), json.loads(state["callbacks"]), strict=True):
            for name, value in values.items():
                setattr(callback, name, value)
        trainer._tr_loss.fill_(state["loss"])
        for name in self._numbers():
            setattr(trainer, name, state["numbers"][name])
        restore_streams(state["streams"])

    def _numbers(self) -> list[str]:
        return [name for name in _NUMBERS if hasattr(self._trainer, name)]

    def _exported(self) -> list[Any]:
        callbacks = self._trainer.callback_handler.callbacks
        return [each for each in callbacks if isinstance(each, _callbacks.ExportableState)]


# Private numbers of a Trainer. Whether a gather happens when it logs depends on the first.
_NUMBERS = (
    "_globalstep_last_logged",
    "_began_s",
    "_total_loss_scalar",
    "_initial_global_step",
    "_initial_num_input_tokens_seen",
    "current_flos",
    "_total_train_tokens",  # of TRL's SFTTrainer
)


def _source_of(dataset: Any) -> ShardSource | None:
    """Return the shards of training data without a length; None for data with one."""
    if isinstance(dataset, ShardSource):
        return dataset
    if hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset):
        return None
    try:
        return sources.hugging_face(dataset)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"training data of the kind {type(dataset).__name__}, which has no known shards",
            slug=SLUG,
            expected="a datasets.IterableDataset, or a ShardSource of elastane.data.sources",
            next_step="train_dataset=sources.ShardSource(shards, open_shard), or"
            " sources.webdataset(...)",
        ) from error


def _check_stream(args: Any) -> None:
    """Refuse settings of loaders that a stream does not have."""
    refused = {
        "dataloader_drop_last": args.dataloader_drop_last,
        "dataloader_num_workers": bool(args.dataloader_num_workers),
    }
    for what, is_so in refused.items():
        if is_so:
            raise _refused(
                f"{what} with training data without a length",
                "its default: a stream is read to its end, by a thread of the worker",
            )


def _without_labels(batch: Any) -> Any:
    """Return a stand-in whose labels are not counted."""
    if not isinstance(batch, Mapping):
        return batch
    names = [name for name in ("labels", "shift_labels") if name in batch]
    return {**batch, **{name: torch.full_like(batch[name], -100) for name in names}}


def _keep_place(skip: Callable[..., Any]) -> Callable[..., Any]:
    """Return `skip_first_batches` of Accelerate, but for a loader that is in its place."""

    def skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
        return loader if isinstance(loader, TrainerLoader) else skip(loader, num_batches)

    return skip_first_batches


_trainer.skip_first_batches = _keep_place(_trainer.skip_first_batches)


def _check(args: Any, accelerator: Any) -> None:
    """Refuse settings that would differ on a worker that joins."""
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    config = accelerator.dataloader_config
    plugin = accelerator.gradient_state.plugin_kwargs
    refused = {
        f"a Trainer of the kind {kind}": kind not in _KINDS,
        "a Trainer that trains in each worker by itself, without use_cpu=True": kind == "NO"
        and bool(environment.get("LOCAL_RANK")),
        "parallelism_config": accelerator.parallelism_config is not None,
        "several GPUs in one process": args.n_gpu > 1,
        "auto_find_batch_size": args.auto_find_batch_size,
        "ignore_data_skip": args.ignore_data_skip,
        "dataloader_persistent_workers": args.dataloader_persistent_workers,
        "dataloader_in_order=False": not args.dataloader_in_order,
        "split_batches": config.split_batches,
        "dispatch_batches": bool(config.dispatch_batches),
        "even_batches=False": not config.even_batches,
        "sync_each_batch": bool(plugin.get("sync_each_batch", False)),
        f"train_sampling_strategy={args.train_sampling_strategy!r}": (
            args.train_sampling_strategy not in ("random", "sequential")
        ),
    }
    for what, is_so in refused.items():
        if is_so:
            raise _refused(what, "a setting that is the same in each world")


def _refused(what: str, expected: str) -> ConfigurationError:
    return ConfigurationError(
        f"{what}: not possible with elastane.transformers.ElasticTrainer",
        slug=SLUG,
        expected=expected,
        next_step="change this, or use transformers.Trainer: then the world grows by a restart of"
        " all workers at a checkpoint",
    )
