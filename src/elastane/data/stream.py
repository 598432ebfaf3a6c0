"""A stream: elastic data from sources that are read front to back and have unknown lengths.

A script gives an `ElasticStream` to `job.steps` or to an ElasticLoader. `StreamFeed` reads it for
one rank: it reads this rank's part of each round, and exchanges the numbers of samples with the
other ranks. Unknown lengths require that exchange: before it, no rank knows the weight of a share
or the end of a shard. With known lengths, `ElasticShards` needs no exchange.

While a step is computed, a thread reads the samples of the next step, as if this one will be
committed. It only fills the readers, which keep uncommitted samples, so a wrong guess costs only
time.

How it fails: ConfigurationError, the exceptions of the source, and those of the exchange.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeAlias

from elastane.data.checks import whole
from elastane.data.feed import Portion
from elastane.data.ledger import cut
from elastane.data.shard_reading import ReadAhead, ShardReaders, ShardSource
from elastane.data.shards import LANES
from elastane.data.stream_position import StreamPosition
from elastane.errors import ConfigurationError

# A function that returns the sums of these numbers over all ranks.
Exchange: TypeAlias = Callable[[list[int]], Sequence[int]]
_NONE = object()


class ReadingCutError(Exception):
    """Raised through a feed whose exchange lost a peer; it never reaches the script."""


class ElasticStream:
    """Deals the samples of a source exactly once per epoch, in any world.

    For `job.steps` and for an ElasticLoader.

    `source` is a ShardSource, or what a function of `elastane.data.sources` returns.
    `global_batch_size` is the number of samples of a step over all ranks; only the last step of an
    epoch has fewer. `shuffle` changes the order of the shards with the epoch, but not the order
    within a shard. `lanes` is how many shards all ranks together read side by side: a multiple of
    the usual world size, so that no shard is read twice. It is fixed for the job, like the batch.

    `collate_fn` makes a batch of a list of samples, in the rank that uses them. Decoding that costs
    time belongs there. The default is torch's `default_collate`.
    """

    def __init__(
        self,
        source: ShardSource,
        global_batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        lanes: int = LANES,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        if not isinstance(source, ShardSource):
            raise ConfigurationError(
                f"the source of the stream is a {type(source).__name__}",
                expected="a ShardSource",
                next_step="ElasticStream(sources.hugging_face(dataset), ...), or another function"
                " of elastane.data.sources",
                slug="data-source",
            )
        self.source = source
        self.collate_fn = collate_fn
        self.position = StreamPosition(
            len(source.shards), global_batch_size, seed, lanes, shuffle=shuffle
        )


class StreamFeed(Iterator[Portion]):
    """Iterates over the steps of a stream from the committed position, over all epochs."""

    def __init__(self, stream: ElasticStream, exchange: Exchange) -> None:
        self.cursor = stream.position
        self._stream = stream
        self._exchange = exchange
        self._readers = ShardReaders(stream.source)
        self._ahead = ReadAhead(self._readers)
        self._trimmed_at = self.cursor.next_step
        self._waiting: deque[Portion] = deque()
        self._spare: Any = _NONE

    def __iter__(self) -> StreamFeed:
        return self

    def __next__(self) -> Portion:
        if not self._waiting:
            step = self.read_step()
            sums: Sequence[int] | None = None
            while True:
                try:
                    report = step.send(sums)
                except StopIteration as read:
                    self._waiting.extend(read.value)
                    self._ahead.begin(*self.cursor.expected())
                    break
                sums = report if self.cursor.world[1] == 1 else self._exchange(report)
        return self._waiting.popleft()

    def commit(self, step: int) -> None:
        """Commit a step; see StreamPosition.commit."""
        self.cursor.commit(step)

    def rewind(self, rank: int | None = None, world_size: int | None = None) -> None:
        """Continue from the committed position, for this rank of this world if given."""
        self._ahead.stop()
        if rank is None and world_size is None:
            self.cursor.forget()
        else:
            self.cursor.bind(whole("rank", rank), whole("world_size", world_size, 1))
        self._waiting.clear()

    def close(self) -> None:
        """Close the open shards, unless a source does not return from a read."""
        self._waiting.clear()
        if self._ahead.close():
            self._readers.close()

    def read_step(self) -> Generator[list[int], Sequence[int] | None, list[Portion]]:
        """Read this rank's part of the next step, from the committed position; return its portions.

        Yields this rank's report of each round, and is sent the sum of all ranks' reports.
        """
        self.cursor.forget()
        self._ahead.finish()
        if self.cursor.next_step != self._trimmed_at:
            self._trimmed_at = self.cursor.next_step
            self._readers.trim(self.cursor.epoch, self.cursor.committed.lanes)
        epoch, rank = self.cursor.epoch, self.cursor.world[0]
        owed = [self._readers.owed(span, epoch) for span in self.cursor.owed_of(rank)]
        own = [sample for samples in owed for sample in samples]
        while not self.cursor.is_whole:
            samples, report = self._read_round()
            own += samples
            sums = yield report
            assert sums is not None, "the sum of the reports is sent"
            self.cursor.learn(sums)
        if own:
            self._spare = own[-1]
        parts = self.cursor.micro_batches
        cuts = [cut(0, len(own), part, parts) for part in range(parts)]
        shares = self.cursor.shares([stop - start for start, stop in cuts])
        return [
            Portion(share, self._batch(own[start:stop] or [self._stand_in()]))
            for share, (start, stop) in zip(shares, cuts, strict=True)
        ]

    def _read_round(self) -> tuple[list[Any], list[int]]:
        """Return this rank's samples of a round, and its report."""
        own: list[Any] = []
        found: dict[int, tuple[int, bool]] = {}
        for reading in self.cursor.readings():
            reader = self._readers.at(reading, self.cursor.epoch)
            own += reader.read(reading.first, reading.stop)
            if reading.reports:
                found[reading.lane] = reader.found(reading.begin, reading.stop)
        return own, self.cursor.report(found, len(own))

    def _batch(self, samples: list[Any]) -> Any:
        collate = self._stream.collate_fn
        if collate is not None:
            return collate(samples)
        from torch.utils.data import default_collate

        return default_collate(samples)

    def _stand_in(self) -> Any:
        """Return a sample for an empty share, which is computed with weight 0."""
        if self._spare is _NONE:
            self._spare = self._readers.first_sample(self.cursor.epoch)
        return self._spare
