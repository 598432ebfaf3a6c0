"""Registers a group in the tables by which torch.distributed's functions find it.

Owns nothing: the tables are torch's (private names of distributed_c10d, 2.13). With these entries
`torch.distributed` works over a group that `init_process_group` did not make. If there is no
default group yet, this one becomes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import (
    Store,
    _register_process_group,
    _unregister_process_group,
)
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import GroupName

from elastane.errors import ConfigurationError


class NoSubgroups(Store):
    """The store that `new_group` finds: it refuses every call, since there are no subgroups."""

    def _refuse(self, *_args: Any, **_kwargs: Any) -> Any:
        raise ConfigurationError(
            "torch.distributed.new_group: an elastic group has no subgroups",
            slug="subgroup",
            expected="collectives over the whole world; its ranks change when it does",
            next_step="use collectives over the whole group",
        )

    set = get = add = wait = check = delete_key = compare_set = _refuse


def enter(group: ProcessGroup, name: str, backends: str) -> None:
    """Register `group`; it becomes the default group if there is none."""
    world = c10d._world
    tag = f"ptd:{name}"
    world.pg_map[group] = (backends.rpartition(":")[2], NoSubgroups())
    world.pg_names[group] = GroupName(name)
    world.pg_backend_config[group] = backends
    world.pg_to_tag[group] = tag
    for each in ("", tag):
        world.tags_to_pg.setdefault(each, []).append(group)
    _register_process_group(GroupName(name), group)
    if world.default_pg is None:
        c10d._update_default_pg(group)


def resize(group: ProcessGroup, members: Iterable[int]) -> None:
    """Set the members of the group: ranks of the job, in the order of the group's ranks."""
    c10d._world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(members)}


def leave(group: ProcessGroup) -> None:
    """Unregister `group`, also as the default group."""
    world = c10d._world
    if group not in world.pg_map:
        return  # destroy_process_group() has removed it
    if world.default_pg is group:
        c10d._update_default_pg(None)
    name = world.pg_names[group]
    tag = world.pg_to_tag[group]
    for table in (world.pg_map, world.pg_names, world.pg_backend_config, world.pg_group_ranks):
        table.pop(group, None)
    world.pg_to_tag.pop(group)
    world.pg_coalesce_state.pop(group, None)
    for each in ("", tag):
        world.tags_to_pg[each].remove(group)
    _unregister_process_group(name)
