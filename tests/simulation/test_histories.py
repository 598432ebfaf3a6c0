"""Thousands of histories of faults hold what must always hold.

A failing seed prints its story and the command that replays it; put it into KEPT then.
"""

import pytest

from elastane.testing.simulation import run_seed

CHUNK = 100
CHUNKS = 15
SOAK_CHUNKS = 400
# Seeds that once failed, with what was wrong: they are played for ever.
KEPT = [
    (15, True, "a stale holder was let into a forming world: two sides trained"),
    (51, True, "workers that left on a drain's SIGTERM were taken for a job well done"),
    (58, True, "an agent of the job, back after its end, was turned away instead of told"),
    (22, False, "a holder outside the world that was pieced together sent the rules in circles"),
    (88, False, "an agent kept failed or hanging workers for a coordinator that never came back"),
    (101, True, "a coordinator that took up an ended job closed before its agents could come"),
    (209, False, "fences began anew when nobody held workers as the coordinator came back"),
    (536, False, "what nodes had said before their world was pieced together was forgotten"),
    (4064, False, "a coordinator without memory settled before old holders could speak"),
    (6356, False, "gated workers were kept for a coordinator that had gone for good"),
    (8747, True, "an assignment that had waited in a paused host's buffer was started"),
    (9819, False, "a departure was charged when its node came back with failed workers"),
    (16852, True, "the same, in a store-backed job"),
    (18026, False, "half of a world was resumed as if it were all of it"),
    (17450, False, "two worlds with one fence were pieced together as one"),
    (30483, False, "the same, with more nodes"),
    (30654, False, "the same, and the rules went in circles"),
    (39602, False, "a drain taken up again ended the job as a success"),
]


@pytest.mark.parametrize("store_backed", [True, False], ids=["store", "endpoint"])
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_history_breaks_what_must_hold(chunk, store_backed):
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        run_seed(seed, store_backed=store_backed)


@pytest.mark.parametrize(("seed", "store_backed", "was"), KEPT, ids=[str(k[0]) for k in KEPT])
def test_a_seed_that_once_failed_holds(seed, store_backed, was):
    assert run_seed(seed, store_backed=store_backed).events, was


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("store_backed", [True, False], ids=["store", "endpoint"])
@pytest.mark.parametrize("chunk", range(CHUNKS, CHUNKS + SOAK_CHUNKS))
def test_no_history_of_many_breaks_what_must_hold(chunk, store_backed):
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        run_seed(seed, store_backed=store_backed)


def test_one_seed_is_one_history():
    assert [run_seed(7, store_backed=True) for _ in range(2)] == [
        run_seed(7, store_backed=True) for _ in range(2)
    ]


def test_histories_meet_what_they_are_meant_to_meet():
    results = [run_seed(seed, store_backed=True) for seed in range(200)]
    assert sum(r.restarts_used for r in results) > 10
    assert sum(r.worlds > 2 for r in results) > 40
    assert sum("succeeded" in r.ended for r in results) > 10
    assert sum("restarts" in r.ended for r in results) > 5
    assert sum("joined within" in r.ended for r in results) > 0
