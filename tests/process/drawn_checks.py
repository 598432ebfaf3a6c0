"""What the tests of drawn scripts share: a job that runs one, and checks of states and updates."""

from __future__ import annotations

import itertools
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from drawn_faults import Fault, Outside
from jobs import PRELOAD_COMPILER

from elastane.data.permutation import Permutation
from elastane.testing import LocalCluster

SCRIPTS = Path(__file__).parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

from drawn_program import (  # noqa: E402
    Joining,
    Program,
    Sharding,
    Stepping,
    batch_of,
    clamp,
    decay,
    evaluation_set,
    losses_of,
    model_of,
    optimizer_of,
    put_into,
    training_set,
    uses_other,
)
from drawn_training import state_of  # noqa: E402

# A step is too small for several threads, which wait for one another on a busy machine.
torch.set_num_threads(1)

FIRST, COUNT = map(int, os.environ.get("ELASTANE_LOOP_SEEDS", "0:2").split(":"))
# Settings of a job in which lost workers are replaced at once.
JOINS = {"crash_loop": 0, "last_call": 0.3, "gather": 0.2}
NEAR = {"rtol": 1e-9, "atol": 1e-11}


@dataclass(frozen=True)
class DrawnJob:
    """A job that has ended well: its workers' records, its restarts, growths and outside faults."""

    records: Path
    restarts: int
    restarts_of_all: int
    growths: int
    faults: tuple[str, ...] = ()

    @property
    def deaths(self) -> int:
        """The number of workers that have died at drawn places."""
        return len([*self.records.glob("death*"), *self.records.glob("all.*")])

    @property
    def final(self) -> dict:
        """What rank 0 saved at its end."""
        return torch.load(self.records / "final.pt")


def run_job(
    script: str,
    program: Program | Joining,
    folder: Path,
    *,
    faults: tuple[Fault, ...] = (),
    nodes: int = 1,
    **options: object,
) -> DrawnJob:
    """Run the script of a program, to its end; with two nodes each has half of its workers."""
    records = folder / "records"
    records.mkdir(parents=True)
    words = [str(SCRIPTS / script), str(records), str(program.seed)]
    if nodes > 1:
        options |= {"rdzv_backend": "file", "rdzv_endpoint": str(folder / "store")}
    is_sharded = isinstance(program, Sharding)
    words += ["outside"] * bool(faults) + ["sharded"] * is_sharded
    with LocalCluster(
        words,
        folder=folder / "c",
        nnodes=f"1:{nodes}" if nodes > 1 else "1",
        nproc_per_node=-(-program.workers // nodes),
        min_workers=1,
        max_restarts=20,
        preload=f"{PRELOAD_COMPILER},torch.distributed.fsdp" if is_sharded else PRELOAD_COMPILER,
        **{"in_place": True, "ranks_may_change": program.may_change, **options},
    ) as cluster:
        for name in "ab"[:nodes]:
            cluster.start(name)

        def has_ended() -> bool:
            return not any(node.is_alive for node in cluster.nodes)

        outside = Outside(cluster, records, has_ended)
        if nodes > 1:
            cluster.wait_world(nodes)
        outside.play(faults)
        cluster.wait(has_ended, "the agents end", 90 if not faults else 240)
        assert cluster.events("job-ended")[-1].data["ok"] is True, cluster.story()
        restarts, growths = (len(cluster.events(kind)) for kind in ("restart", "growth"))
        output = "".join(node.output for node in cluster.nodes)
        of_all = output.count("all workers restart")
        return DrawnJob(records, restarts, of_all, growths, tuple(outside.done))


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
    grads = record["evaluations"][-1]["grads"] if "evaluations" in record else record["grads"]
    for name, parameter in updated(program, before, grads)["model"].items():
        assert torch.allclose(parameter, record["model"][name], **NEAR), f"{what}: {name}"


def updated(
    program: Program | Joining, before: dict, grads: Sequence[torch.Tensor | None]
) -> dict[str, dict]:
    """Return the parameters that an update makes of a state and gradients, and the optimizer's."""
    model = begun(program, before)
    optimizer = optimizer_of(program, model)
    optimizer.load_state_dict(before["optimizer"])
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        parameter.grad = None if grad is None else grad.clone()
    if program.clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step()
    end(program, model)
    return {"model": dict(model.named_parameters()), "optimizer": optimizer.state_dict()}


def begun(program: Program | Joining, before: dict) -> torch.nn.Module:
    """Return the model as the body of a step begins to use it."""
    model = model_of(program)
    model.load_state_dict(before["model"])
    if isinstance(program, Stepping) and program.decays:
        decay([each.detach() for each in model.parameters()])
    return model


def end(program: Program | Joining, model: torch.nn.Module) -> None:
    """Change a model as the body does after its update."""
    if isinstance(program, Stepping) and program.clamps:
        clamp([each.detach() for each in model.parameters()])


def check_beside(program: Stepping, record: dict, what: str) -> None:
    """Assert that a worker made what its body does beside the update: schedules, an average."""
    first, last = record["before"]["schedule"], record["schedule"]
    assert last == first + 1 or (program.late and last == first), f"{what}: {first}, {last}"
    average = [each.clone() for each in record["before"]["average"]]
    if program.average:
        names = [name for name, _ in model_of(program).named_parameters()]
        put_into(average, [record["model"][name] for name in names])
    for right, got in zip(average, record["average"], strict=True):
        assert torch.allclose(right, got, **NEAR), f"{what}: the average"


def check_lbfgs(program: Joining, before: dict, record: dict, what: str) -> None:
    """Assert that LBFGS makes the recorded weights, at each evaluation and at the end."""
    model = begun(program, before)
    optimizer = optimizer_of(program, model)
    optimizer.load_state_dict(before["optimizer"])
    evaluations = iter(record["evaluations"])

    def closure() -> torch.Tensor:
        each = next(evaluations)
        for name, parameter in model.named_parameters():
            assert torch.allclose(parameter, each["before"]["model"][name], **NEAR), (what, name)
        for parameter, grad in zip(model.parameters(), each["grads"], strict=True):
            parameter.grad = None if grad is None else grad.clone()
        if program.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        loss: torch.Tensor = each["loss"]
        return loss

    optimizer.step(closure)
    assert next(evaluations, None) is None, f"{what}: fewer evaluations"
    end(program, model)
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


class Attempt:
    """The records of the workers that started together, by rank and step."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.records: dict[int, dict[int, dict]] = defaultdict(dict)
        self.size = 0

    def check(self) -> int:
        """Check each step; return how many were checked."""
        first = {min(steps) for steps in self.records.values()}
        assert len(first) == 1, f"workers began at different steps: {first}"
        begin = first.pop()
        (self.size,) = {each[begin]["size"] for each in self.records.values()}
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
            slack = 0.5 / self.size + 1e-9 if program.norm == "int" else 1e-9
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
            seen = [(self.size, of), (len(of), range(len(of)))]
            if program.may_change and program.keeps_size:
                seen.append((self.size, range(len(of))))  # A rank of today in a size of once.
            for size, places in seen:
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


def check_loop(program: Program, job: DrawnJob) -> str:
    """Check all steps of a job of drawn_loop.py; return its counts in words."""
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
    counts = f"{job.deaths} deaths, {job.restarts} restarts, {job.growths} growths, {job.faults}"
    return f"{counts}, {checked} steps checked"


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


def check_joining(program: Joining, job: DrawnJob) -> str:
    """Check all steps of a job of drawn_joining.py; return its counts in words."""
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
    counts = f"{job.deaths} deaths, {restarts} restarts, {joined} joined, {job.faults}"
    return f"{counts}, {len(steps)} steps"


class MadeStep:
    """A step as the workers of one world made it: their records, and what the lost ones had begun.

    A step has several if a worker is lost that has made it, and the others make it again.
    """

    def __init__(self, program: Stepping, step: int, ends: list[dict], lost: list[dict]) -> None:
        self.program, self.step, self.ends = program, step, ends
        self._evaluations = [each["evaluations"] for each in (*ends, *lost)]

    def check(self, batch: list[int] | None) -> list[int]:
        """Check it; return its samples, or none if those of a lost worker are not known.

        `batch`: the samples that it has to have, if they are known before.
        """
        program, first = self.program, self.ends[0]
        for each in self.ends:
            for kind in ("model", "optimizer", "average"):
                check_equal(
                    first["before"][kind], each["before"][kind], f"step {self.step}: {kind}"
                )
                check_equal(first[kind], each[kind], f"step {self.step}: {kind} after it")
            for one, other in zip(first["evaluations"], each["evaluations"], strict=True):
                weights = (of["before"]["model"] for of in (one, other))
                check_equal(*weights, f"step {self.step}: evaluated weights")
                check_equal(one["grads"], other["grads"], f"step {self.step}: gradients")
            check_beside(program, each, f"step {self.step}")
            schedules = {of["before"]["schedule"] for of in self.ends}
            assert schedules == {self.step} or (program.late and len(schedules) == 1), schedules
            if program.batch_norm:
                passes = int(each["model"]["norm.num_batches_tracked"])
                assert passes == program.micro * (self.step + 1), f"step {self.step}: {passes}"
        check = check_lbfgs if program.optimizer == "LBFGS" else check_update
        check(program, first["before"], first, f"step {self.step}")
        found = [self._check_evaluation(n, batch) for n in range(len(first["evaluations"]))]
        assert all(each == found[0] for each in found), f"step {self.step}: {found}"
        return found[0]

    def _check_evaluation(self, number: int, batch: list[int] | None) -> list[int]:
        """Check that a gradient is the mean over the samples; return them as `check` does."""
        first = self.ends[0]
        known = [each[number]["passes"] for each in self._evaluations if number < len(each)]
        used = sorted(n for own in known for numbers, _, _ in own for n in numbers)
        right = {"before": first["evaluations"][number]["before"]}
        right["grads"] = first["evaluations"][number]["grads"]
        if len(known) == first["world"]:
            assert batch is None or used == sorted(batch), f"step {self.step}: {used}, {batch}"
            passes = [each for own in known for each in own]
            self._check_gradient(right, passes, first["world"])
            return used
        assert batch is None or {*used} <= {*batch}, f"step {self.step}: {used}, {batch}"
        if batch is not None and not self.program.batch_norm:
            self._check_gradient(right, [(batch, 1.0, batch)], 1)
        return []

    def _check_gradient(
        self, found: dict, passes: list[tuple[list[int], float, list[int]]], over: int
    ) -> None:
        parts = [gradients(self.program, found["before"], self.step, n, w) for _, w, n in passes]
        for number, grad in enumerate(found["grads"]):
            right = sum(part[number] for part in parts) / over
            got = torch.zeros_like(right) if grad is None else grad
            error = ((got - right).abs().max() / (1e-3 + right.abs().max())).item()
            assert error < 1e-9, f"step {self.step}, parameter {number}: {error}, {passes}"


class Steps:
    """All records of a job of drawn_steps.py, by step and process."""

    def __init__(self, program: Stepping, records: Path) -> None:
        self.program = program
        self.made: dict[int, dict[int, dict]] = defaultdict(dict)
        self.begun: dict[int, dict[int, dict]] = defaultdict(dict)
        self.values: dict[int, list[float]] = defaultdict(list)
        self.saved: list[tuple[tuple[int, int], int, bool]] = []
        self.restored: dict[tuple[int, int], set[int]] = defaultdict(set)
        for file in records.glob("[0-9]*/*.*"):
            own, step, found = int(file.parent.name), int(file.stem), torch.load(file)
            if file.suffix == ".value":
                self.values[step].append(found["value"])
            elif file.suffix == ".saved":
                self.saved.append((found["fence"], step, found["began"]))
            elif file.suffix == ".restored":
                self.restored[found["fence"]].add(step)
            else:
                (self.made if file.suffix == ".pt" else self.begun)[step][own] = found

    @property
    def began_again(self) -> bool:
        """Whether a later world made the first step again, as no worker had the state."""
        first = max(each["fence"] for each in self.made[0].values())
        later = (
            each["fence"] for step, made in self.made.items() if step for each in made.values()
        )
        return min(later) < first

    def check(self) -> None:
        """Check each step, and that each sample is in one step of each epoch."""
        self._check_restored()
        once = not self.began_again and not self.restored
        used: dict[int, Counter] = defaultdict(Counter)
        unknown = set()
        for step in sorted(self.made):
            self._check_follows(step)
            worlds = self._worlds(step)
            samples = [self._check_world(step, ends) for ends in worlds]
            known = [each for each in samples if each]
            assert not once or all(each == known[0] for each in known), f"step {step}: {known}"
            epoch = worlds[0][0]["epoch"]
            # A world that has restored a save may deal the shards of a stream otherwise.
            final = samples[-1] or (known[-1] if once and known else [])
            used[epoch].update(final)
            if not final:
                unknown.add(epoch)
            for value in self.values[step] if not self.program.batch_norm else ():
                self._check_value(value, [self.weights(step, ends) for ends in worlds])
        assert {*self.made} == {*range(max(self.made) + 1)}, "steps are missing"
        for epoch in {*range(self.program.epochs)} - unknown:
            wrong = {n: used[epoch][n] for n in range(self.program.samples) if used[epoch][n] != 1}
            assert not wrong, f"epoch {epoch}: samples not used once: {wrong}"

    def _check_restored(self) -> None:
        """All workers of a world continue at one save: the newest, or the one before it.

        A save that is not written, since another one is, may be in memory all the same. The first
        save of a worker whose bodies decay weights is dropped.
        """
        for fence, steps in self.restored.items():
            offered = {step for of, step, _ in self.saved if of < fence}
            began = sorted({step for of, step, began in self.saved if of < fence and began})
            (step,) = steps
            assert step in offered, f"{fence} restored step {step}, of {sorted(offered)}"
            newest = began[-3:] if self.program.decays else began[-2:]
            assert step >= min(newest), f"{fence} restored step {step}, of {began}"
            of_world = {
                n for n, own in self.made.items() for r in own.values() if r["fence"] == fence
            }
            assert not of_world or min(of_world) == step, f"{fence}: {step}, {min(of_world)}"

    def _worlds(self, step: int) -> list[list[dict]]:
        """Return the records of a step, by the world that made it, the newest last."""
        worlds: dict[tuple[int, int], list[dict]] = defaultdict(list)
        for each in self.made[step].values():
            worlds[each["fence"]].append(each)
        return [worlds[fence] for fence in sorted(worlds)]

    def _check_world(self, step: int, ends: list[dict]) -> list[int]:
        fence, program = ends[0]["fence"], self.program
        begun = self.begun[step].items()
        lost = [r for own, r in begun if r["fence"] == fence and own not in self.made[step]]
        batch = None
        if not program.stream:
            per_epoch = -(-program.samples // program.batch)
            epoch, number = divmod(step, per_epoch)
            order = Permutation(program.samples, program.seed, epoch)
            places = range(number * program.batch, program.samples)[: program.batch]
            batch = order.block(places.start, places.stop).tolist()
        return self._check_made(step, ends, lost, batch)

    def _check_made(
        self, step: int, ends: list[dict], lost: list[dict], batch: list[int] | None
    ) -> list[int]:
        return MadeStep(self.program, step, ends, lost).check(batch)

    def _check_follows(self, step: int) -> None:
        """Each worker begins a step with what some worker had after the one before it."""
        for own, each in self.made[step].items():
            before = [*self.made[step - 1].values()] if step else [self._first()]
            if own in self.made.get(step - 1, {}):
                before = [self.made[step - 1][own]]
            assert any(_is_equal(each["before"], other) for other in before), (
                f"step {step} of {own} does not follow the step before it"
            )

    def _first(self) -> dict:
        model = model_of(self.program)
        average = [each.detach() for each in model.parameters()]
        return state_of(model, optimizer_of(self.program, model)) | {"average": average}

    def weights(self, step: int, ends: list[dict]) -> dict[str, torch.Tensor]:
        """Return the weights after a step that one world has made."""
        weights: dict[str, torch.Tensor] = ends[0]["model"]
        return weights

    def final(self) -> dict[str, torch.Tensor]:
        """Return the weights after the last step."""
        last = max(self.made)
        return self.weights(last, self._worlds(last)[-1])

    def _check_value(self, value: float, weights: list[dict[str, torch.Tensor]]) -> None:
        inputs, labels = evaluation_set(self.program)
        found = []
        for each in weights:
            model = model_of(self.program)
            model.load_state_dict(each)
            with torch.no_grad():
                found.append(torch.nn.functional.cross_entropy(model(inputs), labels).item())
        assert any(abs(each - value) < 1e-9 for each in found), (value, found)


def _is_equal(one: dict, other: dict) -> bool:
    try:
        for kind in ("model", "optimizer", "average"):
            check_equal(one[kind], other[kind], kind)
    except AssertionError:
        return False
    return True


def check_steps(program: Stepping, job: DrawnJob, of: type[Steps] = Steps) -> str:
    """Check all steps of a job of drawn_steps.py; return its counts in words."""
    restarts = job.restarts + job.restarts_of_all
    steps = of(program, job.records)
    steps.check()
    check_equal(job.final, steps.final(), "the final weights")
    joined = len({own for each in steps.made.values() for own in each}) - program.workers
    counts = f"{job.deaths} deaths, {restarts} restarts, {joined} joined, {job.faults}"
    again = ", began again" if steps.began_again else ""
    again += f", restored {[*steps.restored.values()]}" if steps.restored else ""
    return f"{counts}, {len(steps.made)} steps{again}"
