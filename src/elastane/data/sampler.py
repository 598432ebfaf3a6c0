"""The two elastic samplers: of single indices, and of batches of a fixed global size.

`ElasticBatchSampler` puts each sample into exactly one step, and keeps the global batch in every
world. It turns shares of positions into lists of indices, for `DataLoader(batch_sampler=...)`;
`elastane.data.feed` pairs the loader's batches with their shares. `ElasticSampler` replaces torch's
DistributedSampler in DataLoader(batch_size=..., sampler=...), and continues in the middle of an
epoch. With it a script reports, by `commit`, how many samples all ranks together have finished.

torch is used only to ask for rank and world. How they fail: ConfigurationError.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, tee
from typing import Any

import numpy as np

from elastane.data.checks import SEED_END, ceil_div, length_of, whole
from elastane.data.ledger import Ledger, LedgerShare, length_of_spans
from elastane.data.permutation import Permutation
from elastane.data.position import DataPosition, matching, world_of_process

# Positions that are evaluated together: enough to be fast (a call takes 40 us for any number), and
# few enough that the first batch of an epoch comes at once. Measured by bench/permutation.py.
_AHEAD_SAMPLES = 8_192
_AHEAD_SHARES = 64


class ElasticSampler:
    """Deals an epoch's order, from `start_index` on, to `num_replicas` in turn.

    Rank r gets positions start_index + r, + num_replicas, ... After s batches of b samples on every
    rank, exactly the positions below start_index + s * b * num_replicas are done, and another world
    continues there. As with torch's samplers, all ranks get equally many samples, since the others
    would wait for a rank with one batch less. If the remaining samples are not divisible by the
    number of ranks, the first of them are repeated at the end, at most num_replicas - 1.

    `num_replicas` and `rank`, if None, are read from the default process group at each iteration.
    `start_index` is the position in the first epoch. Raises ConfigurationError for a dataset
    without a length, and for numbers out of range.
    """

    def __init__(
        self,
        dataset: object,
        num_replicas: int | None = None,
        rank: int | None = None,
        start_index: int = 0,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        self.n = length_of(dataset)
        self._replicas = None if num_replicas is None else whole("num_replicas", num_replicas, 1)
        most = None if self._replicas is None else self._replicas - 1
        self._rank = None if rank is None else whole("rank", rank, 0, most)
        self.start_index = whole("start_index", start_index, 0, self.n)
        self.shuffle = bool(shuffle)
        self.seed = whole("seed", seed, 0, SEED_END - 1)
        # None until the first epoch is set or begun; `start_index` is the position in that one.
        self._epoch: int | None = None

    @property
    def epoch(self) -> int:
        """The epoch whose order is dealt."""
        return self._epoch or 0

    @property
    def rank(self) -> int:
        """The rank that this sampler deals to."""
        rank = world_of_process()[0] if self._rank is None else self._rank
        return whole("rank", rank, 0, self.num_replicas - 1)

    @property
    def num_replicas(self) -> int:
        """The number of ranks that an epoch is dealt to."""
        return world_of_process()[1] if self._replicas is None else self._replicas

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, unless it is the current one, as after load_state_dict."""
        epoch = whole("epoch", epoch)
        if self._epoch not in (None, epoch):
            self.start_index = 0
        self._epoch = epoch

    def commit(self, samples: int) -> None:
        """Record that this many more samples are finished over all ranks; padding counts once.

        Existing iterators continue as they are; the next one begins here.
        """
        self._epoch = self.epoch
        self.start_index = min(self.n, self.start_index + whole("samples", samples))

    def __len__(self) -> int:
        return ceil_div(self.n - self.start_index, self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        self._epoch = self.epoch
        order = Permutation(self.n, self.seed, self._epoch) if self.shuffle else None
        return self._indices(order, self.start_index, self.rank, len(self), self.num_replicas)

    def _indices(
        self, order: Permutation | None, start: int, rank: int, count: int, replicas: int
    ) -> Iterator[int]:
        rest = self.n - start
        for begin in range(0, count, _AHEAD_SAMPLES):
            turns = np.arange(begin, min(begin + _AHEAD_SAMPLES, count), dtype=np.int64)
            # The position wraps in the last turn; repeatedly if fewer samples than ranks remain.
            positions = start + (turns * replicas + rank) % rest
            yield from (positions if order is None else order.map(positions)).tolist()

    def state_dict(self) -> dict[str, Any]:
        """Return epoch and position, equal on all ranks that commit the same."""
        place = {"epoch": self.epoch, "start_index": self.start_index}
        return {"format": 1, **self._described(), **place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position of a state; raises ConfigurationError, unchanged, for other data."""
        matching(self._described(), state, type(self).__name__)
        epoch = whole("epoch", state.get("epoch"))
        self.start_index = whole("start_index", state.get("start_index"), 0, self.n)
        self._epoch = epoch

    def _described(self) -> dict[str, object]:
        return {"n": self.n, "seed": self.seed, "shuffle": self.shuffle}


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
            positions = np.concatenate(
                [np.arange(*s, dtype=np.int64) for each in spans for s in each]
            )
            indices: Sequence[int] = (positions if order is None else order.map(positions)).tolist()
            begin = 0
            for each in spans:
                end = begin + length_of_spans(each)
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
