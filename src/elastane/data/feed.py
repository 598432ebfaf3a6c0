"""Pairs each batch of a loader with its share, from the committed position on.

Owns the loader's iterator. A rewind drops batches that were read ahead, and starts a new iterator
at the committed position, for another rank and world if necessary. Workers of a loader with
`persistent_workers` survive that; other workers end with their iterator.

It knows nothing of membership. How it fails: ConfigurationError for a loader whose batches it
cannot identify. The loader's own errors (an unreadable sample, a killed worker) pass through
unchanged, and a later rewind begins with new workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Self

from elastane.data.checks import whole
from elastane.data.ledger import LedgerShare
from elastane.data.loaders import END, LoaderHandle, cursor_of
from elastane.data.position import DataPosition
from elastane.data.recall import Recall
from elastane.data.stream_position import StreamShare
from elastane.errors import ConfigurationError

__all__ = ["Feed", "Portion"]


class Portion(NamedTuple):
    """A batch of the loader, with its share of a step.

    If `share.samples` is 0 the batch is a stand-in. Compute it like any other batch, with
    `share.weight`, which is 0.
    """

    share: LedgerShare | StreamShare
    batch: Any

    @property
    def step(self) -> int:
        """The number of the step, counted from the start of epoch 0; `Feed.commit` takes it."""
        return self.share.step

    @property
    def samples(self) -> int:
        """The number of the step's samples in this batch."""
        return self.share.samples

    @property
    def weight(self) -> float:
        """The factor of the batch's mean loss; see LedgerShare.weight."""
        return self.share.weight

    @property
    def is_further(self) -> bool:
        """Whether the step follows its epoch's last one and has only samples of lost workers."""
        return self.share.is_further


class Feed(Iterator[Portion]):
    """Iterates over the rest of an epoch; `for portion in feed` begins at the committed position.

    `loader` is a DataLoader over `batch_sampler=ElasticBatchSampler(...)`, or over ElasticShards
    with `batch_size=None`. Use one feed for each loader, and do not iterate over the loader itself.
    Not thread-safe. As a context manager it leaves no worker process behind.
    """

    def __init__(self, loader: Any) -> None:
        self.cursor: DataPosition = cursor_of(loader)
        self._recall = self.cursor.recall = Recall()
        self._handle = LoaderHandle(loader)
        self._batches: Iterator[Any] | None = None
        self._shares: Iterator[LedgerShare] = iter(())
        # False while the iterator starts or reads, and after it failed: persistent workers may then
        # be dead, or may still send old batches.
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
        """Commit a step; see DataPosition.commit."""
        self.cursor.commit(step)

    def rewind(
        self,
        rank: int | None = None,
        world_size: int | None = None,
        restart_workers: bool = False,
    ) -> None:
        """Continue from the committed position, as `rank` of `world_size` workers if given.

        Returns at once: the loader starts again when the next portion is requested. Persistent
        workers first finish their current sample. With `restart_workers` they are replaced instead,
        since one may hang.
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

    def __exit__(self, *_: object) -> None:
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
