"""Lightning scripts with ElasticStrategy: lost workers are replaced, and nodes join, in place.

A plain loop in the test's process is the measure. After each step, all workers of a job that loses
workers have the weights of that loop, up to the rounding of sums in another order.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from growing import Growing
from joining import WorldSizes
from small_regression import DECAY, STEPS, trained_alone, trained_by_hand

from elastane.testing import LocalCluster

pytest.importorskip("lightning")
SCRIPT = Path(__file__).parent / "scripts" / "lightning_joining.py"
VALIDATED, SEED = 24, 1
PRELOAD = "torch,torch.distributed,torch.optim,lightning,torchmetrics"


def check(said: dict[int, dict[str, list[dict]]]) -> None:
    """All workers had one state after each step: that of the plain loop over the same samples."""
    last = max(own["step"][-1]["step"] for own in said.values() if own["step"])
    assert last % STEPS == 0, "no step is missing, or more than in an undisturbed training"
    by_step, seen, lost = defaultdict(set), defaultdict(set), defaultdict(set)
    for pid, own in said.items():
        for before, line in pairwise(own["step"]):
            assert before["step"] + 1 == line["step"], (pid, before, line)
        # One that is killed may have made the step in which the others lost it: over more members.
        for line in own["step"] if own["end"] else own["step"][:-1]:
            by_step[line["step"]].add((line["digest"], line["world"]))
        made = {line["step"] - 1 for line in own["step"]}
        for line in own["batch"]:
            (seen if line["step"] in made else lost)[line["step"]].update(line["samples"])
    differing = {step: states for step, states in by_step.items() if len(states) > 1}
    assert not differing, differing
    # The last step of one that was alone may be known of it only, where others joined after it.
    made_by_all = {line["step"] for own in said.values() for line in own["step"]}
    assert made_by_all == {*range(1, last + 1)}
    alone = trained_alone(last // STEPS, SEED)
    for own in said.values():
        for line in own["step"]:
            samples, weights, rate = alone[line["step"] - 1]
            assert line["weights"] == pytest.approx(weights, rel=1e-9, abs=1e-9), line
            assert (line["rate"], line["seen"]) == (rate, line["step"])
            computed = seen[line["step"] - 1]
            assert computed <= samples <= computed | lost[line["step"] - 1]


def by_kind(lines: dict[str, list[dict]]) -> dict[int, dict[str, list[dict]]]:
    """Sort what each process has written."""
    said = {}
    for pid, own in lines.items():
        said[int(pid)] = kinds = {name: [] for name in ("batch", "step", "validation", "end")}
        for line in own:
            kinds.setdefault(line["what"], []).append(line)
    return said


class LightningJob(WorldSizes):
    """A cluster that runs the script, and what its workers have written."""

    def __init__(self, folder: Path, mode: str = "plain", **options: object) -> None:
        self.folder = folder / "said"
        self.folder.mkdir()
        self._growing = Growing(self.folder)
        options = {
            "nnodes": "1:2",
            "nproc_per_node": 3,
            "min_workers": 1,
            "max_restarts": 20,
            "in_place": True,
            "ranks_may_change": True,
            "rdzv_conf": "last_call=0.1",
            **options,
        }
        self.cluster = LocalCluster(
            [str(SCRIPT), str(self.folder), mode], folder=folder / "c", preload=PRELOAD, **options
        )

    def said(self) -> dict[int, dict[str, list[dict]]]:
        """What each process has written, dead ones too."""
        return by_kind(self._growing.lines())

    def step_lines(self) -> dict[int, list[dict]]:
        """What each process has written after its steps, dead ones too."""
        return {pid: own["step"] for pid, own in self.said().items()}

    def last_step(self) -> int:
        """The number of the last step that any worker has made."""
        return max((own[-1]["step"] for own in self.step_lines().values() if own), default=0)

    def kill_in(self, place: str, pids: set[int]) -> set[int]:
        """Kill a worker while it is in this place, which the others do not pass without it."""
        hold = self.folder / f"hold.{place}"
        hold.touch()
        held = {pid: self.folder / f"{pid}.held.{place}" for pid in pids}
        self.cluster.wait(lambda: any(path.exists() for path in held.values()), place)
        lost = next(pid for pid, path in held.items() if path.exists())
        os.kill(lost, signal.SIGKILL)
        hold.unlink()
        return pids - {lost}

    def comes_to_its_end(self) -> None:
        """Let the job end with success."""
        (self.folder / "enough").touch()
        self.cluster.wait(
            lambda: not any(node.is_alive for node in self.cluster.nodes), "the agents end"
        )
        assert self.cluster.events("job-ended")[-1].data["ok"] is True, self.cluster.story()

    def ends_well(self) -> set[int]:
        """Let the job end, and check it; returns the workers that came to its end."""
        self.comes_to_its_end()
        assert not self.cluster.events("restart", "growth"), self.cluster.story()
        said = self.said()
        check(said)
        ended = {pid for pid, own in said.items() if own["end"]}
        assert len({(x["step"], x["best"]) for pid in ended for x in said[pid]["end"]}) == 1
        return ended


def test_workers_lost_in_training_validation_and_save_are_replaced_in_place(tmp_path):
    job = LightningJob(tmp_path)
    with job.cluster as cluster:
        cluster.start("a")
        workers = job.wait_size(3)
        for place in ("training", "validation", "saving"):
            left = job.kill_in(place, workers)
            workers = job.wait_size(3)
            assert left < workers, "the survivors kept their processes"
        assert job.ends_well() == workers
        assert len(cluster.events("replacement")) == 3
    last = [job.said()[pid]["validation"][-1] for pid in workers]
    assert len({(line["step"], line["error"]) for line in last}) == 1
    assert sum(line["samples"] for line in last) == VALIDATED


def test_a_node_joins_and_another_leaves_between_two_steps(tmp_path):
    job = LightningJob(tmp_path, "module", nproc_per_node=1)
    with job.cluster as cluster:
        cluster.start("a")
        first = job.wait_size(1)
        cluster.start("b")
        both = job.wait_size(2)
        assert first < both
        cluster.node("a").stop()
        left = job.wait_size(1)
        assert left == both - first
        assert job.ends_well() == left


def test_a_restart_of_all_continues_with_the_next_step_of_the_checkpoint(tmp_path):
    job = LightningJob(tmp_path, "resume", nnodes="1", nproc_per_node=2, min_workers=2)
    with job.cluster as cluster:
        cluster.start("a")
        first = job.wait_size(2, count=7)
        job.kill_in("training", first)
        second = job.wait_size(2)
        assert not first & second
        job.comes_to_its_end()
        assert len(cluster.events("restart")) == 1
    said = job.said()
    [begun] = {said[pid]["step"][0]["step"] for pid in second}
    assert (begun - 1) % 5 == 0, "the steps before the checkpoint are not repeated"
    for pid in first:  # What they did after the checkpoint is void.
        kept = [line for line in said[pid]["step"] if line["step"] < begun]
        said[pid] = {"step": kept, "batch": said[pid]["batch"], "end": [True]}
    check(said)


@pytest.mark.soak
def test_a_broadcast_in_setup_ends_only_the_worker_that_joins(tmp_path):
    job = LightningJob(tmp_path, "setup", nproc_per_node=2, max_restarts=1)
    with job.cluster as cluster:
        node = cluster.start("a")
        first = job.wait_size(2)
        left = job.kill_in("training", first)
        cluster.wait(lambda: "[joins-later]" in node.output, "the refusal")
        assert job.wait_size(1, count=5) == left
        assert job.ends_well() == left


@pytest.mark.parametrize("mode", ["manual", pytest.param("toggled", marks=pytest.mark.soak)])
def test_manual_optimization_keeps_states_equal_on_replaced_workers(tmp_path, mode):
    job = LightningJob(tmp_path, mode)
    with job.cluster as cluster:
        cluster.start("a")
        workers = job.wait_size(3, count=3)
        for place in ("second", "training"):
            left = job.kill_in(place, workers)
            workers = job.wait_size(3)
            assert left < workers, "the survivors kept their processes"
        job.comes_to_its_end()
        assert not cluster.events("restart", "growth"), cluster.story()
    said = job.said()
    states, steps = defaultdict(set), defaultdict(lambda: ([], []))
    for own in said.values():
        for line in own["step"]:
            states[line["step"]].add((line["digest"], *line["weights"]))
        for line in own["batch"]:
            steps[line["step"]][0].extend(line["samples"])
        for line in own["second"]:
            steps[line["step"]][1].extend(line["samples"])
    assert {*states} == {*range(1, len(states) + 1)}
    assert not len(states) % STEPS, "no step is missing, or more than in an undisturbed training"
    alone = trained_by_hand([steps[n] for n in range(len(states))], toggled=mode == "toggled")
    for step, sums in enumerate(alone, 1):
        [(_digest, *weights)] = states[step]
        assert weights == pytest.approx(sums, rel=1e-9, abs=1e-9), step


def test_averages_of_weights_are_those_of_the_others_on_a_replaced_worker(tmp_path):
    job = LightningJob(tmp_path, "averages", nproc_per_node=2)
    with job.cluster as cluster:
        cluster.start("a")
        workers = job.wait_size(2)
        for place in ("training", "validation"):
            job.kill_in(place, workers)
            workers = job.wait_size(2)
        job.ends_well()
    averages = average_of([line["weights"] for line in by_step(job.said())])
    for line, average in zip(by_step(job.said()), averages, strict=True):
        assert line["average"] == pytest.approx(average, rel=1e-9, abs=1e-9), line


def by_step(said: dict[int, dict[str, list[dict]]]) -> list[dict]:
    """One worker's line of each step."""
    found = {line["step"]: line for own in said.values() for line in own["step"]}
    return [found[step] for step in sorted(found)]


def average_of(sums: list[list[float]]) -> list[list[float]]:
    """The moving average after each step; sums of parameters average as the parameters do."""
    averages = [sums[0]]
    for each in sums[1:]:
        old = averages[-1]
        averages.append([DECAY * a + (1 - DECAY) * b for a, b in zip(old, each, strict=True)])
    return averages


@pytest.mark.soak
def test_gradients_that_each_worker_keeps_are_refused(tmp_path):
    job = LightningJob(tmp_path, "unreduced", nnodes="1", nproc_per_node=1, max_restarts=0)
    with job.cluster as cluster:
        node = cluster.start("a")
        assert node.wait() != 0
        assert "manual_backward() without the reduction of gradients" in node.output
        assert "[elastic-strategy]" in node.output


@pytest.mark.soak
def test_without_a_launcher_the_same_script_makes_the_same_steps(tmp_path):
    (tmp_path / "enough").touch()
    kept = ("PATH", "HOME", "VIRTUAL_ENV")
    environ = {name: os.environ[name] for name in kept if name in os.environ}
    subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)],
        env=environ | {"OMP_NUM_THREADS": "1"}, cwd=tmp_path, check=True, timeout=200,
    )  # fmt: skip
    check(by_kind(Growing(tmp_path).lines()))


@pytest.mark.soak
def test_in_a_world_that_does_not_change_it_makes_the_same_steps(tmp_path):
    options = {"nnodes": "1", "nproc_per_node": 2, "min_workers": None}
    job = LightningJob(tmp_path, **options, in_place=False, ranks_may_change=False)
    with job.cluster as cluster:
        cluster.start("a")
        job.comes_to_its_end()
    assert job.last_step() == STEPS
    check(job.said())


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "mode", ["plain", "accumulate", "workers", "module", "interval", "averages"]
)
def test_workers_killed_at_random_instants_leave_no_trace(tmp_path, mode, seed):
    chance = random.Random(seed)
    job = LightningJob(tmp_path, mode)
    with job.cluster as cluster:
        cluster.start("a")
        job.wait_size(3)
        for _ in range(4):
            known, at = {*job.step_lines()}, job.last_step() + chance.randrange(9)
            cluster.wait(lambda at=at: job.last_step() >= at, "steps before the next loss")
            pids = sorted(cluster.world().pids["a"])
            for pid in chance.sample(pids, min(chance.choice((1, 1, 2)), len(pids) - 1)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            cluster.wait(lambda known=known: {*job.step_lines()} - known, "a new worker")
        job.wait_size(3)
        job.ends_well()
