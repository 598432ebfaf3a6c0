"""A killed worker is recovered every time, whatever the number of workers and nodes."""

from __future__ import annotations

import pytest

from bench.harness import ELASTANE
from bench.recovery import CASES, worker_kill

KILLS = 100
CHECKPOINT_EVERY = 10


@pytest.mark.soak
@pytest.mark.parametrize(("workers", "nodes"), CASES)
def test_a_killed_worker_is_recovered_100_times_of_100(workers, nodes):
    samples = [worker_kill(ELASTANE, workers, nodes) for _ in range(KILLS)]
    lost = [index for index, sample in enumerate(samples) if sample.seconds is None]
    assert not lost, f"kills {lost} of {KILLS} were not recovered"
    assert max(sample.redone or 0 for sample in samples) <= CHECKPOINT_EVERY


@pytest.mark.parametrize(("workers", "nodes"), [(2, 1), (4, 1), (3, 2)])
def test_a_killed_worker_is_recovered_and_redoes_at_most_what_was_not_checkpointed(workers, nodes):
    sample = worker_kill(ELASTANE, workers, nodes)
    assert sample.seconds is not None
    assert 0 <= (sample.redone or 0) <= CHECKPOINT_EVERY
