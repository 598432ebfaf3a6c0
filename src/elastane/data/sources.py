"""Sources for `ElasticStream`: how the shards of other packages' datasets are opened.

Each function takes the other package's object and imports that package when it opens a shard. It
knows nothing of ranks or steps. How it fails: ConfigurationError for an object of another kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from elastane.data.stream import ShardSource
from elastane.errors import ConfigurationError

__all__ = ["ShardSource", "hugging_face", "webdataset"]


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
        # Of this object: it is not inherited by what shard() or skip() return.
        shard.set_epoch(epoch)
        return islice(shard, start, None)

    return ShardSource(range(count), open_shard)


def webdataset(urls: str | Sequence[str], *stages: Callable[[Any], Iterable[Any]]) -> ShardSource:
    """Return the source of WebDataset's tar files: one shard for each.

    `urls` is a list, or a pattern with braces. `stages` are pipeline stages of WebDataset, such as
    `webdataset.decode("pil")`, without a shuffle; the samples that they drop do not count. A tar
    file that is opened in its middle is read from its beginning, through the stages: decoding that
    costs time belongs into the `collate_fn` of the stream.
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
