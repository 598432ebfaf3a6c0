"""An iterable dataset over files of known length, with the positions of `data.position`.

Owns which samples of which shard a rank reads for each step, and the open shards. Each sample is in
exactly one committed step of each epoch, as with indices. That requires that each shard has its
stated number of samples, in the same order each time it is opened. Any other shard is reported by
name when its end is reached. The position is one integer for each epoch, for any number of shards.

The shards of an epoch, in its order, form one stream. It is cut into L lanes of equal length (to
one sample) that are read in parallel: position p is sample p // L of lane p % L. A step's
positions, ordered by lane, are divided among the ranks. Hence a rank reads the same lanes in every
step, from start to end, while the world is the same. The number of committed samples determines how
far each lane has been read, so the position stays one integer.

How it fails: ConfigurationError, and the exceptions of `open_shard`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar

import torch
from torch.utils.data import IterableDataset, get_worker_info

from elastane.data.checks import whole
from elastane.data.ledger import Ledger, LedgerShare, VirtualDeal
from elastane.data.permutation import Permutation, mixed
from elastane.data.position import DataPosition
from elastane.data.random_streams import begin_streams
from elastane.data.recall import Recall
from elastane.errors import ConfigurationError

__all__ = ["ElasticShards", "LaneRun", "Lanes"]
Shard = TypeVar("Shard")
# The parameters of an iteration: step, rank, world size, micro-batches, virtual shards.
Begin: TypeAlias = tuple[int, int, int, int, VirtualDeal]
_END = object()
# Enough lanes for 16 ranks to read shards of their own, and few enough for one rank to keep open.
LANES = 16


class LaneRun(NamedTuple):
    """Consecutive samples that one lane reads: [start, stop) of shard number `shard`."""

    lane: int
    shard: int
    start: int
    stop: int


class Lanes:
    """The lanes of one epoch. `order` has the shards' numbers in order, `lengths` their lengths."""

    def __init__(self, order: Sequence[int], lengths: Sequence[int], lanes: int) -> None:
        self.lanes = lanes
        self._order = order
        self._begins = [0, *accumulate(lengths[shard] for shard in order)]
        self._lane_begins = [
            0, *accumulate(self._before(lane, self._begins[-1]) for lane in range(lanes))
        ]  # fmt: skip

    def _before(self, lane: int, position: int) -> int:
        """Return how many positions before this one belong to the lane."""
        return (position - lane + self.lanes - 1) // self.lanes

    def runs(self, batch: tuple[int, int], share: tuple[int, int]) -> Iterator[LaneRun]:
        """Yield the runs that a share of a batch reads, in order.

        A share's positions count along the batch as it is ordered by lane. So shares that partition
        the batch read each of its samples once.
        """
        low, high = batch
        slot = low
        for lane in range(self.lanes):
            first, end = self._before(lane, low), self._before(lane, high)
            begin = max(share[0] - slot, 0)
            stop = min(share[1] - slot, end - first)
            if begin < stop:
                yield from self._in_shards(lane, first + begin, first + stop)
            slot += end - first

    def _in_shards(self, lane: int, first: int, end: int) -> Iterator[LaneRun]:
        here, stop = self._lane_begins[lane] + first, self._lane_begins[lane] + end
        at = bisect_right(self._begins, here) - 1
        while here < stop:
            begins, ends = self._begins[at : at + 2]
            until = min(stop, ends)
            if here < until:
                yield LaneRun(lane, self._order[at], here - begins, until - begins)
            here, at = until, at + 1


class ElasticShards(DataPosition, IterableDataset[list[Any]]):
    """Yields lists of samples: this rank's share of each step, from the committed position on.

    For `DataLoader(shards, batch_size=None, collate_fn=default_collate)`, with or without workers.
    Worker v of W makes every W-th batch, and skips the samples of other workers in its lanes.

    `shards` are pairs of a shard (a path, or anything) and its number of samples.
    `open_shard(shard, start)` returns an iterable of its samples from number `start` on; it should
    seek there. `shuffle` changes the order of the shards with the epoch, but not the order within a
    shard. `lanes` is how many parts of the stream all ranks together read side by side; it
    determines which samples make a step, so it is fixed for the job.
    """

    def __init__(
        self,
        shards: Iterable[tuple[Shard, int]],
        open_shard: Callable[[Shard, int], Iterable[Any]],
        global_batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        lanes: int = LANES,
    ) -> None:
        pairs = list(shards)
        self._shards = [shard for shard, _ in pairs]
        self._lengths = [whole(f"length of shard {shard!r}", long) for shard, long in pairs]
        self._open_shard = open_shard
        self.lanes = whole("lanes", lanes, 1)
        super().__init__(Ledger(sum(self._lengths), global_batch_size), seed, shuffle)
        self._beginning = IterationBeginning()

    def __len__(self) -> int:
        return self.portions_left()

    def __iter__(self) -> Iterator[list[Any]]:
        info = get_worker_info()
        begin = self._here()
        if info is None:
            return self._lists(self.ledger.deal_epoch(*begin))
        told = self._beginning.of_worker(begin)
        if told is None:
            # An error here would end the worker silently, so it is raised by the first next().
            return iter(_stale, None)
        return self._lists(islice(self.ledger.deal_epoch(*told), info.id, None, info.num_workers))

    def __getstate__(self) -> dict[str, Any]:
        # A copy for a worker that is not forked: torch.distributed is not initialized there, so the
        # copy must carry the world.
        return {**self.__dict__, "_world": self.world}

    def bind(self, rank: int, world_size: int) -> Self:
        """Set the rank (from 0) and the number of workers of later iterators; return self."""
        super().bind(rank, world_size)
        self._publish()
        return self

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, unless the position is in that epoch already."""
        super().set_epoch(epoch)
        self._publish()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position of a state; raises ConfigurationError, unchanged, for other data."""
        super().load_state_dict(state)
        self._publish()

    def shares(self) -> Iterator[LedgerShare]:
        """Yield this rank's shares to the end of the epoch; a new iteration has the same."""
        self._publish()
        return super().shares()

    def described(self) -> dict[str, object]:
        """Return the properties that define the order and its steps; shard lengths as a hash."""
        lengths = mixed(*self._lengths)
        return {**super().described(), "lanes": self.lanes, "lengths": lengths}

    def _publish(self) -> None:
        self._beginning.publish(self._here())

    def cut_into(self, shards: int, stream_seed: int = 0) -> Self:
        """Deal each step in this many virtual shards, in every world.

        The seeds cover random draws of `collate_fn`, but not of `open_shard`, since the number of
        samples that a reader skips depends on the world.
        """
        super().cut_into(shards, stream_seed)
        self._publish()
        return self

    def deal_by(self, counts: Sequence[int]) -> Self:
        """Deal this many virtual shards to each rank; existing iterators keep theirs."""
        super().deal_by(counts)
        self._publish()
        return self

    @property
    def deals_owed(self) -> bool:
        """False: shards are read forwards, so a later step cannot take lost samples."""
        return False

    def _here(self) -> Begin:
        return self.next_step, *self.world, self.micro_batches, self.virtual

    def _lanes(self, epoch: int) -> Lanes:
        count = len(self._shards)
        order = Permutation(count, self.seed, epoch) if self.shuffle else None
        numbers = list(range(count)) if order is None else order.block(0, count).tolist()
        return Lanes(numbers, self._lengths, self.lanes)

    def _lists(self, shares: Iterator[LedgerShare]) -> Iterator[list[Any]]:
        lanes = None
        readers = Readers(self._shards, self._lengths, self._open_shard, self.recall)
        for share in shares:
            lanes = lanes or self._lanes(share.epoch)
            batch = share.batch_start, share.batch_stop
            (span,) = share.reads  # Shards are read forwards, so nothing is owed.
            runs = lanes.runs(batch, span)
            samples = [sample for run in runs for sample in readers.read(run)]
            if words := self.words(share):
                begin_streams(*words)
            yield samples
        self._beginning.ended = True


class IterationBeginning:
    """The parameters of the next iteration, published to workers.

    A new worker gets the parameters with its copy of the dataset. A persistent worker reads them
    from memory that it shares with the loader's process. A commit does not change that memory, so a
    worker that starts late begins at the same step as the others.
    """

    def __init__(self) -> None:
        cells: Any = torch.zeros(8, dtype=torch.int64)
        self._cells = cells.share_memory_()
        self._number = 0
        # In a worker: the last parameters it used, and whether it has reached the end since.
        self._last: int | None = None
        self.ended = False

    def publish(self, begin: Begin) -> None:
        """Publish the next iteration's parameters to surviving workers."""
        self._number += 1
        *plain, virtual = begin
        self._cells.copy_(torch.tensor([self._number, *plain, *virtual]))

    def of_worker(self, own: Begin) -> Begin | None:
        """Return the parameters of a worker's next iteration; `own`: those it was started with.

        None if the worker has reached the end of its epoch and no iteration was published since.
        """
        if self._last is None:
            self._last = self._number
            return own
        number, step, rank, world_size, micro_batches, *virtual = self._cells.tolist()
        if number == self._last and self.ended:
            return None
        self._last, self.ended = number, False
        return step, rank, world_size, micro_batches, VirtualDeal(*virtual)


def _stale() -> list[Any]:
    raise ConfigurationError(
        "a worker of a loader with persistent_workers=True would read its epoch once more",
        expected="a Feed over the loader, or set_epoch() before each epoch",
        next_step="for portion in Feed(loader): ...",
        slug="data-loader",
    )


class Readers:
    """The open shards of one iteration, one for each lane that this process reads."""

    def __init__(
        self,
        shards: Sequence[Any],
        lengths: Sequence[int],
        open_shard: Callable[[Any, int], Iterable[Any]],
        recall: Recall | None,
    ) -> None:
        self._shards, self._lengths, self._open_shard = shards, lengths, open_shard
        self._recall, self._asked = recall, recall.number if recall else 0
        # By lane: the shard's number, the number of the next sample, and the samples from there on.
        self._open: dict[int, tuple[int, int, Iterator[Any]]] = {}

    def read(self, run: LaneRun) -> Iterator[Any]:
        """Yield the samples of a run, and skip those between the lane's last run and this one."""
        shard, at, samples = self._open.pop(run.lane, (-1, 0, iter(())))
        if shard != run.shard or at > run.start:
            at, samples = run.start, iter(self._open_shard(self._shards[run.shard], run.start))
        for number in range(at, run.stop):
            if self._recall is not None:
                self._recall.check(self._asked)
            sample = next(samples, _END)
            if sample is _END:
                raise self._unlike(run.shard, f"ended after {number}")
            if number >= run.start:
                yield sample
        if run.stop < self._lengths[run.shard]:
            self._open[run.lane] = run.shard, run.stop, samples
        elif next(samples, _END) is not _END:
            raise self._unlike(run.shard, "has more")

    def _unlike(self, shard: int, found: str) -> ConfigurationError:
        return ConfigurationError(
            f"shard {self._shards[shard]!r} {found}",
            expected=f"{self._lengths[shard]} samples, the length that was given for it",
            next_step="count its samples again, and start the data over with the right length",
            slug="data-shard",
        )
