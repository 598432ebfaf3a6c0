"""Lightning under `elastane run --in-place`: what it keeps, and what a shrunken world affects.

Lightning reads rank and world size from the environment, which changes with the program's world. A
few places keep them, or call several collectives that belong together; `adopt` mends these. It
touches names of Lightning that are private, so a version that was not checked is refused.
"""

from __future__ import annotations

import csv
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from elastane.integrations.versions import require_known
from elastane.synchrony.ordered import OrderedGroup
from elastane.synchrony.visible import VisibleWorld

# The versions whose private names these are.
KNOWN = ("2.5.", "2.6.")
# Lightning has two names; that of Fabric by that of the package.
_FABRICS = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


def adopt(name: str, world: VisibleWorld) -> None:
    """Let Lightning follow `world`; `name`: the package as the script has imported it.

    Raises ConfigurationError if the version is not known.
    """
    package = importlib.import_module(name)
    require_known(name, str(package.__version__), KNOWN)
    fabric = _FABRICS[name]
    _follow_rank(world)
    _follow_size(name, fabric, world)
    _prepare_each_pass(name)
    _rebuild_evaluation_loaders(name, world)
    _keep_together(name, world)
    _save_by_a_survivor(name, world)
    _continue_csv_logs(fabric, world)


def _follow_rank(world: VisibleWorld) -> None:
    """Let the next rank 0 print, log and save what only rank 0 does."""
    rank_zero_only: Any = importlib.import_module("lightning_utilities.core.rank_zero")
    rank_zero_only = rank_zero_only.rank_zero_only

    def follow() -> None:
        rank_zero_only.rank = world.rank

    world.tell(follow)


def _follow_size(name: str, fabric: str, world: VisibleWorld) -> None:
    """Let samplers that are built later be for the current world, of another size than devices=."""
    strategy: Any = importlib.import_module(f"{name}.strategies").DDPStrategy
    environment: Any = importlib.import_module(f"{fabric}.plugins.environments")
    environment = environment.TorchElasticEnvironment
    validate = environment.validate_settings

    def validate_settings(self: Any, num_devices: int, num_nodes: int) -> None:
        if num_devices * num_nodes != world.first_size:
            validate(self, num_devices, num_nodes)

    environment.validate_settings = validate_settings
    strategy.distributed_sampler_kwargs = property(
        lambda self: {"num_replicas": self.world_size, "rank": self.global_rank}
    )


def _prepare_each_pass(name: str) -> None:
    """Let each manual_backward() wait for its buckets: several may follow one forward."""
    strategy: Any = importlib.import_module(f"{name}.strategies").DDPStrategy
    before: Callable[[Any, torch.Tensor], None] = strategy.pre_backward

    def pre_backward(self: Any, closure_loss: torch.Tensor) -> None:
        group, module = c10d._get_default_group(), self.model
        if (
            isinstance(group, OrderedGroup)
            and isinstance(module, DistributedDataParallel)
            and not self.lightning_module.automatic_optimization
            and module.require_backward_grad_sync
        ):
            group.before_backward(module)
        before(self, closure_loss)

    strategy.pre_backward = pre_backward


def _rebuild_evaluation_loaders(name: str, world: VisibleWorld) -> None:
    """Ask for the validation data again in another world: else a share is left out, or doubled.

    Ranks may change while the size does not, if a worker is lost and another one joins.
    """
    loop: Any = importlib.import_module(f"{name}.loops.evaluation_loop")._EvaluationLoop
    setup = loop.setup_data

    def setup_data(self: Any) -> None:
        members = getattr(c10d._get_default_group(), "members", world.size)
        if vars(self).get("_elastane_members") != members:
            self._combined_loader = None
        self._elastane_members = members
        setup(self)

    loop.setup_data = setup_data


def _keep_together(name: str, world: VisibleWorld) -> None:
    """Let what takes several collectives be over one membership."""
    strategy: Any = importlib.import_module(f"{name}.strategies").DDPStrategy
    world.make_whole(strategy, "broadcast")
    module: Any = importlib.import_module(name).LightningModule
    world.make_whole(module, "all_gather")
    result: Any = importlib.import_module(f"{name}.trainer.connectors.logger_connector.result")
    metric = result._ResultMetric
    compute = metric.compute

    def compute_whole(self: Any) -> Any:
        if not (self.is_tensor and self.meta.sync.should and self.meta.is_mean_reduction):
            return compute(self)
        # The number of samples is summed in place.
        own = self.cumulated_batch_size.clone()

        def restore() -> None:
            self.cumulated_batch_size = own.clone()

        return world.whole(lambda: compute(self), restore)

    metric.compute = compute_whole


def _save_by_a_survivor(name: str, world: VisibleWorld) -> None:
    """Save a checkpoint again if rank 0 was lost meanwhile: it may not have written it."""
    trainer: Any = importlib.import_module(name).Trainer
    world.make_whole(trainer, "save_checkpoint")
    callback: Any = importlib.import_module(f"{name}.callbacks").ModelCheckpoint
    world.make_whole(callback, "_link_checkpoint")


def _continue_csv_logs(fabric: str, world: VisibleWorld) -> None:
    """Let another rank 0 continue the file of CSVLogger, which it would delete."""
    writer: Any = importlib.import_module(f"{fabric}.loggers.csv_logs")._ExperimentWriter
    check = writer._check_log_dir_exists

    def check_log_dir_exists(self: Any) -> None:
        if world.first_rank == 0:
            check(self)
        elif self._fs.isfile(self.metrics_file_path):
            with self._fs.open(self.metrics_file_path, "r", newline="") as file:
                self.metrics_keys = next(csv.reader(file), [])

    writer._check_log_dir_exists = check_log_dir_exists
