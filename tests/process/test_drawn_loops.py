"""Ordinary training scripts that are drawn from seeds keep right weights, wherever workers die.

Each step of each worker is checked by computing it again: the gradient from the recorded weights
before it, as the mean over the workers that may have contributed, and the update from the recorded
gradient. ELASTANE_LOOP_SEEDS=FIRST:COUNT says which seeds are played.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from drawn_checks import NEAR, check_equal, check_update, grads_of, play_seeds, run_job
from drawn_program import Program, batch_of, evaluation_set, losses_of, model_of, uses_other


class Attempt:
    """The records of the workers that started together, by rank and step."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.records: dict[int, dict[int, dict]] = defaultdict(dict)

    def check(self) -> int:
        """Check each step; return how many were checked."""
        first = {min(steps) for steps in self.records.values()}
        assert len(first) == 1, f"workers began at different steps: {first}"
        begin = first.pop()
        steps = sorted({step for each in self.records.values() for step in each})
        for step in steps:
            here = {rank: each[step] for rank, each in self.records.items() if step in each}
            self._check_equal(step, here)
            if step > begin:
                before = {rank for rank, each in self.records.items() if step - 1 in each}
                self._check_step(step, here, before)
        return len(steps) - 1

    def _check_equal(self, step: int, here: dict[int, dict]) -> None:
        ranks = sorted(here)
        for rank in ranks[1:]:
            for kind in ("model", "optimizer", "grads"):
                one, other = (here[r].get(kind) for r in (ranks[0], rank))
                check_equal(one, other, f"step {step}: {kind} of {ranks[0]} and {rank}")
            for key in ("value", "said"):
                one, other = here[ranks[0]].get(key), here[rank].get(key)
                assert repr(one) == repr(other), f"step {step}: {key} {one} {other}"

    def _check_step(self, step: int, here: dict[int, dict], before: set[int]) -> None:
        survivors, lost = sorted(here), sorted(before - set(here))
        record = here[survivors[0]]
        base = self.records[survivors[0]][step - 1]
        self._check_gradient(step, here, lost, base)
        check_update(self.program, base, record, f"step {step}")
        if record["value"] is not None and not self.program.batch_norm:
            self._check_value(step, record, survivors, lost)

    def _check_gradient(
        self, step: int, here: dict[int, dict], lost: list[int], base: dict
    ) -> None:
        program, survivors = self.program, sorted(here)
        record = here[survivors[0]]
        local: dict[int, list[list[torch.Tensor]]] = {}
        for rank in (*survivors, *lost):
            model = model_of(program)
            model.load_state_dict(base["model"])
            local[rank] = []
            for micro in range(program.micro):
                model.zero_grad()
                batch = batch_of(program, rank, step, micro)
                total = losses_of(model, batch, other=uses_other(program, step)).sum()
                divisor = record["divisors"][micro][0] if program.norm else float(len(batch[1]))
                (total / divisor / program.micro).backward()
                local[rank].append(grads_of(model))
        for number, grad in enumerate(record["grads"]):
            got = torch.zeros_like(local[survivors[0]][0][number]) if grad is None else grad
            candidates = []
            ranges = itertools.product(range(program.micro + 1), repeat=len(lost))
            for until in ranges:
                total = torch.zeros_like(got)
                parts = [
                    [*survivors, *(r for r, n in zip(lost, until, strict=True) if micro < n)]
                    for micro in range(program.micro)
                ]
                if program.no_sync or program.by != "ddp":
                    # One reduction of all passes: those of the last pass contribute to all.
                    parts = [parts[-1]] * program.micro
                for micro, of in enumerate(parts):
                    total += sum(local[rank][micro][number] for rank in of) / len(of)
                candidates.append((until, total))
            if not any(torch.allclose(got, each, **NEAR) for _, each in candidates):
                best = [(u, ((got - c).abs().max() / c.abs().max()).item()) for u, c in candidates]
                ratio = (got.norm() / candidates[0][1].norm()).item()
                raise AssertionError(
                    f"step {step}, parameter {number}: no mean over {survivors} and some of {lost};"
                    f" ratio {ratio}, errors {best}, divisors {record['divisors']}"
                )
        for micro, (divisor, _) in enumerate(record["divisors"] if program.norm else ()):
            self._check_divisor(step, micro, divisor, survivors, lost)

    def _check_divisor(
        self, step: int, micro: int, divisor: float, survivors: list[int], lost: list[int]
    ) -> None:
        program = self.program
        for more in _subsets(lost):
            of = [*survivors, *more]
            mean = sum(len(batch_of(program, r, step, micro)[1]) for r in of) / len(of)
            slack = 0.5 / program.workers + 1e-9 if program.norm == "int" else 1e-9
            if abs(mean - divisor) <= slack:
                return
        raise AssertionError(f"step {step}: divisor {divisor} of {survivors} and {lost}")

    def _check_value(self, step: int, record: dict, survivors: list[int], lost: list[int]) -> None:
        program = self.program
        model = model_of(program)
        model.load_state_dict(record["model"])
        inputs, labels = evaluation_set(program)
        with torch.no_grad():
            losses = torch.nn.functional.cross_entropy(model(inputs), labels, reduction="none")
        found = []
        for more in _subsets(lost):
            of = sorted([*survivors, *more])
            for size, places in ((program.workers, of), (len(of), range(len(of)))):
                parts = [losses[place::size] for place in places]
                value = torch.cat(parts).mean().item()
                if program.evaluates == "mean":
                    value = (sum(p.mean() for p in parts) / len(parts)).item()
                found.append(value)
        assert any(abs(each - record["value"]) < 1e-6 for each in found), (
            f"step {step}: evaluation {record['value']}, of {survivors} and {lost}: {found}"
        )


def _subsets(ranks: list[int]) -> list[tuple[int, ...]]:
    return [c for n in range(len(ranks) + 1) for c in itertools.combinations(ranks, n)]


def play(seed: int, folder: Path) -> str:
    """Run the program of a seed, check all its steps, and return its counts in words."""
    program = Program.drawn(seed)
    job = run_job("drawn_loop.py", program, folder, may_change=program.may_change)
    records = job.records
    attempts: dict[tuple[int, int], Attempt] = {}
    for own in records.glob("*.*.*"):
        if not own.is_dir():
            continue
        number, attempt, rank = map(int, own.name.split("."))
        key = (number, attempt)
        for file in own.glob("*.pt"):
            made = attempts.setdefault(key, Attempt(program))
            made.records[rank][int(file.stem)] = torch.load(file)
    checked = sum(attempts[key].check() for key in sorted(attempts))
    last = attempts[max(attempts)].records
    ends = [each[program.steps] for each in last.values() if program.steps in each]
    assert ends, "no worker recorded the last step"
    check_equal(job.final["model"], ends[0]["model"], "the final weights")
    counts = f"{job.deaths} deaths, {job.restarts} restarts, {job.growths} growths"
    return f"{counts}, {checked} steps checked"


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_each_step_of_drawn_scripts_is_right_wherever_workers_die(tmp_path: Path) -> None:
    play_seeds(play, Program.drawn, tmp_path)
