"""A sampler like torch's DistributedSampler that continues in the middle of an epoch.

For scripts whose batches are made by DataLoader(batch_size=..., sampler=...). The position is the
number of the epoch's samples that all ranks together have finished, as the script reports by
`commit`. `elastane.data.batch_sampler` puts each sample into exactly one step, and keeps the global
batch in every world.

It uses torch only to ask for rank and world. How it fails: ConfigurationError.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from elastane.data.arrays import np
from elastane.data.checks import SEED_END, ceil_div, length_of, whole
from elastane.data.permutation import Permutation
from elastane.data.position import matching, world_of_process

__all__ = ["ElasticSampler"]

_AHEAD = 8_192


class ElasticSampler:
    """Deals an epoch's order, from `start_index` on, to `num_replicas` in turn.

    Rank r gets positions start_index + r, + num_replicas, ... After s batches of b samples on every
    rank, exactly the positions below start_index + s * b * num_replicas are done, and another world
    continues there. As with torch's samplers all ranks get equally many, since a rank with one
    batch less would leave the others waiting. If the rest is not divisible, its first samples are
    repeated at its end, at most num_replicas - 1 of them.

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
        # None until an epoch is set or begun, which `start_index` then belongs to.
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
        for begin in range(0, count, _AHEAD):
            turns = np.arange(begin, min(begin + _AHEAD, count), dtype=np.int64)
            # Wraps only in the last turn; more than once if the rest is smaller than the world.
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
