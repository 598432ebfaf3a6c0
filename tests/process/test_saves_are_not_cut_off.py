"""A worker that is to end during a save of its script ends after the save."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from jobs import until

from elastane.errors import ExitCode

SCRIPT = Path(__file__).parent / "scripts" / "slow_save.py"


@pytest.fixture
def begins(tmp_path):
    """Start the script, and wait until it saves."""
    started = []

    def begin(how):
        command = [sys.executable, str(SCRIPT), str(tmp_path), how]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        started.append(process)
        until((tmp_path / "saving").exists, "the save")
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def is_whole(folder):
    """Whether the checkpoint can be read."""
    state = torch.load(folder / "last.pt", weights_only=False)
    return state["slow"] == 7 and bool(state["weight"].eq(1).all())


def test_sigterm_ends_a_worker_after_its_save_and_before_its_next_line(begins, tmp_path):
    process = begins("sigterm")
    process.send_signal(signal.SIGTERM)
    (tmp_path / "go").touch()
    assert process.wait(60) == -signal.SIGTERM
    assert is_whole(tmp_path) and not (tmp_path / "returned").exists()


def test_a_handler_of_the_script_gets_sigterm_as_without_elastane(begins, tmp_path):
    process = begins("handler")
    process.send_signal(signal.SIGTERM)
    until((tmp_path / "caught").exists, "the handler")
    (tmp_path / "go").touch()
    assert process.wait(60) == 0 and is_whole(tmp_path)


def test_a_restart_of_all_workers_lets_the_main_thread_finish_its_save(begins, tmp_path):
    process = begins("restart")
    assert "all workers restart: the test says so" in process.stderr.readline()
    (tmp_path / "go").touch()
    assert process.wait(60) == ExitCode.TRY_AGAIN and is_whole(tmp_path)


def test_a_worker_stopped_as_it_waits_for_a_place_finishes_its_save(begins, tmp_path):
    process = begins("end")
    assert "told to end" in process.stderr.readline()
    (tmp_path / "go").touch()
    assert process.wait(60) == ExitCode.DRAINED and is_whole(tmp_path)
