"""Sharded state (fully_shard) in jobs that recover in place: from replicas, or from a save.

Each job ends with the weights and moments of plain torch that nothing happened to: to the last bit
where all of its worlds had one size.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from growing import Growing
from jobs import PRELOAD_COMPILER

from elastane.testing import LocalCluster
from elastane.testing.cluster import LocalNode

SCRIPT = Path(__file__).parent / "scripts" / "sharded_in_place.py"
STEP_S = 0.03
# The step in which those who make the update first are cut off from one that is behind.
CUT = 4


class Sharding:
    """A local cluster with sharded state, and its workers' records."""

    def __init__(
        self, folder: Path, shard: int, *more: object, where: str = "", **options: object
    ) -> None:
        self.folder = folder
        self.said_folder = folder / "said"
        self.said_folder.mkdir()
        self._told = Growing(self.said_folder)
        words = [str(word) for word in (SCRIPT, self.said_folder, shard, STEP_S, where, *more)]
        options = {"nnodes": "1", "nproc_per_node": 4, "max_restarts": 30, **options}
        self.workers = int(options["nproc_per_node"])
        options |= {"preload": f"{PRELOAD_COMPILER},torch.distributed.fsdp"}
        options |= {"rdzv_conf": {"crash_loop": 0, "last_call": 1, "gather": 0.2}}
        self.cluster = LocalCluster(words, folder=folder / "c", **options)

    def said(self, what: str = "committed") -> dict[int, list[dict]]:
        """Return the records of each process, in order."""
        told = self._told.lines()
        return {int(n): [x for x in lines if x["what"] == what] for n, lines in told.items()}

    def steps(self, pid: int, what: str = "committed") -> list[int]:
        return [line["step"] for line in self.said(what)[pid]]

    def wait_steps(self, count: int, world: int = 0) -> set[int]:
        """Wait until all workers have made this number of further steps; return their pids."""
        world = world or self.workers
        begun = {pid: len(lines) for pid, lines in self.said().items()}

        def there() -> bool:
            now, pids = self.said(), self.alive()
            far = [pid for pid in pids if len(now.get(pid, ())) >= begun.get(pid, 0) + count]
            return len(pids) == len(far) == world

        self.cluster.wait(there, f"{count} steps of a world of {world}")
        return self.alive()

    def wait_some(self, count: int, world: int) -> set[int]:
        """Wait until some workers have made this number of further steps; return their pids."""
        begun = {pid: len(lines) for pid, lines in self.said().items()}
        far: set[int] = set()

        def there() -> bool:
            now = self.said()
            far.update(p for p in self.alive() if len(now.get(p, ())) >= begun.get(p, 0) + count)
            return len(far) >= world

        self.cluster.wait(there, f"{count} steps of a world of {world} and of those who wait")
        return far

    def waits_an_instant(self, rng: random.Random) -> None:
        """Wait for up to two steps, so that what comes next falls anywhere into one."""
        until_s = time.monotonic() + rng.random() * 2 * STEP_S
        self.cluster.wait(lambda: time.monotonic() > until_s, "some instant")

    def alive(self) -> set[int]:
        return {pid for node in self.cluster.nodes if node.is_alive for pid in node.workers()}

    def ends_exact(self, world: int = 0) -> None:
        """End the job, and compare it with plain training."""
        finals = self.ends(world)
        assert {final["found"] for final in finals} == {finals[0]["plain"]}, finals

    def ends(self, world: int = 0) -> list[dict]:
        """End the job; return the results of its last world's workers."""
        (self.said_folder / "enough").touch()
        nodes = self.cluster.nodes
        # All steps are made again, by plain torch.
        self.cluster.wait(lambda: not any(node.is_alive for node in nodes), "all agents end", 300.0)
        assert self.cluster.events("job-ended")[-1].data["ok"] is True
        finals = [json.loads(path.read_text()) for path in self.said_folder.glob("*.final")]
        assert len(finals) == (world or self.workers)
        return finals


def heals(job: Sharding, node: LocalNode, before: set[int], *victims: int) -> set[int]:
    """Kill these workers at once; return the pids of the next world."""
    pids = node.workers()  # as the survivors of one may be of another world at once
    dead = {pids[victim] for victim in victims}
    for pid in dead:
        os.kill(pid, signal.SIGKILL)
    after = job.wait_steps(3)
    assert after & before == before - dead, "the survivors keep their processes"
    return after


def heals_each(job: Sharding, times: int, rng: random.Random) -> None:
    """Kill each worker of one node this often, at any instant: no step is lost or made twice."""
    with job.cluster:
        node = job.cluster.start("a")
        pids = job.wait_steps(3)
        for victim in (0, 1, 2, 3) * times:
            job.waits_an_instant(rng)
            pids = heals(job, node, pids, victim)
        job.ends_exact()
        assert not job.cluster.events("restored")
    made_once(job)


def made_once(job: Sharding) -> None:
    """Assert that every step was made, by no process twice."""
    made = [job.steps(pid) for pid in job.said()]
    assert all(steps == sorted(set(steps)) for steps in made)
    everything = {step for steps in made for step in steps}
    assert everything == set(range(len(everything)))


@pytest.mark.timeout(200)
@pytest.mark.parametrize("optimizers", ["1", pytest.param("2", marks=pytest.mark.soak)])
def test_replicas_heal_lost_shards_also_where_only_the_dead_had_made_the_step(tmp_path, optimizers):
    job = Sharding(tmp_path, 2, CUT, env={"OPTIMIZERS": optimizers})
    with job.cluster:
        node = job.cluster.start("a")
        job.cluster.wait((job.said_folder / "cut").exists, "the cut")
        after = job.wait_steps(3)
        begun = job.said("restored").items()
        before = {pid for pid, lines in begun if lines and lines[0]["round"] == 1}
        assert len(after & before) == 3
        heals(job, node, after, 0, 3)
        job.ends_exact()
        assert not job.cluster.events("restored")
    made_once(job)
    (behind,) = (p for p in after & before if CUT not in job.steps(p))
    bodies = job.steps(behind, "body")
    assert bodies.count(CUT) == 1, "the step is not dealt again"


@pytest.mark.timeout(200)
@pytest.mark.parametrize("late", ["1", pytest.param("2", marks=pytest.mark.soak)])
def test_a_body_cut_off_after_its_update_takes_what_the_rest_changed_from_another(tmp_path, late):
    job = Sharding(tmp_path, 2, CUT, env={"LATE": late})
    with job.cluster:
        node = job.cluster.start("a")
        job.cluster.wait((job.said_folder / "cut").exists, "the cut")
        pids = job.wait_steps(3)
        heals(job, node, pids, 0)
        job.ends_exact()
        assert not job.cluster.events("restored")
    made_once(job)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("average", [pytest.param("inside", marks=pytest.mark.soak), "behind"])
def test_a_shard_whose_average_misses_a_step_is_restored_from_a_save(tmp_path, average):
    saves, env = str(tmp_path / "ck"), {"AVERAGE": average}
    job = Sharding(tmp_path, 2, CUT, where=saves, env=env)
    with job.cluster:
        job.cluster.start("a")
        job.cluster.wait((job.said_folder / "cut").exists, "the cut")
        after = job.wait_steps(3)
        assert all(job.said("restored")[pid][0]["step"] for pid in after)
        job.ends_exact()
        (restored,) = {line["step"] for ls in job.said("restored").values() for line in ls} - {0}
    assert restored <= CUT


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("optimizers", ["1", "2"])
def test_a_killed_workers_shard_comes_from_its_replica_whichever_it_is_and_whenever(
    tmp_path, optimizers
):
    heals_each(Sharding(tmp_path, 2, env={"OPTIMIZERS": optimizers}), 4, random.Random(5))


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_lost_nodes_replica_is_made_again_on_another_node(tmp_path):
    job = Sharding(tmp_path, 2, nnodes="2", nproc_per_node=2)
    with job.cluster:
        nodes = {name: job.cluster.start(name) for name in "ab"}
        pids = job.wait_steps(3, world=4)
        for lost, new in (("b", "c"), ("a", "d")):  # a has the coordinator
            dead = {*nodes[lost].workers()}
            nodes[lost].kill()
            nodes[new] = job.cluster.start(new)
            after = job.wait_steps(3, world=4)
            assert after & pids == pids - dead
            pids = after
        job.ends_exact(4)
        assert not job.cluster.events("restored")
    made_once(job)


@pytest.mark.timeout(200)
def test_a_job_shrinks_and_grows_by_replicas_and_its_survivors_keep_their_processes(tmp_path):
    """It begins with one replica, and has one again after the coordinator's node is killed."""
    job = Sharding(tmp_path, 2, nnodes="1:3", nproc_per_node=2)
    with job.cluster:
        nodes = [job.cluster.start("a")]
        pids = job.wait_steps(3, world=2)
        pids = changed(job, pids, lambda: nodes.append(job.cluster.start("b")), more=2)
        pids = changed(job, pids, nodes[0].kill)
        pids = changed(job, pids, lambda: job.cluster.start("c"), more=2)
        changed(job, pids, nodes[1].stop)
        ends_alike(job, 2)
        assert not job.cluster.events("restart", "replacement")


@pytest.mark.soak
@pytest.mark.timeout(200)
@pytest.mark.parametrize("shard", [4, 0])
def test_a_job_that_begins_with_one_node_of_its_mesh_uses_no_restart_as_it_grows(tmp_path, shard):
    """A replica needs both nodes, or the mesh has the size of the world in which it is made."""
    job = Sharding(
        tmp_path, shard, where=str(tmp_path / "ck"), nnodes="1:2", nproc_per_node=2, max_restarts=0
    )
    with job.cluster:
        node = job.cluster.start("a")
        if shard:
            job.cluster.wait(lambda: job.cluster.events("workers-stopped"), "too few nodes")
        else:
            job.wait_steps(3, world=2)
        assert node.is_alive
        job.cluster.start("b")
        job.wait_steps(3, world=4)
        job.ends(4)
        assert not job.cluster.events("restart", "replacement")


@pytest.mark.soak
@pytest.mark.timeout(200)
def test_successors_on_two_nodes_leave_each_node_a_whole_replica(tmp_path):
    job = Sharding(tmp_path, 2, nnodes="1:2", nproc_per_node=2)
    with job.cluster:
        nodes = [job.cluster.start(name) for name in "ab"]
        pids = job.wait_steps(3, world=4)
        dead = {nodes[0].kill_worker(1), nodes[1].kill_worker(0)}
        after = job.wait_steps(3, world=4)
        assert after & pids == pids - dead
        changed(job, after, nodes[0].kill)
        ends_alike(job, 2)


@pytest.mark.soak
@pytest.mark.timeout(200)
def test_a_worker_lost_in_the_last_replica_restarts_all_from_memory(tmp_path):
    where = str(tmp_path / "ck")
    job = Sharding(tmp_path, 2, where=where, nnodes="1:2", nproc_per_node=2)
    with job.cluster:
        nodes = [job.cluster.start(name) for name in "ab"]
        pids = changed(job, job.wait_steps(3, world=4), nodes[0].kill)
        nodes[1].kill_worker(1)
        after = job.wait_steps(3, world=2)
        assert not after & pids
        job.cluster.wait_event("restored")
        assert {event.data["location"] for event in job.cluster.events("restored")} == {"memory"}
        assert [e.data["used"] for e in job.cluster.events("restart")] == [1]


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_arrivals_and_losses_restart_no_survivor(tmp_path, seed):
    job, rng = Sharding(tmp_path, 2, nnodes="1:3", nproc_per_node=2), random.Random(seed)
    with job.cluster:
        nodes = [job.cluster.start(name) for name in ("n0", "n1")]
        pids = job.wait_steps(3, world=4)
        for number in range(2, 22):
            job.waits_an_instant(rng)
            what = rng.choice(["start"] * (len(nodes) < 3) + ["kill", "stop", "worker"])
            if what == "start" or len(nodes) == 1:
                name = f"n{number}"
                pids = changed(
                    job, pids, lambda name=name: nodes.append(job.cluster.start(name)), 2
                )
            elif what == "worker":
                pids = changed(
                    job, pids, lambda: rng.choice(nodes).kill_worker(rng.randrange(2)), 0
                )
            else:
                pids = changed(job, pids, getattr(nodes.pop(rng.randrange(len(nodes))), what))
        ends_alike(job, 2 * len(nodes))


def changed(
    job: Sharding, pids: set[int], change: Callable[[], object], more: int = -2
) -> set[int]:
    """Change the world to one of `more` workers; return its pids and those of survivors."""
    change()
    after = job.wait_steps(3, world=len(pids) + more)
    assert len(pids - after) <= max(1, -more), "the survivors keep their processes"
    return after


def ends_alike(job: Sharding, world: int) -> None:
    """End the job; assert equal states, equal to plain training except for rounding of sums."""
    finals = job.ends(world)
    assert len({final["found"] for final in finals}) == 1
    assert all(final["apart"] < 1e-6 for final in finals), finals
    assert not job.cluster.events("restored")
    made_once(job)


@pytest.mark.soak
@pytest.mark.timeout(200)
def test_the_loss_of_all_replicas_of_a_shard_restarts_all_from_memory(tmp_path):
    job = Sharding(tmp_path, 2, where=str(tmp_path / "ck"))
    with job.cluster:
        node = job.cluster.start("a")
        before = heals(job, node, job.wait_steps(3), 0)  # now its successor has the last rank
        for victim in (1, 3):
            node.kill_worker(victim)
        after = job.wait_steps(3)
        assert not after & before
        job.ends_exact()
        assert "all workers that held shard 1 are lost" in node.output
        assert job.cluster.events("restored")[0].data["location"] == "memory"


@pytest.mark.timeout(200)
def test_without_replicas_all_start_again_from_memory_and_say_so(tmp_path):
    job = Sharding(tmp_path, 2, where=str(tmp_path / "ck"), nproc_per_node=2)
    with job.cluster:
        node = job.cluster.start("a")
        before = job.wait_steps(5)
        node.kill_worker(1)
        after = job.wait_steps(3)
        assert not after & before
        job.ends_exact()
        (told,) = {event.reason for event in job.cluster.events("restored")}
        assert "from memory: sharded state has no replica" in told
        assert "when a worker is lost, all start again" in node.output
        assert [e.data["used"] for e in job.cluster.events("restart")] == [1]


@pytest.mark.soak
@pytest.mark.timeout(200)
def test_without_replicas_a_leave_saves_first_and_no_step_is_made_again(tmp_path):
    job = Sharding(tmp_path, 0, where=str(tmp_path / "ck"), nnodes="1:2", nproc_per_node=1)
    with job.cluster:
        nodes = [job.cluster.start(name) for name in "ab"]
        job.wait_steps(4, world=2)
        nodes[1].stop()
        job.wait_steps(4, world=1)
    steps = sorted({line["step"] for lines in job.said().values() for line in lines})
    assert steps == list(range(len(steps)))
    made = [line["step"] for lines in job.said().values() for line in lines if line["world"] == 2]
    (restored,) = {line["step"] for ls in job.said("restored").values() for line in ls} - {0}
    assert restored == max(made) + 1


@pytest.mark.timeout(200)
def test_replicas_of_two_nodes_each_are_lost_and_come_back_whole(tmp_path):
    """One of three remaining nodes waits, and continues once its replica has another node."""
    job = Sharding(tmp_path, 2, nnodes="2:4", nproc_per_node=1)
    with job.cluster:
        nodes = [job.cluster.start(name) for name in "abcd"]
        pids = job.wait_steps(3, world=4)
        nodes[1].kill()
        assert len(job.wait_some(3, 2)) == 2
        assert job.alive() < pids
        nodes.append(job.cluster.start("e"))
        assert pids - job.wait_steps(3, world=4) == pids - job.alive()
        # Of which replica the next one is does not matter.
        nodes[2].kill(), nodes[4].stop()
        job.wait_some(3, 2)
        ends_alike(job, 2)
        assert not job.cluster.events("restart", "replacement")


@pytest.mark.soak
@pytest.mark.timeout(200)
def test_survivors_of_a_replica_over_nodes_make_the_missing_step(tmp_path):
    job = Sharding(tmp_path, 2, CUT, nnodes="2:4", nproc_per_node=1)
    with job.cluster:
        for name in "abcd":
            job.cluster.start(name)
        job.cluster.wait((job.said_folder / "cut").exists, "the cut")
        pids = job.wait_steps(3, world=4)
        ends_alike(job, 4)
    behind = [pid for pid in pids if CUT not in job.steps(pid) and 0 in job.steps(pid)]
    assert len(behind) == 1
    assert job.steps(behind[0], "body").count(CUT) == 1, "the step is not dealt again"


@pytest.mark.soak
@pytest.mark.timeout(200)
@pytest.mark.parametrize("leaves", [True, False])
def test_the_last_replica_over_nodes_restarts_from_a_save(tmp_path, leaves):
    job = Sharding(tmp_path, 2, where=str(tmp_path / "ck"), nnodes="2:3", nproc_per_node=1)
    with job.cluster:
        nodes = [job.cluster.start(name) for name in "ab"]
        before = job.wait_steps(4, world=2)
        durable = (tmp_path / "ck").glob
        job.cluster.wait(lambda: [*durable("step-*/manifest.json")], "a durable checkpoint")
        _ = nodes[1].stop() if leaves else nodes[1].kill()
        job.cluster.start("c")
        assert not job.wait_steps(4, world=2) & before
        job.ends_exact(2)
        assert not job.cluster.events("restart", "replacement")
        (restored,) = {line["step"] for ls in job.said("restored").values() for line in ls} - {0}
    made = [line["step"] for pid in before for line in job.said()[pid]]
    assert restored == max(made) + 1 if leaves else restored <= max(made) + 1


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_body_that_decays_shards_itself_decays_them_once_in_a_retried_step(tmp_path):
    heals_each(Sharding(tmp_path, 2, env={"DECAYS": "1"}), 2, random.Random(3))
