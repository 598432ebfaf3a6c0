"""What a loader yields, each batch with the share it is, from the committed place on.

Owns the loader's iterator: a rewind abandons what it read ahead and begins a new one at the
committed place, for another rank and world if need be. Workers of a loader with
`persistent_workers` are kept over that; those of any other end with their iterator, as torch ends
them. Nothing that was read and not committed counts.

Must not know who decides on membership. Fails by ConfigurationError for a loader whose batches it
could not tell; what the loader raises (a sample that cannot be read, a worker that was killed)
goes to the caller as it is, and a later rewind begins with sound workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any, NamedTuple, Self

from elastane.data.checks import whole
from elastane.data.cursor import DataPosition
from elastane.data.ledger import LedgerShare
from elastane.data.loaders import END, LoaderHandle, cursor_of
from elastane.data.recall import Recall
from elastane.errors import ConfigurationError

__all__ = ["Feed", "Portion"]


class Portion(NamedTuple):
    """A batch as the loader made it, and which share of which step it is.

    Where `share.samples` is 0 the batch is a stand-in: compute it as any other, with
    `share.weight`, which is 0 then.
    """

    share: LedgerShare
    batch: Any

    @property
    def step(self) -> int:
        """The number of the step, from the beginning of epoch 0; `Feed.commit` takes it."""
        return self.share.step

    @property
    def samples(self) -> int:
        """How many samples of the step are in this batch."""
        return self.share.samples

    @property
    def weight(self) -> float:
        """What the batch's mean loss is multiplied by; see Share.weight."""
        return self.share.weight


class Feed(Iterator[Portion]):
    """Iterates over the rest of an epoch; `for portion in feed` begins at the committed place.

    `loader`: a DataLoader over `batch_sampler=ElasticBatchSampler(...)`, or over ElasticShards
    with `batch_size=None`. One feed for each; do not iterate over the loader beside it. Not for
    several threads. As a context manager it leaves no worker process behind.
    """

    def __init__(self, loader: Any) -> None:
        self.cursor: DataPosition = cursor_of(loader)
        self._recall = self.cursor.recall = Recall()
        self._handle = LoaderHandle(loader)
        self._batches: Iterator[Any] | None = None
        self._shares: Iterator[LedgerShare] = iter(())
        # Whether the loader's iterator was begun and has not failed since: else its workers, if
        # they outlive it, may be dead, or have answers on the way that belong to nothing.
        self._sound = True

    def __iter__(self) -> Self:
        self.rewind()
        return self

    def __next__(self) -> Portion:
        if self._batches is None:
            self._batches = self._begin()
        share = next(self._shares, None)
        self._sound = False
        batch = next(self._batches, END)
        self._sound = True
        if (share is None) is not (batch is END):
            raise ConfigurationError(
                f"the loader gave {'more' if share is None else 'fewer'} batches than its sampler",
                where="" if share is None else f"step {share.step}",
                expected="one batch for each share, in order",
                next_step="give the feed the DataLoader itself; let its dataset drop nothing",
                slug="data-loader",
            )
        if share is None:
            self._abandon()
            raise StopIteration
        return Portion(share, batch)

    def commit(self, step: int) -> None:
        """Count a step as done; see Cursor.commit."""
        self.cursor.commit(step)

    def rewind(
        self,
        rank: int | None = None,
        world_size: int | None = None,
        restart_workers: bool = False,
    ) -> None:
        """Deal again from the committed place; for this rank of this world, where they are given.

        Returns at once: the loader begins anew when the next portion is asked for. Workers that
        outlive an iterator first end the sample they are at; `restart_workers` replaces them
        instead, for one that hangs.
        """
        if rank is not None or world_size is not None:
            self.cursor.bind(whole("rank", rank), whole("world_size", world_size, 1))
        self._sound = self._sound and not restart_workers
        self._abandon()

    def close(self) -> None:
        """End the loader's worker processes; the feed may be used again, with new ones."""
        self._batches, self._shares, self._sound = None, iter(()), True
        self._recall.call()
        self._handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _begin(self) -> Iterator[Any]:
        self._sound = False
        cursor, rank = self.cursor, self.cursor.world[0]
        self._shares = cursor.shares()
        batches = self._handle.begin((cursor.seed, cursor.next_step, rank))
        self._sound = True
        return batches

    def _abandon(self) -> None:
        self._batches, self._shares = None, iter(())
        self._recall.call()
        self._handle.abandon(keep_workers=self._sound)
        self._sound = True
