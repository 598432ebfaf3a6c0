"""Ordinary training scripts that are drawn from seeds keep right weights, wherever workers die.

Each step of each worker is checked by computing it again: the gradient from the recorded weights
before it, as the mean over the workers that may have contributed, and the update from the recorded
gradient. ELASTANE_LOOP_SEEDS=FIRST:COUNT says which seeds are played.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from drawn_checks import check_loop, play_seeds, run_job
from drawn_program import Program


def play(seed: int, folder: Path) -> str:
    """Run the program of a seed, check all its steps, and return its counts in words."""
    program = Program.drawn(seed)
    return check_loop(program, run_job("drawn_loop.py", program, folder))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_each_step_of_drawn_scripts_is_right_wherever_workers_die(tmp_path: Path) -> None:
    play_seeds(play, Program.drawn, tmp_path)
