"""A pseudo-random order of [0, n) that can be evaluated at any position, in O(1) time and memory.

A Feistel network mixes the two halves of a position with keys from (seed, epoch, n). A result
outside [0, n) is mapped again until it is inside (cycle walking). It uses only integer arithmetic
that wraps at 32 bits, so the order is equal on every platform and with every version of NumPy. A
checkpoint relies on the order, so it never changes (golden values in the tests). It is a shuffle,
not a cipher.

Sources: Luby and Rackoff 1988 (the network); Black and Rogaway 2002 (cycle walking, halves of
unequal size); the multipliers are those of Wellons' lowbias32 hash.

It knows nothing of ranks, batches or torch. How it fails: ConfigurationError for n, seed or epoch
out of range, IndexError for a position out of range.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from elastane.data.checks import N_MAX, SEED_END, whole

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Positions evaluated at once: the work arrays of a block fit in a core's second-level cache.
BLOCK = 65_536
# From 6 rounds on, no statistic of the tests distinguishes the order from a random one, for any n.
# With 4, the pairs of neighbours still do for n below 1,000.
_ROUNDS = 8
# A network over a few bits has few permutations, so up to here the order is a fair random table.
_TABLE_MAX = 256
_MASK64 = 2**64 - 1
_MULTIPLIER_1 = np.uint32(0x7FEB352D)
_MULTIPLIER_2 = np.uint32(0x846CA68B)
_SHIFT = np.uint32(15)
_REDUCE = np.uint64(32)


def mixed(*words: int) -> int:
    """Return 64 bits that depend on all bits of all words (splitmix64, chained)."""
    state = 0
    for word in words:
        state = (state ^ word) + 0x9E3779B97F4A7C15 & _MASK64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK64
        state ^= state >> 31
    return state


class Permutation:
    """The order of one epoch: `order.block(start, stop)` has the samples at these positions.

    It is a bijection of [0, n) for each (n, seed, epoch), and holds a few numbers for any n.
    0 <= n <= 2**62, 0 <= seed < 2**64, 0 <= epoch.
    """

    def __init__(self, n: int, seed: int = 0, epoch: int = 0) -> None:
        self.n = whole("n", n, 0, N_MAX)
        self.seed = whole("seed", seed, 0, SEED_END - 1)
        self.epoch = whole("epoch", epoch, 0, 2**63 - 1)
        # Low half: whole bits. High half: only as many values as needed, so that the network covers
        # hardly more than n, and few results have to walk.
        self._low_bits = max(self.n - 1, 1).bit_length() // 2
        self._highs = -(-self.n >> self._low_bits)
        keys = [mixed(self.seed, self.epoch, self.n, number) for number in range(_ROUNDS)]
        self._keys = [np.uint32(key >> 32) for key in keys]
        self._table = self._drawn() if self.n <= _TABLE_MAX else None

    def __len__(self) -> int:
        return self.n

    def block(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the samples at the positions from `start` up to `stop`."""
        return self.map(np.arange(start, stop, dtype=np.int64))

    def map(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at these positions; needs memory for some blocks besides the result.

        `positions`: one dimension, int64. Raises IndexError for a position outside [0, n).
        """
        samples = np.empty(len(positions), dtype=np.int64)
        if not len(positions):
            return samples
        if positions.min() < 0 or positions.max() >= self.n:
            raise IndexError(f"a position is outside of 0 to {self.n - 1}")
        for begin in range(0, len(positions), BLOCK):
            part = slice(begin, begin + BLOCK)
            samples[part] = self._walked(positions[part])
        return samples

    def _walked(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        if self._table is not None:
            return self._table[positions]
        samples = self._once(positions)
        # Fewer than 1 in sqrt(n). The network is a bijection, so each walk ends inside.
        outside = np.flatnonzero(samples >= self.n)
        while len(outside):
            again = self._once(samples[outside])
            samples[outside] = again
            outside = outside[again >= self.n]
        return samples

    def _once(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Map positions through the network once: a bijection of [0, highs << low_bits)."""
        bits = np.int64(self._low_bits)
        high = (positions >> bits).astype(np.uint32)
        low = (positions & np.int64((1 << self._low_bits) - 1)).astype(np.uint32)
        down = np.uint32(32 - self._low_bits)
        highs, highs_wide = np.uint32(self._highs), np.uint64(self._highs)
        word, spare = np.empty_like(high), np.empty_like(high)
        wide = np.empty(len(high), dtype=np.uint64)
        for number in range(0, _ROUNDS, 2):
            _hashed(high, self._keys[number], word, spare)
            np.right_shift(word, down, out=word)
            np.bitwise_xor(low, word, out=low)
            _hashed(low, self._keys[number + 1], word, spare)
            np.multiply(word, highs_wide, out=wide)
            np.right_shift(wide, _REDUCE, out=wide)
            np.add(high, wide.astype(np.uint32), out=high)
            # The sum modulo `highs`: below it the difference wraps, and is the larger one.
            np.subtract(high, highs, out=word)
            np.minimum(high, word, out=high)
        return (high.astype(np.int64) << bits) | low

    def _drawn(self) -> NDArray[np.int64]:
        """Draw a table (Fisher and Yates); 64 bits for 256 choices have no measurable bias."""
        table = list(range(self.n))
        for last in range(self.n - 1, 0, -1):
            chosen = mixed(self.seed, self.epoch, self.n, last) % (last + 1)
            table[last], table[chosen] = table[chosen], table[last]
        return np.array(table, dtype=np.int64)


def _hashed(half: Any, key: Any, word: Any, spare: Any) -> None:
    """Leave a hash of each number of `half` in `word`, whose upper bits are the good ones."""
    np.bitwise_xor(half, key, out=word)
    np.multiply(word, _MULTIPLIER_1, out=word)
    np.right_shift(word, _SHIFT, out=spare)
    np.bitwise_xor(word, spare, out=word)
    np.multiply(word, _MULTIPLIER_2, out=word)
