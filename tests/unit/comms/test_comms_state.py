"""State is sent as plain data and tensors, unchanged; other values are refused by name."""

import random
from collections import Counter, OrderedDict, defaultdict

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastane.comms.digest import raw_bytes, state_digest
from elastane.comms.state import Flattening, build, flatten
from elastane.errors import ConfigurationError, StateError

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int8, torch.uint8, torch.int16, torch.int64, torch.bool, torch.float8_e4m3fn),
]


def _state():
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    generator = torch.Generator().manual_seed(7)
    torch.randn(3, generator=generator)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "python": random.Random(3).getstate(),
        "numpy": np.random.default_rng(1).bit_generator.state,
        "generator": generator,
        "array": np.arange(6, dtype="u2").reshape(2, 3)[:, ::2],
        "empty": np.zeros((0, 3)),
        "scalars": [np.float32(1.5), np.int64(-3), np.bool_(True), 2**100, -(2**63), float("inf")],
        "dtypes": [torch.ones(3).to(dtype) for dtype in DTYPES],
        "odd": (torch.tensor(5.0), torch.empty(0, 4), torch.arange(12).reshape(3, 4).t()),
        "keys": {1: "a", (2, None): b"b", "c": True},
        "size": torch.Size([2, 3]),
        "default": defaultdict(list, {"x": [1]}),
        "counter": Counter({30: 1, 60: 2}),
    }


def _same(a, b):
    if isinstance(a, torch.Tensor):
        bits = [raw_bytes(each) for each in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, torch.Generator):
        return torch.equal(a.get_state(), b.get_state())
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


def test_a_state_of_every_supported_type_survives_a_round_trip():
    state = _state()
    again = build(*flatten(state)[:2])
    assert _same(state, again)
    assert isinstance(again["model"], OrderedDict) and isinstance(again["counter"], Counter)
    assert state_digest(state) == state_digest(again)


@pytest.mark.parametrize(
    "value",
    [
        *(object(), {1, 2}, lambda: 0, np.array([object()]), random.Random()),
        *(torch.eye(2).to_sparse(), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
    ],
    ids=["object", "set", "function", "array", "random", "sparse", "nested"],
)
def test_an_unsupported_value_is_reported_with_its_position(value):
    with pytest.raises(ConfigurationError, match=r"state\['a'\]\[1\]") as refused:
        flatten({"a": [0, value]})
    assert refused.value.slug == "state-kind"


def test_a_state_that_contains_itself_is_refused():
    state = []
    state.append(state)
    with pytest.raises(ConfigurationError, match="nested deeper"):
        flatten(state)


@pytest.mark.parametrize(
    "tree",
    [b"", b"\xc1", ["T", 0], ["x"], ["T"], ["d", [[1]]], ["a", "O", [1], 0], ["s", "f4", b"1"]],
    ids=["nothing", "garbage", "number", "kind", "parts", "pairs", "objects", "scalar"],
)
def test_bytes_that_are_no_state_raise_state_error(tree):
    with pytest.raises(StateError):
        build(tree if isinstance(tree, bytes) else msgspec.msgpack.encode(tree), [])


def test_the_digest_changes_with_every_change_of_the_data():
    """Changes: one bit, two equal ones that cancel in xor, a value, a name, a dtype, a shape."""
    base = {"w": torch.arange(64, dtype=torch.int64), "n": 1}
    digests = {state_digest(base)}
    flipped = {"w": base["w"].clone(), "n": 1}
    flipped["w"][9] ^= 1
    twice = {"w": base["w"].clone(), "n": 1}
    twice["w"][8] ^= 1 << 40
    twice["w"][16] ^= 1 << 40
    digests |= {state_digest(flipped), state_digest(twice)}
    digests |= {state_digest({**base, "n": 2}), state_digest({"v": base["w"], "n": 1})}
    digests.add(state_digest({**base, "w": base["w"].view(torch.float64)}))
    digests.add(state_digest({**base, "w": base["w"].reshape(8, 8)}))
    assert len(digests) == 7


def test_the_digest_changes_with_every_exchange_of_values():
    """Exchanges in a row, in a column, across both, across chunks, and of all values."""
    data = torch.arange(100_000)
    changed = [data.flip(0), data.roll(1), data.roll(256)]
    for a, b in [(3, 4), (3, 3 + 256), (3, 4 + 256), (3, 3 + (1 << 15)), (3, 99_999)]:
        changed.append(data.clone())
        changed[-1][[a, b]] = data[[b, a]]
    assert len({state_digest({"x": each}) for each in [data, *changed]}) == 1 + len(changed)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1 << 15, (1 << 18) + 3])
def test_the_digest_covers_every_byte(count):
    data = torch.zeros(count, dtype=torch.uint8)
    before = state_digest({"x": data})
    for at in {0, count // 2, count - 1} & set(range(count)):
        data[at] = 1
        assert state_digest({"x": data}) != before
        data[at] = 0
    assert state_digest({"x": data}) == before


KEYS = st.one_of(st.sampled_from("ab"), st.integers(0, 2), st.just((1, 2)), st.booleans())
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-1, 2**70),
    st.floats(allow_nan=False),
    st.sampled_from(["", "x", b"y", np.float32(2), torch.Size([2])]),
    st.builds(torch.full, st.sampled_from([(2,), (1, 2), ()]), st.sampled_from([0.0, 1.0, 2])),
    st.builds(torch.nn.Parameter, st.builds(torch.ones, st.integers(0, 2))),
    st.builds(np.ones, st.integers(0, 2)),
)
STATES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        *(st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple)),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=8,
)


def _same_parts(a, b):
    alike = all(x is y or _same(x, y) for x, y in zip(a.tensors, b.tensors, strict=True))
    return a.tree == b.tree and a.paths == b.paths and alike


@settings(max_examples=400, deadline=None)
@given(states=st.lists(STATES, min_size=2, max_size=4))
def test_flattening_again_equals_flatten(states):
    flattening = Flattening(states[0])
    for state in states[1:]:
        if not flattening.again(state):
            flattening = Flattening(state)
        assert _same_parts(flattening.parts, flatten(state))


def test_a_training_state_is_taken_apart_again_while_it_is_made_of_the_same_things():
    first, second = ({k: _state()[k] for k in ("model", "optimizer", "keys")} for _ in range(2))
    del first["keys"][(2, None)], second["keys"][(2, None)]
    flattening = Flattening(first)
    second["optimizer"]["param_groups"][0]["lr"] = 0.5
    assert flattening.again(second) and _same_parts(flattening.parts, flatten(second))
    assert build(*flattening.parts[:2])["optimizer"]["param_groups"][0]["lr"] == 0.5
    second["optimizer"]["param_groups"].append({"params": []})
    assert not flattening.again(second)


def test_replaced_tensors_are_found_at_any_depth():
    first, second, other = (torch.full((2,), number) for number in (1.0, 2.0, 3.0))
    state = {"flat": {"a": first, "b": second}, "deep": {0: {"x": first}, 1: {"x": second}}}
    flattening = Flattening(state)
    for change in (
        lambda: None,
        lambda: None,
        lambda: state["flat"].update(b=other),
        lambda: state["deep"][1].update(x=other),
        lambda: state["deep"].update({1: {"x": first}}),
        lambda: state.update(flat={"a": second, "b": first}),
    ):
        change()
        assert flattening.again(state) and _same_parts(flattening.parts, flatten(state))
    for change in (
        lambda: state["deep"][0].update(y=first),
        lambda: state["deep"].update({0: {"z": first}}),
        lambda: state["deep"].update({0: {}, 1: {"x": first, "y": first}}),
        lambda: state["deep"].update({0: [first]}),
        lambda: state.update(flat={"b": second, "a": first}),
        lambda: state.update(flat={"a": 1.0, "b": 2.0}),
    ):
        change()
        assert not flattening.again(state)
        flattening = Flattening(state)
        assert flattening.again(state) and _same_parts(flattening.parts, flatten(state))


def test_a_parameter_whose_data_was_replaced_is_taken_as_it_is_now():
    parameter = torch.nn.Parameter(torch.zeros(2))
    flattening = Flattening({"x": parameter})
    for number in (1.0, 2.0, 3.0):
        assert flattening.again({"x": parameter})
        parameter.data = torch.full((2,), number)
    assert flattening.again({"x": parameter})
    assert flattening.parts.tensors[0].tolist() == [3.0, 3.0]


def test_a_parameter_is_taken_as_it_lives_and_without_its_history():
    net = torch.nn.Linear(2, 2)
    flattening = Flattening(dict(net.named_parameters()))
    assert flattening.again(dict(net.named_parameters()))
    weight = flattening.tensors[0]
    assert not weight.requires_grad and weight.data_ptr() == net.weight.data_ptr()
    assert flattening.again(dict(net.named_parameters())) and flattening.tensors[0] is weight


@pytest.mark.parametrize(
    "change",
    [
        lambda p: setattr(p, "data", torch.ones(2, 2)),
        lambda p: setattr(p, "data", p.data.half()),
        lambda p: setattr(p, "data", p.data.t()),
        lambda p: setattr(p, "data", p.data[:1]),
        lambda p: torch.utils.swap_tensors(p, torch.nn.Parameter(torch.ones(2, 2))),
        lambda p: torch.utils.swap_tensors(p, torch.nn.Parameter(torch.ones(2, device="meta"))),
    ],
    ids=["other", "half", "turned", "part", "swapped", "elsewhere"],
)
def test_a_parameter_with_new_memory_counts_as_new(change):
    state = {"x": torch.nn.Parameter(torch.arange(4.0).view(2, 2)), "y": torch.zeros(1)}
    flattening = Flattening(state)
    assert flattening.has_new
    assert flattening.again(state) and flattening.has_new
    assert flattening.again(state) and not flattening.has_new
    before = flattening.tensors[0]
    change(state["x"])
    assert before.tolist() == [[0.0, 1.0], [2.0, 3.0]], "what is being copied stays as it is"
    assert flattening.again(state) and flattening.has_new
    now = flattening.tensors[0]
    assert (now.device, now.shape, now.dtype) == (
        state["x"].device,
        state["x"].shape,
        state["x"].dtype,
    )
    assert now.device.type == "meta" or torch.equal(now, state["x"])


def test_the_parts_of_modules_are_known_by_their_names_and_keys_of_other_types_are_others():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    first = net.state_dict(keep_vars=True)
    flattening = Flattening({"net": first})
    assert flattening.again({"net": net.state_dict(keep_vars=True)}) and flattening.has_new
    again = net.state_dict(keep_vars=True)
    assert any(one is not other for one, other in zip(first, again, strict=True))
    assert flattening.again({"net": again}) and not flattening.has_new
    held = torch.ones(2)
    flattening = Flattening({0: held, 1: held})
    assert flattening.again({0: held, 1: held}) and flattening.again({0: held, 1: held})
    assert not flattening.has_new
    assert not flattening.again({0: held, True: held})
    flattening = Flattening({0: {"a": held}, 1: {"b": held}})
    for _ in range(2):
        assert flattening.again({0: {"a": held}, 1: {"b": held}})
    assert not flattening.has_new
    assert not flattening.again({0: {"a": held}, 1: {"c": held}})
