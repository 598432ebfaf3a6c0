"""Worlds of ordinary DDP scripts grow: at a checkpoint all restart, with waiting workers."""

import contextlib
import os
import signal
from pathlib import Path

from jobs import PRELOAD_COMPILER
from recorded_jobs import RecordedJob

from elastane.errors import ExitCode
from elastane.testing import LocalCluster

SCRIPTS = Path(__file__).parent / "scripts"


class GrowingJob(RecordedJob):
    """A cluster that runs the script, and its workers' records of each step."""

    def __init__(
        self,
        folder: Path,
        name: str = "growing_ddp.py",
        interval_s: float = 0.0,
        **options: object,
    ) -> None:
        super().__init__(folder)
        script = [str(SCRIPTS / name), str(self.folder)]
        options = {
            "nnodes": "1:3",
            "nproc_per_node": 3,
            "min_workers": 1,
            "max_restarts": 0,
            "ranks_may_change": True,
            **options,
        }
        conf = f"growth_interval={interval_s},last_call=0.1"
        self.cluster = LocalCluster(
            script, folder=folder / "c", in_place=True, preload=PRELOAD_COMPILER,
            rdzv_conf=conf, **options,
        )  # fmt: skip

    def pids(self, *nodes: str) -> set[int]:
        """The workers of these nodes in the newest world."""
        world = self.cluster.world()
        return {pid for node in nodes for pid in world.pids.get(node, ())}

    def save(self) -> None:
        """Let the script save at its next step."""
        (self.folder / "save").touch()

    def wait_growth(self, count: int = 1, **data: object):
        """Wait until all workers have restarted with more; return the event."""
        event = self.cluster.wait_event("growth", count=count)
        assert {key: event.data[key] for key in data} == data
        after = (event.round, event.attempt)
        self.cluster.wait(
            lambda: (w := self.cluster.world()).fence > after and len(w.pids) == len(w.nodes),
            "the larger world",
        )
        return event

    def continues_from_checkpoint(self, before: set[int], now: set[int], repeated: int = 4) -> int:
        """Assert that the restarted workers began with the saved state, bit for bit."""
        said = self.said()
        begins = {(said[pid][0]["step"], said[pid][0]["digest"]) for pid in now}
        assert len(begins) == 1, begins
        [(step, digest)] = begins
        survivor = said[min(before)]
        assert digest == next(line["digest"] for line in survivor if line["step"] == step)
        made = survivor[-1]["step"] - step
        assert made <= repeated, f"it restarted {made} steps after the checkpoint"
        return step

    def ends_well(self, *nodes: str) -> None:
        """Let the job end."""
        (self.folder / "enough").touch()
        for node in nodes:
            assert self.cluster.node(node).wait() == 0, self.cluster.story()
        assert not self.cluster.events("restart"), "a growth is charged to no budget"


def kill(pids: set[int]) -> None:
    """Kill processes with SIGKILL."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_lost_workers_come_back_at_the_next_checkpoint_and_no_step_before_it_is_lost(tmp_path):
    job = GrowingJob(tmp_path)
    with job.cluster as cluster:
        node = cluster.start("a")
        cluster.wait_world(nodes=1)
        first = job.pids("a")
        job.wait_steps(first, 3)
        lost = {min(first)}
        kill(lost)
        job.wait_steps(first - lost, 2)
        again = {max(first)}
        kill(again)  # a second one, while the first one's place waits
        job.wait_steps(first - lost - again, 1)
        job.save()
        job.wait_growth(workers=2, nodes="a", checkpoint=str(job.folder / "new.pt"))
        second = job.pids("a")
        assert len(second) == 3 and not second & first
        job.wait_steps(second, 3)
        job.continues_from_checkpoint(first - lost - again, second)
        assert "all workers restart, with 2 more workers on a" in node.output
        job.ends_well("a")


def test_a_script_that_does_not_resume_grows_once_with_a_warning(tmp_path):
    job = GrowingJob(tmp_path)
    (job.folder / "never-load").touch()
    with job.cluster as cluster:
        node = cluster.start("a")
        for again in (False, True):
            cluster.wait_world(nodes=1)
            pids = job.pids("a")
            job.wait_steps(pids, 3)
            kill({max(pids)})
            left = pids - {max(pids)}
            job.wait_steps(left, 2, count=1)
            job.save()
            if not again:
                job.wait_growth(workers=1)
        said = cluster.wait_event("not-resumed")
        assert said.data["checkpoint"] == str(job.folder / "new.pt")
        job.wait_steps(left, 2)
        assert len(cluster.events("growth")) == 1
        assert "The world does not grow any more" in node.output
        job.ends_well("a")


def test_a_worker_killed_in_its_save_returns_at_another_workers_checkpoint(tmp_path):
    job = GrowingJob(tmp_path, max_restarts=1)
    with job.cluster as cluster:
        cluster.start("a")
        cluster.wait_world(nodes=1)
        first = job.pids("a")
        job.wait_steps(first, 3)
        (job.folder / "hold").touch()
        job.save()
        cluster.wait((job.folder / "saving").exists, "rank 0 saves")
        kill({int((job.folder / "saving").read_text())})  # The others wait for it in a barrier.
        (job.folder / "hold").unlink()
        job.wait_growth(workers=1)  # Another worker is rank 0 now, and saves.
        second = job.pids("a")
        kill({min(second)})  # As it starts: a failure like any other, which is charged.
        cluster.wait_event("restart")
        cluster.wait(
            lambda: job.pids("a") and not job.pids("a") & second, "all workers start again"
        )
        job.wait_steps(job.pids("a"), 3)
        (job.folder / "enough").touch()
        assert cluster.node("a").wait() == 0, cluster.story()
        assert len(cluster.events("growth")) == 1


def test_no_worker_is_killed_in_a_save_and_none_restarts_before_it_is_whole(tmp_path):
    job = GrowingJob(tmp_path)
    with job.cluster as cluster:
        cluster.start("a")
        cluster.wait_world(nodes=1)
        first = job.pids("a")
        job.wait_steps(first, 3)
        kill({max(first)})
        job.wait_steps(first - {max(first)}, 2)
        (job.folder / "hold").touch()
        job.save()
        cluster.wait((job.folder / "saving").exists, "rank 0 saves")
        # torch.save has returned, and the file has not its name yet; a report would come now.
        cluster.start("b")
        cluster.wait_event("waiting", "4 more workers could run on a, b")
        assert not cluster.events("growth", "drain-started")
        (job.folder / "hold").unlink()
        job.wait_growth(workers=4, nodes="a, b")
        job.wait_steps(job.pids("a", "b"), 6)
        job.continues_from_checkpoint(first - {max(first)}, job.pids("a", "b"))
        job.ends_well("a", "b")


def test_late_and_returning_nodes_join_at_checkpoints(tmp_path):
    job = GrowingJob(tmp_path, nproc_per_node=1)
    with job.cluster as cluster:
        cluster.start("a")
        cluster.wait_world(nodes=1)
        job.wait_steps(job.pids("a"), 1)
        cluster.start("b")
        cluster.start("c")
        cluster.wait_event("waiting", "2 more workers could run on b, c")
        cluster.node("c").kill()  # It dies before the checkpoint.
        cluster.wait_event("node-departed")
        job.save()
        job.wait_growth(workers=1, nodes="b")
        both = job.pids("a", "b")
        job.wait_steps(both, 2)
        cluster.node("b").stop()  # A planned departure: the other continues at the next step.
        assert cluster.node("b").wait() == ExitCode.DRAINED
        job.wait_steps(job.pids("a") & both, 1)
        cluster.wait_event("node-released")
        [left] = cluster.events("node-released")
        cluster.start("b")
        cluster.wait(
            lambda: any(
                "could run on b" in event.reason and event.order > left.order
                for event in cluster.events("waiting")
            ),
            "b waits beside the world",
        )
        job.save()
        job.wait_growth(count=2, workers=1, nodes="b")
        job.wait_steps(job.pids("a", "b"), 2)
        job.ends_well("a", "b")


def test_a_script_that_saves_by_a_checkpointer_shrinks_in_place_and_grows_at_its_checkpoints(
    tmp_path,
):
    job = GrowingJob(tmp_path, "checkpointed_ddp.py", ranks_may_change=False)
    with job.cluster as cluster:
        cluster.start("a")
        cluster.wait_world(nodes=1)
        first = job.pids("a")
        cluster.wait_event("checkpoint-saved")
        lost = cluster.world().pids["a"][-1]
        # A loss within a collective of a save restarts all.
        (job.folder / f"die.{lost}").touch()
        event = job.wait_growth(workers=1, nodes="a")
        assert str(job.folder / "checkpoints") in event.data["checkpoint"]
        second = job.pids("a")
        assert len(second) == 3 and not second & first
        job.wait_steps(second, 3)
        # Reports of durable checkpoints are put together, so some steps may have passed.
        assert job.continues_from_checkpoint(first - {lost}, second, repeated=1000) >= 10
        assert {line["world"] for pid in first for line in job.said()[pid]} == {3}
        job.ends_well("a")
