"""A mesh of replicas and shards whose groups stay when the world changes.

Each place in the mesh is a coordinate, written as one number: with 2 shards, 5 is shard 1 of
replica 2. A worker keeps its shard for as long as it lives. Its replica may change when the world
size changes, and its rank in any world. `MeshGroups` owns one group along each dimension and
torch's mesh over them. It does not know why a world changes, nor what is sharded. Fails as the
groups do, and by JobError if a world's workers have no valid coordinates.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from elastane.comms.construction import Wiring
from elastane.comms.elastic import ElasticGroup
from elastane.errors import JobError

REPLICATE, SHARD = "replicate", "shard"
# The coordinate of a worker that has none yet.
NO_COORDINATE = -1


def assign_coordinates(claims: Sequence[int], nodes: Sequence[int], shards: int) -> list[int]:
    """Return the coordinate of each rank, in replicas of `shards` shards.

    `claims` are the coordinates of the previous world. A worker keeps its shard, and its replica
    unless a lower rank claims the same place. Workers without a coordinate get the free ones, in
    the order of their ranks, close to those of their node (numbered in `nodes`). So a lost node
    takes whole replicas along, and not all holders of one shard. The result is the same on all
    members. JobError if more workers hold a shard than there are replicas.
    """
    mesh = _FreeCoordinates(nodes, shards)
    holders = [rank for rank, claim in enumerate(claims) if claim != NO_COORDINATE]
    for rank in holders:
        if claims[rank] in mesh.free:
            mesh.take(rank, claims[rank])
    for rank in holders:
        if mesh.coordinates[rank] == NO_COORDINATE:
            shard = claims[rank] % shards
            coordinate = mesh.best(rank, mesh.free.intersection(range(shard, len(claims), shards)))
            if coordinate == NO_COORDINATE:
                raise _too_many(claims, shards, shard)
            mesh.take(rank, coordinate)
    for rank, claim in enumerate(claims):
        if claim == NO_COORDINATE:
            mesh.take(rank, mesh.best(rank, mesh.free) if holders else rank)
    return mesh.coordinates


def is_whole(claims: Sequence[int], shards: int) -> bool:
    """Whether these claims fit into whole replicas, with no shard held too often."""
    replicas, rest = divmod(len(claims), shards)
    held = Counter(claim % shards for claim in claims if claim != NO_COORDINATE)
    return not rest and max(held.values(), default=0) <= replicas


class _FreeCoordinates:
    def __init__(self, nodes: Sequence[int], shards: int) -> None:
        self.coordinates = [NO_COORDINATE] * len(nodes)
        self.free = set(range(len(nodes)))
        self._nodes, self._shards = nodes, shards
        self._filled: Counter[int] = Counter()
        self._of_node: Counter[tuple[int, int]] = Counter()

    def take(self, rank: int, coordinate: int) -> None:
        replica = coordinate // self._shards
        self.coordinates[rank] = coordinate
        self.free.remove(coordinate)
        self._filled[replica] += 1
        self._of_node[replica, self._nodes[rank]] += 1

    def best(self, rank: int, among: Iterable[int]) -> int:
        """Return the coordinate whose replica has most of this node's workers, fewest of others."""

        def distance(coordinate: int) -> tuple[int, int, int]:
            replica = coordinate // self._shards
            return -self._of_node[replica, self._nodes[rank]], self._filled[replica], coordinate

        return min(among, key=distance, default=NO_COORDINATE)


class MeshGroups:
    """The groups of one worker; `wirings` and `replace` for each world, `device_mesh` once."""

    def __init__(self, shards: int, when_begun: Callable[[], None] | None = None) -> None:
        """`when_begun` is called at the beginning of each operation of the groups."""
        self.shards = shards
        self.span = 1  # nodes per replica, if all nodes have the same number of workers
        self.size = 0  # world size of the current world
        self.coordinate = NO_COORDINATE
        self._ranks: list[int] = []  # world ranks, in the order of their coordinates
        self.made: DeviceMesh | None = None
        self.replicate = ElasticGroup("elastane/replicate", when_begun)
        self.shard = ElasticGroup("elastane/shard", when_begun)

    def spread(self, span: int) -> None:
        """Record how many nodes hold a replica of the current world."""
        self.span = span

    @property
    def groups(self) -> tuple[ElasticGroup, ElasticGroup]:
        """The two groups, in the order of the mesh's dimensions."""
        return self.replicate, self.shard

    @property
    def replicas(self) -> int:
        """How many workers of the current world hold each shard."""
        return self.size // self.shards

    @property
    def is_sole(self) -> bool:
        """Whether no other worker of the current world holds this worker's shard."""
        return self.replicas == 1

    def shard_of(self, coordinate: int) -> int:
        """Return the shard of a coordinate."""
        return coordinate % self.shards

    def set_coordinates(self, coordinates: Sequence[int], rank: int) -> None:
        """Set the coordinates of a world, given by rank."""
        self.coordinate, self.size = coordinates[rank], len(coordinates)
        self._ranks = sorted(range(len(coordinates)), key=lambda each: coordinates[each])

    def wirings(self, world: Wiring) -> tuple[Wiring, Wiring]:
        """Return how this worker's groups are built in a world, in the order of `groups`."""
        replica, shard = divmod(self.coordinate, self.shards)
        rows = self._ranks[replica * self.shards : (replica + 1) * self.shards]
        columns = self._ranks[shard :: self.shards]
        return (
            _subgroup(world, f"{REPLICATE}-{shard}", columns, replica),
            _subgroup(world, f"{SHARD}-{replica}", rows, shard),
        )

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """Return torch's mesh over the groups, which must be built."""
        for group in self.groups:
            group.register()
        ranks = torch.tensor(self._ranks).view(self.replicas, self.shards)
        names = (REPLICATE, SHARD)
        mesh = DeviceMesh.from_group([*self.groups], device_type, ranks, mesh_dim_names=names)
        self.made = mesh
        return mesh

    def close(self) -> None:
        """Close both groups. Idempotent."""
        for group in self.groups:
            group.close()


def _subgroup(world: Wiring, name: str, members: Sequence[int], rank: int) -> Wiring:
    assert members[rank] == world.rank, (members, rank, world.rank)
    return dataclasses.replace(
        world,
        rank=rank,
        world_size=len(members),
        fence=f"{world.fence}/{name}",
        serves=False,
        members=tuple(members),
    )


def _too_many(claims: Sequence[int], shards: int, shard: int) -> JobError:
    ranks = [
        r for r, claim in enumerate(claims) if claim != NO_COORDINATE and claim % shards == shard
    ]
    return JobError(
        f"shard {shard} is held by ranks {', '.join(map(str, ranks))}, and a world of"
        f" {len(claims)} workers has {len(claims) // shards} replicas",
        expected="replicas that are lost and come back whole: each on one node",
        next_step="job.device_mesh(shard=S) with an S that divides the workers of a node, or a"
        " fixed size: --nnodes N",
        slug="job-mesh",
    )
