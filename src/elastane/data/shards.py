"""An iterable dataset over files of known length, with the same place and the same deal.

Owns which samples of which shard a rank reads for each step, and the open shards. A sample is in
exactly one committed step of each epoch, as with indices, if each shard has as many samples as was
said and gives them in the same order each time it is opened; one that does not is refused by name
when its end is reached. The state is the cursor's: one integer for each epoch, however many shards
and readers there are.

Fails by ConfigurationError, and with whatever `open_shard` raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Self, TypeAlias, TypeVar

import torch
from torch.utils.data import IterableDataset, get_worker_info

from elastane.data.checks import whole
from elastane.data.cursor import DataPosition
from elastane.data.lanes import LaneRun, Lanes
from elastane.data.ledger import Ledger, LedgerShare
from elastane.data.permutation import Permutation, mixed
from elastane.data.recall import Recall
from elastane.data.streams import begin_streams
from elastane.errors import ConfigurationError

__all__ = ["ElasticShards"]
Shard = TypeVar("Shard")
# Of an iteration: step, rank, world size, micro-batches, virtual shards.
Begin: TypeAlias = tuple[int, int, int, int, int]
_END = object()
# Enough for 16 ranks to read each its own shards, and few enough to be open at once by one.
LANES = 16


class ElasticShards(DataPosition, IterableDataset[list[Any]]):
    """Yields lists of samples: this rank's share of each step, from the committed place on.

    For `DataLoader(shards, batch_size=None, collate_fn=default_collate)`, with workers or without;
    worker v of W makes every W-th batch, and skips in its lanes what the others read.

    `shards`: pairs of a shard (a path, anything) and its number of samples. `open_shard(shard,
    start)`: an iterable of its samples from number `start` on; it should seek there. The order of
    the shards changes with the epoch (`shuffle`), that within a shard does not. `lanes`: how many
    places of the stream are read side by side, by all ranks together; it decides which samples
    make a step, so it is fixed for the job.
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
        self._beginning = Beginning()

    def __len__(self) -> int:
        return self.portions_left()

    def __iter__(self) -> Iterator[list[Any]]:
        info = get_worker_info()
        begin = self._here()
        if info is None:
            return self._lists(self.ledger.deal_epoch(*begin))
        told = self._beginning.of_worker(begin)
        if told is None:
            # An error here would end the worker unheard; one from next() is told.
            return iter(_stale, None)
        return self._lists(islice(self.ledger.deal_epoch(*told), info.id, None, info.num_workers))

    def __getstate__(self) -> dict[str, Any]:
        # On the way to a loader's worker that is no fork: there nobody can ask for the world.
        return {**self.__dict__, "_world": self.world}

    def bind(self, rank: int, world_size: int) -> Self:
        """Deal from now on for this rank of this world; iterators that exist keep theirs."""
        super().bind(rank, world_size)
        self._publish()
        return self

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; in the middle of that very epoch, stay."""
        super().set_epoch(epoch)
        self._publish()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the place of a state; ConfigurationError, and no change, for one of other data."""
        super().load_state_dict(state)
        self._publish()

    def shares(self) -> Iterator[LedgerShare]:
        """Give this rank's shares to the end of the epoch; an iteration begun now has the same."""
        self._publish()
        return super().shares()

    def described(self) -> dict[str, object]:
        """What makes the order and its steps; the lengths of the shards by what they hash to."""
        lengths = mixed(*self._lengths)
        return {**super().described(), "lanes": self.lanes, "lengths": lengths}

    def _publish(self) -> None:
        self._beginning.publish(self._here())

    def cut_into(self, shards: int, stream_seed: int = 0) -> Self:
        """Deal each step in so many virtual shards from now on, whatever the world is.

        Of what is drawn at random, that covers `collate_fn`, and not what `open_shard` gives: how
        far a reader skips depends on the world.
        """
        super().cut_into(shards, stream_seed)
        self._publish()
        return self

    def _here(self) -> Begin:
        return self.next_step, *self.world, self.micro_batches, self.virtual_shards

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
            runs = lanes.runs(batch, share.reads)
            samples = [sample for run in runs for sample in readers.read(run)]
            if words := self.words(share):
                begin_streams(*words)
            yield samples
        self._beginning.ended = True


class Beginning:
    """With what an iteration begins, told to workers.

    A worker that is new has it in its own copy of the dataset; one that lives on over epochs and
    worlds reads it from memory that is shared with the loader's process. A commit does not touch
    that, so a worker that begins late begins where the others do.
    """

    def __init__(self) -> None:
        cells: Any = torch.zeros(6, dtype=torch.int64)
        self._cells = cells.share_memory_()
        self._number = 0
        # Of a worker: which beginning it had last, and whether it came to the end since.
        self._last: int | None = None
        self.ended = False

    def publish(self, begin: Begin) -> None:
        """Tell workers that live on with what their next iteration begins."""
        self._number += 1
        self._cells.copy_(torch.tensor([self._number, *begin]))

    def of_worker(self, own: Begin) -> Begin | None:
        """Return with what this iteration of a worker begins; `own` is what its copy says.

        None where it came to the end of its epoch, and was told of no other since.
        """
        if self._last is None:
            self._last = self._number
            return own
        number, step, rank, world_size, micro_batches, shards = self._cells.tolist()
        if number == self._last and self.ended:
            return None
        self._last, self.ended = number, False
        return step, rank, world_size, micro_batches, shards


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
        # By lane: the shard's number, the number of the next sample, and the samples from there.
        self._open: dict[int, tuple[int, int, Iterator[Any]]] = {}

    def read(self, run: LaneRun) -> Iterator[Any]:
        """Give the samples of a run; what lies between the lane's last run and this is skipped."""
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
            expected=f"{self._lengths[shard]} samples, as was said of it",
            next_step="count its samples again, and begin the data anew: the deal counts on it",
            slug="data-shard",
        )
