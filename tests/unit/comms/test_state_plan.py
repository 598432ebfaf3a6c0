"""The furthest committed state wins and is sent in few waves; a majority decides differences."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastane.comms.state_plan import (
    GIVERS_MAX,
    STRIPE_BYTES_MIN,
    Handover,
    MemberStatus,
    correct,
    decide,
    judge,
    stripes,
)

J, T = MemberStatus(0, False), MemberStatus(7, False, torn=True)
L = MemberStatus(0, False, came_later=True)


def H(committed):  # noqa: N802 - a holder
    return MemberStatus(committed, True)


@pytest.mark.parametrize(
    ("standings", "committed", "right", "receivers", "fresh"),
    [
        ([J], 0, (0,), (), True),
        ([J, J, J], 0, (0,), (1, 2), True),
        ([H(5), H(5)], 5, (0, 1), (), False),
        ([H(5), H(6), H(6)], 6, (1, 2), (0,), False),
        ([H(6), J, H(5)], 6, (0,), (1, 2), False),
        ([J, H(0)], 0, (1,), (0,), False),
        ([T, H(3)], 3, (1,), (0,), False),
        ([L, H(3), L], 3, (1,), (0, 2), False),
        # A worker was replaced before the first step of all.
        ([L, J, J], 0, (1,), (0, 2), True),
    ],
)
def test_all_others_receive_the_state_of_the_furthest_holders(
    standings, committed, right, receivers, fresh
):
    healing = decide(standings)
    assert (healing.committed, healing.right, healing.fresh) == (committed, right, fresh)
    assert healing.receivers == receivers


@pytest.mark.parametrize("standings", [[T, J], [T]])
def test_without_a_state_holder_half_received_states_heal_no_member(standings):
    assert decide(standings) is None


@pytest.mark.parametrize("standings", [[L], [L, L, L], [L, T]])
def test_workers_that_joined_a_job_whose_state_is_lost_do_not_begin_again_silently(standings):
    """They restored no checkpoint, since the lost members were to give them the state."""
    assert decide(standings) is None


def on(machine, holds):
    return MemberStatus(3 * holds, holds, machine=machine)


@pytest.mark.parametrize(
    ("standings", "waves"),
    [
        # One comes to a machine that has the state: from the memory there.
        ([on(1, True), on(2, True), on(2, False)], [[Handover(2, (1,), True)]]),
        # Two come to a machine that has not: one over the network, a stripe from each machine.
        (
            [on(1, True), on(1, True), on(2, True), on(3, False), on(3, False)],
            [[Handover(3, (0, 2), False)], [Handover(4, (3,), True)]],
        ),
        # Three on one machine from one: each that has received the state sends it on.
        (
            [on(1, True), *[on(1, False)] * 3],
            [
                [Handover(1, (0,), True)],
                [Handover(2, (0,), True), Handover(3, (1,), True)],
            ],
        ),
        # No machine is known: each its own.
        ([H(3), J, J], [[Handover(1, (0,), False)], [Handover(2, (0, 1), False)]]),
    ],
)
def test_each_machine_receives_the_state_once_and_shares_it(standings, waves):
    assert [list(wave) for wave in decide(standings).waves] == waves


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=40))
def test_each_member_receives_once_from_members_that_have_the_state_by_then(members):
    machines = [machine for machine, _ in members]
    healing = decide([on(machine, holds) for machine, holds in members])
    have = set(healing.right)
    for wave in healing.waves:
        giving = [giver for each in wave for giver in each.givers]
        assert len(giving) == len(set(giving)), "nobody gives twice in one wave"
        assert set(giving) <= have
        for each in wave:
            near = {machines[giver] for giver in each.givers} == {machines[each.receiver]} - {0}
            assert each.near == near and each.receiver not in have
            assert 1 <= len(each.givers) <= (1 if each.near else GIVERS_MAX)
        have |= {each.receiver for each in wave}
    assert have == set(range(len(members)))
    assert len(healing.receivers) == len(members) - len(healing.right)
    crossed = [machines[e.receiver] for w in healing.waves for e in w if not e.near]
    assert len([m for m in crossed if m]) == len({m for m in crossed if m}), "once a machine"


MB = STRIPE_BYTES_MIN


@given(
    st.lists(st.tuples(st.integers(0, 3 * MB), st.booleans()), max_size=8),
    st.integers(1, GIVERS_MAX),
)
def test_stripes_cover_each_byte_once_and_what_differs_comes_from_the_first(tensors, givers):
    sizes, same = [size for size, _ in tensors], [each for _, each in tensors]
    dealt = stripes(sizes, [[True] * len(sizes), *[same] * (givers - 1)])
    assert len(dealt) == givers
    pieces = sorted(piece for each in dealt for piece in each)
    for number, size in enumerate(sizes):
        mine = [(start, stop) for which, start, stop in pieces if which == number]
        assert [start for start, _ in mine] == [0, *(stop for _, stop in mine)][: len(mine)]
        assert sum(stop - start for start, stop in mine) == size
        if givers > 1 and not same[number]:
            assert all(which != number for each in dealt[1:] for which, _, _ in each)


def test_stripes_are_alike_and_none_is_too_small():
    assert stripes([6 * MB, 2 * MB], [[True] * 2] * 4) == [
        [(0, 0, 2 * MB)],
        [(0, 2 * MB, 4 * MB)],
        [(0, 4 * MB, 6 * MB)],
        [(1, 0, 2 * MB)],
    ]
    assert stripes([MB, 5], [[True] * 2] * 3) == [[(0, 0, MB), (1, 0, 5)], [], []]


@pytest.mark.parametrize(
    ("digests", "groups", "right"),
    [
        (b"aaa", ((0, 1, 2),), (0, 1, 2)),
        (b"aba", ((0, 2), (1,)), (0, 2)),
        (b"ab", ((0,), (1,)), ()),
        (b"aabb", ((0, 1), (2, 3)), ()),
        (b"abcbb", ((1, 3, 4), (0,), (2,)), (1, 3, 4)),
        (b"abca", ((0, 3), (1,), (2,)), ()),
    ],
)
def test_a_majority_is_more_than_half(digests, groups, right):
    verdict = judge([bytes([each]) for each in digests])
    assert (verdict.groups, verdict.right) == (groups, right)


def test_a_differing_member_receives_the_majoritys_state():
    healing = correct(judge([b"a", b"b", b"a"]), [1, 2, 2], 40)
    assert (healing.committed, healing.right, healing.receivers) == (40, (0, 2), (1,))
    assert healing.waves == ((Handover(1, (2,), True),),)
