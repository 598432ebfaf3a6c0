"""Bodies of comms_crew's workers with deterministic=True; the test makes the worlds."""

import sys
import time
from pathlib import Path

import torch
from comms_bodies import build

from elastane.worker.job import Job
from elastane.worker.mode import Deterministic

sys.path.insert(0, str(Path(__file__).parent / "scripts"))


def job_in(worker, name, world_size, shards=8, seed=7):
    """Return a job in a world of this size, without agents."""
    job = Job(None, Deterministic(shards, seed), None).join()
    if world_size > 1:
        job.process_group.replace(build(worker, name, worker.number, world_size))
    return job


def trains_in_worlds(worker, sizes, steps):
    """Report the result of a whole training in each world of `sizes`."""
    import deterministic_train

    torch.set_num_threads(1)
    for size in sizes:
        if worker.number < size:
            with job_in(worker, f"train-{size}", size) as job:
                worker.say((size, *deterministic_train.train(job, steps)))
    worker.hear()


def trains_beside_a_slow_worker(worker, steps):
    """Report a training alone, and one in a world of three whose rank 2 is slow.

    Each report has the steps, the digest, and how many shards this rank had in each step.
    """
    import deterministic_train

    torch.set_num_threads(1)
    for size in (1, 3):
        if worker.number >= size:
            continue
        had = dict.fromkeys(range(steps), 0)

        def compute(step, had=had, size=size):
            had[step.number] += 1
            if size > 1:
                time.sleep(0.03 if worker.number == 2 else 0.01)

        with job_in(worker, f"slow-{size}", size) as job:
            found = deterministic_train.train(job, steps, compute=compute)
        worker.say((*found, [*had.values()]))
    worker.hear()


def differs_in(worker, name):
    """Begin a step while one member has a different setting; report the outcome."""
    import deterministic_train

    torch.set_num_threads(2 if name == "threads" and worker.number else 1)
    seed = 8 if name == "seed" and worker.number else 7
    with job_in(worker, "other", 2, seed=seed) as job:
        try:
            deterministic_train.train(job, 1)
            worker.say("nothing")
        except Exception as error:
            worker.say(str(error))
    worker.hear()
