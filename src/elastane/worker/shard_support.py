"""Sharded state (`fully_shard`) in a job: whether peers can heal it, and what cannot use it.

Owns that answer and its error texts. If no replica holds the shard of a lost worker, all workers
restart from a snapshot or checkpoint. Nothing else about a job changes then.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from elastane.checkpoint.registered import RegisteredObjects
from elastane.comms.mesh import MeshGroups
from elastane.data.checks import whole
from elastane.errors import JobError
from elastane.worker.digest_log import DigestLog
from elastane.worker.healing import Health
from elastane.worker.mode import Mode
from elastane.worker.undo import Undo
from elastane.worker.world import Worlds

_NO_REPLICA = "sharded state has no replica"


def why_unhealed(tracked: RegisteredObjects, mesh: MeshGroups | None) -> str:
    """Return why peers cannot heal what a worker of this world holds; "" if they can."""
    never = _why_never(tracked, mesh)
    if never or mesh is None or not tracked.sharded or not mesh.is_sole:
        return never
    return f"{_NO_REPLICA}: each of {mesh.shards} workers holds a shard that no other has"


def _why_never(tracked: RegisteredObjects, mesh: MeshGroups | None) -> str:
    """Return why peers cannot heal it in any later world of the same processes; "" if they can."""
    meshes = {each.device_mesh for each in tracked.sharded}
    if not meshes:
        return ""
    if mesh is None or meshes != {mesh.made}:
        return f"{_NO_REPLICA}: it is not over job.device_mesh()"
    if not _passes_can_be_dropped():
        return (
            f"sharded state is healed with torch 2.13 or later; this is torch {torch.__version__}"
        )
    if not tracked.optimizers:
        return "sharded state without its optimizer is not healed: job.track(optimizer=optimizer)"
    return ""


def _passes_can_be_dropped() -> bool:
    """Whether this torch's sharded modules can drop an interrupted forward or backward."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is None or hasattr(fsdp.FSDPModule, "reset_iter_state")


def begin(worlds: Worlds, health: Health, undo: Undo, verify_every: int) -> None:
    """Begin the steps of a job whose state is sharded."""
    if verify_every:
        raise _refused("job.steps(verify_every=...)")
    # A joining worker enters a job that heals, even if one replica is left at the moment.
    why = "" if worlds.came_later else why_unhealed(health.tracked, worlds.mesh)
    worlds.restart_because(why and _why_never(health.tracked, worlds.mesh))
    if not worlds.restarts and worlds.mesh is not None:
        from elastane.worker.shard_healing import Shards  # heavy: torch.distributed.fsdp

        came_later = worlds.came_later
        shards = Shards(worlds.group, worlds.mesh, health, undo, came_later=came_later)
        health.heal_by(shards)
    if why and worlds.rank == 0 and worlds.has_agent:
        sys.stderr.write(
            f"elastane: {why}; when a worker is lost, all start again and continue from the"
            " Checkpointer's snapshot or checkpoint\n"
        )


def refuse(tracked: RegisteredObjects, mode: Mode, digest_log: DigestLog | None) -> None:
    """Raise JobError if sharded objects are registered in a job that needs whole replicas."""
    if tracked.sharded and (mode.is_deterministic or digest_log is not None):
        raise _refused(
            "deterministic=True" if mode.is_deterministic else "a digest log (digest_log=)"
        )


def open_mesh(worlds: Worlds, shards: int) -> Any:
    """Return the mesh of a job's world, in replicas of `shards` workers; wait for a place in it."""
    if worlds.mesh is not None:
        raise JobError(
            "job.device_mesh() was called before",
            expected="one mesh for each job",
            next_step="mesh = job.device_mesh(shard=S), once, before the model is built",
            slug="job-mesh",
        )
    mesh = MeshGroups(whole("shard", shards, 1), worlds.progress.beat)
    worlds.open_mesh(mesh)
    return mesh.device_mesh(worlds.device.type)


def _refused(what: str) -> JobError:
    return JobError(
        f"{what}, with parameters that are sharded over workers (fully_shard)",
        expected="whole parameters on each worker, as with DDP over job.process_group",
        next_step="leave it out, or do not shard",
        slug="job-track",
    )
