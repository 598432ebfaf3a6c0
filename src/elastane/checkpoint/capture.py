"""Takes a state apart for a checkpoint: its tree, its live tensors, its other leaves.

Nothing is copied here. A sharded tensor (DTensor) is represented by this rank's shard. Tensors that
cannot be saved are refused, with their path. Names are those of torch.distributed.checkpoint for
the same state: keys and indices, joined by dots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import torch

from elastane.checkpoint.layout import Chunk, Tensor, name_of
from elastane.checkpoint.small_files import frozen
from elastane.comms.state import DEPTH_MAX, Flattening, Path, spelled
from elastane.errors import CheckpointError

_DTYPE, _SHAPE = attrgetter("dtype"), attrgetter("shape")


class Captured:
    """The parts of a state. `tensors` are its live tensors, numbered as in its tree.

    For a sharded tensor, `tensors` has this rank's shard and `originals` the whole DTensor.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._localizer = local = _Localizer()
        self._flattening = Flattening(local.replace(state, ()))
        self.tensors = self._flattening.tensors
        self.paths = [_dotted(path) for path in self._flattening.paths]
        self.names = _unique([".".join(path) for path in self.paths])
        self.specs: list[Tensor] = []
        self.chunks: list[Chunk] = []
        for number, path in enumerate(self._flattening.paths):
            self._add(number, self.tensors[number], local.shards.get(path), path)
        self._state = state
        self.is_sharded = bool(local.shards)
        self._kinds = _kinds(self.tensors)
        self._identity = b""
        self._named: _Named | None = None

    def update(self, state: Mapping[str, Any], doubtful: Sequence[int] | None = None) -> bool:
        """Replace the captured state by one of the same structure; returns False if it differs.

        After False, do not use this object again. If all tensors are the same objects as before,
        only the `doubtful` ones, by number, are checked here. Check the others with `are_alike`
        before you copy them.
        """
        local = self._localizer.update(state)
        if local is None or not self._flattening.again(local):
            return False
        self.tensors = self._flattening.tensors
        self._state = state
        return self.are_alike(None if self._flattening.has_new else doubtful)

    def are_alike(self, numbers: Sequence[int] | None = None) -> bool:
        """Whether tensors, all or these numbers, have their captured dtypes and shapes."""
        if numbers is None:
            return _kinds(self.tensors) == self._kinds
        dtypes, shapes = self._kinds
        had = [dtypes[number] for number in numbers], [shapes[number] for number in numbers]
        return _kinds([self.tensors[number] for number in numbers]) == had

    @property
    def originals(self) -> list[torch.Tensor]:
        """The live tensors by number, sharded ones as DTensor."""
        found = self._localizer.originals
        pairs = zip(self._flattening.paths, self.tensors, strict=True)
        return [found.get(path, tensor) for path, tensor in pairs]

    def _add(self, number: int, tensor: torch.Tensor, shard: _Shard | None, path: Path) -> None:
        if tensor.is_quantized:
            keep = "keep its int_repr(), scale and zero point in its place"
            raise _refused(path, "a quantized tensor", keep)
        if tensor.is_meta:
            raise _refused(
                path, "of the meta device, without data", "module.to_empty() before that"
            )
        shape = tuple(tensor.shape)
        whole, offsets = (shard.shape, shard.offsets) if shard else (shape, (0,) * len(shape))
        self.specs.append(Tensor(self.names[number], name_of(tensor.dtype), whole))
        if tensor.numel() or not shard:
            self.chunks.append(Chunk(number, offsets, shape))

    def identity(self) -> bytes:
        """Return the names, dtypes and shapes on which the state's layout depends, as bytes."""
        self._identity = self._identity or msgspec.msgpack.encode([self.specs, self.chunks])
        return self._identity

    def leaves(self) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
        """Return the values that are not tensors by name, and the path of each name in the state.

        Names and paths are those of torch.distributed.checkpoint.
        """
        if self._named is None:
            self._named = _named(self._state)
        leaves = {name: _at(self._state, keys) for name, keys in self._named.leaves.items()}
        return leaves, self._named.paths

    def tree(self) -> bytes:
        """Return the packed tree around the tensors, as captured."""
        return self._flattening.parts.tree

    def small(self) -> SmallState:
        """Return everything but the tensors as it is now; the state may change afterwards."""
        leaves, paths = self.leaves()
        return SmallState(self.tree, {name: frozen(leaf) for name, leaf in leaves.items()}, paths)


def _refused(path: Path, what: str, next_step: str) -> CheckpointError:
    return CheckpointError(
        f"{spelled(path)} is {what}",
        expected="dense tensors",
        next_step=next_step,
        slug="checkpoint-state",
    )


def _kinds(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.dtype], list[torch.Size]]:
    return [*map(_DTYPE, tensors)], [*map(_SHAPE, tensors)]


class SmallState(msgspec.Struct, frozen=True):
    """Everything that a save writes besides the tensors; `tree` is valid until the next update."""

    tree: Callable[[], bytes]
    leaves: dict[str, Any]  # Frozen.
    paths: dict[str, tuple[Any, ...]]


class _Shard(msgspec.Struct, frozen=True):
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


class _Spread(NamedTuple):
    """The properties that determine a rank's shard of a tensor."""

    mesh: Any
    placements: Any
    coordinate: Any
    shape: torch.Size
    local: torch.Size


class _Localizer:
    """Replaces each sharded tensor of a state by this rank's shard.

    Computing a shard's offsets takes torch a tenth of a millisecond, so they are cached.
    """

    def __init__(self) -> None:
        self.shards: dict[Path, _Shard] = {}
        self.originals: dict[Path, torch.Tensor] = {}
        self._spread: dict[Path, _Spread] = {}
        self._differs = False

    def update(self, state: Mapping[str, Any]) -> Any:
        """Replace in the next state; returns None if other tensors, or others' shards, differ."""
        self.originals = {}
        self._differs = False
        replaced = self.replace(state, ()) if self.shards else state
        is_same = not self._differs and len(self.originals) == len(self.shards)
        return replaced if is_same else None

    def replace(self, value: Any, path: Path) -> Any:
        if isinstance(value, torch.Tensor):
            return self._local(value, path) if hasattr(value, "to_local") else value
        if len(path) > DEPTH_MAX:
            return value  # Flattening refuses it, with its path.
        if type(value) in (list, tuple):
            return type(value)(self.replace(each, (*path, n)) for n, each in enumerate(value))
        if isinstance(value, dict):
            pairs = [(key, self.replace(each, (*path, key))) for key, each in value.items()]
            same = all(new is value[key] for key, new in pairs)
            return value if same else dict(pairs)
        return value

    def _local(self, tensor: Any, path: Path) -> torch.Tensor:
        mesh, local = tensor.device_mesh, held_of(tensor)
        now = _Spread(mesh, tensor.placements, mesh.get_coordinate(), tensor.shape, local.shape)
        if self._spread.get(path) != now:
            self._find(tensor, local, path)
            self._spread[path], self._differs = now, True
        self.originals[path] = tensor
        return local.detach() if local.requires_grad else local

    def _find(self, tensor: Any, local: torch.Tensor, path: Path) -> None:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        shape, offsets = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        if tuple(local.shape) != tuple(shape):
            raise CheckpointError(
                f"{spelled(path)} is sharded as {tensor.placements}, unevenly inside a dimension",
                expected="shards that are whole boxes of the tensor",
                next_step="shard it along one dimension for each dimension of the mesh",
                slug="checkpoint-state",
            )
        self.shards[path] = _Shard(tuple(tensor.shape), tuple(offsets))


def held_of(tensor: Any) -> torch.Tensor:
    """Return this rank's shard of a tensor, or the tensor itself if it is not sharded."""
    if not hasattr(tensor, "to_local"):
        whole: torch.Tensor = tensor
        return whole
    held = getattr(tensor, "_local_tensor", None)
    # Another type may be an asynchronous result. Else to_local() returns the same, 20 us later.
    return held if type(held) is torch.Tensor else tensor.to_local()


class _Named(NamedTuple):
    """The position of each leaf that is no tensor by torch's names, and torch's path of each name.

    In torch's paths all keys are text.
    """

    leaves: dict[str, Path]
    paths: dict[str, tuple[Any, ...]]


def _named(state: Mapping[str, Any]) -> _Named:
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    try:
        flat, paths = flatten_state_dict(dict(state))
    except ValueError:  # Two keys with one name, which torch alone cannot read.
        return _Named({}, {})
    wanted = {
        paths[name]: (name, value)
        for name, value in flat.items()
        if not isinstance(value, torch.Tensor)
    }
    return _Named(dict(_found(state, (), (), wanted)), paths)


def _found(
    value: Any, path: tuple[Any, ...], keys: Path, wanted: Mapping[tuple[Any, ...], tuple[str, Any]]
) -> Iterator[tuple[str, Path]]:
    """Yield the real keys of the leaves wanted by torch's paths, where 1 and "1" are the same."""
    name, leaf = wanted.get(path, ("", None))
    if name and leaf is value:
        yield name, keys
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _found(each, (*path, str(key)), (*keys, key), wanted)
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _found(each, (*path, number), (*keys, number), wanted)


def _at(state: Any, path: Path) -> Any:
    for key in path:
        state = state[key]
    return state


def _dotted(path: Path) -> list[str]:
    return [str(key) for key in path]


def _unique(names: list[str]) -> list[str]:
    """Number names that occur twice, as in {"a.b": x, "a": {"b": y}}."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name}~{seen[name]}")
    return found
