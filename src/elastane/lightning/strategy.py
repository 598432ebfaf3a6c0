"""`ElasticStrategy`: DistributedDataParallel for Lightning, in a world that shrinks and grows.

Under `elastane run --in-place` all workers pass a boundary where the training loop draws the first
batch of a step. Workers that join wait there for the others (`synchrony.ordered`), and receive the
state of `trainer_state`. If a worker is lost within a step, the survivors compute its samples too
before the optimizer steps. So each step is of exactly `global_batch_size` samples, and a training
has the same steps and learning rates whatever was lost. With manual optimization the program owns
the passes of a step, so none can be made again: the survivors' samples are those of that step.

With another launcher, or without one, the world does not change and the data are dealt alike. Fails
with ConfigurationError for what `limits` names.
"""

from __future__ import annotations

import pickle
import signal
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from elastane.comms import ddp
from elastane.comms.elastic import ElasticGroup
from elastane.data.checks import whole
from elastane.data.ledger import length_of_spans, split
from elastane.errors import ConfigurationError
from elastane.lightning import limits, package
from elastane.lightning.dealt_loader import DealtLoader
from elastane.lightning.limits import refusal
from elastane.lightning.trainer_state import TrainerProgress, set_versions, versions
from elastane.synchrony.operations import Identity
from elastane.synchrony.ordered import OrderedGroup

_Base: Any = package.part("strategies").DDPStrategy
_Launched: Any = package.fabric("plugins.environments").TorchElasticEnvironment


class AnySizeEnvironment(_Launched):  # type: ignore[misc]
    """The variables of the launcher, whose world may have another size than Trainer(devices=)."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accept any numbers: the world is that of the launcher."""


class ElasticStrategy(_Base):  # type: ignore[misc]
    """Train with DistributedDataParallel; workers are replaced and nodes join in place.

        trainer = Trainer(strategy=ElasticStrategy(global_batch_size=256), max_epochs=10)

    `global_batch_size`: the samples of one step of the optimizer, over all workers and all
    `accumulate_grad_batches` batches. It takes the place of the train DataLoader's batch_size.
    `training_step` returns the mean loss of its batch. Other arguments are those of DDPStrategy.
    """

    def __init__(self, *, global_batch_size: int, **options: Any) -> None:
        for name in ("ddp_comm_state", "model_averaging_period"):
            if options.get(name) is not None:
                raise refusal(
                    f"ElasticStrategy({name}=...)",
                    "no state beside the model's: a worker that joins would have none of it",
                    f"leave {name} out",
                )
        if options.get("cluster_environment") is None and _Launched.detect():
            options["cluster_environment"] = AnySizeEnvironment()
        super().__init__(**options)
        self._global_batch_size = whole("global_batch_size", global_batch_size, 1)
        self._dealt: DealtLoader | None = None
        # The factor of the mean loss of the batch that is computed.
        self._weight = 1.0
        # The members whose samples are in the gradient of the last backward pass.
        self._contributors: tuple[Identity, ...] = ()
        self._is_reading_train_data = False

    @property
    def root_device(self) -> torch.device:
        """The device of this worker; CPUs are one device, however many workers a node has."""
        devices = self.parallel_devices
        if devices and devices[0].type == "cpu":
            return torch.device("cpu")
        device: torch.device = super().root_device
        return device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """The world that validation data are shared in, which need not be that of devices=."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def setup_environment(self) -> None:
        """Enter the world, or begin to prepare for it; refuse what is not supported."""
        super().setup_environment()
        trainer = self._trainer
        if trainer.state.fn != package.part("trainer.states").TrainerFn.FITTING:
            return
        limits.check_trainer(trainer, self.lightning_module)
        group = self._group
        if group is not None and group.is_shared:
            raise refusal(
                "a second fit() in one process with ElasticStrategy",
                "one: a worker that joins runs the script from its start, and would train in the"
                " first one",
                "put the second training into a script of its own",
            )
        _read_within(trainer.fit_loop, "setup_data", self._reading_train_data)
        if not self._has_joined:
            # It gets these from the others: a checkpoint may be older than their state.
            trainer._checkpoint_connector.resume_start = lambda *_args, **_kwargs: None
            trainer.num_sanity_val_steps = 0

    def setup(self, trainer: Any) -> None:
        """Set up model and optimizer; note the members of each backward pass."""
        super().setup(trainer)
        if not isinstance(self.model, DistributedDataParallel):
            return
        if hook := ddp.stateful_hook(self.model):
            raise refusal(
                f"a communication hook with {hook}",
                "hooks without a state: a worker that joins has none of it",
                "leave the hook out",
            )
        backward = self.precision_plugin.backward

        def noted(*args: Any, **kwargs: Any) -> None:
            backward(*args, **kwargs)
            # Directly after the pass: later hooks may call collectives, and then see fewer members.
            self._contributors = self._members

        self.precision_plugin.backward = noted

    def process_dataloader(self, dataloader: Any) -> Any:
        """Deal the training data by the ledger; validation data are as Lightning shares them."""
        if not self._is_reading_train_data:
            return super().process_dataloader(dataloader)
        trainer = self._trainer
        self._dealt = DealtLoader(
            dataloader,
            self._global_batch_size,
            trainer.accumulate_grad_batches,
            self._group,
            world=lambda: (self.global_rank, self.world_size),
            before_step=self._check_place,
        )
        return self._dealt

    def on_train_start(self) -> None:
        """Let workers join from here on; one that joins waits at its first batch."""
        trainer, group = self._trainer, self._group
        limits.check_batches(trainer)
        loader = self._loader
        if trainer.fit_loop._combined_loader.iterables is not loader:
            raise refusal(
                "several train dataloaders with ElasticStrategy",
                "one DataLoader, which fit() gets or train_dataloader() returns",
                "put the data into one dataset, such as torch.utils.data.ConcatDataset",
            )
        if saved := trainer.fit_loop._combined_loader_states_to_load:
            # Lightning loads them as it reads the data, which a scheduler may have done before.
            loader.load_state_dict(saved[0])
            trainer.fit_loop._combined_loader_states_to_load = []
        if group is None:
            return
        if self._has_joined:
            set_versions(trainer, self.broadcast(versions(trainer)))
        _leave_signals_alone(trainer)
        limits.check_copies(trainer)
        shared = TrainerProgress(trainer, loader)
        shared.check()
        group.share(shared)

    def backward(
        self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Weight the mean loss of a batch by its samples: shares of a step differ in size."""
        if self._dealt is not None:
            closure_loss = closure_loss * self._weight
            self._check_reduced()
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss of the batch that the loop has drawn."""
        if self._dealt is not None:
            # Lightning divides the loss by the number of batches of a step.
            accumulate = self._trainer.accumulate_grad_batches
            self._weight = self._dealt.portion.weight * accumulate
        output = super().training_step(*args, **kwargs)
        if self._dealt is not None and self._is_manual:
            self._dealt.commit()
        return output

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Step once the gradient is that of all samples of the step."""
        if self._is_manual:
            return super().optimizer_step(optimizer, closure, model, **kwargs)

        def complete() -> Any:
            result = closure()
            self._compute_lost(optimizer)
            return result

        output = super().optimizer_step(optimizer, complete, model, **kwargs)
        if self._dealt is not None:
            self._dealt.commit()
        return output

    @torch.enable_grad()
    def _compute_lost(self, optimizer: Any) -> None:
        """Add the gradient of samples that members lost in this step had not contributed.

        The gradient in place is the mean over those who contributed, with weights for the members
        that the step was dealt to. Workers may also be lost in here: then what they computed of it
        is computed again.
        """
        loader = self._dealt
        if loader is None or not self._members:
            return
        members = self._contributors
        lost = loader.lost(members)
        if not lost:
            return
        parameters = [each for each in self.model.parameters() if each.requires_grad]
        total = _taken(parameters, len(members) / len(loader.dealt_to))
        step, ledger = loader.sampler.next_step, loader.sampler.ledger
        low, high = ledger.span(step)
        # No batch is larger than those of the step were.
        most = -(-(high - low) // (len(loader.dealt_to) * loader.sampler.micro_batches))
        while lost:
            members = self._members
            now, lost = split(lost, most * len(members))
            shares = [ledger.deal_again(step, now, r, len(members)) for r in range(len(members))]
            share = shares[self.global_rank]
            part = length_of_spans(now) / (high - low)
            self._compute_again(loader.read(share), share.weight * part, optimizer)
            for rank, member in enumerate(members):
                if member not in self._contributors:
                    lost += shares[rank].spans
            more = _taken(parameters, len(self._contributors) / len(members))
            total = [_sum(one, other) for one, other in zip(total, more, strict=True)]
        for parameter, gradient in zip(parameters, total, strict=True):
            parameter.grad = gradient

    def _compute_again(self, batch: Any, weight: float, optimizer: Any) -> None:
        """Forward and backward of a batch, as the training loop has them."""
        trainer, module = self._trainer, self.lightning_module
        loop, call = trainer.fit_loop.epoch_loop, package.part("trainer.call")
        batch = trainer.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        batch = call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)
        loop._results.batch, loop._results.batch_size = batch, None
        arguments = loop._build_kwargs(OrderedDict(), batch, loop.batch_idx)
        output = loop.automatic_optimization._training_step(arguments)
        if output.closure_loss is not None:
            self._weight = weight * trainer.accumulate_grad_batches
            self.backward(output.closure_loss, optimizer)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank `src`; of a survivor, if that worker is lost meanwhile.

        Each worker passes what it would decide itself, so any survivor's object is one that the
        program can continue with. Before a worker has joined, Lightning's broadcasts give its own
        object: these are folders, which the others hand over. Other broadcasts raise
        ConfigurationError until then.
        """
        if not self._has_joined:
            if _is_lightnings(sys._getframe(1).f_globals["__name__"]):
                return obj
            raise _joins_later("ElasticStrategy.broadcast()")
        if self._group is None:
            return super().broadcast(obj, src)
        while True:
            data = _maximum(pickle.dumps(obj) if self.global_rank == src else b"")
            if data:
                return pickle.loads(data)
            src = 0  # The worker is lost, and ranks are those of the survivors.

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over all workers; before it has joined, a worker counts its own batches."""
        if not self._has_joined and _is_lightnings(sys._getframe(1).f_globals["__name__"]):
            return tensor
        return super().reduce(tensor, group, reduce_op)

    def teardown(self) -> None:
        """End the processes that load the training data, then as DDPStrategy."""
        if self._dealt is not None:
            self._dealt.close()
        super().teardown()

    @property
    def _trainer(self) -> Any:
        return self.lightning_module.trainer

    @property
    def _is_manual(self) -> bool:
        return not self.lightning_module.automatic_optimization

    @property
    def _loader(self) -> DealtLoader:
        assert self._dealt is not None, "Lightning has read the training data"
        return self._dealt

    @property
    def _group(self) -> OrderedGroup | None:
        """The group in which workers can join; None with another launcher."""
        group = c10d._get_default_group() if dist.is_initialized() else None
        if isinstance(group, ElasticGroup) and not isinstance(group, OrderedGroup):
            raise refusal(
                "ElasticStrategy in a job of elastane.init()",
                "a script without elastane.init(): Lightning owns its loop",
                "leave elastane.init() out and start with: elastane run --in-place",
            )
        return group if isinstance(group, OrderedGroup) else None

    @property
    def _has_joined(self) -> bool:
        group = self._group
        return group is None or group.has_joined

    @property
    def _members(self) -> tuple[Identity, ...]:
        group = self._group
        return () if group is None else group.members

    def _check_reduced(self) -> None:
        """Refuse gradients that each worker keeps: one that joins, or is lost, has its own."""
        model = self.model
        if (
            self._is_manual
            and isinstance(model, DistributedDataParallel)
            and not model.require_backward_grad_sync
        ):
            raise refusal(
                "manual_backward() without the reduction of gradients (no_sync)",
                "gradients that are equal on all workers after each manual_backward()",
                "leave no_sync() and block_backward_sync() out of training_step()",
            )

    def _check_place(self) -> None:
        """Refuse a loop whose place is not that of its data: one that was resumed elsewhere."""
        if not self._has_joined:
            return
        limits.check_copies(self._trainer)
        loop, accumulate = self._trainer.fit_loop, self._trainer.accumulate_grad_batches
        epoch, begun = loop.epoch_progress.current.processed, loop.epoch_loop.batch_progress.current
        sampler = self._loader.sampler
        if begun.ready % accumulate:
            raise refusal(
                f"a training that continues with batch {begun.ready} of an epoch, within a step of"
                f" {accumulate} batches",
                "a checkpoint that was saved between two steps",
                "resume from another checkpoint, and save at multiples of accumulate_grad_batches",
            )
        step = epoch * sampler.ledger.steps_per_epoch + begun.ready // accumulate
        if step != sampler.next_step:
            raise refusal(
                f"a training that continues with step {step}, and its data with step"
                f" {sampler.next_step}",
                "a checkpoint of a training with ElasticStrategy and the same global_batch_size,"
                " or one between two epochs",
                "resume from a checkpoint that was saved at the end of an epoch",
            )

    def _reading_train_data(self, read: Callable[[], None]) -> None:
        self._is_reading_train_data = True
        try:
            read()
        finally:
            self._is_reading_train_data = False


def _read_within(owner: Any, name: str, around: Callable[[Callable[[], None]], None]) -> None:
    """Let the method `name` of one object run within `around`."""
    method = getattr(owner, name)
    setattr(owner, name, lambda: around(method))


def _is_lightnings(module: str) -> bool:
    return module.startswith(("lightning.", "pytorch_lightning.", "lightning_fabric."))


def _joins_later(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{what} by a worker that joins a running job: the others are at their steps",
        slug="joins-later",
        expected="no collectives before the first batch",
        next_step="call it after the first batch, or let each worker compute the value by itself",
    )


def _maximum(data: bytes) -> bytes:
    """Return the bytes of the one worker that passes some; none if it is lost.

    A maximum means the same over the survivors, where a broadcast ends with its root.
    """
    length = torch.tensor([len(data)])
    dist.all_reduce(length, op=dist.ReduceOp.MAX)
    if not length:
        return b""
    total = torch.zeros(int(length), dtype=torch.uint8)
    if data:
        total[:] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.all_reduce(total, op=dist.ReduceOp.MAX)
    return total.numpy().tobytes() if total.any() else b""


def _leave_signals_alone(trainer: Any) -> None:
    """Undo Lightning's handler of SIGTERM, which makes a broadcast that the others do not make.

    The agent ends workers between two steps, and the others continue.
    """
    handler = trainer._signal_connector._original_handlers.get(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is None else handler)


def _taken(parameters: list[torch.Tensor], factor: float) -> list[torch.Tensor | None]:
    """Take the gradients of parameters away, multiplied by `factor`."""
    taken = []
    for parameter in parameters:
        gradient, parameter.grad = parameter.grad, None
        taken.append(None if gradient is None else gradient.detach() * factor)
    return taken


def _sum(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other
