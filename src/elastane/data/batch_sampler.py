"""Batches of indices of a fixed global size, dealt to whatever world there is.

Turns shares of positions into lists of indices, for `DataLoader(batch_sampler=...)`;
`elastane.data.feed` pairs the loader's batches with their shares. It does not use torch. How it
fails: as `elastane.data.position` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, tee

from elastane.data.arrays import np
from elastane.data.ledger import Ledger, LedgerShare
from elastane.data.permutation import Permutation
from elastane.data.position import DataPosition

__all__ = ["ElasticBatchSampler"]

# Evaluated together: enough to be fast (a call takes 40 us for any number), and few enough that the
# first batch of an epoch comes at once. Measured by bench/permutation.py.
_AHEAD_SAMPLES = 8_192
_AHEAD_SHARES = 64


class ElasticBatchSampler(DataPosition):
    """Yields the indices of this rank's share of each step, from the committed position on.

    An iterator ends with the epoch; only `commit` moves the position. With `micro_batches` k a step
    is k lists. An empty share (a step with fewer samples than ranks, or a share with fewer than k)
    is a stand-in of one index with weight 0: see LedgerShare.reads.

    `n` is the length of the dataset, `global_batch_size` the samples of a step over all ranks,
    whatever the world. Raises ConfigurationError for invalid sizes, or an epoch without a step.
    """

    def __init__(
        self,
        n: int,
        global_batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        micro_batches: int = 1,
    ) -> None:
        super().__init__(Ledger(n, global_batch_size, drop_last), seed, shuffle)
        self.accumulate(micro_batches)

    def __len__(self) -> int:
        return self.portions_left()

    def __iter__(self) -> Iterator[list[int]]:
        dealt, again = tee(self.shares())
        lists = self.lists(dealt, self.epoch)
        return lists if self.recall is None else self.recall.marked(lists, map(self.words, again))

    def lists(self, shares: Iterator[LedgerShare], epoch: int) -> Iterator[list[int]]:
        """Turn shares of one epoch into lists of indices."""
        order = Permutation(self.ledger.n, self.seed, epoch) if self.shuffle else None
        while ahead := self._ahead(shares):
            spans = [share.reads for share in ahead]
            positions = np.concatenate([np.arange(*span, dtype=np.int64) for span in spans])
            indices: Sequence[int] = (positions if order is None else order.map(positions)).tolist()
            begin = 0
            for start, stop in spans:
                end = begin + stop - start
                yield list(indices[begin:end])
                begin = end

    @staticmethod
    def _ahead(shares: Iterator[LedgerShare]) -> list[LedgerShare]:
        """Return the shares to evaluate together; none at the end."""
        ahead = list(islice(shares, 1))
        if ahead:
            more = _AHEAD_SAMPLES // max(ahead[0].samples, 1)
            ahead += islice(shares, min(more, _AHEAD_SHARES) - 1 if more > 1 else 0)
        return ahead
