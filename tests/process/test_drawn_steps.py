"""Drawn loops of `job.steps()`: workers and nodes are lost and join, and each step is right.

Each committed step is computed again from the recorded weights before it: its gradient is the mean
over its samples, which are known before. Each sample is in one step of each epoch.
ELASTANE_LOOP_SEEDS=FIRST:COUNT says which seeds are played.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from drawn_checks import JOINS, DrawnJob, check_steps, play_seeds, run_job
from drawn_faults import faults_of
from drawn_program import Sharding, Stepping
from drawn_shards import ShardedSteps

_FIRST_STEPS = 20


def on_two_nodes(program: Stepping | Sharding, folder: Path) -> DrawnJob:
    """Run a program on two nodes, which are stopped and killed from outside."""
    faults = faults_of(program.seed, _FIRST_STEPS, nodes=True)
    options = {"nodes": 2, "in_place": False, "rdzv_conf": JOINS}
    return run_job("drawn_steps.py", program, folder, faults=faults, **options)


def inside(seed: int, folder: Path) -> str:
    """Run a program whose workers die at drawn places, and check all its steps."""
    program = Stepping.drawn(seed)
    job = run_job("drawn_steps.py", program, folder, in_place=False, rdzv_conf=JOINS)
    return check_steps(program, job)


def outside(seed: int, folder: Path) -> str:
    """Run a program on two nodes, of which workers and whole nodes are stopped and killed."""
    program = Stepping.drawn(seed)
    job = on_two_nodes(program, folder)
    return check_steps(program, job)


def sharded(seed: int, folder: Path) -> str:
    """Run a program with fully_shard() whose workers die at drawn places, and check all steps."""
    program = Sharding.drawn(seed)
    job = run_job("drawn_steps.py", program, folder, in_place=False, rdzv_conf=JOINS)
    return check_steps(program, job, ShardedSteps)


def sharded_outside(seed: int, folder: Path) -> str:
    """Run a program on two nodes, each a replica, that are stopped and killed from outside."""
    program = Sharding.of_nodes(seed)
    job = on_two_nodes(program, folder)
    return check_steps(program, job, ShardedSteps)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("play", "drawn"),
    [
        (inside, Stepping.drawn),
        (outside, Stepping.drawn),
        (sharded, Sharding.drawn),
        (sharded_outside, Sharding.of_nodes),
    ],
)
def test_each_step_of_drawn_loops_is_right_as_workers_are_lost_and_join(tmp_path, play, drawn):
    play_seeds(play, drawn, tmp_path)
