"""Whether other workers can heal sharded state, and the warnings if they cannot."""

from types import SimpleNamespace

import pytest

from elastane.comms.mesh import MeshGroups
from elastane.errors import JobError, PeerLostError
from elastane.worker import world
from elastane.worker.shard_support import _why_never, why_unhealed

MADE = object()


def tracked(*meshes, optimizers=1):
    sharded = [SimpleNamespace(device_mesh=mesh) for mesh in meshes]
    return SimpleNamespace(sharded=sharded, optimizers=[object()] * optimizers)


def mesh(*, sole=False):
    return SimpleNamespace(made=MADE, is_sole=sole, shards=4)


@pytest.mark.parametrize(
    ("state", "where", "now", "ever"),
    [
        (tracked(), None, "", ""),
        (tracked(), mesh(sole=True), "", ""),
        (tracked(MADE), mesh(), "", ""),
        (tracked(MADE, optimizers=2), mesh(), "", ""),
        (tracked(MADE), mesh(sole=True), "each of 4 workers holds a shard", ""),
        (tracked(MADE), None, "not over job.device_mesh()", "not over job.device_mesh()"),
        (tracked(MADE, object()), mesh(), "not over", "not over"),
        (tracked(MADE, optimizers=0), mesh(), "job.track(optimizer=", "job.track(optimizer="),
    ],
)
def test_why_a_lost_worker_would_have_all_start_again(state, where, now, ever):
    for found, wanted in ((why_unhealed(state, where), now), (_why_never(state, where), ever)):
        assert wanted in found and bool(wanted) == bool(found)


@pytest.mark.parametrize(("claims", "slug"), [((0, -1), "job-mesh-size"), ((-1, -1), "job-mesh")])
def test_a_mesh_of_another_size_is_an_error_of_the_script_unless_workers_joined(
    monkeypatch, claims, slug
):
    worlds = world.Worlds(None)
    worlds.group = SimpleNamespace(rank=lambda: 1, size=lambda: 2)
    said = [[claim, 0, shards, 1] for claim, shards in zip(claims, (1, 2), strict=True)]
    monkeypatch.setattr(world, "gathered", lambda group, own: said)
    with pytest.raises(JobError, match="with 1, 2, by rank") as failed:
        worlds._take_coordinate(MeshGroups(2))
    assert failed.value.slug == slug


@pytest.mark.parametrize(("claims", "is_level"), [((-1, -1, -1), True), ((0, 1, -1), False)])
def test_members_are_level_without_shards_and_not_beside_holders_of_shards(
    monkeypatch, claims, is_level
):
    """A holder of a shard may be a step ahead of the others."""
    worlds = world.Worlds(SimpleNamespace())
    worlds.mesh = MeshGroups(4)
    worlds.group = SimpleNamespace(rank=lambda: 2, size=lambda: 3, consist_of=lambda groups: None)
    monkeypatch.setattr(world, "gathered", lambda group, own: [[c, 0, 4, 1] for c in claims])
    with pytest.raises(PeerLostError, match="no whole replicas of 4"):
        worlds._take_coordinate(worlds.mesh)
    assert (worlds._sharded().level is not None) == is_level
