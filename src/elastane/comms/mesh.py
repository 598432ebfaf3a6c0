"""A mesh of replicas and shards whose groups stay when the world changes.

Each place in the mesh is a seat: seat 5 of replicas of 2 is shard 1 of replica 2. A worker keeps
its seat for as long as it lives, for what it holds is that shard; its rank may change. `MeshGroups`
owns one group along each dimension and the mesh of torch's over them. It must not know why a world
changes, nor what is sharded. Fails as the groups do; JobError where two workers claim one seat.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from elastane.comms.construction import Wiring
from elastane.comms.elastic import ElasticGroup
from elastane.errors import JobError

REPLICATE, SHARD = "replicate", "shard"
# What a worker claims that has no seat yet.
NO_SEAT = -1


def seated(claims: Sequence[int]) -> list[int]:
    """Return the seat of each rank: the one that it has; of others the free ones, in their order.

    The same on all members. JobError where a seat is claimed twice, or is none of this world.
    """
    kept = [seat for seat in claims if seat != NO_SEAT]
    if len(set(kept)) < len(kept) or any(not 0 <= seat < len(claims) for seat in kept):
        raise JobError(
            f"the workers of this world hold these parts of the state, by rank: {list(claims)}",
            expected=f"each of {len(claims)} parts at most once",
            next_step="a job with job.device_mesh() has a fixed size: --nnodes N, no --min-workers",
            slug="job-mesh",
        )
    free = iter(sorted(set(range(len(claims))) - set(kept)))
    return [next(free) if seat == NO_SEAT else seat for seat in claims]


class MeshGroups:
    """One worker's; `wirings` and `replace` for each world, `device_mesh` once."""

    def __init__(self, shards: int) -> None:
        self.shards = shards
        self.size = 0  # of each of its worlds; not known before the first
        self.seat = NO_SEAT
        self._ranks: list[int] = []  # by seat
        self.made: DeviceMesh | None = None
        self.replicate = ElasticGroup("elastane/replicate")
        self.shard = ElasticGroup("elastane/shard")

    @property
    def groups(self) -> tuple[ElasticGroup, ElasticGroup]:
        """The two groups, in the order of the mesh's dimensions."""
        return self.replicate, self.shard

    @property
    def replicas(self) -> int:
        """How many workers hold each shard."""
        return self.size // self.shards

    def shard_of(self, seat: int) -> int:
        """Return the number of the shard that belongs to a seat."""
        return seat % self.shards

    def settle(self, seats: Sequence[int], rank: int) -> None:
        """Take note of who sits where in a world; `seats` by rank."""
        self.seat, self.size = seats[rank], len(seats)
        self._ranks = sorted(range(len(seats)), key=lambda each: seats[each])

    def wirings(self, world: Wiring) -> tuple[Wiring, Wiring]:
        """Return how this worker's groups are built in a world, in the order of `groups`."""
        replica, shard = divmod(self.seat, self.shards)
        rows = self._ranks[replica * self.shards : (replica + 1) * self.shards]
        columns = self._ranks[shard :: self.shards]
        return (
            _part(world, f"{REPLICATE}-{shard}", columns, replica),
            _part(world, f"{SHARD}-{replica}", rows, shard),
        )

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """Return torch's mesh over the groups, which are built."""
        for group in self.groups:
            group.register()
        ranks = torch.tensor(self._ranks).view(self.replicas, self.shards)
        names = (REPLICATE, SHARD)
        mesh = DeviceMesh.from_group([*self.groups], device_type, ranks, mesh_dim_names=names)
        self.made = mesh
        return mesh

    def close(self) -> None:
        """End both groups. Idempotent."""
        for group in self.groups:
            group.close()


def _part(world: Wiring, name: str, members: Sequence[int], rank: int) -> Wiring:
    assert members[rank] == world.rank, (members, rank, world.rank)
    return dataclasses.replace(
        world,
        rank=rank,
        world_size=len(members),
        fence=f"{world.fence}/{name}",
        serves=False,
        members=tuple(members),
    )
