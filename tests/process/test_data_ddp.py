"""Unchanged DDP over worlds with more ranks than a step has samples."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import warm_start

SCRIPT = Path(__file__).parent / "scripts" / "unequal_shares.py"


def trained(folder, world):
    """Return world, position and weights at the end, in a world of this size."""
    out = folder / f"weights-{world}.json"
    if world == 1:
        subprocess.run([sys.executable, str(SCRIPT), str(out)], check=True, timeout=100)
    else:
        warm_start.run(["--standalone", "--nproc-per-node", str(world), str(SCRIPT), str(out)], 100)
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
