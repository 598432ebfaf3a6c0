"""The open shards of one rank, and the thread that reads ahead in them.

A reader keeps the samples of its shard from the committed offset on. So a retried step, or one that
was read ahead, reads no shard again. `ShardReaders` opens, keeps and closes the readers.
`ReadAhead` fills them in a thread while a step is computed; until it has stopped, no other code may
use them.

How it fails: with the exceptions of the source, in the thread that requests the sample. An error in
the read-ahead thread is raised when the sample is requested. ConfigurationError for a shard that is
shorter than at an earlier reading.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from elastane.data.shard_ledger import LaneReading, OpenShard, ShardSpan
from elastane.errors import ConfigurationError

_END = object()
# How long the end of a job waits for a sample that is being read.
CLOSE_S = 5.0


@dataclass(frozen=True)
class ShardSource:
    """Data in shards. `open_shard(shard, start, epoch)` returns the samples from `start` on.

    Each time a shard is opened for an epoch it has to give the same samples in the same order. It
    is read in a thread while steps are computed, so it draws from no random stream of the program.
    `shards` is the same list on all ranks; its items are anything that `open_shard` understands.
    """

    shards: Sequence[Any]
    open_shard: Callable[[Any, int, int], Iterable[Any]]


class ShardReader:
    """An open shard: its samples by number, kept from the committed offset on."""

    def __init__(self, samples: Iterable[Any], start: int) -> None:
        self._samples = iter(samples)
        self._kept: list[Any] = []
        self.start = start
        self._has_ended = False
        self._failure: Exception | None = None

    def read(self, first: int, stop: int) -> list[Any]:
        """Return the samples from number `first` up to `stop`, or to the end of the shard."""
        self.reach(stop)
        return self._kept[first - self.start : stop - self.start]

    def found(self, begin: int, stop: int) -> tuple[int, bool]:
        """Return how many samples [begin, stop) has, and whether the shard ends there."""
        self.reach(stop + 1)
        there = self.start + len(self._kept)
        return min(stop, there) - begin, there <= stop

    def forget(self, before: int) -> None:
        """Drop the samples before this number: they are committed."""
        dropped = max(0, min(before - self.start, len(self._kept)))
        del self._kept[:dropped]
        self.start += dropped

    def reach(self, stop: int) -> None:
        """Read up to number `stop`, or to the end of the shard."""
        while not self._has_ended and self.start + len(self._kept) < stop:
            if self._failure is not None:
                # A failed iterator would end at its next call, as if the shard had ended.
                raise self._failure
            try:
                sample = next(self._samples, _END)
            except Exception as error:
                self._failure = error
                raise
            if sample is _END:
                self._has_ended = True
            else:
                self._kept.append(sample)

    def close(self) -> None:
        """Close the source's iterator, if it can be closed."""
        close = getattr(self._samples, "close", None)
        if close is not None:
            close()


class ShardReaders:
    """The open shards of this rank, by epoch and number."""

    def __init__(self, source: ShardSource) -> None:
        self._source = source
        self._open: dict[tuple[int, int], ShardReader] = {}
        self._used: set[tuple[int, int]] = set()

    def at(self, reading: LaneReading, epoch: int) -> ShardReader:
        """Return the reader of a shard, which has the samples from `reading.begin` on."""
        key = epoch, reading.shard
        reader = self._open.get(key)
        if reader is None or reader.start > reading.begin:
            reader = self._open[key] = self._opened(reading.shard, reading.begin, epoch)
        self._used.add(key)
        return reader

    def first_sample(self, epoch: int) -> Any:
        """Return the first sample of the epoch, which must have one."""
        for shard in range(len(self._source.shards)):
            sample = self._opened(shard, 0, epoch).read(0, 1)
            if sample:
                return sample[0]
        raise AssertionError("a step of an epoch without samples")

    def owed(self, span: ShardSpan, epoch: int) -> list[Any]:
        """Return the samples of a span that a lost rank had read.

        Raises ConfigurationError if the shard has fewer now.
        """
        shard, start, stop = span
        reader = self._opened(shard, start, epoch)
        try:
            samples = reader.read(start, stop)
        finally:
            reader.close()
        if len(samples) < stop - start:
            raise ConfigurationError(
                f"shard {self._source.shards[shard]!r} ended after {start + len(samples)} samples,"
                f" and a worker that was lost has read {stop}",
                expected="the same samples in the same order each time a shard is opened",
                next_step="make the source repeatable: no draw without a seed, no changing files",
                slug="data-shard",
            )
        return samples

    def trim(self, epoch: int, lanes: Iterable[OpenShard]) -> None:
        """Drop committed samples; close shards that are not in `lanes` or were not used.

        `lanes` has the open shards of the committed position. Call this after each commit.
        """
        offsets = {(epoch, opened.shard): opened.offset for opened in lanes}
        for key in self._open.keys() - (self._used & offsets.keys()):
            self._open.pop(key).close()
        for key, reader in self._open.items():
            reader.forget(offsets[key])
        self._used.clear()

    def close(self) -> None:
        """Close all shards."""
        while self._open:
            self._open.popitem()[1].close()
        self._used.clear()

    def _opened(self, shard: int, start: int, epoch: int) -> ShardReader:
        return ShardReader(self._source.open_shard(self._source.shards[shard], start, epoch), start)


class ReadAhead:
    """A thread that reads what a step will need, sample by sample."""

    def __init__(self, readers: ShardReaders) -> None:
        self._readers = readers
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def begin(self, epoch: int, readings: Sequence[LaneReading]) -> None:
        """Begin to read; `finish` or `stop` comes before any other use of the readers."""
        self.finish()
        # A daemon thread: a source that hangs must not keep the process from ending.
        self._thread = threading.Thread(
            target=self._read, args=(epoch, readings), name="elastane-read-ahead", daemon=True
        )
        self._thread.start()

    def finish(self) -> None:
        """Wait until all samples are read."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def stop(self) -> None:
        """Stop after the current sample."""
        self._stopped.set()
        self.finish()
        self._stopped.clear()

    def close(self) -> bool:
        """Stop; return False if the source still holds the thread after CLOSE_S.

        After False this object must not be used again; after True it may begin again.
        """
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                return False
        self._thread = None
        self._stopped.clear()
        return True

    def _read(self, epoch: int, readings: Sequence[LaneReading]) -> None:
        # The error is raised again when a step needs the sample.
        with suppress(Exception):
            for reading in readings:
                if self._stopped.is_set():
                    return
                reader = self._readers.at(reading, epoch)
                for number in range(reading.begin, reading.stop + reading.reports):
                    if self._stopped.is_set():
                        return
                    reader.reach(number + 1)
