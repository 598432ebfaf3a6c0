"""Lightning's Trainer under `elastane run --in-place`: what it keeps, and what a loss affects.

Its rank and world size are Fabric's (`integrations.fabric`). `adopt` changes the few places that
keep them, or that call several collectives which belong together. It uses private names of
Lightning, so an unchecked version is refused.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from elastane.comms.elastic import members_left
from elastane.integrations import fabric
from elastane.integrations.versions import require_known
from elastane.synchrony.ordered import OrderedGroup
from elastane.synchrony.visible import VisibleWorld

# The packages of which a Trainer runs, or has run, by their names.
_running: set[str] = set()


def adopt(name: str, world: VisibleWorld) -> None:
    """Let Lightning follow `world`; `name`: the package as the script has imported it.

    Raises ConfigurationError if the version is not known.
    """
    package = importlib.import_module(name)
    require_known(name, str(package.__version__), fabric.KNOWN)
    _note_trainers(name)
    fabric.share_by_world(importlib.import_module(f"{name}.strategies").DDPStrategy)
    _prepare_each_pass(name)
    _rebuild_evaluation_loaders(name, world)
    _keep_together(name, world)
    _save_by_a_survivor(name, world)


def in_use(name: str) -> bool:
    """Whether the script trains or tests by a Trainer; `name`: the imported package."""
    return name in _running


def _note_trainers(name: str) -> None:
    """Note each Trainer that runs. Its import says nothing: Fabric's package imports it too."""
    module: Any = importlib.import_module(f"{name}.trainer.trainer")
    run: Callable[..., Any] = module.Trainer._run
    if _is_below(run):
        _running.add(name)

    @functools.wraps(run)
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if name not in _running and c10d.is_initialized():
            # From here on all workers see the members that are left.
            with members_left(c10d._get_default_group()):
                _running.add(name)
        return run(self, *args, **kwargs)

    module.Trainer._run = noted


def _is_below(function: Any) -> bool:
    """Whether this thread is in a call of `function`: a Trainer makes the process group."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


def _prepare_each_pass(name: str) -> None:
    """Make each manual_backward() wait for its buckets: several may follow one forward."""
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
    """Run functions with several collectives over one membership."""
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
