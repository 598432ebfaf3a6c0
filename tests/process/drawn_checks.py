"""What the tests of drawn scripts share: a job that runs one, and checks of states and updates."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from jobs import PRELOAD_COMPILER

from elastane.testing import LocalCluster

SCRIPTS = Path(__file__).parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

from drawn_program import Joining, Program, model_of, optimizer_of  # noqa: E402

FIRST, COUNT = map(int, os.environ.get("ELASTANE_LOOP_SEEDS", "0:2").split(":"))
NEAR = {"rtol": 1e-9, "atol": 1e-11}


@dataclass(frozen=True)
class DrawnJob:
    """A job that has ended well: its workers' records, its restarts and its growths."""

    records: Path
    restarts: int
    restarts_of_all: int
    growths: int

    @property
    def deaths(self) -> int:
        """The number of workers that have died."""
        return len([*self.records.glob("death*")])

    @property
    def final(self) -> dict:
        """What rank 0 saved at its end."""
        return torch.load(self.records / "final.pt")


def run_job(
    script: str, program: Program | Joining, folder: Path, *, may_change: bool, **options: object
) -> DrawnJob:
    """Run the script of a program in a job of one node, to its end."""
    records = folder / "records"
    records.mkdir(parents=True)
    with LocalCluster(
        [str(SCRIPTS / script), str(records), str(program.seed)],
        folder=folder / "c",
        nnodes="1",
        nproc_per_node=program.workers,
        min_workers=1,
        max_restarts=20,
        in_place=True,
        ranks_may_change=may_change,
        preload=PRELOAD_COMPILER,
        **options,
    ) as cluster:
        node = cluster.start("a")
        cluster.wait(lambda: not node.is_alive, "the agent ends", 90)
        assert cluster.events("job-ended")[-1].data["ok"] is True, cluster.story()
        restarts, growths = (len(cluster.events(kind)) for kind in ("restart", "growth"))
        return DrawnJob(records, restarts, node.output.count("all workers restart"), growths)


def tensors_of(state: object) -> list[torch.Tensor]:
    """Return the tensors of a state, without BatchNorm's statistics, which differ by rank."""
    if isinstance(state, dict):
        state = {k: v for k, v in state.items() if "running" not in str(k)}
        state = {k: v for k, v in state.items() if "num_batches" not in str(k)}
    leaves = torch.utils._pytree.tree_leaves(state)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def check_equal(one: object, other: object, what: str) -> None:
    """Assert that two states have equal tensors."""
    of_one, of_other = tensors_of(one), tensors_of(other)
    assert len(of_one) == len(of_other), f"{what} differ in number"
    for a, b in zip(of_one, of_other, strict=True):
        assert torch.equal(a, b), f"{what} differ"


def check_update(program: Program | Joining, before: dict, record: dict, what: str) -> None:
    """Assert that the recorded gradients make the recorded weights of those before."""
    model = model_of(program)
    model.load_state_dict(before["model"])
    optimizer = optimizer_of(program, model)
    optimizer.load_state_dict(before["optimizer"])
    for parameter, grad in zip(model.parameters(), record["grads"], strict=True):
        parameter.grad = None if grad is None else grad.clone()
    if program.clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter, record["model"][name], **NEAR), f"{what}: {name}"


def grads_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return a copy of each gradient; zeros of a parameter that has none."""
    parameters = model.parameters()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]


def play_seeds(play: Callable[[int, Path], str], drawn: Callable[[int], object], to: Path) -> None:
    """Play the seeds that the environment names; a failure names its program."""
    for seed in range(FIRST, FIRST + COUNT):
        try:
            print(f"seed {seed}: {play(seed, to / str(seed))}", flush=True)
        except AssertionError as error:
            error.add_note(f"seed {seed}: {drawn(seed)}")
            raise
