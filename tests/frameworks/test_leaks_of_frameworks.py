"""A survivor in a framework's loop holds after many lost workers what it held after a few."""

import pytest
from held import outlives

OPTIONS = {"max_restarts": 1000, "rdzv_conf": "last_call=0.1,crash_loop=0"}


def lightning_job(folder):
    """Return a job of a Lightning script."""
    from test_lightning_joining import LightningJob

    return LightningJob(folder, **OPTIONS)


def trainer_job(folder):
    """Return a job of a Hugging Face Trainer."""
    from test_trainer_joining import TrainerJob

    return TrainerJob(folder, **OPTIONS)


def accelerate_job(folder):
    """Return a job of an Accelerate script."""
    from test_accelerate_joining import AcceleratedJob

    return AcceleratedJob(folder, **OPTIONS)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("job_of", [lightning_job, trainer_job, accelerate_job])
def test_a_survivor_in_a_frameworks_loop_holds_after_many_losses_what_it_held(tmp_path, job_of):
    job = job_of(tmp_path)
    with job.cluster as cluster:
        cluster.start("a")
        survivor = min(job.wait_size(3))
        outlives(job, survivor, few=10, many=60)
        job.ends_well()
