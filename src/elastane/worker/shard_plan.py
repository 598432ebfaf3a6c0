"""Decides which member gives which shard to which, when a world begins. Pure.

A member makes an update only when all members hold their whole reductions (`Shards.agree`). If one
member has made an update, every other can make it from what it holds. A member whose body was cut
short after its update lacks what the rest of the body changes, and takes that from one whose body
completed. A member without its shard receives it from a member that holds the same one. No update
is undone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastane.comms.state_plan import Handover, MemberStatus, decide


@dataclass(frozen=True, slots=True)
class ShardClaim:
    """What one member reports: its committed steps, and whether it holds its shard at that step.

    `torn`: it does not hold the initial state either, since half of it was overwritten or since it
    joined later. `ready`: it holds its whole reduction of the next step. `cut`: its body failed
    after the last update. `machine`: as in `MemberStatus`.
    """

    committed: int
    holds: bool
    torn: bool
    ready: bool
    shard: int
    machine: int
    cut: bool = False


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """How all members reach `committed` steps, by rank.

    `leader` sends the `advancing` members what does not follow from their own shard, and they make
    the update unless they have made it. Then all perform the `handovers` in order. No member holds
    the `lost` shards.
    """

    committed: int
    leader: int
    advancing: tuple[int, ...]
    handovers: tuple[Handover, ...]
    lost: tuple[int, ...]


def plan(claims: Sequence[ShardClaim], shards: int) -> ShardPlan:
    """Return how a world comes to one state; `claims` by rank, the same on all members.

    `shards`: how many shards the state has. In a world without whole replicas a shard may be lost.
    """
    assert claims, "a world has members"
    committed = max((claim.committed for claim in claims if claim.holds), default=0)
    newest = [r for r, c in enumerate(claims) if c.holds and c.committed == committed]
    right = [rank for rank in newest if not claims[rank].cut] or newest
    advancing = [
        rank
        for rank, claim in enumerate(claims)
        if claim.holds and claim.ready and claim.committed == committed - 1
    ]
    advancing = sorted([*advancing, *(rank for rank in newest if rank not in right)])
    handovers: list[Handover] = []
    lost = []
    for shard in range(shards):
        ranks = [rank for rank, claim in enumerate(claims) if claim.shard == shard]
        givers = {rank for rank in ranks if rank in right or rank in advancing}
        if not givers and not committed:
            # Before the first step, members of the first world hold the common initial state.
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
    assert healing is not None and not healing.fresh, "a giver exists"
    return [
        Handover(ranks[each.receiver], tuple(ranks[giver] for giver in each.givers), each.near)
        for wave in healing.waves
        for each in wave
    ]
