"""State as plain data and a list of tensors, so that nothing is ever unpickled.

`flatten` takes apart nested dict, list, tuple, None, bool, int, float, str, bytes, tensors, NumPy
arrays and scalars, and `torch.Generator`; `build` assembles them again. Any other value is refused
with its position in the state. It does not know processes or digests.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import is_, methodcaller
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch

from elastane.errors import ConfigurationError, StateError

# A node of the tree: a plain value, or a list of its kind's letter and its parts.
Tree: TypeAlias = Any
# Keys and indices, from the outside in.
Path: TypeAlias = tuple[Any, ...]

_PLAIN = (type(None), bool, float, str, bytes)
_INT64 = 1 << 63
DEPTH_MAX = 64
_VALUES = methodcaller("values")
_A_KEY = "(a key)"
_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
# Not allowed: objects, which are pointers, and dates and records, which are no training state.
_ARRAY_KINDS = "biufcSU"
# As numpy.dtype.str writes it.
_ARRAY_DTYPE = re.compile(rf"[<>|=][{_ARRAY_KINDS}][0-9]{{1,9}}")
# The tensors that a tree refers to by number and that are not in their places yet.
Given: TypeAlias = dict[int, torch.Tensor]


class Parts(NamedTuple):
    """The result of `flatten`: the tree as bytes, and the tensors that it refers to by number.

    `paths` are the positions of the tensors, as keys and indices: the same in every process.
    """

    tree: bytes
    tensors: list[torch.Tensor]
    paths: list[Path]

    @property
    def names(self) -> list[str]:
        """The paths as Python would write them."""
        return [spelled(path) for path in self.paths]


def flatten(state: object) -> Parts:
    """Take a state apart; the tensors are those of the state, not copies."""
    flattener = _Flattener()
    tree = flattener.take(state, ())
    return Parts(msgspec.msgpack.encode(tree), flattener.tensors, flattener.paths)


class Flattening:
    """Takes states of one structure apart, again and again.

    While the structure does not change, it is reused. A mapping that holds the identical tensors as
    before, as an optimizer's state does, is not traversed again.
    """

    def __init__(self, state: object) -> None:
        flattener = _Flattener()
        self._tree = flattener.take(state, ())
        self.tensors, self.paths = flattener.tensors, flattener.paths
        self.has_new = True  # whether the last pass found tensors that it had not seen before
        self._known: dict[int, _Known] = {}  # by the id of a list of the tree, which is kept

    @property
    def parts(self) -> Parts:
        """The result of `flatten` for the last state."""
        return Parts(msgspec.msgpack.encode(self._tree), self.tensors, self.paths)

    def again(self, state: object) -> bool:
        """Take `state` apart, reusing the structure of the previous one.

        Returns False if the structure differs; then this object is of no further use.
        """
        self.tensors, self.has_new = [], False
        try:
            self._tree = self._refilled(self._tree, state)
        except _DiffersError:
            return False
        return True

    def _refilled(self, node: Tree, value: Any) -> Tree:
        """Return `node` with the values of `value`; its lists are changed in place."""
        kind = type(value)
        if type(node) is not list:
            if kind in _PLAIN or (kind is int and -_INT64 <= value < _INT64):
                return value
            raise _DiffersError
        letter = node[0]
        if letter == "T":
            self._take(value)
        elif letter == _MAPPINGS.get(kind, ""):
            self._refill_pairs(node[1], value)
        elif letter == _SEQUENCES.get(kind, ""):
            if len(node[1]) != len(value):
                raise _DiffersError
            if not _are_ints(node[1], value):
                node[1][:] = map(self._refilled, node[1], value)
        else:
            raise _DiffersError
        return node

    def _take(self, value: Any) -> None:
        self.tensors.append(_alias(value))
        self.has_new = True

    def _refill_pairs(self, pairs: list[list[Tree]], value: dict[Any, Any]) -> None:
        if len(pairs) != len(value):
            raise _DiffersError
        known = self._known.get(id(pairs))
        if known is None:
            known = self._known[id(pairs)] = _Known(_depth(pairs))
        if known.has(value):
            self.tensors += known.tensors
            return
        began = len(self.tensors)
        for pair, (key, each) in zip(pairs, value.items(), strict=True):
            if type(key) is not type(pair[0]) or key != pair[0]:
                raise _DiffersError
            if known.depth == 1:
                self._take(each)
            else:
                pair[1] = self._refilled(pair[1], each)
        known.take(value, self.tensors[began:])


class _Known:
    """The tensors of a mapping, or of a mapping of mappings, when it was last traversed.

    It is compared by identity, in C. `depth` is 1 or 2, or 0 for any other mapping.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._keys: list[Any] = []
        self._kinds: list[type] = []
        self._inner: list[Any] = []
        self._tensors_held: list[torch.Tensor] = []
        self.tensors: list[torch.Tensor] = []  # as in `Parts`
        self._aliases: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []

    def has(self, value: dict[Any, Any]) -> bool:
        """Whether `value` is identical, down to the last tensor."""
        if not self.tensors:
            return False
        if self.depth == 1:
            is_same = _same(value.values(), self._tensors_held) and self._has_keys([*value])
        else:
            inner = [*value.values()]
            is_same = (
                [*map(type, inner), *map(len, inner)] == self._inner
                and _same(chain.from_iterable(map(_VALUES, inner)), self._tensors_held)
                and self._has_keys([*chain(value, *inner)])
            )
        if not is_same:
            return False
        try:
            # A parameter may have other memory now, for instance if weights were swapped for
            # averages.
            return all(map(torch.Tensor.is_set_to, *self._aliases))
        except RuntimeError:
            return False  # It has moved to a device that does not support the comparison.

    def take(self, value: dict[Any, Any], tensors: list[torch.Tensor]) -> None:
        """Record a mapping, with its tensors as they are in `Parts`."""
        if not self.depth:
            return
        inner = [*value.values()] if self.depth == 2 else []
        held = chain.from_iterable(map(_VALUES, inner)) if inner else value.values()
        self._tensors_held, self.tensors = [*held], tensors
        pairs = zip(tensors, self._tensors_held, strict=True)
        aliases = [(alias, own) for alias, own in pairs if alias is not own]
        self._aliases = [alias for alias, _ in aliases], [own for _, own in aliases]
        self._inner = [*map(type, inner), *map(len, inner)]
        self._keys = [*chain(value, *inner)]
        self._kinds = [*map(type, self._keys)]

    def _has_keys(self, keys: list[Any]) -> bool:
        # Keys may be new objects each time; a key of another type is another key.
        is_same = len(keys) == len(self._keys) and _same(keys, self._keys)
        return is_same or ([*map(type, keys)] == self._kinds and keys == self._keys)


def _depth(pairs: list[list[Tree]]) -> int:
    """Return the depth of a mapping's tensors if it holds nothing else: 1 or 2, else 0."""
    found = set()
    for _key, node in pairs:
        letter = node[0] if type(node) is list else ""
        below = _depth(node[1]) if letter in _MAPPINGS.values() else 0
        found.add(1 if letter == "T" else 2 if below == 1 else 0)
    return found.pop() if len(found) == 1 else 0


def _same(one: Iterable[Any], other: list[Any]) -> bool:
    """Whether both hold the same objects; surplus items of the longer one are ignored."""
    return all(map(is_, one, other))


def _are_ints(parts: list[Tree], value: Sequence[Any]) -> bool:
    """Whether a sequence has the same integers, as an optimizer's list of parameters has."""
    kinds = {*map(type, parts), *map(type, value)}
    return kinds == {int} and parts == [*value]


class _DiffersError(Exception):
    """The structure of a state has changed."""


def _alias(value: Any) -> torch.Tensor:
    """Return a tensor as it is in `Parts`."""
    if not _is_dense(value):
        raise _DiffersError
    tensor: torch.Tensor = value
    return tensor.detach() if tensor.requires_grad else tensor


def _is_dense(value: Any) -> bool:
    return type(value) in _TENSORS and value.layout == torch.strided and not value.is_nested


def spelled(path: Path) -> str:
    """Return a position in a state as Python would write it."""
    return "state" + "".join(f"[{key!r}]" for key in path)


def build(tree: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """Assemble the state that `flatten` took apart; raises StateError for other bytes."""
    try:
        # Each tensor is removed when it is used. A tree that names one twice could copy it
        # endlessly, and a negative number is no index here.
        return _put(msgspec.msgpack.decode(tree), dict(enumerate(tensors)))
    except (
        *(msgspec.DecodeError, ValueError, TypeError, LookupError, RuntimeError, RecursionError),
    ) as error:
        raise StateError(
            f"a state cannot be read: {error}",
            slug="state-wire",
            expected="a state from a worker with this version of elastane",
            next_step="run the same version on all nodes",
        ) from error


class _Flattener:
    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.paths: list[Path] = []

    def take(self, value: object, path: Path) -> Tree:
        if len(path) > DEPTH_MAX:
            raise _refused(value, spelled(path), f"nested deeper than {DEPTH_MAX}")
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, int) and kind is int:
            return value if -_INT64 <= value < _INT64 else ["i", str(value)]
        if isinstance(value, (list, tuple)) and kind in _SEQUENCES:
            parts = [self.take(each, (*path, index)) for index, each in enumerate(value)]
            return [_SEQUENCES[kind], parts]
        if isinstance(value, dict) and kind in _MAPPINGS:
            pairs = [
                [self._key(key, path), self.take(each, (*path, key))] for key, each in value.items()
            ]
            return [_MAPPINGS[kind], pairs]
        return self._leaf(value, path)

    def _key(self, key: object, path: Path) -> Tree:
        if type(key) is str or type(key) is int:
            return self.take(key, path)
        before = len(self.tensors)
        tree = self.take(key, (*path, _A_KEY))
        if len(self.tensors) > before:
            raise _refused(key, spelled(self.paths[-1]), "a tensor within a key")
        return tree

    def _leaf(self, value: object, path: Path) -> Tree:
        if isinstance(value, torch.Tensor):
            if not _is_dense(value):
                raise _refused(value, spelled(path), "not a plain dense tensor")
            return ["T", self._number(value.detach(), path)]
        if isinstance(value, torch.Generator):
            # Members number their GPUs differently.
            return ["g", value.device.type, self._number(value.get_state(), path)]
        if isinstance(value, np.ndarray) and value.dtype.kind in _ARRAY_KINDS:
            raw = torch.from_numpy(np.frombuffer(value.tobytes(), dtype=np.uint8).copy())
            return ["a", value.dtype.str, list(value.shape), self._number(raw, path)]
        if isinstance(value, np.generic) and value.dtype.kind in _ARRAY_KINDS:
            return ["s", value.dtype.str, value.tobytes()]
        if isinstance(value, np.ndarray):
            raise _refused(value, spelled(path), f"an array of {value.dtype}")
        kind = type(value)
        raise _refused(value, spelled(path), f"a {kind.__module__}.{kind.__qualname__}")

    def _number(self, tensor: torch.Tensor, path: Path) -> int:
        self.tensors.append(tensor)
        self.paths.append(path)
        return len(self.tensors) - 1


def _refused(value: object, where: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"{where} cannot be saved or sent: {why}",
        slug="state-kind",
        expected="None, bool, int, float, str, bytes, list, tuple, dict, tensor, NumPy array or"
        " scalar, torch.Generator",
        next_step=f"let state_dict() give one of these in place of {type(value).__name__}",
    )


_SEQUENCES: dict[type, str] = {list: "l", tuple: "t", torch.Size: "z"}
# A MultiStepLR keeps its milestones in a Counter.
_MAPPINGS: dict[type, str] = {dict: "d", defaultdict: "d", OrderedDict: "o", Counter: "c"}


def _put(node: Tree, tensors: Given) -> Any:
    if not isinstance(node, list):
        return node
    kind, *parts = node
    return _MAKERS[kind](tensors, *parts)


def _many(tensors: Given, parts: list[Tree]) -> list[Any]:
    return [_put(part, tensors) for part in parts]


def _pairs(tensors: Given, pairs: list[list[Tree]]) -> list[tuple[Any, Any]]:
    return [(_put(key, tensors), _put(value, tensors)) for key, value in pairs]


def _generator(tensors: Given, device: str, number: int) -> torch.Generator:
    generator = torch.Generator(device)
    generator.set_state(tensors.pop(number))
    return generator


def _array(tensors: Given, dtype: str, shape: list[int], number: int) -> np.ndarray[Any, Any]:
    data = tensors.pop(number).cpu().numpy().tobytes()
    return np.frombuffer(data, dtype=_dtype(dtype)).reshape(shape).copy()


def _dtype(name: str) -> np.dtype[Any]:
    if not _ARRAY_DTYPE.fullmatch(name):
        raise ValueError(f"arrays of {name}")
    return np.dtype(name)


_MAKERS: dict[str, Callable[..., Any]] = {
    "i": lambda _tensors, text: int(text),
    "l": _many,
    "t": lambda tensors, parts: tuple(_many(tensors, parts)),
    "z": lambda tensors, parts: torch.Size(_many(tensors, parts)),
    "d": lambda tensors, pairs: dict(_pairs(tensors, pairs)),
    "o": lambda tensors, pairs: OrderedDict(_pairs(tensors, pairs)),
    "c": lambda tensors, pairs: Counter(dict(_pairs(tensors, pairs))),
    "T": lambda tensors, number: tensors.pop(number),
    "g": _generator,
    "a": _array,
    "s": lambda _tensors, dtype, raw: np.frombuffer(raw, dtype=_dtype(dtype))[0],
}
