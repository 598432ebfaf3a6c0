"""Services as sinks of `job.log`: each step is written once, and a failed service stops no job.

The service is a stand-in for MLflow (`scripts/fake_services`), which can hang and fail.
"""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import runs, until

import elastane
from elastane.worker import service_sinks
from elastane.worker.scalars import ScalarLog

SCRIPTS = Path(__file__).parent / "scripts"
FAKES = SCRIPTS / "fake_services"
WRITER = SCRIPTS / "service_writer.py"
DEADLINE_S = 90.0


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    monkeypatch.syspath_prepend(str(FAKES))
    monkeypatch.setattr(service_sinks, "RETRY_FIRST_S", 0.05)
    monkeypatch.setattr(service_sinks, "RETRY_MAX_S", 0.05)


def worker(folder):
    """Return a worker that logs to the service in the folder, and that does not write yet."""
    log = ScalarLog()
    log.add_sinks((elastane.MLflow(str(folder)),))
    return log


def writer(folder):
    log = worker(folder)
    log.enter(is_writer=True, committed=0, is_first=True)
    return log


def made(log, *steps):
    """Let the bodies of steps log, and commit them."""
    for step in steps:
        log.begin()
        log.add({"loss": step / 10}, step - 1)
        log.leave()
        log.commit(step)


def runs_of_service(folder):
    """Return the metrics of each run: name, value, time, step."""
    lines = [path.read_text().splitlines()[1:] for path in sorted(folder.glob("run-*.jsonl"))]
    return [[json.loads(line) for line in some] for some in lines]


def steps(folder, name="loss"):
    return [step for run in runs_of_service(folder) for key, _, _, step in run if key == name]


def left_processes(folder):
    """Return the living processes of the service, and those that it started."""
    pids = (folder / "pids").read_text().split() if (folder / "pids").exists() else []
    return [pid for pid in pids if runs(int(pid))]


def started(folder):
    """Wait for the process of the service; return its pid."""
    pids = folder / "pids"
    until(
        lambda: pids.exists() and pids.read_text().endswith("\n"),
        "the service is opened",
        DEADLINE_S,
    )
    return int(pids.read_text().split()[-2])


def test_values_reach_a_service_once_and_its_processes_end_with_the_worker(tmp_path):
    log = writer(tmp_path)
    made(log, 1, 2)
    log.add({"accuracy": 0.5}, 2)
    made(log, 3)
    log.end()
    assert steps(tmp_path) == [1, 2, 3] and steps(tmp_path, "accuracy") == [2]
    assert (tmp_path / "terminated").exists()
    until(lambda: not left_processes(tmp_path), "all processes end", DEADLINE_S)


def test_another_worker_continues_the_run_of_a_writer_that_was_killed(tmp_path):
    environment = {**os.environ, "PYTHONPATH": f"{FAKES}:{os.environ.get('PYTHONPATH', '')}"}
    with subprocess.Popen(
        [sys.executable, str(WRITER), str(tmp_path)], stdout=subprocess.PIPE, env=environment
    ) as first:
        assert first.stdout.readline() == b"made\n"
        started(tmp_path)
        first.kill()
    second = worker(tmp_path)
    made(second, *range(1, 12))
    second.enter(is_writer=True, committed=11, is_first=False)
    made(second, 12)
    second.end()
    assert len(runs_of_service(tmp_path)) == 1 and steps(tmp_path) == [*range(1, 13)]
    until(lambda: not left_processes(tmp_path), "all processes end", DEADLINE_S)


def test_a_writer_hands_over_without_a_wait_and_no_value_comes_twice(tmp_path):
    first, second = writer(tmp_path), worker(tmp_path)
    made(first, *range(1, 9)), made(second, *range(1, 9))
    started(tmp_path)
    first.close()
    second.enter(is_writer=True, committed=8, is_first=False)
    made(second, 9)
    second.end(), first.end()
    assert steps(tmp_path) == [*range(1, 10)] and len(runs_of_service(tmp_path)) == 1
    until(lambda: not left_processes(tmp_path), "all processes end", DEADLINE_S)


def test_a_service_that_hangs_stops_no_step_and_the_end_only_for_a_bounded_time(tmp_path, capsys):
    (tmp_path / "hang").touch()
    log = writer(tmp_path)
    began = time.monotonic()
    made(log, *range(1, 2001))
    started(tmp_path)
    [sink] = log._sinks
    sink.finish(time.monotonic() + 0.2)
    assert time.monotonic() - began < DEADLINE_S
    assert "1024 entries (at most 1024) are lost" in capsys.readouterr().err
    until(lambda: not left_processes(tmp_path), "all processes end", DEADLINE_S)


def test_a_service_that_takes_nothing_for_too_long_is_started_again(tmp_path, monkeypatch, capsys):
    (tmp_path / "hang").touch()
    log = writer(tmp_path)
    made(log, 1)
    first = started(tmp_path)
    with monkeypatch.context() as patience:
        patience.setattr(service_sinks, "HANG_S", 0.0)
        made(log, 2)
    (tmp_path / "hang").unlink()
    assert not runs(first)
    log.end()
    assert steps(tmp_path) == [1, 2]
    assert capsys.readouterr().err.count("cannot be written: nothing was written for") == 1


def test_a_service_that_fails_is_reported_once_and_gets_all_values_later(tmp_path, capsys):
    (tmp_path / "refuse").touch()
    log = writer(tmp_path)
    made(log, 1)
    [sink] = log._sinks
    until(lambda: sink._advance() or sink._is_told, "the failure", DEADLINE_S)
    first = started(tmp_path)
    until(lambda: sink._advance() or started(tmp_path) != first, "another try", DEADLINE_S)
    (tmp_path / "refuse").unlink()
    made(log, 2)
    log.end()
    told = capsys.readouterr().err
    assert told.count("cannot be written: RuntimeError: the server is away") == 1
    assert "is written again; 0 entries are lost" in told
    assert steps(tmp_path) == [1, 2]


def test_a_locked_database_of_a_service_stops_no_step_and_gets_all_values_later(tmp_path, capsys):
    database = sqlite3.connect(tmp_path / "runs.db", isolation_level=None)
    database.execute("create table logged (step int)")
    log = writer(tmp_path)
    made(log, 1)
    until(lambda: steps(tmp_path) == [1], "the service is written", DEADLINE_S)
    database.execute("begin exclusive")
    took_s, said = [0.0], []

    def a_step_finds_the_lock():
        begun_s = time.perf_counter()
        made(log, len(took_s) + 1)
        took_s.append(time.perf_counter() - begun_s)
        said.append(capsys.readouterr().err)
        return "database is locked" in "".join(said)

    until(a_step_finds_the_lock, "the lock is reported", DEADLINE_S)
    assert "".join(said).count("cannot be written") == 1 and max(took_s) < 2.0
    database.execute("rollback")
    log.end()
    assert "is written again; 0 entries are lost" in capsys.readouterr().err
    rows = database.execute("select step from logged order by step").fetchall()
    database.close()
    assert [row for (row,) in rows] == steps(tmp_path) == [*range(1, len(took_s) + 1)]


def test_a_missing_package_loses_values_with_a_warning_that_names_the_command(
    tmp_path, monkeypatch, capsys
):
    without = [path for path in sys.path if path != str(FAKES)]
    if any((Path(path) / "mlflow").exists() for path in without):
        pytest.skip("mlflow is installed")
    monkeypatch.setattr(sys, "path", without)
    log = writer(tmp_path)
    made(log, 1)
    [sink] = log._sinks
    until(lambda: sink._advance() or sink._is_told, "the failure", DEADLINE_S)
    sink.finish(time.monotonic())
    assert "pip install 'elastane[mlflow]'" in capsys.readouterr().err


@pytest.mark.soak
def test_a_process_of_a_service_that_is_killed_is_started_again(tmp_path):
    log = writer(tmp_path)
    made(log, 1, 2)
    os.kill(started(tmp_path), signal.SIGKILL)
    made(log, 3)
    log.end()
    assert steps(tmp_path) == [1, 2, 3]


@pytest.mark.soak
def test_another_run_of_the_job_is_another_run_of_the_service(tmp_path):
    for _ in range(2):
        log = writer(tmp_path)
        made(log, 1, 2)
        log.end()
    assert steps(tmp_path) == [1, 2, 1, 2] and len(runs_of_service(tmp_path)) == 2
