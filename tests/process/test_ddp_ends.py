"""A script that trains under DDP, destroys its group and returns does not hang at exit."""

import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
# The script takes 4 s alone; a worker that hangs does so for ever.
LIMIT_S = 60.0


def run(*command: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "elastane", "run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*launcher, *command], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def test_a_model_freed_after_its_group_was_destroyed_does_not_hang():
    """Twenty worlds per worker, one of which hangs without what process/zygote/server.py does.

    Of ten worlds one hung in 10 of 10 runs (torch 2.13, two cores, 2026-11-21), a world alone in
    two of five: twenty pass by luck in 1 of 20 000 runs.
    """
    done = run(str(SCRIPTS / "ddp_ends.py"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("world 19 is left") == 2, done.stdout
