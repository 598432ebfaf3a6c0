"""Refused agents get both values and the next step, and do not disturb others."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from jobs import Agent, Job, newest, ranks
from ports import free_port
from supervise import words_agent, write_script

from elastane.options.facts import torch_build
from elastane.protocol.log_events import EventKind


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A job that trains while agents of other jobs try to join."""
    folder = tmp_path_factory.mktemp("door")
    with Job(folder, mode="alone", options=("--max-restarts", "0"), nnodes="1:3") as job:
        job.options = (*job.options, "--rdzv-conf", "last_call=0.2,token=right")
        job.start("a")
        job.wait_step(world=1)
        yield job


def assert_refused(agent: Agent, code: int, *words: str) -> None:
    assert agent.wait() == code, agent.words
    for word in (*words, "next"):
        assert word in agent.box, f"{word!r} in {agent.box}"
    assert "Traceback" not in agent.words


def assert_undisturbed(job: Job) -> None:
    steps = newest(job.seen())
    assert (steps[-1].round, steps[-1].attempt) == (1, 0)
    job.wait_step(world=1, count=len(steps) + 3)


@contextmanager
def foreign_agent(folder: Path, of: Job, conf: str) -> Iterator[Job]:
    with Job(folder, mode="alone", nnodes=of.nnodes, name=of.name, port=of.port) as other:
        other.options = (*of.options, "--rdzv-conf", conf)
        yield other


def test_a_wrong_token_is_refused(job: Job, tmp_path: Path) -> None:
    with foreign_agent(tmp_path, job, "last_call=0.2,token=wrong") as other:
        assert_refused(other.start("x"), 78, "token", f"127.0.0.1:{job.port}")
        assert "right" not in other.agents[0].words
    assert_undisturbed(job)


def test_a_wrong_job_is_refused(job: Job, tmp_path: Path) -> None:
    with foreign_agent(tmp_path, job, "last_call=0.2,token=right") as other:
        other.name = "another-job"
        assert_refused(other.start("x"), 78, "another-job", f"127.0.0.1:{job.port}")
    assert_undisturbed(job)


def test_another_configuration_is_refused(job: Job, tmp_path: Path) -> None:
    with foreign_agent(tmp_path, job, "last_call=0.2,token=right") as other:
        agent = other.start("x", "--max-restarts", "7")
        assert_refused(agent, 78, "max_restarts", "the job has 0", "this agent 7")
    assert_undisturbed(job)


def test_a_duplicate_node_id_is_refused_while_the_first_trains(job: Job) -> None:
    assert_refused(job.start("a"), 78, "'a'", "--node-id", "127.0.0.1")
    assert_undisturbed(job)


def test_unequal_numbers_of_workers_make_contiguous_ranks(tmp_path: Path) -> None:
    with Job(tmp_path, steps=10) as job:
        wide, narrow = job.start("wide", nproc=2), job.start("narrow", nproc=1)
        assert (wide.wait(), narrow.wait()) == (0, 0)
        places = ranks(job.seen())
        assert sorted(places) == [0, 1, 2]
        assert [places[r] for r in range(3)] in (
            ["wide"] * 2 + ["narrow"],
            ["narrow"] + ["wide"] * 2,
        )


def test_unequal_numbers_of_workers_are_refused_where_they_were_declared_identical(
    tmp_path: Path,
) -> None:
    env = {"TORCH_ELASTIC_WORKER_IDENTICAL": "1"}
    with Job(tmp_path, mode="alone") as job:
        job.start("wide", nproc=2, env=env)
        job.wait_event(EventKind.NODE_JOINED, "wide")
        narrow = job.start("narrow", nproc=1, env=env)
        assert_refused(narrow, 78, "--nproc-per-node 1 on node narrow", "2 on node wide")


def test_an_endpoint_without_a_server_is_given_up_within_the_join_timeout(tmp_path: Path) -> None:
    with Job(tmp_path, mode="alone", conf="join_timeout=2,is_host=0") as job:
        assert_refused(job.start("a"), 75, job.endpoint, "2 s")


def test_a_host_that_does_not_resolve_is_given_up_within_the_join_timeout(tmp_path: Path) -> None:
    with Job(tmp_path, mode="alone", conf="join_timeout=2", endpoint="no-such.invalid:2") as job:
        assert_refused(job.start("a"), 75, "no-such.invalid")


class _Web(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        self.request.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


def test_a_port_that_another_program_has_is_named(tmp_path: Path) -> None:
    with (
        socketserver.ThreadingTCPServer(("127.0.0.1", free_port()), _Web) as web,
        Job(tmp_path, mode="alone", port=web.server_address[1]) as job,
    ):
        threading.Thread(target=web.serve_forever, daemon=True).start()
        try:
            agent = job.start("a")
            assert agent.wait() != 0
            assert job.endpoint in agent.box and "next" in agent.box, agent.box
            assert "Traceback" not in agent.words
        finally:
            web.shutdown()


def test_a_job_that_has_ended_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    with Job(tmp_path, mode="alone", backend="file", endpoint=str(folder), steps=5) as job:
        a, b = job.start("a"), job.start("b")
        assert (a.wait(), b.wait()) == (0, 0)
        assert_refused(job.start("c"), 78, job.name, "ended", "--rdzv-id")


def test_another_torch_is_refused_and_both_versions_are_named(job: Job, tmp_path: Path) -> None:
    fake = tmp_path / "path" / "torch"
    fake.mkdir(parents=True)
    (fake / "__init__.py").touch()
    (fake / "version.py").write_text("__version__ = '9.9.9'\n")
    with foreign_agent(tmp_path, job, "last_call=0.2,token=right") as other:
        agent = other.start("x", env={"PYTHONPATH": str(fake.parent)})
        ours = torch_build()["__version__"]
        assert_refused(agent, 78, f"torch {ours} in the job", "9.9.9 on node x")
    assert_undisturbed(job)


def test_a_limit_of_open_files_that_is_too_low_for_the_job_ends_it_with_the_next_step(
    tmp_path: Path,
) -> None:
    lead = ("sh", "-c", 'ulimit -n 64; exec "$@"', "sh")
    words = ("--standalone", "--no-zygote", write_script(tmp_path, "tell('ran')"))
    with words_agent(tmp_path, *words, lead=lead) as one:
        assert one.wait() == 78
        said = " ".join(one.err.replace("║", " ").split())
        assert "may open 64 files" in said and "[descriptor-limit]" in said
        assert "ulimit -n 1024" in said
        assert not (tmp_path / "ran.0.0").exists()
