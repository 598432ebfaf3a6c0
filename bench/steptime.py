"""The step time under a launcher against none: the launcher must cost nothing."""

from __future__ import annotations

import itertools
import statistics

from bench.harness import NO_LAUNCHER, BenchJob, Launcher, Node, Sample
from bench.recovery import standalone_flags
from bench.startup import WORKERS, start_by_hand

STEPS = 600
WARM_UP_STEPS = 100


def step_time(launcher: Launcher) -> Sample:
    """Return rank 0's median time from one step to its next, without a pause between steps."""
    args = f"--steps {STEPS} --step-s 0 --checkpoint-every {STEPS}"
    with BenchJob(launcher, script_args=args) as job:
        if launcher is NO_LAUNCHER:
            start_by_hand(job)
        else:
            job.start(Node("a"), standalone_flags(WORKERS))
        job.wait_for(lambda: any(line.step == STEPS for line in job.steps()), "last step", 120.0)
        times = [line.at for line in job.steps() if line.rank == 0][WARM_UP_STEPS:]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        return Sample(statistics.median(gaps))
