"""docs/get-started.md: its script survives the kill that the page asks for."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "get-started.md").read_text("utf-8")
[SCRIPT] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
[COMMAND] = re.findall(r"^elastane run (.*)$", PAGE, re.MULTILINE)
_LINE = re.compile(r"rank (\d+) of (\d+), pid (\d+): step (\d+)")
# Generous: the bound of a test that fails on a busy machine.
DEADLINE_S = 120.0
# Shorter than the page's ten: of 64 steps each.
EPOCHS = 3
STEPS = 64 * EPOCHS


@pytest.fixture
def job(tmp_path):
    """The page's command in a folder with the page's script; its output goes to a file."""
    (tmp_path / "train.py").write_text(SCRIPT.replace("until_epoch=10", f"until_epoch={EPOCHS}"))
    output = tmp_path / "output"
    words = [*COMMAND.split()[:-1], "--log-dir", str(tmp_path / "logs"), "train.py"]
    with output.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "elastane", "run", *words],
            cwd=tmp_path, stdout=sink, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        yield process, output
    finally:
        process.kill()
        process.wait()


def lines(output):
    """Return the lines of the workers: (rank, world size, pid, step)."""
    return [tuple(map(int, each)) for each in _LINE.findall(output.read_text())]


def wait_for(condition, process, output):
    deadline_s = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < deadline_s and process.poll() is None, output.read_text()
        time.sleep(0.05)
    return found


def test_the_job_of_the_page_survives_a_kill_without_a_restart(job):
    process, output = job
    before = wait_for(
        lambda: (pids := {p for _, _, p, _ in lines(output)}) and len(pids) == 3 and pids,
        process, output,
    )  # fmt: skip
    victim = next(pid for rank, _, pid, _ in lines(output) if rank == 1)
    os.kill(victim, signal.SIGKILL)
    assert process.wait(DEADLINE_S) == 0, output.read_text()
    last = {pid: step for _, _, pid, step in lines(output)}
    survivors = before - {victim}
    ends = {step for pid, step in last.items() if pid in survivors}
    assert ends == {180}, output.read_text()
    assert any(size == 3 and pid not in before for _, size, pid, _ in lines(output))
    steps = [step for rank, _, _, step in lines(output) if rank == 0]
    assert steps == [*range(0, STEPS, 20)]
