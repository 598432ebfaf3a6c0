"""Datasets and loaders of other packages, with the real packages."""

import gc
import io
import tarfile
import threading

import pytest
from torch.utils.data import DataLoader

from elastane import ElasticBatchSampler
from elastane.data import sources
from elastane.data.feed import Feed
from elastane.data.shards import ElasticShards
from elastane.data.stream import ElasticStream, StreamFeed
from elastane.errors import ConfigurationError

DEADLINE_S = 90.0
LENGTHS = [7, 0, 30, 1, 12]
SAMPLES = [100 * shard + number for shard, n in enumerate(LENGTHS) for number in range(n)]


def epochs_of(source, number_of, epochs=2, batch=8):
    """Return the numbers of each epoch; each step is read as if by a new process."""
    position, found = None, [[] for _ in range(epochs)]
    while position is None or position["epoch"] < epochs:
        stream = ElasticStream(source, batch, lanes=3, collate_fn=lambda samples: samples)
        feed = StreamFeed(stream, None)
        if position is not None:
            feed.cursor.load_state_dict(position)
        portion = next(feed)
        found[portion.share.epoch] += map(number_of, portion.batch)
        feed.commit(portion.step)
        position = feed.cursor.state_dict()
    return found


def test_shards_of_a_hugging_face_iterable_dataset_come_once_filtered_and_shuffled():
    datasets = pytest.importorskip("datasets")

    def rows(shards):
        for shard, count in shards:
            yield from ({"number": 100 * shard + number} for number in range(count))

    dataset = datasets.IterableDataset.from_generator(
        rows, gen_kwargs={"shards": [*enumerate(LENGTHS)]}
    )
    even = dataset.filter(lambda row: row["number"] % 2 == 0).shuffle(seed=4, buffer_size=5)
    found = epochs_of(sources.hugging_face(even), lambda row: row["number"])
    want = [number for number in SAMPLES if number % 2 == 0]
    assert [sorted(each) for each in found] == [want, want]
    assert found[0] != found[1], "each epoch has an order of its own"


def test_a_map_style_dataset_is_no_stream():
    datasets = pytest.importorskip("datasets")
    with pytest.raises(ConfigurationError, match=r"\[data-source\]\n(.*\n)*.*ElasticBatchSampler"):
        sources.hugging_face(datasets.Dataset.from_dict({"number": [1, 2]}))


def test_samples_of_webdataset_come_once_through_its_stages(tmp_path):
    wds = pytest.importorskip("webdataset")
    for shard, count in enumerate(LENGTHS):
        with tarfile.open(tmp_path / f"part-{shard}.tar", "w") as tar:
            for number in range(count):
                data = str(100 * shard + number).encode()
                member = tarfile.TarInfo(f"{number:05}.cls")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    pattern = f"{tmp_path}/part-{{0..{len(LENGTHS) - 1}}}.tar"
    source = sources.webdataset(pattern, wds.decode(), wds.to_tuple("cls"))
    assert [sorted(each) for each in epochs_of(source, lambda row: row[0])] == [SAMPLES, SAMPLES]


def once(loader_of, count, collate=list):
    """Whether one epoch has each of `count` samples once; the world changes within it."""
    seen, step, world = [], 0, 2
    with Feed(loader_of()) as feed, Feed(loader_of()) as other:
        while feed.cursor.epoch == 0:
            for rank, each in enumerate((feed, other)[:world]):
                each.rewind(rank, world)
                portion = next(each)
                seen += [*map(int, collate(portion.batch))][: portion.samples]
                assert portion.step == step
            for each in (feed, other):
                each.commit(step)
            step += 1
            world = 1 + step % 2
    return sorted(seen) == [*range(count)]


def test_a_map_style_hugging_face_dataset_is_dealt_by_index():
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"number": [*range(50)]}).with_format("torch")

    def loader():
        batches = ElasticBatchSampler(len(dataset), 8, seed=1)
        return DataLoader(dataset, batch_sampler=batches)

    assert once(loader, 50, lambda batch: batch["number"])


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_stateful_data_loader_is_a_data_loader(options):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def loader():
        batches = ElasticBatchSampler(50, 8, seed=1)
        return stateful.StatefulDataLoader(range(50), batch_sampler=batches, **options)

    assert once(loader, 50)


def test_nodes_of_torchdata_are_dealt_by_index_and_leave_no_thread():
    nodes = pytest.importorskip("torchdata.nodes")

    class Loader:
        def __init__(self):
            self.batch_sampler = ElasticBatchSampler(50, 8, seed=1)
            source = nodes.IterableWrapper(self.batch_sampler)
            node = nodes.ParallelMapper(source, list, num_workers=2, method="thread")
            self.nodes = nodes.Loader(nodes.Prefetcher(node, prefetch_factor=2))

        def __iter__(self):
            return iter(self.nodes)

    before = {*threading.enumerate()}
    assert once(Loader, 50)
    gc.collect()
    for thread in {*threading.enumerate()} - before:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), thread


def test_chunks_of_litdata_are_read_once_in_any_world(tmp_path):
    litdata = pytest.importorskip("litdata")
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(tmp_path), chunk_size=12)
    for number in range(50):
        writer.add_item(number, number)
    writer.done()
    writer.merge()
    known = sources.litdata(litdata.StreamingDataset(str(tmp_path)))
    assert len(known.shards) > 3
    assert once(lambda: DataLoader(ElasticShards(*known, 8, lanes=2), batch_size=None), 50)


def test_shards_of_mosaicml_are_downloaded_and_read_once_in_any_world(tmp_path):
    streaming = pytest.importorskip("streaming")
    with streaming.MDSWriter(
        out=str(tmp_path / "remote"), columns={"number": "int"}, size_limit=200
    ) as writer:
        for number in range(50):
            writer.write({"number": number})
    stream = streaming.Stream(local=str(tmp_path / "local"), remote=str(tmp_path / "remote"))
    known = sources.mosaicml(stream)
    assert len(known.shards) > 3
    loader = lambda: DataLoader(  # noqa: E731
        ElasticShards(*known, 8, lanes=2), batch_size=None, collate_fn=list
    )
    assert once(loader, 50, lambda batch: [row["number"] for row in batch])


@pytest.mark.parametrize("source_of", [sources.litdata, sources.mosaicml, sources.hugging_face])
def test_a_dataset_of_another_kind_is_refused(source_of):
    with pytest.raises(ConfigurationError, match=r"given a list \[data-source\]"):
        source_of([1, 2])
