"""Assigns ranks: agents exchange the sizes of their nodes through the store of their world.

Nodes may differ in their number of workers and in their role. Keys and values are those of torch
2.13. One more key holds the restart count of the world, the highest of its agents', so that all
workers of a world receive the same one.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from elastane.elastic.agent.server._spec import Worker, WorkerSpec

_ROLE_INFO = "torchelastic/role_info/"
_ASSIGNED = "torchelastic/assigned_ranks/"
_RESTARTS = "torchelastic/restart_count"
_IDENTICAL = "TORCH_ELASTIC_WORKER_IDENTICAL"


class _RoleInstanceInfo:
    """What one agent publishes for the others of its world."""

    __slots__ = ["local_world_size", "rank", "restarts", "role"]

    def __init__(self, role: str, rank: int, local_world_size: int, restarts: int = 0) -> None:
        self.role = role
        self.rank = rank
        self.local_world_size = local_world_size
        self.restarts = restarts

    def serialize(self) -> bytes:
        return json.dumps({name: getattr(self, name) for name in sorted(self.__slots__)}).encode()

    @staticmethod
    def deserialize(data: bytes) -> _RoleInstanceInfo:
        """Parse it; torch's agents publish no restart count."""
        found = json.loads(data.decode())
        return _RoleInstanceInfo(
            found["role"], found["rank"], found["local_world_size"], found.get("restarts", 0)
        )

    @staticmethod
    def compare(obj1: _RoleInstanceInfo, obj2: _RoleInstanceInfo) -> int:
        if obj1.role == obj2.role:
            return obj1.rank - obj2.rank
        return 1 if obj1.role > obj2.role else -1

    @staticmethod
    def find_role_boundaries(roles_infos: list[_RoleInstanceInfo], role: str) -> tuple[int, int]:
        found = [index for index, info in enumerate(roles_infos) if info.role == role]
        return (found[0], found[-1]) if found else (-1, -1)


@dataclass(frozen=True)
class Ranks:
    """The workers of this agent, and the restart count of their world; None if unknown."""

    workers: list[Worker]
    restarts: int | None


def assign(store: Any, place: tuple[int, int], spec: WorkerSpec, restarts: int) -> Ranks:
    """Agree on ranks with the world's other agents; `place` is (rank, number) of agents.

    Blocks until all have published; raises what the store raises. With
    TORCH_ELASTIC_WORKER_IDENTICAL=1 nothing is exchanged, and all agents are assumed to be alike.
    """
    group_rank, group_world_size = place
    if os.environ.get(_IDENTICAL, "0") == "1":
        base, total = group_rank * spec.local_world_size, group_world_size * spec.local_world_size
        return Ranks(_workers(spec, (base, total, base, total)), None)
    mine = _RoleInstanceInfo(spec.role, group_rank, spec.local_world_size, restarts)
    store.set(f"{_ROLE_INFO}{group_rank}", mine.serialize())
    if group_rank == 0:
        found = store.multi_get([f"{_ROLE_INFO}{index}" for index in range(group_world_size)])
        _publish(store, [_RoleInstanceInfo.deserialize(data) for data in found])
    assigned = json.loads(store.get(f"{_ASSIGNED}{group_rank}"))
    count = int(store.get(_RESTARTS)) if store.check([_RESTARTS]) else None
    return Ranks(_workers(spec, assigned), count)


def _publish(store: Any, infos: list[_RoleInstanceInfo]) -> None:
    """Publish each agent's first ranks, and the totals."""
    role_sizes: dict[str, int] = defaultdict(int)
    for info in infos:
        role_sizes[info.role] += info.local_world_size
    total = sum(role_sizes.values())
    # First: an agent that finds its ranks must also find the count.
    store.set(_RESTARTS, str(max(info.restarts for info in infos)))
    keys, values, base = [], [], 0
    role_bases: dict[str, int] = defaultdict(int)
    for index, info in enumerate(infos):
        keys.append(f"{_ASSIGNED}{index}")
        values.append(json.dumps([base, total, role_bases[info.role], role_sizes[info.role]]))
        base += info.local_world_size
        role_bases[info.role] += info.local_world_size
    store.multi_set(keys, values)


def _workers(spec: WorkerSpec, assigned: tuple[int, int, int, int] | list[int]) -> list[Worker]:
    base, total, role_base, role_total = assigned
    return [
        Worker(
            local_rank=rank,
            global_rank=base + rank,
            role_rank=role_base + rank,
            world_size=total,
            role_world_size=role_total,
        )
        for rank in range(spec.local_world_size)
    ]
