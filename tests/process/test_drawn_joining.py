"""Drawn scripts with an ElasticLoader: workers die, new ones join, and each step is right.

Each step of a job that never restarts as a whole is computed again from the recorded weights before
it, and each sample is in exactly one step of each epoch. Of other jobs only the last weights are
compared. ELASTANE_LOOP_SEEDS=FIRST:COUNT says which seeds are played.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch
from drawn_checks import check_equal, check_update, grads_of, play_seeds, run_job
from drawn_program import Joining, model_of, training_set, uses_other


def gradients(
    program: Joining, before: dict, step: int, numbers: list[int], weight: float
) -> list[torch.Tensor]:
    """Return the gradients of one worker's pass, with zeros for parameters that it does not use."""
    model = model_of(program)
    model.load_state_dict(before["model"])
    _, inputs, labels = training_set(program)
    logits = model(inputs[numbers], other=uses_other(program, step))
    (torch.nn.functional.cross_entropy(logits, labels[numbers]) * weight).backward()
    return grads_of(model)


class StepCheck:
    """One step: the records of its survivors, and what the lost ones had begun."""

    def __init__(self, program: Joining, step: int, ends: list[dict], lost: list[dict]) -> None:
        self.program, self.step, self.ends, self.lost = program, step, ends, lost

    def check(self) -> Counter:
        """Check it; return how often each sample is in its gradient."""
        self._check_equal()
        first = self.ends[0]
        check_update(self.program, first["before"], first, f"step {self.step}")
        return self._check_gradient()

    def _check_equal(self) -> None:
        first = self.ends[0]
        for other in self.ends[1:]:
            for kind in ("before", "model", "optimizer", "grads"):
                check_equal(first[kind], other[kind], f"step {self.step}: {kind}")
            assert first["epoch"] == other["epoch"], f"step {self.step}: epochs"

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
                # A later step takes the samples of a worker that is missing in the last pass.
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
    conf = {"crash_loop": 0, "last_call": 0.3, "gather": 0.2}
    job = run_job("drawn_joining.py", program, folder, may_change=True, rdzv_conf=conf)
    records, restarts = job.records, job.restarts + job.restarts_of_all
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
    check_equal(job.final, steps[max(steps)][0]["model"], "the final weights")
    joined = len({file.parent.name for file in records.glob("*/*.pt")}) - program.workers
    return f"{job.deaths} deaths, {restarts} restarts, {joined} joined, {len(steps)} steps"


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_each_step_of_drawn_scripts_is_right_as_workers_die_and_join(tmp_path: Path) -> None:
    play_seeds(play, Joining.drawn, tmp_path)
