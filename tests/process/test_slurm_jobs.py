"""Jobs on a real Slurm of four nodes: how they meet, leave, are requeued and resume."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from growing import Growing
from jobs import PRELOAD_COMPILER, PRELOAD_OPTIMIZER
from slurm_bed import NODES, slurm_bed

from elastane.testing import LocalCluster

SCRIPTS = Path(__file__).parent / "scripts"
TRAIN = SCRIPTS / "checkpointed.py"
REQUEUES = int(os.environ.get("SLURM_REQUEUES", "50"))
PRELOADS = {"job": PRELOAD_OPTIMIZER, "exact": PRELOAD_COMPILER}
NEVER = 10**6  # steps between two saves: only a notice makes one
# A program without torch: which node has which rank.
PLACES = """\
import os, pathlib, sys
e = os.environ
line = " ".join([e["SLURMD_NODENAME"], e["RANK"], e["WORLD_SIZE"], e["TORCHELASTIC_RUN_ID"]])
pathlib.Path(sys.argv[1], e["SLURM_JOB_ID"] + "." + e["RANK"]).write_text(line)
"""


@pytest.fixture(scope="module")
def bed(tmp_path_factory):
    with slurm_bed(tmp_path_factory.mktemp("slurm") / "bed") as bed:
        yield bed


class Training:
    """A job of `elastane slurm` that trains, and its workers' records."""

    def __init__(self, bed, folder, nodes, *, every=NEVER, sbatch="", step_s=0.03, more=()):
        self.bed, self.folder = bed, folder
        self.said_folder = folder / "said"
        self.said_folder.mkdir(parents=True)
        self._told = Growing(self.said_folder)
        self.where = folder / "ck"
        self.output = folder / "job.out"
        words = ["--nodes", nodes, "--output", self.output, f"--sbatch={sbatch}"]
        words += ["--report-file", folder / "outcome.json", "--log-dir", folder / "logs"]
        # Sums of more than two workers depend on their number, and on how DDP lays out its buckets.
        self.mode = "job" if nodes == "2" else "exact"
        words += ["--preload", PRELOADS[self.mode], "--rdzv-conf", "last_call=1,gather=0.2", *more]
        words += [TRAIN, self.said_folder, self.where, self.mode, step_s, every]
        self.script = batch_script(*words)
        self.job = bed.submit(self.script)

    @property
    def words(self):
        return self.output.read_text() if self.output.exists() else ""

    def said(self, what):
        told = self._told.lines().items()
        found = [x | {"pid": int(n)} for n, lines in told for x in lines if x["what"] == what]
        return sorted(found, key=lambda line: line["at_s"])

    def made(self):
        """Return the number of steps so far."""
        return max((line["step"] for line in self.said("step")), default=0)

    def wait_steps(self, count):
        goal = self.made() + count
        self.wait(lambda: self.made() >= goal, f"step {goal}")

    def wait(self, holds, what):
        def there():
            assert self.bed.state(self.job) != "FAILED", "the job failed"
            return holds()

        try:
            self.bed.wait(there, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n== the job\n{self.words[-5000:]}") from None

    def wait_restart(self, restarts, world):
        """Wait until all workers of the run after a requeue restored."""
        self.wait(lambda: len(self.said("restored")) >= world * (restarts + 1), "the next run")

    def ends(self):
        (self.said_folder / "enough").touch()
        self.wait((self.said_folder / "final").exists, "the last step")
        self.wait(lambda: self.bed.state(self.job) in ("COMPLETED", "FAILED", ""), "the job's end")
        assert self.bed.state(self.job) != "FAILED", self.words
        return json.loads((self.said_folder / "final").read_text())

    def restored_at(self):
        return [line["step"] for line in self.said("restored")]

    def check_no_step_is_lost(self, final):
        """Assert that each step was made by the workers of one run, with the right weights."""
        weights = {}
        for line in self.said("step"):
            weights.setdefault(line["step"], set()).add(line["weights"])
        assert sorted(weights) == list(range(1, final["steps"] + 1))
        for step, found in weights.items():
            assert found == {undisturbed(step, self.mode)}, step
        assert final["weights"] == undisturbed(final["steps"], self.mode)


def batch_script(*words):
    """Return the output of `elastane slurm`."""
    command = [sys.executable, "-m", "elastane", "slurm", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


# Of each mode: the weights after each step of an undisturbed job.
_undisturbed: dict[str, dict[int, str]] = {}
UNDISTURBED_STEPS = 40


def undisturbed(step, mode):
    """Return the weights after a step of a job of two workers on one machine, without Slurm."""
    if step not in _undisturbed.get(mode, {}):
        with tempfile.TemporaryDirectory() as folder:
            steps = max(UNDISTURBED_STEPS, 2 * step)
            _undisturbed[mode] = trained_alone(Path(folder), steps, mode)
    return _undisturbed[mode][step]


def trained_alone(folder, steps, mode):
    cluster = LocalCluster(
        [str(word) for word in (TRAIN, folder, folder / "ck", mode, 0.0, NEVER)],
        folder=folder / "c",
        nnodes="1",
        nproc_per_node=2,
        preload=PRELOADS[mode],
    )
    told = Growing(folder)

    def weights():
        lines = [line for lines in told.lines().values() for line in lines]
        return {line["step"]: line["weights"] for line in lines if line["what"] == "step"}

    with cluster:
        node = cluster.start("a")
        cluster.wait(lambda: len(weights()) >= steps, f"{steps} steps")
        (folder / "enough").touch()
        cluster.wait(lambda: not node.is_alive, "the end")
    return weights()


def preempt(bed):
    """Run a short job of a partition with a higher priority on all nodes."""
    urgent = bed.submit("#!/bin/sh\n", "--partition=urgent", "--nodes=4", "--exclusive")
    bed.wait(lambda: bed.state(urgent) == "COMPLETED", "the urgent job")


def test_srun_needs_no_option_and_ranks_follow_slurms_order(bed, tmp_path):
    program = tmp_path / "places.py"
    program.write_text(PLACES)
    words = [sys.executable, "-m", "elastane", "run", "--preload=", "--log-dir", str(tmp_path)]
    output = f"--output={tmp_path}/out.%t"
    bed.call("srun", "-N4", "--ntasks-per-node=1", output, *words, str(program), str(tmp_path))
    found = sorted(path.read_text() for path in tmp_path.glob("[0-9]*.[0-3]"))
    job = found[0].split("slurm-")[1]
    assert found == [f"{node} {rank} 4 slurm-{job}" for rank, node in enumerate(NODES)]
    said = [(tmp_path / f"out.{task}").read_text() for task in range(4)]
    assert f"elastane: Slurm job {job}: 4 nodes, rendezvous at {NODES[0]}:2" in said[0]
    assert not any("Slurm job" in text for text in said[1:])
    assert not any("has no secret" in text for text in said)


@pytest.mark.soak
def test_a_preempted_job_is_requeued_and_resumes_without_a_lost_step(bed, tmp_path):
    job = Training(bed, tmp_path, "2")
    job.wait_steps(5)
    preempt(bed)
    last = job.made()
    job.wait_restart(1, world=2)
    assert job.restored_at() == [0, 0, last, last]
    job.wait_steps(3)
    job.check_no_step_is_lost(job.ends())
    assert f"Slurm job {job.job}, requeued once: 2 nodes" in job.words


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_job_that_is_preempted_many_times_loses_no_step(bed, tmp_path):
    job = Training(bed, tmp_path, "4", more=["--requeues", "1000"])
    for number in range(REQUEUES):
        job.wait_steps(3)
        preempt(bed)
        last = job.made()
        job.wait_restart(number + 1, world=4)
        assert job.restored_at()[-4:] == [last] * 4, number
        print(f"requeued {number + 1} times, step {last}", flush=True)
    job.wait_steps(3)
    job.check_no_step_is_lost(job.ends())


@pytest.mark.soak
@pytest.mark.parametrize("whole", [False, True], ids=["agent", "node"])
def test_the_loss_of_a_node_leaves_the_others_running_and_the_job_ends_well(bed, tmp_path, whole):
    job = Training(bed, tmp_path, "1:4", every=1, more=["--max-restarts", 100])
    job.wait_steps(5)
    before = {line["pid"] for line in job.said("step")}
    if whole:
        bed.lose(NODES[2], job.job)
    else:
        os.kill(bed.tasks(job.job)[NODES[2]], signal.SIGKILL)
    try:
        job.wait(lambda: worlds(job)[-1:] == [3], "a world of three")
        if whole:
            bed.wait(lambda: NODES[2] in bed.nodes_in("down*"), "Slurm notices")
        job.wait_steps(3)
        final = job.ends()
    finally:
        if whole:
            bed.join(NODES[2])
            bed.wait(lambda: NODES[2] in bed.nodes_in("idle"), "the node is back")
    assert bed.state(job.job) == "COMPLETED", job.words
    assert {line["pid"] for line in job.said("step")} == before
    job.check_no_step_is_lost(final)
    assert "requeued" not in job.words


def worlds(job):
    """Return the size of the world at each step, as the number of workers that made it."""
    made = {}
    for line in job.said("step"):
        made.setdefault(line["step"], set()).add(line["rank"])
    steps = sorted(made)
    # The last step may not be written by all workers yet.
    return [len(made[step]) for step in steps[:-1]]


@pytest.mark.soak
def test_a_drained_node_is_left_at_the_next_requeue(bed, tmp_path):
    job = Training(bed, tmp_path, "1:4")
    job.wait_steps(3)
    bed.call("scontrol", "update", f"nodename={NODES[3]}", "state=drain", "reason=disk")
    try:
        job.wait_steps(3)
        assert worlds(job)[-1] == 4
        bed.call("scontrol", "requeue", job.job)
        job.wait(lambda: len(job.said("restored")) == 7, "the next run, of three")
        job.wait_steps(3)
        final = job.ends()
    finally:
        bed.call("scontrol", "update", f"nodename={NODES[3]}", "state=resume")
    restored = job.restored_at()
    assert restored[:4] == [0] * 4 and len(set(restored[4:])) == 1
    job.check_no_step_is_lost(final)


@pytest.mark.soak
def test_a_job_saves_before_its_time_limit_and_resumes_after_it(bed, tmp_path):
    more = ["--time", "2", "--notice", "30", "--shutdown-timeout", "5"]
    job = Training(bed, tmp_path, "2", more=more)
    job.wait_restart(1, world=2)
    assert len(set(job.restored_at()[2:])) == 1 and job.restored_at()[2] > 0
    job.wait_steps(3)
    final = job.ends()
    assert sorted({line["step"] for line in job.said("step")}) == list(range(1, final["steps"] + 1))
    assert "TIME LIMIT" not in job.words


@pytest.mark.soak
def test_a_notice_by_hand_requeues_the_job(bed, tmp_path):
    job = Training(bed, tmp_path, "2")
    job.wait_steps(3)
    bed.call("scancel", "--signal=USR1", job.job)
    job.wait_restart(1, world=2)
    assert job.restored_at()[2] > 0
    job.wait_steps(3)
    job.check_no_step_is_lost(job.ends())


@pytest.mark.soak
@pytest.mark.parametrize("node", [1, 0])
def test_a_job_without_a_node_to_spare_is_requeued_after_a_loss(bed, tmp_path, node):
    conf = ["--rdzv-conf", "last_call=1,rejoin_timeout=10"]
    job = Training(bed, tmp_path, "2", every=1, more=["--max-restarts", 100, *conf])
    job.wait_steps(5)
    os.kill(bed.tasks(job.job)[NODES[node]], signal.SIGKILL)
    job.wait_restart(1, world=2)
    assert node == 0 or "10 s at most" in job.words
    assert "requeued once" in job.words and job.restored_at()[2] >= 4
    job.wait_steps(3)
    final = job.ends()
    assert sorted({line["step"] for line in job.said("step")}) == list(range(1, final["steps"] + 1))


@pytest.mark.soak
def test_a_cancelled_job_saves_and_is_not_requeued(bed, tmp_path):
    job = Training(bed, tmp_path, "2")
    job.wait_steps(3)
    bed.call("scancel", job.job)
    bed.wait(lambda: bed.state(job.job) == "CANCELLED", "its end")
    assert len(list(job.where.glob("step-*/manifest.json"))) == 1
    assert "requeued" not in job.words


@pytest.mark.soak
def test_each_task_of_an_array_is_a_job_of_its_own(bed, tmp_path):
    program = tmp_path / "places.py"
    program.write_text(PLACES)
    words = ["--array", "3-4", "--nodes", "2", "--output", tmp_path / "%a.out", "--preload="]
    script = batch_script(*words, "--log-dir", tmp_path, program, tmp_path)
    array = bed.submit(script)
    done = f"{array}_3", f"{array}_4"
    bed.wait(lambda: all(bed.state(job) == "COMPLETED" for job in done), "both tasks")
    found = sorted(path.read_text() for path in tmp_path.glob("[0-9]*.[0-1]"))
    assert {line.split()[3] for line in found} == {f"slurm-{array}_3", f"slurm-{array}_4"}
    assert sorted(line.split()[2] for line in found) == ["2"] * 4


@pytest.mark.soak
def test_a_heterogeneous_step_is_one_job(bed, tmp_path):
    program = tmp_path / "places.py"
    program.write_text(PLACES)
    words = [sys.executable, "-m", "elastane", "run", "--preload=", "--log-dir", str(tmp_path)]
    words += [str(program), str(tmp_path)]
    bed.call("srun", "-N1", "-n1", *words, ":", "-N2", "-n2", *words)
    found = sorted(path.read_text().split()[:3] for path in tmp_path.glob("[0-9]*.[0-2]"))
    assert found == [[node, str(rank), "3"] for rank, node in enumerate(NODES[:3])]


@pytest.mark.soak
def test_the_loss_of_the_first_node_is_survived_with_a_shared_folder(bed, tmp_path):
    store = ["--rdzv-backend", "file", "--rdzv-endpoint", tmp_path / "store"]
    job = Training(bed, tmp_path, "1:3", every=1, more=["--max-restarts", 100, *store])
    job.wait_steps(5)
    os.kill(bed.tasks(job.job)[NODES[0]], signal.SIGKILL)
    job.wait(lambda: worlds(job)[-1:] == [2], "a world of two")
    job.wait_steps(3)
    bed.call("scontrol", "requeue", job.job)
    job.wait(lambda: len(job.said("restored")) == 6, "the next run, of three")
    job.wait_steps(3)
    final = job.ends()
    job.check_no_step_is_lost(final)
