"""Jobs with sharded state and copies on other nodes: the effect of the loss of a node."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from test_checkpoint_jobs import Saving, exact, exchange, published


class Apart(Saving):
    """Three nodes with a sharded state, and storage that is unreachable from some step on."""

    def __init__(self, folder: Path, where: str = "", **options: object) -> None:
        options = {"nnodes": "3", "nproc_per_node": 1, **options}
        super().__init__(folder, "sharded", where, **options)
        self.kept = 0

    def start(self) -> None:
        for name in "abc":
            self.cluster.start(name)
        self.wait_steps(4)

    def storage_goes(self) -> None:
        """Let storage accept no newer checkpoint than its present ones."""
        where = Path(self.where)
        self.cluster.wait(lambda: published(where), "a checkpoint")
        (self.folder / "away").write_text("no folder")
        exchange(where, self.folder / "away")

    def storage_comes(self) -> None:
        self.kept = max(int(name[5:17]) for name in published(self.folder / "away"))
        exchange(Path(self.where), self.folder / "away")

    def last_step(self) -> int:
        return max(line["step"] for line in self.said("step"))

    def copied(self) -> set[str]:
        """Return the saves of which all nodes have copies."""
        last = {line["rank"]: line["copied"] for line in self.said("step")}
        return set.intersection(*map(set, last.values()))

    def wait_copied(self) -> None:
        """Wait until a later save is copied."""
        for _ in range(2):  # The first may have been on its way.
            before = self.copied()
            self.cluster.wait(lambda before=before: self.copied() - before, "a save is copied")

    def next_world(self, size: int) -> list[dict]:
        """Wait for the next world; return the restores that its workers report."""
        before = len(self.said("restored"))
        self.cluster.wait(lambda: len(self.said("restored")) >= before + size, "the next world")
        return self.said("restored")[before:]


def one_step(restored: list[dict]) -> int:
    (step,) = {line["step"] for line in restored}
    return step


def test_a_lost_nodes_part_is_restored_from_its_replica(tmp_path):
    job = Apart(tmp_path, snapshot_replicas=1)
    with job.cluster:
        job.start()
        job.storage_goes()
        job.wait_copied()
        job.cluster.node("b").kill()
        job.storage_comes()
        job.cluster.start("d")
        restored = job.next_world(3)
        job.wait_steps(3)
        final = job.ends()
    assert {line["where"] for line in restored} == {"memory"}
    assert one_step(restored) > job.kept
    exact(job, final, world=3)


@pytest.mark.soak
def test_without_replicas_a_lost_nodes_part_is_lost_and_storage_is_older(tmp_path):
    job = Apart(tmp_path)
    with job.cluster:
        job.start()
        job.storage_goes()
        job.wait_steps(8)
        job.cluster.node("b").kill()
        job.storage_comes()
        job.cluster.start("d")
        restored = job.next_world(3)
        job.ends()
    assert {line["where"] for line in restored} == {job.where}
    assert one_step(restored) == job.kept


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_after_a_loss_and_the_departure_of_all_a_new_run_resumes_from_the_last_step(
    tmp_path,
):
    job = Apart(tmp_path, snapshot_replicas=1)
    with job.cluster:
        job.start()
        job.storage_goes()
        job.wait_copied()
        job.cluster.node("b").kill()
        job.storage_comes()
        for name in "ac":
            job.cluster.node(name).stop()
        nodes = job.cluster.nodes
        job.cluster.wait(lambda: not any(node.is_alive for node in nodes), "all end", 150.0)
    again = Apart(tmp_path / "again", where=job.where)
    with again.cluster:
        again.start()
        final = again.ends()
    assert one_step(again.said("restored")) > job.kept
    exact(again, final, world=3)


@pytest.mark.soak
def test_saves_that_are_cut_short_in_a_row_leave_the_last_that_all_nodes_have(tmp_path):
    job = Apart(tmp_path, nnodes="2")
    with job.cluster:
        for name in "ab":
            job.cluster.start(name)
        job.wait_steps(4)
        job.storage_goes()
        job.wait_steps(8)
        (job.said_folder / "torn").write_text("....")
        for _ in range(4):
            restored = job.next_world(2)
            assert {line["where"] for line in restored} == {"memory"}
        job.storage_comes()
        assert one_step(restored) > job.kept
        job.wait_steps(3)
        final = job.ends()
    exact(job, final, world=2)


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("workers", [1, 2])
def test_one_node_after_the_other_may_be_lost_while_storage_is_away(tmp_path, workers):
    job, rng = Apart(tmp_path, snapshot_replicas=1, nproc_per_node=workers), random.Random(workers)
    with job.cluster:
        job.start()
        job.storage_goes()
        here = ["a", "b", "c"]
        for number in range(8):
            job.wait_steps(rng.randint(8, 15))
            before = job.last_step()
            lost = here.pop(rng.randrange(3))
            job.cluster.node(lost).kill()
            job.cluster.start(f"new{number}")
            here.append(f"new{number}")
            restored = job.next_world(3 * workers)
            assert {line["where"] for line in restored} == {"memory"}
            assert one_step(restored) >= before - 3
        job.storage_comes()
        job.wait_steps(3)
        final = job.ends()
    exact(job, final, world=3 * workers)


@pytest.mark.soak
def test_the_remaining_nodes_restore_the_state_in_a_smaller_world(tmp_path):
    job = Apart(tmp_path, snapshot_replicas=1, nnodes="2:3")
    with job.cluster:
        job.start()
        job.storage_goes()
        job.wait_steps(8)
        before = job.last_step()
        job.cluster.node("b").kill()
        restored = job.next_world(2)
        assert {line["where"] for line in restored} == {"memory"}
        assert one_step(restored) >= before - 3
        job.storage_comes()
        job.wait_steps(3)
        job.ends()
