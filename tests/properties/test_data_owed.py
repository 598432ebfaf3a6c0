"""Each sample of a worker lost in a step is used once in its epoch, in any history."""

from collections import Counter
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from elastane.data.ledger import Ledger, split
from elastane.data.position import DataPosition


def numbers(spans):
    return [position for span in spans for position in range(*span)]


@given(st.data())
def test_lost_shares_are_redistributed_and_each_sample_is_used_once(data):
    n, batch = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 24))
    micro = data.draw(st.integers(1, 3))
    position = DataPosition(Ledger(n, batch), seed=0, shuffle=False).accumulate(micro)
    used, steps, losses = Counter(), 0, 0
    while position.epoch == 0:
        world = data.draw(st.integers(1, 5), "world")
        position.bind(0, world)
        dealt = {rank: numbers(position.spans_of(rank)) for rank in range(world)}
        everything = [number for rank in dealt for number in dealt[rank]]
        own = batch if position.is_last_of_epoch(position.next_step) else batch + -(-batch // 4)
        assert 0 < len(everything) <= max(own, batch + -(-batch // 4))
        may_lose = losses < 12
        lost = data.draw(st.sets(st.integers(0, world - 1), max_size=world - 1)) if may_lose else ()
        losses += bool(lost)
        for rank in dealt.keys() - lost:
            used.update(dealt[rank])
        position.commit_without(
            tuple(span for rank in sorted(lost) for span in position.spans_of(rank))
        )
        # Another worker that has the same state computes the same shares.
        other = DataPosition(Ledger(n, batch), seed=0, shuffle=False).accumulate(micro)
        other.load_state_dict(position.state_dict())
        other.bind(0, world)
        assert other.state_dict() == position.state_dict()
        assert other.spans_of(0) == position.spans_of(0)
        steps += 1
    assert used == Counter(range(n))
    assert position.state_dict()["samples"] == 0 and "owed" not in position.state_dict()
    assert steps >= Ledger(n, batch).steps_per_epoch


@given(
    st.integers(1, 40), st.integers(1, 16), st.integers(1, 5), st.integers(1, 3), st.integers(0, 30)
)
def test_weights_average_over_own_and_taken_over_samples(n, batch, world, micro, owed):
    position = DataPosition(Ledger(n, batch), seed=0, shuffle=False).accumulate(micro)
    position.bind(0, world)
    lost = ((0, min(owed, n)),) if min(owed, n) else ()
    position.load_state_dict({**position.state_dict(), "owed": [list(span) for span in lost]})
    mean, reads = Fraction(0), []
    for rank in range(world):
        shares = position.bind(rank, world).shares()
        for share, _ in zip(shares, range(micro), strict=False):
            read = numbers(share.reads)
            assert read, "each micro-batch has something to compute"
            weight = Fraction(share.weight).limit_denominator(10**6)
            mean += Fraction(sum(read), len(read)) * weight
            reads += numbers(share.spans)
    assert mean / world == Fraction(sum(reads), len(reads))


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9))), st.integers(0, 60))
def test_split_divides_spans_at_a_count(pairs, count):
    spans = tuple((start, start + length) for start, length in pairs)
    first, rest = split(spans, count)
    assert numbers(first) + numbers(rest) == numbers(spans)
    assert len(numbers(first)) == min(count, len(numbers(spans)))
