"""Opens the shards of other packages' datasets, for `ElasticStream` and `ElasticShards`.

Each function takes the other package's object, and imports that package when it opens a shard. The
module knows nothing of ranks or steps. How it fails: ConfigurationError for an object of another
type.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple

from elastane.data.shard_reading import ShardSource
from elastane.errors import ConfigurationError

__all__ = ["KnownShards", "ShardSource", "hugging_face", "litdata", "mosaicml", "webdataset"]


class KnownShards(NamedTuple):
    """Shards with the number of samples in each, for `ElasticShards(*known, ...)`."""

    shards: list[tuple[int, int]]
    open_shard: Callable[[int, int], Iterable[Any]]


def litdata(dataset: Any) -> KnownShards:
    """Return the chunks of LitData's `StreamingDataset`, with the samples in each.

    The dataset is read by index, chunk after chunk. Its own shuffle, distribution and state are not
    used. Raises ConfigurationError for another object.
    """
    chunks = getattr(dataset, "region_of_interest", None)
    if chunks is None:
        raise _refused(
            f"litdata() was given a {type(dataset).__name__}",
            "a litdata.StreamingDataset",
            "sources.litdata(litdata.StreamingDataset(folder))",
        )
    lengths = [stop - start for start, stop in chunks]
    return KnownShards(
        [*enumerate(lengths)], _IndexedChunks(dataset, [*accumulate(lengths, initial=0)])
    )


@dataclass(frozen=True)
class _IndexedChunks:
    """Opens a chunk of a dataset with indices."""

    dataset: Any
    begins: list[int]

    def __call__(self, chunk: int, start: int) -> Iterator[Any]:
        begin, end = self.begins[chunk : chunk + 2]
        return (self.dataset[index] for index in range(begin + start, end))


def mosaicml(stream: Any) -> KnownShards:
    """Return the shards of MosaicML's `streaming.Stream`, with the samples in each.

    The stream needs a `local` folder. With a `remote` one, each shard is downloaded by the worker
    that first reads it; workers of a node may share `local`. A StreamingDataset raises
    ConfigurationError: a new worker could not create one, since the surviving workers use its
    shared memory.
    """
    if not all(hasattr(stream, name) for name in ("prepare_shard", "get_shards", "local")):
        raise _refused(
            f"mosaicml() was given a {type(stream).__name__}",
            "a streaming.Stream",
            "sources.mosaicml(streaming.Stream(local=folder, remote=url))",
        )
    from streaming.base.world import World

    stream.apply_default(_STREAM_DEFAULTS)
    folder = Path(stream.local) / (stream.split or "")
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "elastane.lock"):
        shards = stream.get_shards(World(1, 1, 1, 0), allow_unsafe_types=False)
    return KnownShards([*enumerate(map(len, shards))], _MosaicmlShards(stream, folder, shards))


# What streaming.StreamingDataset gives to its streams.
_STREAM_DEFAULTS = {
    "split": None,
    "download_retry": 2,
    "download_timeout": 60,
    "validate_hash": None,
    "keep_zip": False,
}


@dataclass(frozen=True)
class _MosaicmlShards:
    """Opens a shard of a stream, after its download."""

    stream: Any
    folder: Path
    shards: list[Any]

    def __call__(self, number: int, start: int) -> Iterator[Any]:
        shard = self.shards[number]
        # The download is locked, since it would overwrite that of another process.
        with _locked(self.folder / f"elastane.{number}.lock"):
            self.stream.prepare_shard(shard)
        return (shard[index] for index in range(start, len(shard)))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which the kernel releases; a read-only folder needs no lock."""
    if not os.access(path.parent, os.W_OK):
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def hugging_face(dataset: Any) -> ShardSource:
    """Return the source of a Hugging Face `IterableDataset`: its own shards.

    `map`, `filter` and a seeded `shuffle` of the dataset apply within a shard. A shard that is
    opened in its middle is read from its beginning. Raises ConfigurationError for a map-style
    dataset, which ElasticBatchSampler deals by index.
    """
    if not all(hasattr(dataset, name) for name in ("num_shards", "shard", "set_epoch")):
        raise _refused(
            f"hugging_face() was given a {type(dataset).__name__}",
            "a datasets.IterableDataset",
            "DataLoader(dataset, batch_sampler=ElasticBatchSampler(len(dataset), ...)), if it has"
            " indices",
        )
    count = dataset.num_shards

    def open_shard(number: int, start: int, epoch: int) -> Iterator[Any]:
        shard = dataset.shard(num_shards=count, index=number)
        # The objects that shard() and skip() return do not have this attribute.
        shard.set_epoch(epoch)
        return islice(shard, start, None)

    return ShardSource(range(count), open_shard)


def webdataset(urls: str | Sequence[str], *stages: Callable[[Any], Iterable[Any]]) -> ShardSource:
    """Return the source of WebDataset's tar files: one shard for each.

    `urls` is a list, or a pattern with braces. `stages` are pipeline stages of WebDataset, such as
    `webdataset.decode("pil")`, without a shuffle; the samples that they drop do not count. A tar
    file that is opened in its middle is read from its beginning, through the stages: decoding that
    costs time belongs in the `collate_fn` of the stream.
    """
    if isinstance(urls, str):
        from braceexpand import braceexpand

        urls = list(braceexpand(urls))

    def open_shard(url: str, start: int, _epoch: int) -> Iterator[Any]:
        from webdataset import DataPipeline, SimpleShardList, tarfile_to_samples

        pipeline = DataPipeline(SimpleShardList([url]), tarfile_to_samples(), *stages)
        return islice(pipeline, start, None)

    return ShardSource(urls, open_shard)


def _refused(what: str, expected: str, next_step: str) -> ConfigurationError:
    return ConfigurationError(what, expected=expected, next_step=next_step, slug="data-source")
