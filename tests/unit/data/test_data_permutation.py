"""The order of an epoch: a bijection, equal on every platform, without a visible pattern."""

import numpy as np
import pytest

from elastane.data.permutation import BLOCK, Permutation
from elastane.errors import ConfigurationError

SIZES = [*range(70), 255, 256, 257, 258, 300, 511, 512, 513, 1000, 1023, 1024, 1025, 4097, 10_007]
# What this version of the order is. A change would break every checkpoint that names a place.
GOLDEN = {
    (5, 0, 0): [4, 1, 2, 3, 0],
    (10_007, 0, 0): [7693, 2289, 1955, 7570, 7310, 2573],
    (10_007, 0, 1): [9781, 7360, 3372, 9591, 2005, 3050],
    (1_000_000_000, 7, 3): [261386788, 238988905, 322408481, 653102745, 238776340, 432840544],
    (2**40 + 1, 2**64 - 1, 0): [
        755155877957,
        754468639359,
        1097230555909,
        1005954461567,
        906227192325,
        577645388496,
    ],
    (2**62, 1, 2**40): [
        959836772479735299,
        2476114519671587486,
        1200338652069625106,
        165265419536250728,
        1158029617636329895,
        3673548348430041408,
    ],
}


@pytest.mark.parametrize("n", SIZES)
def test_each_sample_has_one_position(n):
    for seed, epoch in ((0, 0), (12345, 0), (0, 1), (2**64 - 1, 10**6)):
        assert sorted(Permutation(n, seed, epoch).block(0, n).tolist()) == list(range(n))


def test_each_sample_has_one_position_at_a_million():
    n = 1_000_003
    order = Permutation(n, 5, 5)
    seen = order.block(0, n)
    assert np.array_equal(np.sort(seen), np.arange(n))


@pytest.mark.parametrize("case", GOLDEN, ids=str)
def test_the_order_never_changes(case):
    order = Permutation(*case)
    assert [_at(order, position) for position in _golden_positions(case[0])] == GOLDEN[case]


def _at(order, position):
    return int(order.map(np.array([position], dtype=np.int64))[0])


def _golden_positions(n):
    return range(n) if n < 10 else [0, 1, 2, n // 2, n - 2, n - 1]


@pytest.mark.parametrize("n", [200, 10_007, 10**9, 2**40, 2**62])
def test_the_order_is_that_of_the_formula_in_plain_integers(n):
    """Wrapping arithmetic in plain integers, which no version of NumPy or platform can change."""
    positions = [0, 1, 5, n // 3, n // 2, n - 1]
    order = Permutation(n, 99, 4)
    assert [_at(order, p) for p in positions] == [_formula(n, 99, 4, p) for p in positions]


def _formula(n, seed, epoch, position):
    keys = [_mixed(seed, epoch, n, number) >> 32 for number in range(8)]
    if n <= 256:
        table = list(range(n))
        for last in range(n - 1, 0, -1):
            chosen = _mixed(seed, epoch, n, last) % (last + 1)
            table[last], table[chosen] = table[chosen], table[last]
        return table[position]
    bits = (n - 1).bit_length() // 2
    highs = (n + 2**bits - 1) // 2**bits
    while True:
        high, low = position >> bits, position % 2**bits
        for number in range(0, 8, 2):
            low ^= _hashed(high ^ keys[number]) >> (32 - bits)
            high = (high + (_hashed(low ^ keys[number + 1]) * highs >> 32)) % highs
        position = high << bits | low
        if position < n:
            return position


def _hashed(word):
    word = word * 0x7FEB352D % 2**32
    return (word ^ word >> 15) * 0x846CA68B % 2**32


def _mixed(*words):
    state = 0
    for word in words:
        state = ((state ^ word) + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state


def test_blocks_of_any_size_and_single_positions_agree():
    order = Permutation(10**12 + 39, 3, 2)
    whole = order.block(10**11, 10**11 + 2 * BLOCK + 7)
    parts = [order.block(begin, begin + 1_000) for begin in range(10**11, 10**11 + BLOCK, 1_000)]
    assert np.array_equal(whole[: 1_000 * len(parts)], np.concatenate(parts))
    assert whole[BLOCK + 1] == _at(order, 10**11 + BLOCK + 1)
    shuffled = np.array([10**11 + 5, 10**11, 10**11 + 9])
    assert order.map(shuffled).tolist() == whole[[5, 0, 9]].tolist()


def test_no_position_of_a_block_overwrites_those_that_were_asked():
    positions = np.arange(5_000, dtype=np.int64)
    Permutation(10_007).map(positions)
    assert np.array_equal(positions, np.arange(5_000))


@pytest.mark.parametrize("position", [-1, 10_007, 2**62])
def test_a_position_out_of_range_is_refused(position):
    with pytest.raises(IndexError):
        _at(Permutation(10_007), position)
    with pytest.raises(IndexError):
        _at(Permutation(7), -1)


@pytest.mark.parametrize(
    "arguments",
    [(-1,), (1.5,), (True,), ("8",), (None,), (2**62 + 1,), (5, -1), (5, 2**64), (5, 0, -1)],
    ids=str,
)
def test_an_invalid_size_is_refused_by_name(arguments):
    with pytest.raises(ConfigurationError, match="data-size") as refused:
        Permutation(*arguments)
    name = ("n", "seed", "epoch")[len(arguments) - 1]
    assert refused.value.what.startswith(f"{name} is ")


def test_numpys_integers_are_sizes():
    order = Permutation(np.int64(300), np.uint8(1), np.int32(2))
    assert _at(order, 0) == _at(Permutation(300, 1, 2), 0)


# A z-score of this size comes once in a million times; the seeds are fixed, so it comes never.
Z_MAX = 5.0


def z_of(counts, expected):
    """Return by how many standard deviations Pearson's statistic differs from its mean."""
    freedom = counts.size - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)


@pytest.mark.parametrize("n", [256, 300, 1_000, 10_007])
@pytest.mark.parametrize("what", ["seed", "epoch"])
def test_orders_of_other_seeds_and_epochs_look_unrelated(n, what):
    draws = 2_000
    pairs = [(draw, 0) if what == "seed" else (7, draw) for draw in range(draws)]
    take = min(n, 40)
    drawn = np.stack([Permutation(n, *pair).block(0, take) for pair in pairs])
    even = np.full(n, draws / n)
    for position in range(0, take - 1, 6):
        column, after = drawn[:, position], drawn[:, position + 1]
        # Where a sample comes is spread evenly ...
        assert abs(z_of(np.bincount(column, minlength=n), even)) < Z_MAX
        # ... what comes after it at any distance alike (never itself) ...
        apart = np.bincount((after - column) % n, minlength=n)
        assert apart[0] == 0
        assert abs(z_of(apart[1:], np.full(n - 1, draws / (n - 1)))) < Z_MAX
        # ... and the next seed, or epoch, says nothing of this one.
        moved = np.bincount((column[1:] - column[:-1]) % n, minlength=n)
        assert abs(z_of(moved, np.full(n, (draws - 1) / n))) < Z_MAX


@pytest.mark.parametrize("n", [10**6, 10**9, 2**40 + 12_345])
def test_a_stretch_of_a_large_order_is_spread_over_all_samples(n):
    count, bins = 400_000, 200
    samples = Permutation(n, 11, 3).block(n // 2, n // 2 + count)
    high = np.bincount((samples * bins // n).astype(int), minlength=bins)
    low = np.bincount((samples % bins).astype(int), minlength=bins)
    # Without replacement it is more even than chance, where the stretch is much of the whole.
    assert z_of(high, count / bins) < Z_MAX
    assert z_of(low, count / bins) < Z_MAX
    steps = np.diff(samples.astype(np.float64)) / n
    assert abs(np.corrcoef(steps[:-1], steps[1:])[0, 1] + 0.5) < 0.01
    assert abs(np.corrcoef(samples[:-1].astype(float), samples[1:].astype(float))[0, 1]) < 0.01


def test_orders_of_few_samples_are_all_drawn_alike():
    counts = {}
    for seed in range(6_000):
        order = tuple(Permutation(4, seed).block(0, 4).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert abs(z_of(np.array([*counts.values()]), 250)) < Z_MAX
