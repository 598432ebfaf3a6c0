"""The example script without elastane: it resumes from its checkpoint, and stops on request."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from ports import free_port

import elastane

SCRIPT = Path(elastane.__file__).parent / "examples" / "digits.py"
CHECKPOINT_EVERY = 20
DEADLINE_S = 90.0


@contextmanager
def training(folder: Path, world_size: int, *options: str):
    """Start the script's workers by hand, as any launcher would."""
    port = str(free_port())
    workers = []
    for rank in range(world_size):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world_size)}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(SCRIPT), "--dir", str(folder), *options]
        workers.append(subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL))
    try:
        yield workers
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def progress(folder: Path) -> list[dict]:
    path = folder / "progress.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def wait_for_step(folder: Path, step: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not any(line["step"] >= step for line in progress(folder)):
        assert time.monotonic() < deadline, f"step {step} did not come in {folder}"
        time.sleep(0.02)


def first_new_step(folder: Path, old: int) -> int:
    """Return the first step after `old` lines of progress."""
    deadline = time.monotonic() + DEADLINE_S
    while len(progress(folder)) <= old:
        assert time.monotonic() < deadline, "no step after the restart"
        time.sleep(0.02)
    return progress(folder)[old]["step"]


@pytest.mark.soak
def test_after_sigkill_training_resumes_from_the_checkpoint_in_another_world_size(tmp_path):
    with training(tmp_path, 1) as workers:
        wait_for_step(tmp_path, 50)
        workers[0].kill()
        workers[0].wait()
    lines = progress(tmp_path)
    with training(tmp_path, 2):
        again = first_new_step(tmp_path, len(lines))
    last_checkpoint = lines[-1]["step"] // CHECKPOINT_EVERY * CHECKPOINT_EVERY
    # The kill may come between the step's line and the end of its checkpoint.
    assert again in (last_checkpoint + 1, last_checkpoint + 1 - CHECKPOINT_EVERY)


@pytest.mark.soak
def test_sigterm_to_one_worker_stops_all_after_one_step_and_no_step_is_repeated(tmp_path):
    with training(tmp_path, 2) as workers:
        wait_for_step(tmp_path, 30)
        workers[1].send_signal(signal.SIGTERM)
        assert [w.wait(DEADLINE_S) for w in workers] == [128 + signal.SIGTERM] * 2
    lines = progress(tmp_path)
    with training(tmp_path, 1):
        assert first_new_step(tmp_path, len(lines)) == lines[-1]["step"] + 1


@pytest.mark.soak
@pytest.mark.parametrize("world_size", [1, 3])
def test_the_example_learns_the_digits_at_any_world_size(tmp_path, world_size):
    with training(tmp_path, world_size, "--epochs", "10") as workers:
        assert [w.wait(DEADLINE_S) for w in workers] == [0] * world_size
    assert progress(tmp_path)[-1]["final_accuracy"] >= 0.97
