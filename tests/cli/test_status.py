"""`elastane status` of a running job, an ended one, and one without a coordinator."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from ports import free_port

from elastane.cli.main import main
from elastane.errors import ExitCode
from elastane.process.files import JobEntry, JobRegistry, process_start, runtime_folder

DEADLINE_S = 90.0


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    """Set a runtime folder and a log folder for each test."""
    private = tmp_path / "run"
    private.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(private))
    monkeypatch.setenv("PET_LOG_DIR", str(tmp_path / "logs"))
    monkeypatch.delenv("ELASTANE_TOKEN", raising=False)


@pytest.fixture
def job():
    """Run a real job of one worker that sleeps."""
    words = ["run", "--no-python", "--max-restarts", "2", "sleep", "600"]
    process = subprocess.Popen([sys.executable, "-m", "elastane", *words], stderr=subprocess.PIPE)
    yield process
    if process.poll() is None:
        process.kill()
    process.communicate()


def running(capsys):
    """Wait until status shows a running job; return its status."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        main(["status", "--json"])
        jobs = json.loads(capsys.readouterr().out)["jobs"]
        if jobs and (jobs[0]["report"] or {}).get("phase") == "running":
            return jobs[0]
        time.sleep(0.05)
    raise AssertionError("no job came to run")


def test_a_running_job_is_shown_and_an_ended_one_by_its_log(job, capsys, monkeypatch):
    found = running(capsys)
    monkeypatch.setenv("PET_LOG_DIR", "/nowhere")  # the place of its log follows from its name
    assert main(["explain", found["job"]]) == 0
    assert "round 1 attempt 0" in capsys.readouterr().out
    report = found["report"]
    assert (report["world_size"], report["max_restarts"], len(report["nodes"])) == (1, 2, 1)
    assert found["agents"][0]["pid"] == job.pid

    assert main(["status"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{found['job']}: running, round 1 attempt 0, 1 worker\n")
    assert found["endpoint"] in text

    job.send_signal(signal.SIGTERM)
    job.wait(DEADLINE_S)
    assert main(["status", found["job"]]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{found['job']}: ")
    assert "agent-stopped" in text
    assert main(["status"]) == 0
    assert "no job of this user" in capsys.readouterr().out


def test_a_remote_job_is_found_by_its_endpoint_and_its_secret(job, capsys, monkeypatch):
    found = running(capsys)
    words = ["status", found["job"], "--rdzv-endpoint", found["endpoint"]]
    assert main(words) != 0
    captured = capsys.readouterr()
    assert "[wrong-token]" in captured.err
    assert captured.out == ""

    entry = JobRegistry(runtime_folder(os.environ)).running()[0]
    monkeypatch.setenv("ELASTANE_TOKEN", entry.token)
    assert main(words) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"{found['job']}: running")
    assert entry.token not in captured.out

    assert main(["status", "other", "--rdzv-endpoint", found["endpoint"]]) != 0
    assert "[wrong-job]" in capsys.readouterr().err


def test_a_missing_coordinator_is_reported_with_the_running_agents(capsys):
    entry = JobEntry(
        job="left",
        node="a",
        endpoint=f"127.0.0.1:{free_port()}",
        token="hush",
        pid=os.getpid(),
        process=process_start(os.getpid()),
    )
    JobRegistry(runtime_folder(os.environ)).write(entry)
    assert main(["status"]) == ExitCode.TRY_AGAIN
    text = capsys.readouterr().out
    assert "left: its coordinator does not answer" in text
    assert entry.endpoint in text
    assert f"a (pid {os.getpid()})" in text
    assert main(["status", "--json"]) == ExitCode.TRY_AGAIN
    out = capsys.readouterr().out
    assert "hush" not in out
    assert json.loads(out)["jobs"][0]["trouble"]


def test_a_dead_endpoint_is_an_error_that_names_it(capsys):
    endpoint = f"127.0.0.1:{free_port()}"
    words = ["status", "--rdzv-endpoint", endpoint, "--rdzv-id", "x"]
    assert main(words) == ExitCode.TRY_AGAIN
    assert endpoint in capsys.readouterr().err


def test_no_running_job_is_reported_without_an_error(capsys):
    assert main(["status"]) == 0
    assert "no job of this user runs" in capsys.readouterr().out
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"jobs": []}


def test_an_unknown_job_is_an_error(capsys):
    assert main(["status", "nobody"]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert "[no-such-job]" in said and "next: elastane status --log-dir" in said


def test_an_endpoint_requires_exactly_one_job_name(capsys):
    assert main(["status", "--rdzv-endpoint", "h:1"]) == ExitCode.USAGE
    assert main(["status", "a", "--rdzv-id", "b"]) == ExitCode.USAGE
    capsys.readouterr()
