"""Thousands of histories of faults hold what must always hold.

A failing seed prints a story that is as small as could be found, and the command that replays it;
put its line into kept_seeds.txt then. ELASTANE_SOAK_SEEDS is how many the soak plays in each mode.
"""

import os
from pathlib import Path

import msgspec
import pytest
from played_histories import all_hold, played

from elastane.coordinator.rules import ranks
from simulation import Cut, History, HistoryFailedError, Violation, run_seed, setup_of
from simulation.kept import read_kept
from simulation.shrink import shrunk

CHUNK = 100
CHUNKS = 3
# The first chunks with a store are played by the test that looks at what they meet.
LOOKED_AT = 2
SOAK_SEEDS = int(os.environ.get("ELASTANE_SOAK_SEEDS", "500000"))
KEPT = read_kept(Path(__file__).parent / "kept_seeds.txt")
MODES = pytest.mark.parametrize("store_backed", [True, False], ids=["store", "endpoint"])


@pytest.mark.parametrize(
    ("mode", "chunk"),
    [
        *(("store", chunk) for chunk in range(LOOKED_AT, CHUNKS)),
        *(("endpoint", chunk) for chunk in range(CHUNKS)),
    ],
)
def test_no_history_breaks_what_must_hold(mode, chunk):
    all_hold(range(chunk * CHUNK, (chunk + 1) * CHUNK), [mode == "store"])


@MODES
def test_nodes_of_a_rack_are_next_to_each_other_in_all_histories(store_backed, monkeypatch):
    def play() -> None:
        for seed in range(40):
            setting = setup_of(seed, store_backed=store_backed)
            History(msgspec.structs.replace(setting, racks=2)).run()

    play()
    monkeypatch.setattr(ranks, "grouped", list)
    with pytest.raises(HistoryFailedError, match="the nodes of a rack are apart"):
        play()


@pytest.mark.parametrize(
    "kept", KEPT, ids=[f"{k.seed}-{k.store_backed}-{k.in_place}" for k in KEPT]
)
def test_a_seed_that_once_failed_holds(kept):
    drawn = {name: getattr(kept, name) for name in ("store_backed", "in_place", "span", "kind")}
    assert run_seed(kept.seed, cut=kept.cut, **drawn).events, kept.was


@pytest.mark.soak
@pytest.mark.timeout(36_000)
@MODES
def test_no_history_of_a_million_breaks_what_must_hold(store_backed):
    first = CHUNK * CHUNKS
    jobs = len(os.sched_getaffinity(0))
    all_hold(range(first, first + SOAK_SEEDS), [store_backed], jobs)


def test_one_seed_is_one_history():
    assert [run_seed(7, store_backed=True) for _ in range(2)] == [
        run_seed(7, store_backed=True) for _ in range(2)
    ]


def test_the_first_histories_hold_and_meet_what_they_are_meant_to_meet():
    results, stories, kinds = [], "", set()
    for seed in range(LOOKED_AT * CHUNK):
        history, result = played(setup_of(seed, store_backed=True))
        results.append(result)
        stories += history.cluster.story.text()
        kinds |= {planned.kind for planned in history.setting.plan}
    assert all(r.events for r in results)
    assert sum(r.restarts_used for r in results) > 15
    assert sum(r.worlds > 2 for r in results) > 25
    assert sum("succeeded" in r.ended for r in results) > 6
    assert sum("restarts" in r.ended for r in results) > 3
    assert sum("joined within" in r.ended for r in results) > 0
    for what in (
        "crashes silently",
        "owner wants",
        "the job's owner gives agent",
        "is fenced",
        "leave the world",
        "stands still",
        "is suspended",
        "clocks of",
        "wrong sequence number",
        "goes dead",
        "delays all",
        "is slow",
        "partition",
        "do not reach each other",
        "nothing passes",
        "dies where it is",
        "the store is away",
        "the store takes",
        "answers of the store are lost",
        "loses the lease",
        "cannot reach the store",
        "reaches no other node, now or later",
        "too few nodes reach it",
        "SIGTERM",
        "agent of",
        "agent and orphan reaper of",
        "workers of",
        "orphan reaper of",
        "the zygote of",
        "the store process of",
        "the snapshot server of",
    ):
        assert what in stories, what
    assert len(kinds) == 38


def test_a_failing_history_is_shrunk_to_the_fault_that_matters(monkeypatch):
    from simulation.faults import Faults

    def breaks(self):
        raise Violation("something that a drain breaks")

    monkeypatch.setattr(Faults, "_drain", breaks)
    setting = next(
        s
        for s in (setup_of(n, store_backed=True) for n in range(500))
        if len(s.plan) > 3 and "drain" in [p.kind for p in s.plan] and len(s.sizes) > 3
    )
    with pytest.raises(HistoryFailedError) as failure:
        History(setting).run()
    small = shrunk(setting, Cut(), failure.value)
    drains = sum(p.kind == "drain" for p in setting.plan)
    assert str(small).count("FAULT") == 0
    left_out = str(small).split("--without ")[1].split()[0].split(",")
    assert len(left_out) >= len(setting.plan) - drains
    assert "--nodes 1 --story" in str(small)
    assert (
        str(small)
        .splitlines()[-1]
        .startswith(f"replay: python -m simulation --seed {setting.seed} ")
    )


def test_a_shrinking_ends_in_its_time(monkeypatch):
    from simulation.faults import Faults

    def breaks(self):
        raise Violation("something that a drain breaks")

    monkeypatch.setattr(Faults, "_drain", breaks)
    setting = next(
        s
        for s in (setup_of(n, store_backed=True) for n in range(500))
        if len(s.plan) > 3 and "drain" in [p.kind for p in s.plan]
    )
    with pytest.raises(HistoryFailedError) as failure:
        History(setting).run()
    assert shrunk(setting, Cut(), failure.value, limit_s=0.0) is failure.value


@pytest.mark.parametrize("line", ["7 store", "7 somewhere # x", "seven store # x"])
def test_a_line_of_kept_seeds_that_says_too_little_is_refused(tmp_path, line):
    path = tmp_path / "kept.txt"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=r"7|seven"):
        read_kept(path)
