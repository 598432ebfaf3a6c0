"""A bench that is ended leaves no process of its tables."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import until

from bench.__main__ import RUN_VARIABLE
from bench.harness import marked

ROOT = Path(__file__).parents[2]


@pytest.mark.soak
def test_a_bench_that_gets_sigterm_ends_its_agents_and_workers(tmp_path):
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [
        sys.executable,
        "-m",
        "bench",
        "--rows",
        "node-killed",
        "--reps",
        "1",
        "--only",
        "elastane",
    ]
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL) as bench:
        try:
            until(lambda: [*tmp_path.glob("elastane-bench-*/steps.txt")], "the workers train")
            mark = _mark_of(bench.pid)
            assert len(marked(mark)) > 3
            bench.send_signal(signal.SIGTERM)
            assert bench.wait(60) == 128 + signal.SIGTERM
            assert not marked(mark)
        finally:
            bench.kill()
    assert not [*tmp_path.glob("elastane-bench-*")], "the table removes its folders"


def _mark_of(pid: int) -> str:
    """Return the variable that marks the processes of a running table."""
    (child,) = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    names = Path(f"/proc/{child}/environ").read_bytes().decode().split("\0")
    return next(name for name in names if name.startswith(f"{RUN_VARIABLE}="))
