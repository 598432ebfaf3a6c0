"""Drawn scripts whose workers and nodes are stopped or killed from outside: each step is right.

ELASTANE_LOOP_SEEDS=FIRST:COUNT says which seeds are played.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from drawn_checks import JOINS, check_joining, check_loop, play_seeds, run_job
from drawn_faults import faults_of
from drawn_program import Joining, Program, from_outside

# A world lost as a whole delays the next one as little as it may.
GROWS = {"crash_loop": 0, "growth_interval": 2, "isolation_limit": 15}
# Steps of a joining program: about as many as its epochs have.
_FIRST_STEPS = 20


def one_node(seed: int, folder: Path) -> str:
    """Run a program whose workers are stopped and killed, and check all its steps."""
    program = from_outside(Program.drawn(seed))
    faults = faults_of(seed, program.steps)
    job = run_job("drawn_loop.py", program, folder, faults=faults, rdzv_conf=GROWS)
    return check_loop(program, job)


def two_nodes(seed: int, folder: Path) -> str:
    """Run a program on two nodes, of which whole ones are lost, and check all its steps."""
    program = from_outside(Program.drawn(seed))
    faults = faults_of(seed, program.steps, nodes=True)
    job = run_job("drawn_loop.py", program, folder, faults=faults, nodes=2, rdzv_conf=GROWS)
    return check_loop(program, job)


def joining(seed: int, folder: Path) -> str:
    """Run a program with an ElasticLoader, whose workers are stopped and killed, and check it."""
    program = Joining.drawn(seed)
    faults = faults_of(seed, _FIRST_STEPS)
    job = run_job("drawn_joining.py", program, folder, faults=faults, rdzv_conf=JOINS)
    return check_joining(program, job)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("play", "drawn"),
    [(one_node, Program.drawn), (two_nodes, Program.drawn), (joining, Joining.drawn)],
)
def test_each_step_of_drawn_scripts_is_right_wherever_workers_are_stopped(tmp_path, play, drawn):
    play_seeds(play, drawn, tmp_path)
