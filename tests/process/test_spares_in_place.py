"""Spare workers wait in init(), and take the place and all variables of a lost worker."""

from __future__ import annotations

import os
import signal

import pytest
from supervise import alive
from test_recovery_in_place import InPlace


@pytest.fixture
def job(tmp_path):
    made = InPlace(
        tmp_path, nnodes="1", nproc_per_node=2, spares_per_node=1, redirects="3", tee="0"
    )
    with made.cluster:
        made.cluster.start("a")
        yield made


def spares(job):
    """Return the processes that have reported that they wait in init(), and have no place."""
    waited = {int(path.stem) for path in (job.folder / "said").glob("*.spare")}
    made_steps = {pid for pid, lines in job.said("body").items() if lines}
    return {pid for pid in waited - made_steps if alive(pid)}


def test_a_spare_takes_the_place_of_a_lost_worker_with_its_variables_and_its_log(job):
    before = set(job.wait_steps(5, 2))
    job.cluster.wait(lambda: spares(job), "a spare waits")
    [spare] = spares(job)
    dead = job.cluster.nodes[0].kill_worker(1)
    assert set(job.wait_steps(5, 2)) == before - {dead} | {spare}
    job.cluster.wait_event("replacement")
    assert [e.data["used"] for e in job.cluster.events("replacement")] == [1]
    job.cluster.wait(lambda: spares(job) - {spare}, "another spare waits")
    said = [path.read_text() for path in job.cluster.log_dir.glob("**/stdout.log")]
    assert sorted(text.split()[-1] for text in said) == ["0", "1", "1"], said
    assert not any("-1" in text for text in said)
    [other] = spares(job)
    job.ends_exact()
    assert not alive(other)


def test_a_spare_that_ends_is_replaced_at_no_cost_to_the_job(job):
    job.wait_steps(5, 2)
    job.cluster.wait(lambda: spares(job), "a spare waits")
    [first] = spares(job)
    os.kill(first, signal.SIGKILL)
    job.cluster.wait(lambda: spares(job), "another spare waits")
    job.wait_steps(5, 2)
    job.ends_exact()
    assert not job.cluster.events("restart", "replacement")
    assert not [e for e in job.cluster.events("worker-exited") if e.data.get("exit_code")]
