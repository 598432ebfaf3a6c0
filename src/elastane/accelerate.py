"""Scripts with Accelerate's own loop, whose workers join in place: `adopt(Accelerator(...))`.

Under `elastane run --in-place` the rank and world size of Accelerate follow the world in any case
(`integrations.accelerate`). An adopted accelerator also prepares an ElasticStream, or a DataLoader
over an ElasticBatchSampler, as an `AcceleratedLoader`, which knows all prepared objects, and which
`accumulate`, `backward` and the schedulers follow. Nothing imports the package accelerate before
`adopt` is called. Fails with ConfigurationError for settings with which a worker that joins would
train differently from the others.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

import torch

from elastane.checkpoint.registered import RandomStreams, restore_streams
from elastane.data.position import DataPosition
from elastane.data.stream import ElasticStream
from elastane.errors import ConfigurationError
from elastane.process import environment
from elastane.worker.elastic_loader import ElasticLoader
from elastane.worker.framework_hooks import accelerate_tracker

__all__ = ["AcceleratedLoader", "adopt", "scalar_tracker"]

SLUG = "accelerate-adopt"
A = TypeVar("A")
# Accelerate's names of plain data parallelism. MULTI_GPU is for other launchers.
_KINDS = ("NO", "MULTI_CPU", "MULTI_GPU")


class AcceleratedLoader(ElasticLoader):
    """An ElasticLoader of all objects that an accelerator has prepared.

    Made by `accelerator.prepare(DataLoader(data, batch_sampler=ElasticBatchSampler(...)))` of an
    adopted accelerator, or by `accelerator.prepare(ElasticStream(...))`. A step has
    `gradient_accumulation_steps` batches.
    """

    def __init__(self, accelerator: Any, loader: Any) -> None:
        super().__init__(loader, accumulate=accelerator.gradient_accumulation_steps)
        self._accelerator = accelerator
        self._is_complete = False

    def epochs(self, until: int, *, until_step: int | None = None) -> Iterator[int]:
        """Yield the number of each epoch; see ElasticLoader.epochs."""
        if not self._is_complete:
            self._is_complete = True
            self.track(**self._prepared())
        return super().epochs(until, until_step=until_step)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches of the rest of the current epoch, on the accelerator's device.

        Outside of an `epochs` loop it raises ConfigurationError.
        """
        send: Any = importlib.import_module("accelerate.utils").send_to_device
        for batch in super().__iter__():
            yield send(batch, self._accelerator.device)

    def _prepared(self) -> dict[str, Any]:
        """Return what a worker that joins needs, by name."""
        accelerator = self._accelerator
        named = {
            "model": accelerator._models,
            "optimizer": accelerator._optimizers,
            "scheduler": [each.scheduler for each in accelerator._schedulers],
            "scaler": [] if accelerator.scaler is None else [accelerator.scaler],
            "registered": [each for each in accelerator._custom_objects if each is not self],
            "counters": [_Counters(accelerator)],
            "streams": [_ProcessStreams()],
        }
        return {f"{kind} {n}": each for kind, all_ in named.items() for n, each in enumerate(all_)}

    def _naming(self, name: str) -> str:
        return f"accelerator.prepare({name}), or accelerator.register_for_checkpointing({name})"


class _Counters:
    """The counts of an accelerator: batches, and the checkpoints that it has named itself."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        """Return both numbers."""
        accelerator = self._accelerator
        return {"step": accelerator.step, "saves": accelerator.project_configuration.iteration}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Accept those of another worker."""
        self._accelerator.step = state["step"]
        self._accelerator.project_configuration.iteration = state["saves"]


class _ProcessStreams:
    """The random streams of this process, as a state for other workers.

    Scripts give all workers one seed. A worker with the streams of its own start would take another
    branch where they draw one, and make other collectives.
    """

    def state_dict(self) -> dict[str, bytes]:
        """Return the streams as they are."""
        return {"packed": RandomStreams().packed()}

    def load_state_dict(self, state: dict[str, bytes]) -> None:
        """Continue with those of another worker."""
        restore_streams(state["packed"])


def adopt(accelerator: A) -> A:
    """Let workers join a script of this accelerator in place; return the accelerator.

        accelerator = elastane.accelerate.adopt(Accelerator(cpu=True))
        sampler = elastane.ElasticBatchSampler(len(dataset), global_batch_size=256)
        loader = DataLoader(dataset, batch_sampler=sampler)
        model, optimizer, scheduler, loader = accelerator.prepare(
            model, optimizer, scheduler, loader
        )
        for epoch in loader.epochs(10):
            for inputs, labels in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(criterion(model(inputs), labels))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()

    Call it before `prepare`, on all workers. `backward` weights the mean loss of the current batch
    by its samples, `accumulate` ends a step with its last batch, and a prepared scheduler steps
    once for each step, in every world. Loaders for evaluation are prepared as before, and deal
    their data to the current world at each iteration. Under other launchers the loop is the same.
    Raises ConfigurationError for settings that are not possible with workers that join.
    """
    if "_elastane" not in vars(accelerator):
        _check(accelerator)
        vars(accelerator)["_elastane"] = _Adopted(accelerator)
    return accelerator


def _check(accelerator: Any) -> None:
    """Refuse settings that would differ on a worker that joins."""
    state, loading = accelerator.state, accelerator.dataloader_config
    kind = str(getattr(state.distributed_type, "value", state.distributed_type))
    if kind not in _KINDS:
        raise _refused(f"an accelerator of the kind {kind}", f"one of {', '.join(_KINDS)}")
    if kind == "NO" and environment.get("LOCAL_RANK"):
        # Without cpu=True Accelerate makes no DistributedDataParallel on a host without GPUs.
        raise _refused(
            "an accelerator that trains in each worker by itself", "Accelerator(cpu=True)"
        )
    if accelerator._models or accelerator._optimizers or accelerator._dataloaders:
        raise _refused("adopt() after prepare()", "adopt(Accelerator(...)), then prepare()")
    if accelerator.parallelism_config is not None:
        raise _refused("parallelism_config", "replicas of the whole model")
    if loading.split_batches:
        raise _refused(
            "split_batches=True, which divides each batch by a world size that changes",
            "split_batches=False: global_batch_size of the sampler is that of all workers",
        )
    if loading.dispatch_batches:
        raise _refused(
            "dispatch_batches=True, which reads all data on a worker that may be lost",
            "dispatch_batches=False",
        )
    if not loading.even_batches:
        raise _refused(
            "even_batches=False, which gives workers different numbers of batches",
            "even_batches=True; gather_for_metrics drops what is repeated",
        )
    if accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False):
        raise _refused(
            "sync_each_batch=True: a gradient would be of other members in each batch of a step",
            "sync_each_batch=False",
        )


def _refused(what: str, expected: str) -> ConfigurationError:
    return ConfigurationError(
        f"{what}: not possible with elastane.accelerate.adopt()",
        slug=SLUG,
        expected=expected,
        next_step="change this, or leave adopt() out: then the world grows by a restart of all"
        " workers at a checkpoint",
    )


def scalar_tracker(*targets: Any, resumed: bool = False) -> Any:
    """Return a tracker for an adopted accelerator whose sinks are those of `job.log_to`.

    Pass it as `Accelerator(log_with=...)`, and call `init_trackers` after `adopt`. Each step that
    is given to `accelerator.log(values, step=number)` on all workers is written once, despite lost
    workers. `resumed`: the script continues from a checkpoint, so the sinks may have its steps
    before. Without it another run begins.
    """
    package = importlib.import_module("accelerate")
    return accelerate_tracker(package, targets, is_resumed=resumed)


class _Adopted:
    """The functions that replace those of one accelerator, and its loader."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._loader: AcceleratedLoader | None = None
        # Trackers that take what is logged on each worker.
        self._for_all: list[Any] = []
        replacements: dict[str, Callable[..., Any]] = {
            "prepare_data_loader": self._prepare_data_loader,
            "_prepare_one": self._prepare_one,
            "prepare_scheduler": self._prepare_scheduler,
            "backward": self._backward,
            "_do_sync": self._do_sync,
            "init_trackers": self._init_trackers,
            "log": self._log,
            "join_uneven_inputs": _join_uneven_inputs,
        }
        for name, replacement in replacements.items():
            before = getattr(accelerator, name)
            setattr(accelerator, name, functools.wraps(before)(self._over(before, replacement)))

    @staticmethod
    def _over(before: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
        """Return `replacement`, with the function that it replaces as its first argument."""
        return lambda *args, **kwargs: replacement(before, *args, **kwargs)

    @property
    def _training(self) -> AcceleratedLoader | None:
        """The loader, while the program is in the body of its inner loop."""
        loader = self._loader
        return loader if loader is not None and loader.in_step else None

    def _prepare_data_loader(
        self, before: Callable[..., Any], loader: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if isinstance(loader, ElasticLoader):
            return loader
        places = getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None)
        is_stream = isinstance(loader, ElasticStream)
        if not is_stream and not any(isinstance(each, DataPosition) for each in places):
            return self._for_evaluation(before, loader, *args, **kwargs)
        accelerator = self._accelerator
        self._loader = AcceleratedLoader(accelerator, loader)
        # save_state() and load_state() carry the position in the data.
        accelerator.register_for_checkpointing(self._loader)
        return self._loader

    def _prepare_one(
        self, before: Callable[..., Any], each: Any, first_pass: bool = False, **kwargs: Any
    ) -> Any:
        if first_pass and isinstance(each, ElasticStream):
            # Accelerate's prepare() leaves alone what it does not know.
            return self._accelerator.prepare_data_loader(each)
        return before(each, first_pass=first_pass, **kwargs)

    def _for_evaluation(
        self, before: Callable[..., Any], loader: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Prepare a loader that deals its batches to the world in which an iteration begins."""
        accelerator = self._accelerator
        if isinstance(getattr(loader, "dataset", None), torch.utils.data.IterableDataset):
            raise _refused(
                f"a loader over the iterable dataset {type(loader.dataset).__name__}",
                "a dataset with a length for evaluation; for training an elastane.ElasticStream",
            )
        state = accelerator.state._shared_state
        before_size = state.get("num_processes", 1)
        try:
            # A world of one worker would not be divided, and may grow.
            state["num_processes"] = max(2, before_size)
            prepared = before(loader, *args, **kwargs)
        finally:
            state["num_processes"] = before_size
        samplers = prepared.batch_sampler, prepared.sampler
        shards = [each for each in samplers if hasattr(each, "process_index")]
        begin = prepared.begin

        def begin_in_world() -> None:
            for shard in shards:
                shard.num_processes = accelerator.num_processes
                shard.process_index = accelerator.process_index
            begin()

        prepared.begin = begin_in_world
        return prepared

    def _prepare_scheduler(self, before: Callable[..., Any], scheduler: Any) -> Any:
        prepared = before(scheduler)
        # Accelerate steps it once for each process: the schedule would depend on the world.
        prepared.split_batches = True
        step = prepared.step

        def step_once(*args: Any, **kwargs: Any) -> None:
            loader = self._training
            if loader is None or not loader.is_further:
                step(*args, **kwargs)

        prepared.step = step_once
        return prepared

    def _backward(self, before: Callable[..., Any], loss: torch.Tensor, **kwargs: Any) -> None:
        loader = self._training
        if loader is None:
            before(loss, **kwargs)
            return
        self._check_accumulation(loader)
        # Accelerate divides by this number, and the weight is over all batches of a step.
        before(loss * (loader.weight * self._accelerator.gradient_accumulation_steps), **kwargs)
        loader._note_contributors()

    def _check_accumulation(self, loader: AcceleratedLoader) -> None:
        """Refuse gradients that are reduced in the middle of a step: its members may change."""
        if loader.is_last or self._accelerator.num_processes == 1:
            return
        for model in loader.replicas:
            if model.require_backward_grad_sync:
                raise ConfigurationError(
                    f"accelerator.backward() of a {type(model.module).__name__} reduces gradients"
                    " before the last batch of a step",
                    where=f"step {loader.step}",
                    slug=SLUG,
                    expected="each batch within accelerator.accumulate(), which names all models",
                    next_step="with accelerator.accumulate(model): ...",
                )

    def _do_sync(self, before: Callable[..., Any]) -> None:
        loader, accelerator = self._training, self._accelerator
        if loader is None:
            before()
            return
        accelerator.step += 1
        accelerator.gradient_state._set_sync_gradients(loader.is_last)

    def _init_trackers(self, before: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Keep the trackers for all workers here: Accelerate's `log` reaches the main process."""
        given = self._accelerator.log_with
        self._for_all = [one for one in given if not getattr(one, "main_process_only", True)]
        self._accelerator.log_with = [one for one in given if one not in self._for_all]
        before(*args, **kwargs)

    def _log(self, before: Callable[..., Any], values: Any, *args: Any, **kwargs: Any) -> None:
        """Log by the trackers for all workers, then by those of the main process."""
        step = args[0] if args else kwargs.get("step")
        for tracker in self._for_all:
            tracker.log(values, step)
        before(values, *args, **kwargs)


def _join_uneven_inputs(_before: object, *_args: object, **_kwargs: object) -> NoReturn:
    raise _refused(
        "join_uneven_inputs()", "the loop of the prepared loader, whose shares all have a batch"
    )
