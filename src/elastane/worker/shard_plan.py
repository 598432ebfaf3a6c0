"""Whose shard is right when a world begins, and who gives it to whom. Pure.

A member makes an update only when all members hold their whole reductions (`Shards.agree`). So
where one has made it, each of the others that has not can make it by itself, from what it holds;
and who holds nothing gets its shard from a member that holds the same one. Nothing is taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastane.comms.state_plan import Handover, MemberStatus, decide


@dataclass(frozen=True, slots=True)
class ShardClaim:
    """What one member says of itself: steps committed, and whether it holds its shard then.

    `torn`: what it has instead is no beginning either, since half of it was overwritten, or since
    it came later. `ready`: it holds its whole reduction of the step that comes
    next. `machine`: as in `MemberStatus`.
    """

    committed: int
    holds: bool
    torn: bool
    ready: bool
    shard: int
    machine: int


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """How all members come to `committed` steps, by rank.

    `leader` gives to those who are `advancing` what does not follow from their own shard, then they
    make the update; then all go through `handovers` in their order. `lost` shards nobody holds.
    """

    committed: int
    leader: int
    advancing: tuple[int, ...]
    handovers: tuple[Handover, ...]
    lost: tuple[int, ...]


def plan(claims: Sequence[ShardClaim], shards: int) -> ShardPlan:
    """Return how a world comes to one state; `claims` by rank, the same on all members.

    `shards`: how many the state has. Where the world is of no whole replicas, nobody may hold one.
    """
    assert claims, "a world has members"
    committed = max((claim.committed for claim in claims if claim.holds), default=0)
    right = [r for r, c in enumerate(claims) if c.holds and c.committed == committed]
    advancing = [
        rank
        for rank, claim in enumerate(claims)
        if claim.holds and claim.ready and claim.committed == committed - 1
    ]
    handovers: list[Handover] = []
    lost = []
    for shard in range(shards):
        ranks = [rank for rank, claim in enumerate(claims) if claim.shard == shard]
        givers = {rank for rank in ranks if rank in right or rank in advancing}
        if not givers and not committed:
            # Nobody has made a step: who was there from the beginning holds what all begin with.
            givers = {rank for rank in ranks if not claims[rank].torn}
        if not givers:
            lost.append(shard)
            continue
        handovers += _within(ranks, givers, claims)
    leader = right[0] if right else 0
    return ShardPlan(committed, leader, tuple(advancing), tuple(handovers), tuple(lost))


def _within(ranks: list[int], givers: set[int], claims: Sequence[ShardClaim]) -> list[Handover]:
    """Return the handovers among the members that hold the same shard."""
    healing = decide(
        [MemberStatus(0, rank in givers, machine=claims[rank].machine) for rank in ranks]
    )
    assert healing is not None and not healing.fresh, "somebody gives"
    return [
        Handover(ranks[each.receiver], tuple(ranks[giver] for giver in each.givers), each.near)
        for wave in healing.waves
        for each in wave
    ]
