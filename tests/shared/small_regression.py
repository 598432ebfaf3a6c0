"""A small regression, and its training in a plain loop: the measure for one that loses workers.

All is in double precision, so that sums in another order differ by little. Each step is the mean
over its samples, whoever computes them.
"""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

from elastane import ElasticBatchSampler

SAMPLES, BATCH = 90, 12  # the last step of an epoch has half a batch
STEPS = -(-SAMPLES // BATCH)  # of an epoch
CLIP, RATE, STEPS_MAX = 1.0, 1e-2, 10_000
DECAY = 0.9  # of the average of weights
BY_HAND = 1, 2  # the batches of a step of each optimizer


class Numbers(Dataset):
    """Samples that are functions of their index."""

    def __init__(self, size: int = SAMPLES) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.randn(16, generator=torch.Generator().manual_seed(index)).double()


def made_model() -> torch.nn.Module:
    """Return the model, the same one in each process."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        inner = torch.nn.LayerNorm(32), torch.nn.Tanh()
        layers = torch.nn.Linear(16, 32), *inner, torch.nn.Linear(32, 1)
        return torch.nn.Sequential(*layers).double()


def made_optimizer(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, object]:
    """Return the optimizer, and its scheduler, which steps with it."""
    optimizer = torch.optim.AdamW(model.parameters(), RATE / 10)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS_MAX)
    return optimizer, schedule


def made_optimizers(model: torch.nn.Sequential) -> tuple[list[torch.optim.Optimizer], object]:
    """Return the optimizers of both parts of the model, and the schedule of the first one."""
    first, schedule = made_optimizer(model[:2])
    return [first, torch.optim.SGD(model[2:].parameters(), RATE, momentum=0.9)], schedule


def loss_of(model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Return the mean loss."""
    return torch.nn.functional.mse_loss(model(inputs).squeeze(-1), inputs.sum(1))


def trained_alone(epochs: int, seed: int) -> list[tuple[set[int], list[float], float]]:
    """Return of each step: its samples, the sum of each parameter, and the next rate."""
    model, data, steps = made_model(), Numbers(), []
    optimizer, schedule = made_optimizer(model)
    sampler = ElasticBatchSampler(SAMPLES, BATCH, seed=seed).bind(0, 1)
    for _ in range(epochs):
        for indices in [*sampler]:
            optimizer.zero_grad()
            loss_of(model, torch.stack([data[i][1] for i in indices])).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            schedule.step()
            sampler.commit()
            steps.append(({*indices}, sums_of(model), schedule.get_last_lr()[0]))
    return steps


def sums_of(model: torch.nn.Module) -> list[float]:
    """Return the sum of each parameter."""
    return [float(each.detach().sum()) for each in model.parameters()]


def trained_by_hand(steps: list[tuple[list[int], ...]], *, toggled: bool) -> list[list[float]]:
    """Return the sum of each parameter after each step, with two optimizers.

    `steps`: the samples of the backward pass of each optimizer. `toggled`: it is of its own
    parameters alone.
    """
    model, data, sums = made_model(), Numbers(), []
    optimizers, schedule = made_optimizers(model)
    for number, passes in enumerate(steps):
        for optimizer, many, indices in zip(optimizers, BY_HAND, passes, strict=True):
            own = [each for group in optimizer.param_groups for each in group["params"]]
            loss = loss_of(model, torch.stack([data[i][1] for i in indices]))
            loss.backward(inputs=own if toggled else None)
            if (number % STEPS + 1) % many == 0:
                optimizer.step()
                optimizer.zero_grad()
        if not (number + 1) % STEPS:
            model.zero_grad()  # as Lightning does before a validation
        schedule.step()
        sums.append(sums_of(model))
    return sums
