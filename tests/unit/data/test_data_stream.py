"""ElasticStream in one process: shares, weights, ends of epochs, and faulty sources."""

import threading

import pytest

from elastane.data.shard_reading import ShardSource
from elastane.data.stream import ElasticStream, StreamFeed
from elastane.errors import ConfigurationError, JobError
from elastane.worker.mode import Deterministic

LENGTHS = [5, 0, 9, 3]


class Opened:
    """A source of (shard, number); it records how often and where each shard was opened."""

    def __init__(self, lengths=LENGTHS):
        self.lengths = lengths
        self.at = []

    def __call__(self, shard, start, _epoch):
        self.at.append((shard, start))
        return [(shard, number) for number in range(start, self.lengths[shard])]


def stream_of(opened=None, batch=4, **options):
    opened = opened or Opened()
    options = {"shuffle": False, "lanes": 2, "collate_fn": list, **options}
    return ElasticStream(ShardSource(range(len(opened.lengths)), opened), batch, **options)


def feed_of(stream, rank=0, world_size=1):
    feed = StreamFeed(stream, None)
    feed.rewind(rank, world_size)
    return feed


def read(*feeds):
    """Return the portions of the next step of each rank."""
    steps, sums = [feed.read_step() for feed in feeds], None
    while True:
        reports, read = [], []
        for step in steps:
            try:
                reports.append(step.send(sums))
            except StopIteration as end:
                read.append(end.value)
        if read:
            return read
        sums = [sum(numbers) for numbers in zip(*reports, strict=True)]


def test_steps_have_the_batch_size_until_the_last_one_of_an_epoch_which_is_known_as_such():
    feed = feed_of(stream_of())
    sizes, lasts = [], []
    for step in range(10):
        portion = next(feed)
        sizes.append(portion.samples)
        lasts.append(feed.cursor.is_last_of_epoch(step))
        feed.commit(portion.step)
        assert feed.cursor.is_last_of_epoch(step) == lasts[-1], "after the body too"
    assert sizes == [4, 4, 4, 4, 1] * 2
    assert lasts == [False] * 4 + [True] + [False] * 4 + [True]


@pytest.mark.parametrize("lengths", [[4, 4], [8], [0, 8, 0, 0], [4, 0, 4, 0, 0]])
def test_no_step_is_empty_where_shards_end_with_a_step_or_are_empty(lengths):
    feed = feed_of(stream_of(Opened(lengths), lanes=1))
    for step in range(4):
        assert next(feed).samples == 4
        assert feed.cursor.is_last_of_epoch(step) == (step % 2 == 1)
        feed.commit(step)


def test_a_rank_without_samples_gets_a_stand_in_of_weight_0():
    ranks = [feed_of(stream_of(Opened([1])), rank, 3) for rank in range(3)]
    portions = [portion for [portion] in read(*ranks)]
    assert [portion.samples for portion in portions] == [1, 0, 0]
    assert [portion.weight for portion in portions] == [3, 0, 0]
    assert [portion.batch for portion in portions] == [[(0, 0)]] * 3


def test_micro_batches_have_the_weights_of_their_samples():
    stream = stream_of(batch=5)
    stream.position.accumulate(2)
    [portions] = read(feed_of(stream))
    assert [p.samples for p in portions] == [2, 3] and sum(p.weight for p in portions) == 1
    assert [p.share.is_last for p in portions] == [False, True]


def test_a_step_that_is_read_again_opens_no_shard_again():
    opened = Opened()
    feed = feed_of(stream_of(opened))
    [[first]] = read(feed)
    feed.rewind(0, 1)
    [[again]] = read(feed)
    assert (again.step, again.batch) == (first.step, first.batch)
    assert opened.at == [(0, 0), (1, 0), (2, 0)]


def test_a_position_continues_in_another_process_in_the_middle_of_a_shard():
    feed = feed_of(stream_of())
    seen = list(next(feed).batch)
    feed.commit(0)
    opened = Opened()
    ranks = [feed_of(stream_of(opened), rank, 2) for rank in range(2)]
    for step in range(1, 5):
        for other in ranks:
            if step == 1:
                other.cursor.load_state_dict(feed.cursor.state_dict())
        for [portion] in read(*ranks):
            seen += portion.batch[: portion.samples]
        for other in ranks:
            other.commit(step)
    assert sorted(seen) == sorted((s, n) for s, count in enumerate(LENGTHS) for n in range(count))
    assert [rank.cursor.epoch for rank in ranks] == [1, 1]
    assert all(start for shard, start in opened.at[:2] if shard == 0)


def test_readers_of_shards_that_this_rank_no_longer_reads_are_closed():
    closed = []

    def opened(shard, start, _epoch):
        try:
            yield from ((shard, number) for number in range(start, 9))
        finally:
            closed.append(shard)

    stream = ElasticStream(ShardSource(range(2), opened), 4, shuffle=False, collate_fn=list)
    feed, other = feed_of(stream), feed_of(stream_of(Opened([9, 9]), lanes=4), 1, 2)
    read(feed)
    feed.commit(0)
    feed.rewind(0, 2)
    other.cursor.load_state_dict(feed.cursor.state_dict())
    for step in (1, 2):
        read(feed, other)
        feed.commit(step)
        other.commit(step)
    assert closed == [1]


def test_the_next_step_is_read_while_this_one_is_computed():
    opened, reached = Opened([100]), threading.Event()

    def signalling(shard, start, epoch):
        for sample in opened(shard, start, epoch):
            if sample[1] == 7:
                assert threading.current_thread() is not threading.main_thread()
                reached.set()
            yield sample

    feed = feed_of(ElasticStream(ShardSource([0], signalling), 4, collate_fn=list))
    assert next(feed).batch[-1] == (0, 3)
    assert reached.wait(60)
    feed.commit(0)
    assert next(feed).batch[-1] == (0, 7)
    assert opened.at == [(0, 0)]
    feed.close()


def test_a_rewind_waits_for_one_sample_and_not_for_a_whole_step():
    begun, go_on = threading.Event(), threading.Event()

    def slow(_shard, start, _epoch):
        for number in range(start, 100):
            if number == 5:
                begun.set()
                assert go_on.wait(60)
            assert number < 7, "read on after the rewind"
            yield number

    feed = feed_of(ElasticStream(ShardSource([0], slow), 4, collate_fn=list))
    next(feed)
    assert begun.wait(60)
    rewinding = threading.Thread(target=feed.rewind, args=(0, 1))
    rewinding.start()
    while not feed._ahead._stopped.is_set():
        assert rewinding.is_alive()
    go_on.set()
    rewinding.join(60)
    assert next(feed).batch == [0, 1, 2, 3]
    feed.close()


def test_a_feed_is_closed_while_its_source_hangs_beyond_the_last_step(monkeypatch):
    monkeypatch.setattr("elastane.data.shard_reading.CLOSE_S", 0.1)
    begun, go_on = threading.Event(), threading.Event()

    def hanging(_shard, start, _epoch):
        yield from range(start, 5)
        begun.set()
        go_on.wait()

    feed = feed_of(ElasticStream(ShardSource([0], hanging), 4, collate_fn=list))
    next(feed)
    assert begun.wait(60)
    feed.close()
    assert not go_on.is_set()
    go_on.set()


def test_an_error_of_a_source_is_raised_by_the_step_that_needs_the_sample():
    def broken(_shard, start, _epoch):
        yield from range(start, 6)
        raise OSError("unreadable")

    feed = feed_of(ElasticStream(ShardSource([0], broken), 4, collate_fn=list))
    assert next(feed).batch == [0, 1, 2, 3]
    feed.commit(0)
    for _ in range(2):
        with pytest.raises(OSError, match="unreadable"):
            next(feed)


def test_a_source_that_differs_between_two_readers_is_refused():
    ranks = [feed_of(stream_of(Opened([n])), rank, 2) for rank, n in enumerate((1, 9))]
    with pytest.raises(ConfigurationError, match=r"\[data-shard\]"):
        read(*ranks)


def test_shards_without_any_sample_are_refused():
    with pytest.raises(ConfigurationError, match=r"\[data-no-step\]"):
        next(feed_of(stream_of(Opened([0, 0, 0]))))


def test_an_object_that_is_not_a_source_is_refused():
    with pytest.raises(ConfigurationError, match=r"list.*\[data-source\]"):
        ElasticStream([1, 2], 4)


def test_deterministic_mode_is_refused():
    with pytest.raises(JobError, match=r"ElasticStream.*\[deterministic-use\]"):
        Deterministic(4, 0).open(stream_of().position, 1)


def test_a_step_that_was_not_read_is_not_committed():
    feed = feed_of(stream_of())
    with pytest.raises(ConfigurationError, match=r"\[data-step\]"):
        feed.commit(0)
    next(feed)
    with pytest.raises(ConfigurationError, match=r"\[data-step\]"):
        feed.commit(1)
    feed.commit(0)
    feed.commit(0)
    assert feed.cursor.next_step == 1


@pytest.mark.parametrize("other", [{"seed": 1}, {"batch": 5}, {"lanes": 3}, {"shuffle": True}])
def test_a_state_of_other_data_is_refused(other):
    with pytest.raises(ConfigurationError, match=r"\[data-state\]"):
        feed_of(stream_of(**other)).cursor.load_state_dict(stream_of().position.state_dict())


def lose(feeds, portions, lost):
    """Commit a step without the shares of some ranks; return the samples of the others."""
    for feed in feeds:
        feed.cursor.commit_without_ranks(lost)
    kept = [portion for rank, portion in enumerate(portions) if rank not in lost]
    return [x for [portion] in kept for x in portion.batch[: portion.samples]]


def test_a_lost_ranks_samples_are_owed_and_dealt_in_later_steps_and_a_further_one():
    feeds = [feed_of(stream_of(batch=8, lanes=3), rank, 2) for rank in range(2)]
    seen = lose(feeds, read(*feeds), [1])
    assert len(seen) == 4 and feeds[0].cursor.state_dict()["owed"] != []
    sizes = []
    while feeds[0].cursor.epoch == 0:
        step = read(*feeds)
        shares = [portion.share for [portion] in step]
        sizes.append((shares[0].step, shares[0].step_samples, shares[0].is_further))
        assert sum(share.weight for share in shares) == pytest.approx(2)
        # The second one is the last own step, in which the other rank is lost.
        seen += lose(feeds, step, [0] if len(sizes) == 2 else [])
    assert sorted(seen) == sorted((s, n) for s, count in enumerate(LENGTHS) for n in range(count))
    # A quarter of a batch is dealt with each step, and the rest after the last one.
    assert sizes[:2] == [(1, 8 + 2, False), (2, 1 + 2, False)]
    assert all(step == 2 and is_further for step, _, is_further in sizes[2:])
    assert "owed" not in feeds[0].cursor.state_dict()


def test_a_state_that_owes_samples_continues_in_another_world():
    feeds = [feed_of(stream_of(batch=8, lanes=3), rank, 2) for rank in range(2)]
    seen = []
    for lost in ([], [1], [0]):
        seen += lose(feeds, read(*feeds), lost)
    state = feeds[0].cursor.state_dict()
    assert state["is_further"] and state["step"] == 2
    others = [feed_of(stream_of(batch=8, lanes=3), rank, 3) for rank in range(3)]
    for feed in others:
        feed.cursor.load_state_dict(state)
    while others[0].cursor.epoch == 0:
        assert others[0].cursor.is_last_of_epoch(2)
        seen += lose(others, read(*others), [])
    assert sorted(seen) == sorted((s, n) for s, count in enumerate(LENGTHS) for n in range(count))
    with pytest.raises(ConfigurationError, match="shard is 4"):
        others[0].cursor.load_state_dict({**state, "owed": [[4, 0, 1]]})


def test_a_shard_that_lacks_what_a_lost_rank_had_read_is_refused():
    opened = Opened()
    feeds = [feed_of(stream_of(opened, batch=8, lanes=3), rank, 2) for rank in range(2)]
    lose(feeds, read(*feeds), [1])
    [shard, start, stop], *_ = feeds[0].cursor.state_dict()["owed"]
    opened.lengths = [*LENGTHS]
    opened.lengths[shard] = start
    with pytest.raises(ConfigurationError, match=f"a worker that was lost has read {start + 1}"):
        read(*feeds)
    assert stop > start
