"""The shares of an epoch equal those of a model that lists every position."""

from fractions import Fraction
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastane.data.ledger import CommittedPosition, Ledger
from elastane.data.sampler import ElasticBatchSampler
from elastane.data.shards import Lanes

sizes = st.tuples(st.integers(1, 90), st.integers(1, 100), st.booleans()).filter(
    lambda size: not (size[2] and size[0] < size[1])
)


def deal(ledger, step, rank, world, micro_batches=1):
    """Return a rank's shares of one step."""
    return list(islice(ledger.deal_epoch(step, rank, world, micro_batches), micro_batches))


def model_steps(n, batch, drop_last):
    """Return the positions of an epoch, a list for each step."""
    steps = [list(range(n))[begin : begin + batch] for begin in range(0, n, batch)]
    return [step for step in steps if len(step) == batch] if drop_last else steps


@given(sizes, st.integers(1, 9), st.integers(1, 4))
def test_the_shares_of_a_world_cover_each_step_exactly_once(size, world, micro_batches):
    ledger = Ledger(*size)
    steps = model_steps(*size)
    assert ledger.steps_per_epoch == len(steps)
    assert ledger.samples_per_epoch == sum(map(len, steps))
    for number, step in enumerate(steps):
        dealt = [deal(ledger, number, r, world, micro_batches) for r in range(world)]
        assert {(s.step, s.micro) for shares in dealt for s in shares} == {
            (number, micro) for micro in range(micro_batches)
        }
        flat = [share for shares in dealt for share in shares]
        assert [p for s in flat for p in range(s.start, s.stop)] == step
        of_ranks = [sum(s.samples for s in shares) for shares in dealt]
        assert max(of_ranks) - min(of_ranks) <= 1
        for shares in dealt:
            assert max(s.samples for s in shares) - min(s.samples for s in shares) <= 1
        # Local mean times weight, summed and divided by the world, is the mean over the step.
        total = sum(
            Fraction(sum(range(*s.reads[0])), len(range(*s.reads[0])))
            * Fraction(s.weight).limit_denominator(1_000)
            for s in flat
        )
        assert total / world == Fraction(sum(step), len(step))


@given(sizes, st.lists(st.tuples(st.integers(1, 6), st.booleans()), max_size=60), st.integers(1, 3))
def test_each_position_is_committed_once_in_any_history_of_worlds(size, history, micro_batches):
    """A history has the world of each attempt of a step, and whether the attempt committed."""
    sampler = ElasticBatchSampler(*size[:2], seed=3, drop_last=size[2], micro_batches=micro_batches)
    steps = model_steps(*size)
    order = [i for lists in ElasticBatchSampler(size[0], size[0], seed=3) for i in lists]
    committed = []
    for world, is_good in history:
        number = sampler.next_step
        assert sampler.place == CommittedPosition(
            number // len(steps), number % len(steps) * size[1]
        )
        got = []
        for rank in range(world):
            sampler.bind(rank, world)
            lists, shares = iter(sampler), sampler.shares()
            pairs = [(next(shares), next(lists)) for _ in range(micro_batches)]
            assert all(len(lists) == max(share.samples, 1) for share, lists in pairs)
            got += [i for share, lists in pairs if share.samples for i in lists]
        if sampler.epoch == 0:
            assert got == [order[position] for position in steps[number % len(steps)]]
        if is_good:
            committed.append(sorted(got))
            sampler.commit(number)
    for begin in range(0, len(committed) - len(steps) + 1, len(steps)):
        epoch = [i for step in committed[begin : begin + len(steps)] for i in step]
        assert len(set(epoch)) == len(epoch) == sum(map(len, steps))


@given(sizes, st.integers(0, 2**40))
def test_positions_and_steps_map_to_each_other_one_to_one(size, step):
    ledger = Ledger(*size)
    assert ledger.step_at(ledger.place_before(step)) == step


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(any),
    st.integers(1, 9),
    st.integers(1, 20),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
)
def test_lanes_read_each_sample_of_each_shard_once(lengths, lanes, batch, world, rng):
    order = list(range(len(lengths)))
    rng.shuffle(order)
    ledger, found = Ledger(sum(lengths), batch), []
    plan = Lanes(order, lengths, lanes)
    last = {}
    for number in range(ledger.steps_per_epoch):
        span = ledger.span(number)
        for rank in range(world):
            for share in deal(ledger, number, rank, world, 2):
                runs = list(plan.runs(span, (share.start, share.stop)))
                samples = [(r.shard, i) for r in runs for i in range(r.start, r.stop)]
                assert len(samples) == share.samples
                found += samples
                for run in runs:
                    # A lane only advances, so no shard is opened twice.
                    place = (order.index(run.shard), run.start)
                    assert last.get(run.lane, (-1, 0)) <= place
                    last[run.lane] = place
    assert sorted(found) == [(s, i) for s, long in enumerate(lengths) for i in range(long)]


@pytest.mark.parametrize(("world", "batch"), [(1, 16), (2, 16), (4, 32), (16, 16)])
def test_a_rank_reads_only_its_own_lanes_if_the_world_divides_them(world, batch):
    ledger, plan = Ledger(1_600, batch), Lanes(range(10), [160] * 10, 16)
    for rank in range(world):
        lanes = {
            run.lane
            for number in range(ledger.steps_per_epoch)
            for share in deal(ledger, number, rank, world)
            for run in plan.runs(ledger.span(number), (share.start, share.stop))
        }
        assert lanes == set(range(rank * 16 // world, (rank + 1) * 16 // world))
