"""Jobs that save each step end with the weights of an undisturbed job after any fault."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import warm_start
from _pytest.capture import CaptureResult
from growing import Growing
from jobs import PRELOAD_COMPILER, PRELOAD_OPTIMIZER
from snapshot_server_support import snapshot_servers

from elastane.cli.main import main
from elastane.testing import LocalCluster

SCRIPT = Path(__file__).parent / "scripts" / "checkpointed.py"
STEP_S = 0.02
RENAME_EXCHANGE = 2


def preload(mode: str) -> str:
    """Return what its workers import; only a job in place imports uncompiled.py."""
    return PRELOAD_OPTIMIZER if mode == "job" else PRELOAD_COMPILER


class Saving:
    """A local cluster whose workers save, and their records."""

    def __init__(
        self, folder: Path, mode: str, where: str = "", *more: object, **options: object
    ) -> None:
        self.folder, self.mode = folder, mode
        self.where = where or str(folder / "ck")
        self.said_folder = folder / "said"
        self._told = Growing(self.said_folder)
        self.said_folder.mkdir(parents=True)
        words = (SCRIPT, self.said_folder, self.where, mode, STEP_S, *more)
        script = [str(word) for word in words]
        options = {"nnodes": "1", "nproc_per_node": 2, "max_restarts": 1000, **options}
        options |= {
            "preload": preload(mode),
            "rdzv_conf": {"crash_loop": 0, "last_call": 1, "gather": 0.2},
        }
        self.cluster = LocalCluster(script, folder=folder / "c", **options)

    def said(self, what: str) -> list[dict]:
        told = self._told.lines().items()
        found = [x | {"pid": int(n)} for n, lines in told for x in lines if x["what"] == what]
        return sorted(found, key=lambda line: line["at_s"])

    def wait_steps(self, count: int) -> None:
        """Wait until a living worker has made this number of further steps."""
        begun: dict[int, int] = {}
        for line in self.said("step"):
            begun[line["pid"]] = begun.get(line["pid"], 0) + 1

        def there() -> bool:
            now: dict[int, int] = {}
            for line in self.said("step"):
                now[line["pid"]] = now.get(line["pid"], 0) + 1
            alive = {pid for node in self.cluster.nodes if node.is_alive for pid in node.workers()}
            return any(now.get(pid, 0) >= begun.get(pid, 0) + count for pid in alive)

        self.cluster.wait(there, f"{count} steps")

    def ends(self) -> dict:
        (self.said_folder / "enough").touch()
        nodes = self.cluster.nodes
        self.cluster.wait(lambda: not any(node.is_alive for node in nodes), "all agents end")
        assert self.cluster.events("job-ended")[-1].data["ok"] is True
        return json.loads((self.said_folder / "final").read_text())


# Of each mode and world size: the weights after each step of an undisturbed job.
_undisturbed: dict[tuple[str, int], list[str]] = {}
# More than most jobs here make, so that one run serves all. Those with sharded state are short, and
# each of their steps takes long.
UNDISTURBED_STEPS = {"sharded": 40}
UNDISTURBED_STEPS_OF_OTHERS = 300


def undisturbed(folder: Path, mode: str, steps: int, world: int) -> str:
    """Return the weights of an undisturbed job after a number of steps."""
    if len(_undisturbed.get((mode, world), ())) < steps:
        longer = max(UNDISTURBED_STEPS.get(mode, UNDISTURBED_STEPS_OF_OTHERS), 2 * steps)
        _undisturbed[mode, world] = trained(folder, mode, longer, world)
    return _undisturbed[mode, world][steps - 1]


def trained(folder: Path, mode: str, steps: int, world: int) -> list[str]:
    """Return the weights after each step of an undisturbed job that saves nothing."""
    said = folder / "undisturbed"
    said.mkdir()
    program = f"""
import sys, pathlib
sys.path.insert(0, {str(SCRIPT.parent)!r})
import checkpointed, elastane, torch
steps = {steps}
class Never:
    def __init__(self, *a, **k): self.n = 0
    def restore(self, what): return None
    def maybe_save(self, step):
        self.n += 1
        if self.n == steps: (pathlib.Path({str(said)!r}) / "enough").touch()
        return True
    def wait(self): pass
    def close(self): pass
elastane.Checkpointer = Never
folder = pathlib.Path({str(said)!r})
(checkpointed.in_place(folder, "", 0.0) if {mode == "job"} else
 checkpointed.alone(folder, "", 0.0, sharded={mode == "sharded"}))
"""
    script = folder / "undisturbed.py"
    script.write_text(program)
    words = ["--standalone", "--nproc-per-node", str(world), "--preload", preload(mode)]
    warm_start.run([*words, str(script)], 100)
    lines = [line for told in Growing(said).lines().values() for line in told]
    made = {x["step"]: x["weights"] for x in lines if x["what"] == "step" and x["rank"] == 0}
    assert [*made] == [*range(1, len(made) + 1)], "one process made all steps"
    return [*made.values()]


def exact(job: Saving, final: dict, world: int = 2) -> None:
    """Assert that the weights are those of as many steps without a fault."""
    assert final["weights"] == undisturbed(job.folder, job.mode, final["steps"], world)


def exchange(one: Path, other: Path) -> None:
    """Swap two names atomically, since a process would create a missing folder again."""
    exchanged = ctypes.CDLL(None, use_errno=True).renameat2(
        -100, bytes(one), -100, bytes(other), RENAME_EXCHANGE
    )
    assert exchanged == 0, ctypes.get_errno()


def published(where: Path) -> list[str]:
    return sorted(p.parent.name for p in where.glob("step-*/manifest.json"))


@pytest.mark.parametrize("mode", ["objects", pytest.param("sharded", marks=pytest.mark.soak)])
def test_restarted_workers_restore_from_memory_and_lose_one_step_at_most(tmp_path, mode):
    job, rng = Saving(tmp_path, mode), random.Random(7)
    with job.cluster:
        node = job.cluster.start("a")
        for _ in range(4):
            job.wait_steps(rng.randint(2, 9))
            node.kill_worker(rng.randint(0, 1))
        job.wait_steps(3)
        final = job.ends()
    restored = job.said("restored")
    assert [line["where"] for line in restored] == ["", ""] + ["memory"] * 8
    steps = job.said("step")
    for line in restored[2:]:
        before = [each["step"] for each in steps if each["at_s"] < line["at_s"]]
        assert line["step"] >= max(before) - 1, line
    told = [
        (event.data["step"], event.data["location"]) for event in job.cluster.events("restored")
    ]
    assert told == [(step, "memory") for step in sorted({line["step"] for line in restored[2:]})]
    saved = job.cluster.events("checkpoint-saved")
    assert saved[-1].data["step"] == final["steps"], "the last is told, however close they came"
    assert {event.data["location"] for event in saved} == {job.where}
    assert sum(event.data["saves"] for event in saved) >= len(published(Path(job.where)))
    exact(job, final)


def test_steps_continue_while_the_snapshot_server_is_stopped(tmp_path):
    job = Saving(tmp_path, "objects")
    with job.cluster:
        node = job.cluster.start("a")
        job.wait_steps(5)
        (stopped,) = snapshot_servers(node.process.pid)
        before = node.output.count("does not answer")
        os.kill(stopped, signal.SIGSTOP)
        job.wait_steps(20)
        job.cluster.wait(
            lambda: snapshot_servers(node.process.pid) - {stopped},
            "another snapshot server follows",
        )
        # The next one may be slow on a busy host, too.
        silent = node.output.count("does not answer") - before
        lost = job.cluster.events("snapshot-server-lost")
        job.wait_steps(20)
        final = job.ends()
    assert len(lost) == 1 and "SIGKILL" in lost[0].reason
    assert silent == 2, "once a worker"
    assert job.cluster.events("checkpoint-saved")[-1].data["step"] == final["steps"]
    assert len(job.said("restored")) == 2, "no worker was started again"


@pytest.mark.soak
def test_all_workers_of_a_job_in_place_may_die_at_once(tmp_path):
    job = Saving(tmp_path, "job")
    with job.cluster:
        node = job.cluster.start("a")
        for _ in range(2):
            job.wait_steps(5)
            node.kill_worker(0), node.kill_worker(1)
        job.wait_steps(3)
        node.kill_worker(1)  # and one alone, that its survivor heals
        job.wait_steps(3)
        final = job.ends()
    assert any(line["where"] == "memory" for line in job.said("restored"))
    exact(job, final)


def safe_copies(job: str, printed: Callable[[], CaptureResult[str]]) -> dict:
    """Return the newest copies of a running job's state, as `elastane status` has them."""
    printed()
    assert main(["status", job, "--json"]) == 0
    (found,) = json.loads(printed().out)["jobs"]
    return found["report"]["safe"]


def test_a_new_node_restores_from_a_surviving_nodes_memory(tmp_path, capsys):
    job = Saving(tmp_path, "objects", nnodes="2", nproc_per_node=1)
    with job.cluster:
        job.cluster.start("a")
        job.cluster.start("b")
        job.wait_steps(6)
        made = min(line["step"] for line in job.said("step")[-2:])
        job.cluster.wait(
            lambda: all(
                copy and copy["step"] >= made and copy["age_s"] < 60
                for copy in safe_copies(job.cluster.job, capsys.readouterr).values()
            ),
            "status shows a copy beside the workers, one on both nodes, and a checkpoint",
        )
        job.cluster.node("b").kill()
        job.cluster.start("c")
        job.cluster.wait(lambda: len(job.said("restored")) == 4, "the world of a and c")
        job.wait_steps(3)
        final = job.ends()
    assert {line["where"] for line in job.said("restored")[2:]} == {"memory"}
    exact(job, final)


@pytest.mark.soak
def test_a_node_local_folder_gets_the_checkpoint_it_lacks(tmp_path):
    where = str(tmp_path / "own" / "{node}")
    job = Saving(tmp_path, "objects", where, nnodes="2", nproc_per_node=1)
    with job.cluster:
        job.cluster.start("a")
        job.cluster.start("b")
        job.wait_steps(6)
        job.cluster.wait(lambda: published(tmp_path / "own" / "a"), "a checkpoint")
        for name in "ab":
            job.cluster.node(name).kill()
    again = Saving(tmp_path / "again", "objects", where, nnodes="2", nproc_per_node=1)
    with again.cluster:
        again.cluster.start("a")
        again.cluster.start("new")
        again.cluster.wait(lambda: len(again.said("restored")) == 2, "both restore")
        restored = again.said("restored")
        assert restored[0]["step"] == restored[1]["step"] >= 1
        assert {line["where"] for line in restored} == {
            str(tmp_path / "own" / "a"),
            str(tmp_path / "own" / "new"),
        }
        again.wait_steps(3)
        final = again.ends()
    exact(again, final)
    sizes = {
        p.name: p.stat().st_size for p in (tmp_path / "own" / "new").glob("step-*/__0_0.distcp")
    }
    assert sizes


@pytest.mark.soak
def test_a_job_that_loses_all_agents_is_restored_from_storage_in_a_new_run(tmp_path):
    job = Saving(tmp_path, "objects")
    with job.cluster:
        node = job.cluster.start("a")
        job.wait_steps(8)
        job.cluster.wait(lambda: len(published(tmp_path / "ck")) >= 2, "checkpoints")
        node.kill()
    kept = published(tmp_path / "ck")
    again = Saving(tmp_path / "again", "objects", str(tmp_path / "ck"))
    with again.cluster:
        again.cluster.start("a")
        again.wait_steps(3)
        final = again.ends()
    assert again.said("restored")[0]["step"] >= int(kept[-1][5:17])
    assert published(tmp_path / "ck")[-1] > kept[-1]
    exact(again, final)


@pytest.mark.parametrize(
    ("nnodes", "apart"),
    [
        ("1:2", False),
        pytest.param("1:2", True, marks=pytest.mark.soak),
        pytest.param("2", True, marks=pytest.mark.soak),
    ],
    ids=["together", "one-by-one", "one-by-one-of-a-fixed-number"],
)
def test_a_job_in_place_whose_nodes_all_leave_saves_the_step_that_it_leaves_at(
    tmp_path, nnodes, apart
):
    more = [10**6] + ["behind"] * (not apart)  # then it is saved in memory, and written at the end
    job = Saving(tmp_path, "job", "", *more, nnodes=nnodes, nproc_per_node=1)
    with job.cluster:
        nodes = [job.cluster.start(name) for name in "ab"]
        job.cluster.wait(lambda: len({line["pid"] for line in job.said("step")}) == 2, "both")
        job.wait_steps(3)
        for node in nodes:
            node.stop()
            if apart:
                job.cluster.wait(lambda node=node: not node.is_alive, "its end")
        job.cluster.wait(lambda: not any(node.is_alive for node in nodes), "the end of both")
    made = max(line["step"] for line in job.said("step"))
    # An earlier one may be kept, too: on a busy host the second leave may come after a save.
    newest = max(published(tmp_path / "ck"))
    assert int(newest[5:17]) == made
    again = Saving(tmp_path / "again", "job", str(tmp_path / "ck"), nproc_per_node=1)
    with again.cluster:
        again.cluster.start("a")
        again.wait_steps(3)
        again.ends()
    assert [line["step"] for line in again.said("restored")] == [made]
    assert min(line["step"] for line in again.said("step")) == made + 1


def test_sharded_state_is_restored_in_worlds_of_other_sizes_and_exported_whole(tmp_path):
    where = str(tmp_path / "ck")
    sums = []
    for number, world in enumerate((2, 3, 1)):
        job = Saving(tmp_path / str(number), "sharded", where, nproc_per_node=world)
        with job.cluster:
            job.cluster.start("a")
            job.cluster.wait(lambda job=job: len(job.said("restored")) >= 1, "it restores")
            job.wait_steps(2)
            sums.append(job.ends())
        restored = job.said("restored")
        assert len(restored) == world
        if number:
            was = (sums[number - 1]["steps"], sums[number - 1]["weights"])
            assert {(each["step"], each["weights"]) for each in restored} == {was}
        exported = tmp_path / f"{number}.pt"
        assert main(["checkpoint", "export", where, str(exported), "--only", "model"]) == 0
        whole = torch.load(exported, weights_only=True).values()
        digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in whole))
        assert digest.hexdigest() == sums[number]["weights"]
    steps = [each["steps"] for each in sums]
    assert steps == sorted(set(steps))


def test_training_continues_without_storage_and_the_user_is_warned_once(tmp_path):
    job = Saving(tmp_path, "objects")
    with job.cluster:
        node = job.cluster.start("a")
        job.wait_steps(4)
        (tmp_path / "away").write_text("no folder")
        exchange(tmp_path / "ck", tmp_path / "away")
        job.wait_steps(10)
        # Storage may have been resting.
        job.cluster.wait(lambda: "training continues" in node.output, "a warning is printed")
        node.kill_worker(0)
        job.wait_steps(5)  # from memory, though storage is away
        exchange(tmp_path / "ck", tmp_path / "away")
        job.wait_steps(3)
        final = job.ends()
        output = node.output
    told = [line for line in output.splitlines() if "training continues" in line]
    # Once for each reason and each worker that was there, of one local rank.
    assert 1 <= len(told) <= 4, told
    assert "going on from memory" in output
    failed = job.cluster.events("checkpoint-failed")
    assert {event.data["slug"] for event in failed} == {"checkpoint-write"}
    assert len({event.reason.partition(": ")[2] for event in failed}) <= len(failed) <= 4
    exact(job, final)
    assert int(published(tmp_path / "ck")[-1][5:17]) == final["steps"]
