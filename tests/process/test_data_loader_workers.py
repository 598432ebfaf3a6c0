"""A Feed over loaders with worker processes: checks of the results of feed_scenarios.py.

One child process plays all scenarios: a loader forks, and this process has threads.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "feed_scenarios.py"


@pytest.fixture(scope="module")
def found():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=280,  # half a minute of processor time, on a host that does other things too
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    errors = {name: result["error"] for name, result in results.items() if "error" in result}
    assert not errors, errors
    return results


def test_no_scenario_leaves_a_worker_process(found):
    assert {name: result["left"] for name, result in found.items() if result["left"]} == {}


@pytest.mark.parametrize("name", ["rewound", "rewound-persistent"])
def test_prefetched_uncommitted_steps_are_dealt_to_the_new_world(found, name):
    result = found[name]
    assert result["steps"] == [0, 1, 2]
    assert result["again"] == [2, 5, 1.0, result["was"][5:]]


def test_persistent_workers_are_kept_and_others_end(found):
    assert found["rewound-persistent"]["same_workers"]
    assert found["rewound"]["gone"]
    assert found["many-persistent"]["pids"] == found["epochs-persistent"]["pids"] == 2
    assert found["many-persistent"]["at_end"] == found["many"]["at_end"] == 2


@pytest.mark.parametrize("name", ["many", "many-persistent", "shards-0", "shards-3"])
def test_each_sample_is_committed_once_over_many_worlds(found, name):
    assert found[name]["once"] in ([True], [True, True])


@pytest.mark.parametrize("name", ["shards-2-persistent", "shards-2-spawned"])
def test_workers_of_shards_start_at_the_published_position(found, name):
    assert all(found[name]["once"])


@pytest.mark.parametrize("name", ["epochs", "epochs-persistent"])
def test_a_plain_loop_over_epochs_reads_each_sample_once(found, name):
    assert found[name]["once"] == [True, True]
    assert found[name]["differ"]


@pytest.mark.parametrize("name", ["killed", "killed-persistent"])
def test_a_killed_loader_worker_is_reported_and_replaced_at_the_rewind(found, name):
    assert "DataLoader worker" in found[name]["raised"]
    assert found[name]["step"] == 1
    assert found[name]["alive"] == 2


def test_a_loader_worker_killed_unseen_is_replaced_at_the_rewind(found):
    assert found["killed-unseen"]["step"] == 1
    assert found["killed-unseen"]["first"], "else torch finds it, which looks now and then"


def test_a_datasets_exception_reaches_the_caller_and_the_step_can_be_retried(found):
    assert "is broken" in found["broken"]["raised"]
    assert found["broken"]["step"] == 1


@pytest.mark.parametrize("name", ["slow", "slow-persistent"])
def test_a_rewind_does_not_wait_for_samples_that_are_being_read(found, name):
    assert not found[name]["waited"]
    assert found[name]["samples"] == 2
    # Each worker was reading a void sample, and has 3 batches of 2 samples to read, then a fourth.
    # The void batches have 10 samples each.
    assert found[name]["reads"] <= 2 + 2 * 4 * 2


def test_workers_of_shards_stop_reading_void_batches(found):
    """Each worker gets two void batches of 40 samples, and reads one when they become void."""
    assert not found["slow-shards"]["waited"]
    assert found["slow-shards"]["samples"] == 2
    assert found["slow-shards"]["reads"] == 2


def test_hung_workers_are_replaced_when_asked(found):
    assert found["hung"]["step"] == 1
    assert found["hung"]["fresh"]


def test_beginning_a_loader_leaves_the_programs_random_stream_alone(found):
    assert found["random"]["untouched"]
    assert found["random"]["repeatable"]
    assert found["random"]["ranks_differ"]
    assert found["random"]["own_generator"]


def test_persistent_workers_of_shards_without_a_feed_need_a_named_epoch(found):
    assert found["shards-plain-persistent"]["count"] == 97
    assert "[data-loader]" in found["shards-plain-persistent"]["raised"]
    assert found["shards-plain-epochs"]["once"]
    assert found["shards-plain-epochs"]["differ"]


@pytest.mark.parametrize("name", ["virtual-index", "virtual-files"])
def test_a_virtual_shard_and_what_is_drawn_for_it_are_the_same_wherever_it_is_read(found, name):
    result = found[name]
    assert result["odd"] == [] and result["shards"] == result["drawn"] == 12 * 5
