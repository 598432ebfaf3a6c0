"""Which ranks make the others wait in each step: single comparisons, and whole histories."""

import math
import random

import pytest

from elastane.observe.events import DATA_CHARS_MAX
from elastane.protocol.stragglers import (
    COMPARED_STEPS,
    COMPARISONS_MIN,
    EXCESS_MIN_S,
    LISTED_MAX,
    LISTED_SLOWEST,
    NAMED_MAX,
    WINDOW_STEPS,
    Pace,
    StepTimes,
    StragglerRules,
    Why,
    listed_parts,
    pace_of,
)


def pace(rank, step, share=0.75, whole_s=0.1, **more):
    return Pace(
        rank, step, share, more.pop("spread", 0.01), whole_s, more.pop("loads_s", 0.0), **more
    )


def looked(rules, rounds, *paces_of, first=WINDOW_STEPS):
    """Compare this many times, each time after enough new steps; return all stragglers."""
    found = [], []
    for number in range(rounds):
        step = first + COMPARED_STEPS * number
        paces = {rank: make(rank, step) for rank, make in enumerate(paces_of)}
        for all_of, some in zip(found, rules.look(paces, len(paces)), strict=True):
            all_of.extend(some)
    return found


def even(rank, step):
    return pace(rank, step)


def slow(rank, step):
    return pace(rank, step, share=0.99)


def test_the_rank_that_never_waits_is_named_once():
    begun, ended = looked(StragglerRules(), 3 * COMPARISONS_MIN, even, slow, even)
    [found] = begun
    assert (found.rank, ended) == (1, [])
    assert found.own_s == pytest.approx(0.099) and found.others_s == pytest.approx(0.075)
    assert found.sentence("a").startswith(
        "rank 1 on node a makes the others wait in each step: its own part takes 0.099 s, theirs"
        " 0.075 s (1.32 times); "
    )


def test_a_straggler_ends_once_its_rank_is_as_fast_as_the_others():
    rules = StragglerRules()
    looked(rules, COMPARISONS_MIN, even, slow, even)
    begun, [ended] = looked(rules, 1, even, even, even, first=1000)
    assert (begun, ended.rank, rules.named) == ([], 1, {})


def test_a_named_rank_stays_named_between_the_two_limits():
    rules = StragglerRules()
    looked(rules, COMPARISONS_MIN, even, slow, even)
    between = lambda rank, step: pace(rank, step, share=0.75 * 1.15)  # noqa: E731
    assert looked(rules, 3, even, between, even, first=1000) == ([], [])
    assert [*rules.named] == [1]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"loads_s": 0.02}, Why.LOADER),
        ({"queues_s": 0.02}, Why.CPU_SHARE),
        ({"runs_s": 0.02}, Why.COMPUTE),
        ({"runs_s": 0.005, "queues_s": 0.005}, Why.OTHER),
    ],
)
def test_the_reason_is_what_explains_half_of_the_excess(more, why):
    def odd(rank, step):
        return pace(rank, step, share=0.99, **more)

    [found], _ = looked(StragglerRules(), COMPARISONS_MIN, even, odd, even)
    assert found.why is why


def test_each_rank_of_a_slow_node_is_named_up_to_a_bound():
    workers = [even] * (2 * NAMED_MAX + 4) + [slow] * (NAMED_MAX + 2)
    begun, _ = looked(StragglerRules(), COMPARISONS_MIN + 2, *workers)
    assert len({found.rank for found in begun}) == len(begun) == NAMED_MAX


def test_steps_that_are_too_short_to_tell_name_no_rank():
    whole_s = EXCESS_MIN_S * 3
    short = lambda share: lambda rank, step: pace(rank, step, share, whole_s)  # noqa: E731
    assert looked(StragglerRules(), 9, short(0.75), short(0.99), short(0.75)) == ([], [])


def test_a_world_with_a_rank_without_a_pace_is_not_compared():
    rules = StragglerRules()
    for step in range(WINDOW_STEPS, 200):
        assert rules.look({0: even(0, step), 1: slow(1, step)}, 3) == ([], [])
    assert rules.look({0: slow(0, 99)}, 1) == ([], [])


def test_nothing_is_compared_before_each_rank_has_made_new_steps():
    rules = StragglerRules()
    looked(rules, COMPARISONS_MIN - 1, even, slow, even)
    same = WINDOW_STEPS + COMPARED_STEPS * (COMPARISONS_MIN - 2)
    last = {0: even(0, 900), 1: slow(1, same), 2: even(2, 900)}
    assert rules.look(last, 3) == ([], [])
    assert rules.look({**last, 1: slow(1, 900)}, 3)[0]


def test_a_worker_without_own_time_breaks_nothing():
    idle = lambda rank, step: pace(rank, step, share=0.0)  # noqa: E731
    begun, _ = looked(StragglerRules(), COMPARISONS_MIN, idle, even, idle)
    assert [found.rank for found in begun] == [1]
    assert looked(StragglerRules(), COMPARISONS_MIN, idle, idle, idle) == ([], [])


def test_a_pace_takes_the_shortest_steps_of_the_window():
    times = [StepTimes(0.1, 0.02, 0.01)] * (WINDOW_STEPS - 6) + [StepTimes(2.0, 1.9, 0.0)] * 6
    found = pace_of(3, 40, times, 0.05, 0.01)
    assert (found.rank, found.step, found.whole_s, found.loads_s) == (3, 40, 0.1, 0.01)
    assert found.share == pytest.approx(0.8) and found.spread == 0.0


class History:
    """The steps of a world from a seed: each is as long as that of its slowest rank.

    Each rank's own part scatters by `sigma`, and all of them together by 15%, as with texts of
    different length. One in a hundred is five times as long. Each 25th is twenty times as long, on
    rank 0 alone or on all ranks, like a save or an evaluation.
    """

    def __init__(self, seed, ranks, sigma, straggler=None):
        self.rng = random.Random(seed)
        self.ranks, self.sigma, self.straggler = ranks, sigma, straggler
        self.saves = self.rng.choice([[0], range(ranks)])
        self.times = [[] for _ in range(ranks)]
        self.rules = StragglerRules()

    def run(self, steps, slow_from=math.inf):
        """Make the steps; return (step, rank) of all named stragglers."""
        named = []
        for step in range(1, steps + 1):
            self._step(step, slow_from)
            if step >= WINDOW_STEPS and step % COMPARED_STEPS == 0:
                paces = {rank: pace_of(rank, step, own) for rank, own in enumerate(self.times)}
                named += [(step, one.rank) for one in self.rules.look(paces, self.ranks)[0]]
        return named

    def _step(self, step, slow_from):
        gauss, both = self.rng.gauss, 0.1 * math.exp(self.rng.gauss(0, 0.15))
        owns = [both * math.exp(gauss(0, self.sigma)) for _ in self.times]
        owns = [own * 5 if self.rng.random() < 0.01 else own for own in owns]
        if step % 25 == 0:
            owns = [own * 20 if rank in self.saves else own for rank, own in enumerate(owns)]
        if step > slow_from:
            owns[self.straggler] *= 1.3
        whole = 1.03 * max(owns)
        for times, own in zip(self.times, owns, strict=True):
            times.append(StepTimes(whole, whole - own, 0.0))
            del times[:-WINDOW_STEPS]


@pytest.mark.parametrize("ranks", [2, 3, 8, 32])
def test_a_rank_of_one_and_a_third_is_named_within_twenty_steps(ranks):
    """In 20 of 20 histories with a random slow rank, whose own parts scatter by 3%."""
    for seed in range(20):
        rank = seed % ranks
        named = History(seed, ranks, 0.03, rank).run(124, slow_from=101)
        assert [one for _, one in named] == [rank], (seed, named)
        assert 101 < named[0][0] <= 101 + 20, (seed, named)


@pytest.mark.parametrize(("ranks", "sigma"), [(2, 0.15), (3, 0.05), (4, 0.1), (8, 0.2)])
def test_noise_alone_names_no_rank(ranks, sigma):
    assert History(ranks, ranks, sigma).run(4_000) == []


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("sigma", [0.03, 0.05, 0.1, 0.15, 0.2])
def test_a_hundred_thousand_steps_of_noise_name_no_rank(ranks, sigma):
    assert History(ranks, ranks, sigma).run(100_000) == []


def test_own_parts_of_a_small_world_are_listed_by_rank():
    paces = {1: pace(1, 16, share=0.5), 0: pace(0, 16, whole_s=1e-9), 2: pace(2, 16, whole_s=20.0)}
    listed = listed_parts(paces)
    assert listed.ranks == (0, 1, 2)
    assert listed.own_ms == "0.01,50,15000" and listed.median_ms == 50.0


def test_of_a_large_world_the_slowest_are_listed_and_each_list_fits_its_field():
    paces = {rank: pace(rank, 16, share=0.5 + rank % 97 / 1000) for rank in range(8192)}
    listed = listed_parts(paces)
    assert len(listed.ranks) == LISTED_SLOWEST and {rank % 97 for rank in listed.ranks} == {96}
    long = {rank: pace(rank, 16, share=0.0123456, whole_s=0.00123) for rank in range(LISTED_MAX)}
    assert len(listed_parts(long).ranks) == LISTED_MAX
    assert len(listed_parts(long).own_ms) <= DATA_CHARS_MAX
