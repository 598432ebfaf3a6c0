"""Sources of other packages, read by the packages themselves."""

import io
import tarfile

import pytest

from elastane.data import sources
from elastane.data.stream import ElasticStream, StreamFeed
from elastane.errors import ConfigurationError

LENGTHS = [7, 0, 30, 1, 12]
SAMPLES = [100 * shard + number for shard, n in enumerate(LENGTHS) for number in range(n)]


def epochs_of(source, number_of, epochs=2, batch=8):
    """The numbers of each epoch; each step's reader is another process in effect."""
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
