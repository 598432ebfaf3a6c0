"""Workers that recover in place: survivors keep their processes; no step is lost or repeated.

Each job ends with the weights of one that nothing happened to, to the last bit.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from growing import Growing
from jobs import PRELOAD_OPTIMIZER

from elastane.process.status_page import PAGE_BYTES, StatusPage
from elastane.testing import Fault, FaultPlan, LocalCluster
from elastane.testing.cluster import LocalNode

sys.path.insert(0, str(Path(__file__).parent / "scripts"))
from in_place import undisturbed

SCRIPT = Path(__file__).parent / "scripts" / "in_place.py"
STEP_S = 0.03


class InPlace:
    """A local cluster that trains in place, and its workers' records."""

    def __init__(self, folder: Path, script_path: Path = SCRIPT, **options: object) -> None:
        self.folder = folder
        (folder / "said").mkdir()
        self._told = Growing(folder / "said")
        script = [str(script_path), str(folder / "said"), "1000000", str(STEP_S)]
        options = {"nnodes": "1:3", "nproc_per_node": 1, "max_restarts": 1000, **options}
        options.setdefault("rdzv_conf", {"last_call": 1, "gather": 0.2})
        options |= {"preload": PRELOAD_OPTIMIZER, "tee": "0"}
        self.cluster = LocalCluster(script, folder=folder / "c", **options)

    def said(self, what: str = "committed") -> dict[int, list[dict]]:
        """Return the records of each process, in order."""
        told = self._told.lines()
        return {int(n): [x for x in lines if x["what"] == what] for n, lines in told.items()}

    def wait_steps(self, count: int, world: int) -> dict[int, list[dict]]:
        """Wait until all workers of a world of this size have made this number of further steps.

        Returns their records by process.
        """
        begun = {pid: len(lines) for pid, lines in self.said().items()}
        far: dict[int, list[dict]] = {}

        def there() -> bool:
            far.clear()
            for pid, lines in self.said().items():
                if len(lines) >= begun.get(pid, 0) + count and lines[-1]["world"] == world:
                    far[pid] = lines
            return len(far) == world

        self.cluster.wait(there, f"{count} steps of a world of {world}")
        return far

    def ends_exact(self) -> list[dict]:
        """End the job; return the common result of the last world's workers."""
        (self.folder / "said" / "enough").touch()
        nodes = self.cluster.nodes
        self.cluster.wait(lambda: not any(node.is_alive for node in nodes), "all agents end")
        assert self.cluster.events("job-ended")[-1].data["ok"] is True
        finals = [json.loads(p.read_text()) for p in (self.folder / "said").glob("*.final")]
        steps = finals[0]["steps"]
        want = {"steps": steps, "weights": undisturbed(steps), "bodies": steps}
        assert all(found == want for found in finals), finals
        for pid, lines in self.said().items():
            # One that was behind takes the step over instead of making it.
            numbers = [line["step"] for line in lines]
            assert numbers == sorted(set(numbers)), (pid, numbers)
        return finals


def _alive(job: InPlace) -> set[int]:
    return {pid for node in job.cluster.nodes if node.is_alive for pid in node.workers()}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[InPlace]:
    made = InPlace(tmp_path)
    with made.cluster:
        yield made


def starts(job: InPlace, names: str, world: int = 0) -> list[LocalNode]:
    """Start nodes, and wait for steps of a world of this size; by default of one worker a node."""
    nodes = [job.cluster.start(name) for name in names]
    job.wait_steps(5, world or len(names))
    # Workers may be faster than the events of their agents, which name them.
    job.cluster.wait(lambda: all(node.workers() for node in nodes), "the agents name their workers")
    return nodes


@pytest.mark.parametrize("victim", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 2))])
def test_after_a_kill_of_any_rank_the_others_keep_their_processes_and_it_is_replaced(job, victim):
    nodes = starts(job, "abc")
    by_rank = {lines[-1]["rank"]: pid for pid, lines in job.said().items() if lines}
    job.cluster.wait(lambda: _know_their_round(job, by_rank.values()), "their status pages know it")
    dead = by_rank[victim]
    next(node for node in nodes if dead in node.workers()).kill_worker()
    after = job.wait_steps(5, 3)
    assert {*by_rank.values()} - {dead} < set(after) and dead not in after
    job.cluster.wait(lambda: _know_their_round(job, after), "their status pages know the next one")
    assert job.cluster.events("round-settled")[-1].round > 1
    assert len(job.ends_exact()) == 3
    assert [e.data["used"] for e in job.cluster.events("replacement")] == [1]


@pytest.mark.parametrize("victim", ["a", pytest.param("b", marks=pytest.mark.soak)])
def test_survivors_continue_without_a_killed_node_also_the_coordinators(job, victim):
    nodes = {node.name: node for node in starts(job, "abc")}
    before = set(job.said())
    gone = set(nodes[victim].workers())
    nodes[victim].kill()
    after = job.wait_steps(5, 2)
    assert set(after) == before - gone
    job.cluster.start(victim)
    assert before - gone < set(job.wait_steps(5, 3))
    assert len(job.ends_exact()) == 3
    assert not job.cluster.events("restart", "replacement")


def test_an_arrival_and_a_departure_come_at_a_boundary_and_no_step_is_retried(job):
    """A worker that fails after both is reported with its new rank."""
    b = starts(job, "ab")[1]
    before = set(job.said())
    c = job.cluster.start("c")
    [(_, lines)] = [each for each in job.wait_steps(5, 3).items() if each[0] not in before]
    assert {line["rank"] for line in lines} == {2}
    job.cluster.wait(b.workers, "its agent names its worker")
    left = set(b.workers())
    b.stop()
    after = job.wait_steps(5, 2)
    assert before - left < set(after) and len(after) == 2
    for pid, bodies in job.said("body").items():
        numbers = [body["step"] for body in bodies]
        again = [body for body in bodies if numbers.count(body["step"]) > 1]
        assert not again, (pid, again)
    c.kill_worker()
    told = job.cluster.wait_event("incident").reason
    assert f"worker of rank 1 on node {c.name} ended with SIGKILL" in told
    job.wait_steps(3, 2)
    job.ends_exact()


def _know_their_round(job: InPlace, pids: Iterable[int]) -> bool:
    """Whether these workers have met in the last world, which may be logged after their steps."""
    return rounds_met(pids) == {job.cluster.events("round-settled")[-1].round}


def rounds_met(pids: Iterable[int]) -> set[int]:
    """Return, from the status pages of training workers, the rounds whose members they have met."""
    return {page.round for pid in pids for page in _pages_of(pid)}


def _pages_of(pid: int) -> Iterator[StatusPage]:
    for path in Path(f"/proc/{pid}/fd").iterdir():
        # A worker that trains opens and closes other files meanwhile.
        with contextlib.suppress(FileNotFoundError):
            if "elastane-page" in os.readlink(path):
                with path.open("r+b") as file:
                    yield StatusPage(-1, mmap.mmap(file.fileno(), PAGE_BYTES))


def fixed_size(folder, size, *victims, **options):
    job = InPlace(folder, nnodes="1", nproc_per_node=size, **options)
    with job.cluster:
        node = job.cluster.start("a")
        job.wait_steps(5, size)
        before = set(job.said())
        for together in victims:
            dead = {node.kill_worker(victim) for victim in together}
            after = set(job.wait_steps(5, size))
            assert before - dead < after and len(after) == size
            before = after
        assert all(line["world"] == size for lines in job.said().values() for line in lines)
        job.ends_exact()


def test_a_replacement_has_its_rank_from_init_on_despite_deaths(job):
    nodes = starts(job, "abc")
    first, hold = _alive(job), job.folder / "said" / "hold"

    def placed() -> list[dict]:
        return [lines[0] for pid, lines in job.said("placed").items() if lines and pid not in first]

    hold.touch()
    nodes[0].kill_worker()
    job.cluster.wait(placed, "the replacement has a place")
    # The script compares rank and size with torch's and with the variables, in each line.
    assert [(line["rank"], line["world"]) for line in placed()] == [(2, 3)]
    nodes[1].kill_worker()
    job.cluster.wait(lambda: len(job.cluster.events("replacement")) == 2, "a member died meanwhile")
    hold.unlink()
    job.wait_steps(3, 3)
    job.ends_exact()
    assert [e.data["used"] for e in job.cluster.events("replacement")] == [1, 2]


def test_without_wait_for_place_the_others_train_while_a_replacement_builds(tmp_path):
    job = InPlace(tmp_path, env={"WAIT_FOR_PLACE": "0"})
    with job.cluster:
        nodes = starts(job, "ab")
        first, said = _alive(job), job.folder / "said"
        (said / "hold").touch()
        nodes[0].kill_worker()

        def begun() -> list[dict]:
            paths = [path for path in said.glob("*.building") if int(path.stem) not in first]
            return [json.loads(words) for words in (path.read_text() for path in paths) if words]

        job.cluster.wait(begun, "the replacement builds, after init()")
        job.wait_steps(5, 1)
        assert [{*before.values()} for before in begun()] == [{None}]
        (said / "hold").unlink()
        job.wait_steps(3, 2)
        job.ends_exact()


def test_a_fixed_size_job_waits_in_memory_for_one_or_two_replacements(tmp_path):
    fixed_size(tmp_path, 3, [1], [1, 2])


@pytest.mark.soak
def test_without_a_zygote_the_worker_of_rank_0_serves_the_store(tmp_path):
    fixed_size(tmp_path, 2, [0], no_zygote="1")


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("seed", "faults"), [(1, 3), pytest.param(2, 8, marks=pytest.mark.soak)])
def test_faults_in_a_row_lose_and_repeat_no_step(tmp_path, seed, faults):
    """Each fault comes when all train again, so the state always has two holders.

    Seed 1 kills a node, then a worker, and stops a node.
    """
    job, rng = InPlace(tmp_path), random.Random(seed)
    with job.cluster:
        starts(job, "abc")
        first = max(line["step"] for lines in job.said().values() for line in lines)
        for _ in range(faults):
            kind = rng.choice(("kill-worker", "kill-node", "kill-agent", "stop-node"))
            plan = FaultPlan((Fault(0.0, kind, rng.random()),), back_s=0.2)
            print(*plan.run(job.cluster))
            job.wait_steps(3, 3)
        ends = job.ends_exact()
        assert ends[0]["steps"] > first, "the job began anew"
        dealt = [[body["step"] for body in bodies] for bodies in job.said("body").values()]
        assert any(len({*steps}) < len(steps) for steps in dealt), "no step was dealt again"


def test_a_script_of_several_loops_takes_arrivals_and_replaces_losses(tmp_path):
    job = InPlace(tmp_path, env={"STEPS_PER_LOOP": "7"})
    with job.cluster:
        starts(job, "ab")
        before = set(job.said())
        job.cluster.start("c")
        assert before < set(job.wait_steps(10, 3))
        dead = job.cluster.nodes[0].kill_worker()
        after = job.wait_steps(10, 3)
        assert before - {dead} < set(after) and dead not in after
        job.ends_exact()


@pytest.mark.soak
def test_a_death_between_two_loops_keeps_the_other_processes(tmp_path):
    job = InPlace(tmp_path, env={"STEPS_PER_LOOP": "20", "PAUSE_S": "1.5"})
    with job.cluster:
        starts(job, "abc")
        before = {pid for pid, lines in job.said().items() if lines}
        pauses = sum(map(len, job.said("between").values()))
        job.cluster.wait(lambda: sum(map(len, job.said("between").values())) > pauses, "a pause")
        dead = job.cluster.nodes[0].kill_worker()
        after = job.wait_steps(25, 3)
        assert before - {dead} < set(after) and dead not in after
        job.ends_exact()
