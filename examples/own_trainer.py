"""A small training framework whose workers are replaced, and join, while it trains.

The framework is the class `Trainer`; its users write a module with `loss`, and callbacks. What it
does for elastane is marked with numbers, explained in docs/framework-authors.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, default_collate

import elastane


class Callback:
    """What users hook into; one that keeps something has `state_dict` and `load_state_dict`."""

    def step_ended(self, trainer: Trainer, loss: torch.Tensor) -> None:
        """Each step, on all workers."""

    def epoch_ended(self, trainer: Trainer, loss: float) -> None:
        """Each epoch, on all workers, with the loss of the data for evaluation."""


class Trainer:
    """Trains a module that has `loss(batch)`, the mean over the batch's samples."""

    def __init__(
        self, module: torch.nn.Module, data: Any, *, batch: int, evaluation: Any = (),
        callbacks: Iterable[Callback] = (), folder: Path = Path(),
    ) -> None:  # fmt: skip
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        elastane.on_world_change(self._change)  # 1
        self.module, self.callbacks = module, list(callbacks)
        self.evaluation, self.file = evaluation, folder / "checkpoint.pt"
        self.model = DistributedDataParallel(_Losses(module))
        self.optimizer = torch.optim.AdamW(module.parameters(), 1e-3)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 50, 0.9)
        self.steps = 0
        batches = elastane.ElasticBatchSampler(len(data), batch)
        self.loader = elastane.ElasticLoader(  # 2
            DataLoader(data, batch_sampler=batches),
            model=module, optimizer=self.optimizer, scheduler=self.scheduler, trainer=self,
        )  # fmt: skip
        for number, each in enumerate(self.callbacks):
            if hasattr(each, "state_dict"):
                self.loader.track(**{f"callback {number}": each})  # 3

    def fit(self, epochs: int) -> None:
        """Train until `epochs` are over, from the newest checkpoint on."""
        self._resume()
        for _ in self.loader.epochs(epochs):  # 4
            for batch in self.loader:
                loss = self.model(batch)
                self.loader.backward(loss)  # 5
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
                self.steps += 1
                for each in self.callbacks:
                    each.step_ended(self, loss.detach())
            loss = self._evaluate()
            for each in self.callbacks:
                each.epoch_ended(self, loss)
            self._save()

    def _evaluate(self) -> float:
        """Return the mean loss over the data for evaluation, the same on all workers."""
        total = torch.zeros(2, dtype=torch.int64)  # 6
        with torch.no_grad():
            for index in range(self.rank, len(self.evaluation), self.world_size):
                loss = self.module.loss(default_collate([self.evaluation[index]]))
                total += torch.tensor([round(loss.item() * 1e6), 1])
        dist.all_reduce(total)
        return total[0].item() / max(1, total[1].item()) / 1e6

    def _save(self) -> None:
        if self.rank == 0:  # 7
            held = {"module": self.module, "optimizer": self.optimizer, "loader": self.loader}
            held |= {"scheduler": self.scheduler, "trainer": self}
            temporary = self.file.with_suffix(".tmp")
            torch.save({name: each.state_dict() for name, each in held.items()}, temporary)
            temporary.replace(self.file)

    def _resume(self) -> None:
        if self.file.exists():
            state = torch.load(self.file)
            self.module.load_state_dict(state["module"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.scheduler.load_state_dict(state["scheduler"])
            self.loader.load_state_dict(state["loader"])
            self.load_state_dict(state["trainer"])

    def state_dict(self) -> dict[str, Any]:
        """Return what the framework itself counts."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue to count where another worker, or a checkpoint, is."""
        self.steps = state["steps"]

    def _change(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size


class _Losses(torch.nn.Module):
    """Lets DistributedDataParallel compute a loss in its forward."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = self.module.loss(batch)
        return loss
