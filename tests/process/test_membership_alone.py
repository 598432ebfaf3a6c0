"""Standalone jobs, and jobs with fixed ranks."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import SCRIPT, Job, newest, ranks
from ports import free_port


@pytest.mark.soak
def test_two_standalone_jobs_at_the_same_time_do_not_clash(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    running = []
    try:
        for folder in folders:
            folder.mkdir()
            options = ["--standalone", "--nproc-per-node", "2", "--log-dir", str(folder)]
            script = [str(SCRIPT), str(folder / "steps"), "10"]
            running.append(
                subprocess.Popen([sys.executable, "-m", "elastane", "run", *options, *script])
            )
        assert [process.wait(90) for process in running] == [0, 0]
    finally:
        for process in running:
            process.kill()
            process.wait()
    jobs = [next(p.name for p in folder.iterdir() if p.is_dir()) for folder in folders]
    assert jobs[0] != jobs[1]
    for folder in folders:
        assert len((folder / "steps").read_text().splitlines()) == 20


def test_static_nodes_have_the_ranks_they_were_given(tmp_path: Path) -> None:
    with Job(tmp_path, backend="static", steps=20) as job:
        second = job.start("a", "--node-rank", "1")
        first = job.start("z", "--node-rank", "0")
        assert (first.wait(), second.wait()) == (0, 0)
        assert ranks(job.seen()) == {0: "z", 1: "a"}


def test_a_static_rank_is_given_once_and_a_replacement_takes_a_free_one(
    tmp_path: Path,
) -> None:
    with Job(tmp_path, backend="static", mode="alone", options=("--max-restarts", "0")) as job:
        first, _ = job.start("z", "--node-rank", "0"), job.start("a", "--node-rank", "1")
        job.wait_step(world=2)
        twin = job.start("twin", "--node-rank", "1")
        assert twin.wait() == 78
        assert "on node twin and on node a" in twin.box, twin.box
        first.send(signal.SIGKILL)
        first.wait()
        job.start("y", "--node-rank", "0")
        job.wait_step(world=2, fence=(1, 0))
        assert ranks(newest(job.seen())) == {0: "y", 1: "a"}


def test_jobs_without_an_id_that_meet_at_one_endpoint_never_merge(tmp_path: Path) -> None:
    port = free_port()
    with (
        Job(tmp_path / "one", name="", port=port, mode="alone") as one,
        Job(tmp_path / "two", name="", port=port, mode="alone") as two,
    ):
        one.start("a"), one.start("b")
        one.wait_step(world=2)
        # Another script's arguments, for its folder is another: another job.
        other = two.start("c")
        assert other.wait() == 78
        assert "job" in other.box and "next" in other.box, other.box
        assert not two.seen()
        one.wait_step(world=2, count=20)
