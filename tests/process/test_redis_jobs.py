"""Jobs whose coordinator is elected in a real Redis, which stops, dies and comes back."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from elected_jobs import (
    a_store_that_is_away_stops_no_training,
    elected_job,
    the_coordinator_dies_and_another_takes_over,
)
from jobs import Job
from redis_server import RedisServer, need_redis, redis, shared_redis


@pytest.fixture(autouse=True)
def _needs_redis() -> None:
    need_redis()


def two_nodes(folder: Path, server: RedisServer) -> Job:
    return elected_job(folder, "redis", server.endpoint)


def test_the_host_of_the_coordinator_dies_and_the_other_takes_over(tmp_path: Path) -> None:
    with two_nodes(tmp_path, shared_redis()) as job:
        the_coordinator_dies_and_another_takes_over(job)


def test_a_redis_that_is_stopped_or_restarted_for_10_s_stops_no_training(
    tmp_path: Path,
) -> None:
    with redis(tmp_path / "redis") as server, two_nodes(tmp_path, server) as job:

        def restart() -> None:
            server.kill()
            server.start()

        faults = [
            (lambda: server.send(signal.SIGSTOP), lambda: server.send(signal.SIGCONT)),
            (lambda: server.send(signal.SIGKILL), restart),
        ]
        a_store_that_is_away_stops_no_training(job, 10.0, faults)


def test_an_ended_job_leaves_only_its_outcome_and_a_late_agent_reads_it(tmp_path: Path) -> None:
    server = shared_redis()
    with Job(tmp_path, backend="redis", endpoint=server.endpoint, steps=3) as job:
        assert [agent.wait() for agent in [job.start("a"), job.start("b")]] == [0, 0]
        late = job.start("late")
        assert late.wait() == 78 and "has ended" in late.box


def test_a_password_opens_the_store_and_without_it_the_error_says_so(tmp_path: Path) -> None:
    one = ("--nnodes", "1", "--no-zygote")
    with (
        redis(tmp_path / "redis", "--requirepass", "hush-hush") as server,
        Job(tmp_path / "1", backend="redis", endpoint=server.endpoint, steps=3) as job,
    ):
        allowed = job.start("a", *one, "--rdzv-conf", "password=hush-hush")
        assert allowed.wait() == 0, allowed.words
        refused = job.start("b", *one, "--rdzv-id", "other")
        assert refused.wait() == 78
        assert "[redis-auth]" in refused.words
        assert "hush-hush" not in allowed.words


def test_a_job_whose_redis_lost_its_record_ends_and_says_so(tmp_path: Path) -> None:
    with (
        redis(tmp_path / "redis", durable=False) as server,
        two_nodes(tmp_path / "job", server) as job,
    ):
        agents = [job.start("a"), job.start("b")]
        job.wait_step(world=2)
        server.kill()
        server.start()
        assert 78 in [agent.wait() for agent in agents]
        assert any("[redis-data-lost]" in agent.words for agent in agents)
        assert any("no append-only file" in agent.words for agent in agents)
