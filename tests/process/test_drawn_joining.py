"""Drawn scripts with an ElasticLoader: workers die, new ones join, and each step is right.

Each step of a job that never restarts as a whole is computed again from the recorded weights before
it, and each sample is in exactly one step of each epoch. Of other jobs only the last weights are
compared. ELASTANE_LOOP_SEEDS=FIRST:COUNT says which seeds are played.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from drawn_checks import JOINS, check_joining, play_seeds, run_job
from drawn_program import Joining


def play(seed: int, folder: Path) -> str:
    """Run the program of a seed, check all its steps, and return its counts in words."""
    program = Joining.drawn(seed)
    return check_joining(program, run_job("drawn_joining.py", program, folder, rdzv_conf=JOINS))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_each_step_of_drawn_scripts_is_right_as_workers_die_and_join(tmp_path: Path) -> None:
    play_seeds(play, Joining.drawn, tmp_path)
