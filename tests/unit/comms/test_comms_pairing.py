"""The records of members' collectives, and which records contradict each other."""

import pytest
import torch

from elastane.comms.pairing import (
    ENDED,
    IN_BODY,
    KINDS,
    UPDATED,
    CollectiveRecord,
    CollectiveTally,
    at_one_commit,
    odd_pair,
    odd_survivors,
)


def tally_of(*names, count=8):
    tally = CollectiveTally()
    for name in names:
        tally.note(name, [torch.zeros(count)])
    return tally


def record(*names, world=1, step=5, commits=2, reached=IN_BODY, count=8):
    return tally_of(*names, count=count).record(world, step, commits, reached)


def test_a_tally_says_how_many_of_which_kind():
    said = record("allreduce", "allreduce", "broadcast", "_allgather_base", "reduce_scatter_tensor")
    assert said.described() == "2 all-reduces, 1 broadcast, 1 all-gather, 1 reduce-scatter"
    assert record("gather", "scatter").described() == "2 other collectives"
    assert record().described() == "no collective"
    assert CollectiveRecord.unpacked(said.packed()) == said
    assert all(-(2**63) <= number < 2**63 for number in said.packed())


@pytest.mark.parametrize(
    ("names", "count"),
    [
        (["broadcast", "allreduce"], 8),
        (["allreduce", "broadcast"], 9),
        (["allreduce"], 8),
        (["allreduce", "broadcast", "barrier"], 8),
        (["allreduce_coalesced", "broadcast"], 8),
    ],
    ids=["order", "size", "fewer", "more", "name"],
)
def test_members_with_different_collectives_are_found(names, count):
    same = record("allreduce", "broadcast")
    assert odd_pair([same, record(*names, count=count), same]) == (0, 1)
    assert odd_pair([record(*names, count=count), same, same]) == (0, 1)


def test_gathers_of_different_sizes_count_as_equal():
    assert record("allgather", count=1) == record("allgather", count=2)


def test_members_at_different_steps_are_found():
    assert odd_pair([record(step=5), record(step=6)]) == (0, 1)


AT_COMMIT = record("allreduce", reached=ENDED)


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (record("allreduce", "allreduce"), (0, 1)),  # stood in a surplus collective
        (record("broadcast"), (0, 1)),
        (record("allreduce", "allreduce", reached=ENDED), (0, 1)),
        (record(), None),  # it was behind
        (record("allreduce"), None),
        (record("allreduce", "allreduce", commits=3), None),  # it was a step further
        (record("allreduce", "allreduce", world=7), None),
        (record("allreduce", "allreduce", world=0), None),
    ],
)
def test_survivors_of_a_broken_world_are_compared_only_where_the_order_is_certain(other, found):
    assert odd_survivors([AT_COMMIT, other]) == found
    assert odd_survivors([other, AT_COMMIT]) == found
    came_later = CollectiveRecord(0, 0, 0, IN_BODY, 0, (0,) * len(KINDS))
    assert odd_survivors([came_later, other]) is None


def test_members_that_keep_no_update_are_not_compared():
    assert odd_survivors([record("allreduce"), record("barrier")]) is None


def test_an_update_of_an_interrupted_body_is_compared():
    kept = record("allreduce", "broadcast", reached=UPDATED)
    further = record("allreduce", "broadcast", "barrier", reached=UPDATED)
    assert odd_survivors([kept, further]) is None
    assert odd_survivors([kept, record("allreduce")]) is None
    assert odd_survivors([kept, record("allreduce", "barrier")]) == (0, 1)
    assert odd_survivors([kept, record("allreduce", "broadcast", "barrier")]) == (0, 1)


AHEAD = record(commits=3)


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (record("allreduce", reached=ENDED), None),
        (record(), None),  # it was behind
        (record("allreduce", "allreduce"), (0, 1)),  # stood in a surplus one behind its update
        (record("allreduce", "allreduce", reached=ENDED), (0, 1)),
        (record("broadcast", reached=UPDATED), (0, 1)),
        (record("allreduce", "allreduce", world=7), None),
        (record("allreduce", "allreduce", commits=1), None),  # two commits behind: no longer known
    ],
)
def test_a_survivor_that_is_a_commit_ahead_is_compared_by_what_it_committed(other, found):
    nothing = CollectiveRecord(0, 0, 0, IN_BODY, 0, (0,) * len(KINDS))
    assert odd_survivors([AHEAD, other], [AT_COMMIT, nothing]) == found
    assert odd_survivors([other, AHEAD], [nothing, AT_COMMIT]) == found
    assert at_one_commit([AHEAD, other], [AT_COMMIT, nothing], (0, 1))[1] == other
