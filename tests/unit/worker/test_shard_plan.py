"""The holders of shards, the transfers between workers, and a worker's part of a state."""

from __future__ import annotations

import itertools

import pytest
import torch

from elastane.comms.mesh import MeshGroups
from elastane.comms.state_plan import Handover
from elastane.errors import JobError
from elastane.worker.shard_plan import OwnChanges, ShardClaim, plan


def claim(
    shard: int, committed: int = 5, *, holds=True, torn=False, ready=False, **more
) -> ShardClaim:
    return ShardClaim(committed, holds, torn, ready, shard, machine=1, **more)


NEW = {"committed": 0, "holds": False, "torn": True}
FRESH = {"committed": 0, "holds": False}


def test_the_groups_of_a_coordinate_are_its_row_and_its_column_by_the_ranks_of_the_world():
    from elastane.comms.construction import Wiring

    mesh = MeshGroups(2)
    mesh.set_coordinates([1, 2, 3, 0], 2)  # ranks 0 to 3 are at 1, 2, 3, 0
    world = Wiring(2, 4, "host", 1, "7.0", serves=True)
    replicate, shard = mesh.wirings(world)
    assert (replicate.members, replicate.rank) == ((0, 2), 1)
    assert (shard.members, shard.rank) == ((1, 2), 1)
    assert replicate.fence != shard.fence
    assert not (replicate.serves or shard.serves)


def test_complete_members_exchange_nothing():
    found = plan([claim(0), claim(1), claim(0), claim(1)], 2)
    assert (found.handovers, found.advancing, found.lost) == ((), (), ())


def test_an_empty_member_receives_its_shard_from_a_holder_of_the_same_one():
    found = plan([claim(0), claim(1), claim(0, **NEW), claim(1)], 2)
    assert found.handovers == (Handover(2, (0,), near=True),)
    assert not found.advancing


def test_a_ready_member_makes_the_missing_update_before_it_gives():
    one_behind = {"committed": 4, "ready": True}
    found = plan([claim(0), claim(1, **one_behind), claim(0), claim(1, **NEW)], 2)
    assert found.committed == 5 and found.leader == 0
    assert found.advancing == (1,)
    assert found.handovers == (Handover(3, (1,), near=True),)


def test_a_member_cut_short_takes_the_rest_of_the_step_before_it_gives():
    found = plan([claim(0, cut=True), claim(1), claim(0, **NEW), claim(1)], 2)
    assert found.leader == 1 and found.advancing == (0,)
    assert found.handovers == (Handover(2, (0,), near=True),)


def test_members_that_were_all_cut_short_take_the_rest_of_the_step_from_the_first():
    found = plan([claim(shard, cut=True) for shard in (0, 1, 0, 1)], 2)
    assert found.leader == 0 and found.advancing == (1, 2, 3)
    assert not (found.handovers or found.lost)


@pytest.mark.parametrize("own", [OwnChanges.INSIDE, OwnChanges.OUTSIDE])
def test_a_ready_member_receives_a_shard_that_the_step_changed_after_its_update(own):
    one_behind = {"committed": 4, "ready": True}
    done = [claim(0, own=own), claim(1, own=own)]
    found = plan([*done, claim(0, **NEW), claim(1, **one_behind)], 2)
    assert not (found.advancing or found.lost)
    assert {(each.receiver, each.givers) for each in found.handovers} == {(2, (0,)), (3, (1,))}
    found = plan([done[0], claim(1, **NEW), claim(0, **NEW), claim(1, **one_behind)], 2)
    assert (found.advancing, found.lost, found.own) == ((), (1,), own)


def test_a_member_cut_short_has_changed_what_a_step_changes_behind_its_body():
    found = plan([claim(0, cut=True, own=OwnChanges.OUTSIDE), claim(1, own=OwnChanges.OUTSIDE)], 2)
    assert found.advancing == (0,) and not found.lost
    found = plan([claim(0, cut=True), claim(1, own=OwnChanges.INSIDE)], 2)
    assert not found.advancing and found.lost == (0,)
    found = plan([claim(0, cut=True, own=OwnChanges.INSIDE), claim(1, cut=True)], 2)
    assert not found.advancing and found.lost == (1,)


def test_a_ready_member_that_cannot_undo_its_body_gives_no_shard():
    stuck = {"ready": True, "stuck": True}
    found = plan([claim(0, **stuck), claim(1, ready=True), claim(0, ready=True), claim(1)], 2)
    assert found.handovers == (Handover(0, (2,), near=True),)
    for committed in (0, 5):
        claims = [claim(shard, committed, **stuck) for shard in (0, 1, 0, 1)]
        assert plan(claims, 2).lost == (0, 1)


def test_an_update_that_no_living_member_made_is_retried():
    found = plan([claim(shard, ready=True) for shard in (0, 1, 0)] + [claim(1, **NEW)], 2)
    assert found.committed == 5 and not found.advancing


def test_a_partly_received_shard_does_not_count():
    found = plan([claim(0), claim(1, holds=False, torn=True), claim(0), claim(1, **NEW)], 2)
    assert found.lost == (1,)


def test_before_the_first_step_the_initial_state_is_valid():
    found = plan([claim(shard, **FRESH) for shard in (0, 1, 0, 1)], 2)
    assert not (found.lost or found.advancing or found.handovers)
    some = plan([claim(0, committed=0), claim(0, **FRESH), claim(1, **FRESH), claim(1, **NEW)], 2)
    assert not some.lost


def test_joining_workers_alone_do_not_restart_from_the_initial_state():
    assert plan([claim(shard, **NEW) for shard in (0, 1, 0, 1)], 2).lost == (0, 1)


def test_every_shard_of_four_workers_comes_from_its_holders_or_is_lost():
    kinds = [{}, NEW, {"committed": 4, "ready": True}, {"holds": False}, {"cut": True}]
    for chosen in itertools.product(kinds, repeat=4):
        claims = [claim(rank % 2, **kind) for rank, kind in enumerate(chosen)]
        found = plan(claims, 2)
        assert not {each % 2 for each in found.advancing} & set(found.lost)
        has = {r for r, c in enumerate(claims) if c.holds and c.committed == found.committed}
        has |= {*found.advancing}
        for handover in found.handovers:
            assert {*handover.givers} <= has or not found.committed
            assert handover.receiver not in has
            assert {each % 2 for each in handover.givers} == {handover.receiver % 2}
            has.add(handover.receiver)
        if found.committed:
            assert has == {rank for rank in range(4) if rank % 2 not in found.lost}


def test_a_state_goes_by_its_parts_and_comes_into_their_places():
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    from elastane.worker.shard_healing import local, placed

    mesh = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    own = DTensor.from_local(torch.zeros(3, 2), mesh, [Shard(0)], run_check=False)
    state = {"net": {"weight": own, "count": torch.zeros(())}, "groups": [{"lr": 0.1}]}
    sent = local(state)
    sent["net"]["weight"].fill_(7)  # as what is received is written, where it lies
    got = placed(state, {**sent, "groups": [{"lr": 0.2}]})
    assert got["net"]["weight"] is own and own.to_local().eq(7).all()
    assert got["groups"] == [{"lr": 0.2}]
    placed(state, {"net": {"weight": torch.full((3, 2), 8.0)}})
    assert own.to_local().eq(8).all()
    with pytest.raises(JobError, match="has no place"):
        placed(state, {"net": {"moment": torch.zeros(3, 2)}})
