"""Repeated captures of a state with an unchanged structure."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastane.checkpoint.capture import Captured
from elastane.errors import ElastaneError


def state(lr=0.1, size=3, **more):
    net = torch.nn.Linear(size, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net(torch.ones(size)).sum().backward()
    optimizer.step()
    return {"net": net.state_dict(), "optimizer": optimizer.state_dict(), **more}


def test_each_save_has_the_values_of_its_own_time():
    captured, now = Captured(state()), state(lr=0.7)
    names, identity = captured.names, captured.identity()
    assert captured.update(now)
    fresh = Captured(now)
    assert (captured.tree(), captured.names, captured.identity()) == (fresh.tree(), names, identity)
    assert captured.leaves() == fresh.leaves()
    assert captured.leaves()[0]["optimizer.param_groups.0.lr"] == 0.7
    live = [now["net"]["weight"], now["net"]["bias"]]
    assert [t.data_ptr() for t in captured.tensors[:2]] == [t.data_ptr() for t in live]


def test_leaves_are_found_under_keys_of_every_kind():
    keyed = {1: 2, "1.5": 3, 1.5: {None: 4}, "1": {"a": 7}, 3: [(8, [9])]}
    held = {"a": [{0: "x"}, torch.ones(1)], "b": keyed}
    captured = Captured(held)
    for value in (2, 0):
        keyed[1] = value
        assert captured.update(held)
        named = {"a.0.0": "x", "b.1": value, "b.1.5": 3, "b.1.5.None": 4}
        assert captured.leaves()[0] == {**named, "b.1.a": 7, "b.3": [(8, [9])]}
    leaves, paths = Captured({"a": {(1, 2): 5}}).leaves()
    assert leaves == {"a.(1, 2)": 5} and paths == {"a.(1, 2)": ("a", "(1, 2)")}


def test_a_state_whose_keys_share_a_name_is_not_written_for_torch():
    captured = Captured({"a": {1: 2, "1": 3}, "b": torch.ones(1)})
    assert captured.leaves() == ({}, {}) and captured.names == ["b"]


def test_unsavable_tensors_are_refused_with_their_path():
    itself = []
    itself.append(itself)
    quantized = torch._empty_affine_quantized(2, scale=1, zero_point=0, dtype=torch.qint8)
    wrong = [(torch.ones(1, device="meta"), "meta device"), (quantized, "quantized")]
    for value, why in [*wrong, (itself, "nested deeper"), ([{2, 3}], "builtins.set")]:
        with pytest.raises(ElastaneError, match=rf"state\['a'\]\['b'\].*{why}"):
            Captured({"a": {"b": value}})


def test_a_different_shape_dtype_or_part_is_a_different_state():
    for other in (state(size=4), state(extra=1), {"net": state()["net"]}):
        assert not Captured(state()).update(other)
    halved = state()
    halved["net"]["weight"] = halved["net"]["weight"].half()
    assert not Captured(state()).update(halved)


def test_a_shape_or_dtype_changed_in_place_is_found_when_checked():
    for change in (lambda t: t.resize_(5), lambda t: setattr(t, "data", t.data.double())):
        held = {"a": torch.ones(2), "b": torch.ones(3)}
        captured = Captured(held)
        assert captured.update(held) and captured.update(held, [0]) and captured.are_alike()
        change(held["b"])
        assert captured.update(held, [0]) and captured.update(held, [])
        assert not captured.are_alike() and not captured.are_alike([1])
        assert not captured.update(held, [1]) and not captured.update(held)


@pytest.fixture
def mesh():
    """A mesh of two ranks with this process as one of them; nothing is sent."""
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def sharded(mesh, rows=4, placement=None, **more):
    local = [torch.full((rows // 2, 3), number) for number in (1.0, 2.0)]
    placements = [placement or Shard(0)]
    first, second = (DTensor.from_local(each, mesh, placements) for each in local)
    return {"net": {"a": first, "b": second}, "lr": [0.1], **more}


def test_the_next_save_of_a_sharded_state_has_the_parts_of_its_own_time(mesh):
    captured, now = Captured(sharded(mesh)), sharded(mesh)
    held = now["net"]["b"].to_local()
    held.fill_(7.0)
    identity = captured.identity()
    assert captured.update(now)
    fresh = Captured(now)
    assert captured.is_sharded and captured.identity() == fresh.identity() == identity
    assert [chunk.offsets for chunk in captured.chunks] == [(2, 0), (2, 0)]
    assert [t.data_ptr() for t in captured.tensors] == [t.data_ptr() for t in fresh.tensors]
    assert captured.tensors[1].data_ptr() == held.data_ptr()
    assert captured.originals == [now["net"]["a"], now["net"]["b"]]


def test_a_different_sharding_is_a_different_state(mesh, monkeypatch):
    plain = sharded(mesh)
    plain["net"]["b"] = plain["net"]["b"].to_local()
    for other in (
        sharded(mesh, rows=6),
        sharded(mesh, placement=Replicate()),
        sharded(mesh, more=1),
        plain,
        state(),
    ):
        assert not Captured(sharded(mesh)).update(other)
    captured = Captured(sharded(mesh))
    monkeypatch.setattr(type(mesh), "get_coordinate", lambda self: (0,))
    assert not captured.update(sharded(mesh)), "this process has become another rank"
