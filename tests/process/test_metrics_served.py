"""`elastane metrics` beside real jobs: it finds them, follows them, and answers scrapes."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys

import httpx
import pytest
from jobs import Job, until
from prometheus_client.parser import text_string_to_metric_families

from elastane.cli.main import main
from elastane.dashboard.exporter import MetricsExporter
from elastane.errors import ExitCode
from elastane.observe.events import EventReader
from elastane.process.files import JobEntry, JobRegistry, process_start

DEADLINE_S = 90.0


class Exporter:
    """A running `elastane metrics`, which finds the jobs of one runtime folder."""

    def __init__(self, folder, *options):
        command = [sys.executable, "-m", "elastane", "metrics", "--port", "0", *options]
        self.said = folder / "said"
        with self.said.open("wb") as said:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True)
        told = self.process.stdout.readline()
        self.url = re.search(r"http://localhost:\d+", told)[0].replace("localhost", "127.0.0.1")

    def get(self, path="/metrics", method="GET"):
        return httpx.request(method, self.url + path, timeout=DEADLINE_S)

    def samples(self, job):
        """Return the samples of one job by name and label values."""
        answer = self.get()
        assert answer.status_code == 200, answer.text
        found = {}
        for family in text_string_to_metric_families(answer.text):
            for one in family.samples:
                labels = dict(one.labels)
                if labels.pop("job_name") == job:
                    found[one.name.removeprefix("elastane_"), *labels.values()] = one.value
        return found

    def wait(self, job, condition, what):
        until(lambda: condition(self.samples(job)), what, DEADLINE_S)
        return self.samples(job)

    def close(self):
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(DEADLINE_S)
        self.process.stdout.close()
        assert (code, self.said.read_text()) == (0, "")


@pytest.fixture
def exporter(tmp_path, monkeypatch):
    private = tmp_path / "run"
    private.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(private))
    found = Exporter(tmp_path)
    yield found
    found.close()


def test_a_job_is_found_followed_over_a_loss_and_served_after_its_end(
    tmp_path, monkeypatch, exporter
):
    private = str(tmp_path / "run")
    with Job(tmp_path / "job", nnodes="1:2", steps=100_000) as job:
        a = job.start("a", "--max-restarts", "3", env={"XDG_RUNTIME_DIR": private}, nproc=2)
        job.wait_step(world=2)
        found = exporter.wait(
            job.name, lambda now: now.get(("training_state", "training")), "the job is found"
        )
        assert found["training_world_size",] == 2 and found["training_nodes_allowed",] == 2
        assert found["node_is_coordinator", "a"] == 1
        assert found["node_workers", "a", "training"] == 2
        assert found["training_incidents_total", "worker"] == 0
        victim = job.wait_step(world=2)
        os.kill(victim.pid, signal.SIGKILL)
        job.wait_step(world=2, fence=(victim.round, victim.attempt))
        found = exporter.wait(
            job.name, lambda now: now["training_incidents_total", "worker"] == 1, "the loss"
        )
        assert found["training_restarts_total",] == 1
        found = exporter.wait(
            job.name,
            lambda now: now["training_recovery_seconds_count", "worker"] == 1,
            "the recovery counts once it is surely over",
        )
        assert 0 < found["training_recovery_seconds_sum", "worker"] < DEADLINE_S
        a.process.terminate()
        assert a.wait() != 0
        found = exporter.wait(
            job.name, lambda now: now["training_state", "training"] == 0, "the end is served"
        )
        assert found["training_state", "stopped"] == 1


def test_only_get_and_head_of_the_metrics_are_answered(exporter):
    assert exporter.get("/").status_code == 404
    assert exporter.get("/metrics?x=1").status_code == 200
    assert exporter.get(method="POST").status_code == 405
    head = exporter.get(method="HEAD")
    assert head.status_code == 200 and not head.content
    assert head.headers["content-type"].startswith("text/plain; version=")


def registered(folder, *jobs):
    """A registry with an agent of each job, whose logs are below `folder`."""
    registry = JobRegistry(folder / "run")
    (folder / "run").mkdir(mode=0o700, exist_ok=True)
    for job in jobs:
        (folder / "logs" / job).mkdir(parents=True)
        registry.write(
            JobEntry(
                job=job, node="a", endpoint="127.0.0.1:1", token="", pid=os.getpid(),
                process=process_start(os.getpid()), log_dir=str(folder / "logs"),
            )
        )  # fmt: skip
    return registry


def test_a_job_that_cannot_be_followed_leaves_the_others_served(tmp_path, monkeypatch, caplog):
    read = EventReader.read

    def failing(self, count):
        if self._folder.name == "bad":
            raise PermissionError(13, "Permission denied", str(self._folder))
        return read(self, count)

    monkeypatch.setattr(EventReader, "read", failing)
    exporter = MetricsExporter(registered(tmp_path, "bad", "good"))

    async def scenario():
        async with asyncio.timeout(DEADLINE_S):
            while "job bad is served no more" not in caplog.text:
                await exporter.look()
                await asyncio.sleep(0.01)
            await exporter.look()
            await exporter.ready()
            answer = exporter.answer("GET", "/metrics")
            await exporter.close()
        return answer.body.decode()

    text = asyncio.run(scenario())
    assert 'job_name="good"' in text and 'job_name="bad"' not in text
    assert "Permission denied" in caplog.text


def test_a_job_is_served_for_some_minutes_after_its_last_agent(tmp_path, monkeypatch):
    registry = registered(tmp_path, "over")
    exporter = MetricsExporter(registry)

    async def scenario():
        async with asyncio.timeout(DEADLINE_S):
            await exporter.look()
            await exporter.ready()
            registry.remove(registry.running("over")[0])
            await exporter.look()
            kept = exporter.answer("GET", "/metrics").body
            monkeypatch.setattr("elastane.dashboard.exporter.KEPT_S", -1.0)
            monkeypatch.setattr("elastane.dashboard.exporter.ANSWER_S", -1.0)
            await exporter.look()
            return kept, exporter.answer("GET", "/metrics").body

    kept, dropped = asyncio.run(scenario())
    assert b'job_name="over"' in kept and b'job_name="over"' not in dropped


def test_a_port_that_is_taken_is_named(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code = main(["metrics", "--host", "127.0.0.1", "--port", str(port)])
    told = capsys.readouterr().err
    assert code == ExitCode.CONFIGURATION, told
    assert "[metrics-listen]" in told and f"127.0.0.1, port {port}" in told


def test_a_missing_package_is_named(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["metrics", "--once"]) == ExitCode.CONFIGURATION
    assert "pip install 'elastane[metrics]'" in capsys.readouterr().err


def test_a_folder_of_a_job_that_is_over_is_printed_once(tmp_path, capsys, monkeypatch):
    from shown_job import write_job

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    assert main(["metrics", "--once", str(write_job(tmp_path / "logs"))]) == 0
    assert 'elastane_training_step{job_name="gpt2-medium"}' in capsys.readouterr().out
