"""Drawn scripts with an ElasticLoader: workers die, new ones join, and each step is right.

Each step of each worker is computed again from the recorded weights before it. In each epoch each
sample is in exactly one step. ELASTANE_LOOP_SEEDS=FIRST:COUNT says which seeds are played.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch
from jobs import PRELOAD_COMPILER

from elastane.testing import LocalCluster

SCRIPTS = Path(__file__).parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

from drawn_program import Joining, model_of, optimizer_of, training_set  # noqa: E402

FIRST, COUNT = map(int, os.environ.get("ELASTANE_LOOP_SEEDS", "0:2").split(":"))
NEAR = {"rtol": 1e-9, "atol": 1e-11}


def flat(state: object) -> list[torch.Tensor]:
    """Return the tensors of a state."""
    leaves = torch.utils._pytree.tree_leaves(state)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def gradients(
    program: Joining, before: dict, step: int, numbers: list[int], weight: float
) -> list[torch.Tensor]:
    """Return the gradients of one worker's pass, with zeros for parameters that it does not use."""
    model = model_of(program)
    model.load_state_dict(before["model"])
    _, inputs, labels = training_set(program)
    logits = model(inputs[numbers], other=program.unused and step % 3 != 1)
    (torch.nn.functional.cross_entropy(logits, labels[numbers]) * weight).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


class StepCheck:
    """One step: the records of its survivors, and what the lost ones had begun."""

    def __init__(self, program: Joining, step: int, ends: list[dict], lost: list[dict]) -> None:
        self.program, self.step, self.ends, self.lost = program, step, ends, lost

    def check(self) -> Counter:
        """Check it; return how often each sample is in its gradient."""
        self._check_equal()
        self._check_update()
        return self._check_gradient()

    def _check_equal(self) -> None:
        first = self.ends[0]
        for other in self.ends[1:]:
            for kind in ("before", "model", "optimizer", "grads"):
                for a, b in zip(flat(first[kind]), flat(other[kind]), strict=True):
                    assert torch.equal(a, b), f"step {self.step}: {kind} differs"
            assert first["epoch"] == other["epoch"], f"step {self.step}: epochs"

    def _check_update(self) -> None:
        first = self.ends[0]
        model = model_of(self.program)
        model.load_state_dict(first["before"]["model"])
        optimizer = optimizer_of(self.program, model)
        optimizer.load_state_dict(first["before"]["optimizer"])
        for parameter, grad in zip(model.parameters(), first["grads"], strict=True):
            parameter.grad = None if grad is None else grad.clone()
        if self.program.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        for name, parameter in model.named_parameters():
            assert torch.allclose(parameter, first["model"][name], **NEAR), (self.step, name)

    def _check_gradient(self) -> Counter:
        micro = self.program.micro
        before = self.ends[0]["before"]
        parts = [
            [gradients(self.program, before, self.step, n, w) for _, w, n in each["passes"]]
            for each in (*self.ends, *self.lost)
        ]
        counts = [len(each["passes"]) for each in self.lost]
        errors = []
        for until in itertools.product(*(range(count + 1) for count in counts)):
            if self.program.no_sync and any(n not in (0, micro) for n in until):
                continue
            shares = (*(micro for _ in self.ends), *until)
            error = self._error(parts, shares)
            if error < 1e-9:
                # The shares of a worker that is not in the last pass are dealt again.
                used = [
                    e for e, n in zip((*self.ends, *self.lost), shares, strict=True) if n == micro
                ]
                return Counter(
                    n for each in used for numbers, _, _ in each["passes"] for n in numbers
                )
            errors.append((until, error))
        raise AssertionError(f"step {self.step}: no mean of {len(self.ends)} workers: {errors}")

    def _error(self, parts: list[list[list[torch.Tensor]]], shares: tuple[int, ...]) -> float:
        worst = 0.0
        for number, grad in enumerate(self.ends[0]["grads"]):
            total = torch.zeros_like(parts[0][0][number])
            for micro in range(self.program.micro):
                of = [p[micro][number] for p, n in zip(parts, shares, strict=True) if micro < n]
                total += sum(of) / len(of)
            got = torch.zeros_like(total) if grad is None else grad
            worst = max(worst, ((got - total).abs().max() / (1e-3 + total.abs().max())).item())
        return worst


def play(seed: int, folder: Path) -> str:
    """Run the program of a seed, check all its steps, and return its counts in words."""
    program = Joining.drawn(seed)
    records = folder / "records"
    records.mkdir(parents=True)
    with LocalCluster(
        [str(SCRIPTS / "drawn_joining.py"), str(records), str(seed)],
        folder=folder / "c",
        nnodes="1",
        nproc_per_node=program.workers,
        min_workers=1,
        max_restarts=20,
        in_place=True,
        ranks_may_change=True,
        rdzv_conf={"crash_loop": 0, "last_call": 0.3, "gather": 0.2},
        preload=PRELOAD_COMPILER,
    ) as cluster:
        node = cluster.start("a")
        cluster.wait(lambda: not node.is_alive, "the agent ends", 90)
        assert cluster.events("job-ended")[-1].data["ok"] is True, cluster.story()
        restarts = len(cluster.events("restart")) + node.output.count("all workers restart")
    steps: dict[int, list[dict]] = defaultdict(list)
    begun: dict[int, list[tuple[int, dict]]] = defaultdict(list)
    ended: dict[int, set[int]] = defaultdict(set)
    for file in records.glob("*/*.pt"):
        steps[int(file.stem)].append(torch.load(file))
        ended[int(file.stem)].add(int(file.parent.name))
    for file in records.glob("*/*.begin"):
        pid = int(file.parent.name)
        if pid not in ended[int(file.stem)]:
            begun[int(file.stem)].append((pid, torch.load(file)))
    if restarts == 0:
        used: dict[int, Counter] = defaultdict(Counter)
        for step in sorted(steps):
            lost = [each for _, each in begun[step]]
            used[steps[step][0]["epoch"]] += StepCheck(program, step, steps[step], lost).check()
        everything = Counter(range(program.samples))
        for epoch in range(program.epochs):
            wrong = {n: used[epoch][n] for n in everything if used[epoch][n] != 1}
            assert not wrong, f"epoch {epoch}: samples not used once: {wrong}"
    final = torch.load(records / "final.pt")
    for name, value in final.items():
        assert torch.equal(value, steps[max(steps)][0]["model"][name]), f"the final {name}"
    deaths = len(list(records.glob("death*")))
    joined = len({file.parent.name for file in records.glob("*/*.pt")}) - program.workers
    return f"{deaths} deaths, {restarts} restarts, {joined} joined, {len(steps)} steps"


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_each_step_of_drawn_scripts_is_right_as_workers_die_and_join(tmp_path: Path) -> None:
    for seed in range(FIRST, FIRST + COUNT):
        try:
            print(f"seed {seed}: {play(seed, tmp_path / str(seed))}", flush=True)
        except AssertionError as error:
            error.add_note(f"seed {seed}: {Joining.drawn(seed)}")
            raise
