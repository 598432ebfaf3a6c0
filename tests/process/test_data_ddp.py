"""Unchanged DDP over worlds with more ranks than a step has samples."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "unequal_shares.py"


def trained(folder, world):
    """Return world, position and weights at the end, in a world of this size."""
    launcher = ["-m", "elastane", "run", "--standalone", "--nproc-per-node", str(world)]
    out = folder / f"weights-{world}.json"
    command = [sys.executable, *(launcher if world > 1 else []), str(SCRIPT), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


def test_ranks_without_samples_take_part_and_do_not_change_the_weights(tmp_path):
    """Steps of 2 samples and a last one of 1, in two micro-batches, on 3 ranks and on 1."""
    (of_one, place, alone), (of_three, same_place, together) = (
        trained(tmp_path, world) for world in (1, 3)
    )
    assert (of_one, of_three) == ([0, 1], [0, 3])
    assert place == same_place == [2, 0]
    for one, three in zip(alone, together, strict=True):
        assert three == pytest.approx(one, rel=1e-12)
