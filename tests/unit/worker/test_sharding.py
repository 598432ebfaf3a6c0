"""Whether others can heal sharded state, now and in worlds to come, and what is said where not."""

from types import SimpleNamespace

import pytest

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
