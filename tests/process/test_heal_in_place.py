"""A joining worker gets the others' state bit for bit, and a differing replica is found.

Each job ends with the state of one that nothing happened to.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from growing import Growing
from jobs import PRELOAD_OPTIMIZER

from elastane.testing import LocalCluster
from elastane.testing.cluster import LocalNode

sys.path.insert(0, str(Path(__file__).parent / "scripts"))
from healed import COUNT, undisturbed

SCRIPT = Path(__file__).parent / "scripts" / "healed.py"
# Two moments and a count of steps for each of two parameters, and those: float64, counts float32.
DENSE_BYTES = 3 * COUNT * 8 + 2 * 4


class Healed:
    """A local cluster that trains with AdamW, and its workers' records."""

    def __init__(self, folder: Path, how: str = "memory", verify_every: int = 0, **more) -> None:
        self.said_in = folder / "said"
        self.said_in.mkdir()
        self._told = Growing(self.said_in)
        options = {"nnodes": "1:3", "nproc_per_node": 1, "max_restarts": 100, **more}
        options |= {"preload": PRELOAD_OPTIMIZER, "tee": "0"}
        options["rdzv_conf"] = {"last_call": 0.3, "crash_loop": 0}
        script = [str(SCRIPT), str(self.said_in), how, str(verify_every)]
        self.cluster = LocalCluster(script, folder=folder / "c", **options)

    def said(self, what: str) -> dict[int, list[dict]]:
        told = self._told.lines()
        return {int(n): [x for x in lines if x["what"] == what] for n, lines in told.items()}

    def wait_steps(self, count: int, world: int) -> None:
        """Wait until each worker of a world of this size has made this number of further steps."""
        begun = {pid: len(lines) for pid, lines in self.said("committed").items()}

        def there() -> bool:
            far = [
                pid
                for pid, lines in self.said("committed").items()
                if len(lines) >= begun.get(pid, 0) + count and lines[-1]["world"] == world
            ]
            return len(far) == world

        self.cluster.wait(there, f"{count} steps of a world of {world}")

    def once(self, what: str) -> None:
        (self.said_in / what).touch()

    def ends_exact(self, count: int) -> None:
        """End the job; assert that the last world has the state of an undisturbed run."""
        self.once("enough")
        self.cluster.wait(lambda: not any(n.is_alive for n in self.cluster.nodes), "all agents end")
        assert self.cluster.events("job-ended")[-1].data["ok"] is True
        finals = [json.loads(path.read_text()) for path in self.said_in.glob("*.final")]
        steps = finals[0]["steps"]
        want = {"steps": steps, "digest": undisturbed(steps)}
        assert finals.count(want) == count, (finals, want)
        for pid, lines in self.said("committed").items():
            numbers = [line["step"] for line in lines]
            assert numbers == sorted(set(numbers)), (pid, numbers)


def named(job: Healed, node: LocalNode) -> tuple[int, ...]:
    """Return the workers of a node, once its agent has named them: they may train before."""
    job.cluster.wait(node.workers, "the agent names its workers")
    return node.workers()


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("how", "channel", "givers", "faults"),
    [
        ("memory", "NearChannel", 1, ["kill-taker", "kill-giver"]),
        ("group", "GroupChannel", 2, ["kill-giver"]),
        pytest.param("memory", "NearChannel", 1, ["stop-giver"] * 2, marks=pytest.mark.soak),
        pytest.param(
            "group", "GroupChannel", 2, ["kill-taker", "stop-giver"] * 2, marks=pytest.mark.soak
        ),
    ],
    ids=["memory", "group", "memory-long", "group-long"],
)
def test_arrivals_receive_only_missing_state_despite_deaths(tmp_path, how, channel, givers, faults):
    job = Healed(tmp_path, how)
    with job.cluster:
        for name in "ab":
            job.cluster.start(name)
        job.wait_steps(5, 2)
        before = set(job.said("taken"))
        last = job.cluster.start("c")
        job.wait_steps(5, 3)
        (taken,) = [lines for pid, lines in job.said("taken").items() if pid not in before]
        told = [(line["step"], line["by"], line["givers"]) for line in taken]
        assert told == [(DENSE_BYTES, channel, givers)]
        for fault in faults:
            last.stop()
            job.wait_steps(2, 2)
            job.once(f"{fault}.once")
            last = job.cluster.start("c")
            job.cluster.wait(lambda what=fault: any(job.said(what).values()), fault)
            job.wait_steps(5, 3)
        job.ends_exact(3)


def test_a_replica_with_one_wrong_bit_is_named_and_gets_the_majoritys_state(tmp_path):
    # A smaller world would restart for an arrival that comes before it can recover in place.
    job = Healed(tmp_path, verify_every=5, nnodes="3")
    with job.cluster:
        for name in "abc":
            job.cluster.start(name)
        job.wait_steps(5, 3)
        odd = job.cluster.nodes[1]
        [flipped] = named(job, odd)
        job.once(f"{flipped}.flip")
        job.cluster.wait(lambda: "differed from" in odd.output, "the wrong bit is found")
        rank = job.said("committed")[flipped][-1]["rank"]
        others = ", ".join(str(each) for each in range(3) if each != rank)
        told = f"rank {rank} on node {odd.name} differed from ranks {others}: ['net']['b.weight'];"
        assert told in odd.output
        other = [node for node in job.cluster.nodes if node is not odd]
        theirs = f"rank {rank} differ from ranks {others}"
        job.cluster.wait(
            lambda: any(theirs in node.output for node in other), "another worker reports it"
        )
        assert sum(theirs in node.output for node in other) == 1
        event = job.cluster.wait_event("replica-differed")
        assert (event.node, event.data["rank"], event.data["local_rank"]) == (odd.name, rank, 0)
        folder = str(job.cluster.log_dir / job.cluster.job)
        explained = subprocess.check_output(
            [sys.executable, "-m", "elastane", "explain", folder], text=True
        )
        after = f"replicas after {event.data['steps']} steps"
        assert f"{after}: rank {rank} on node {odd.name} differed from" in explained
        job.wait_steps(10, 3)
        job.ends_exact(3)
    assert len(job.said("committed")) == 3, "nobody was replaced"


def test_two_differing_replicas_are_refused(tmp_path):
    job = Healed(tmp_path, verify_every=5, nnodes="1", nproc_per_node=2, max_restarts=0)
    with job.cluster:
        node = job.cluster.start("a")
        job.wait_steps(5, 2)
        job.once(f"{named(job, node)[1]}.flip")
        assert node.wait() == 1
        assert "no more than half of them agree: rank 0; rank 1 [job-replicas]" in node.output
