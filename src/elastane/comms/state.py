"""State as plain data and a list of tensors, so that nothing is ever unpickled.

`flatten` takes apart nested dict, list, tuple, None, bool, int, float, str, bytes, tensors, NumPy
arrays and scalars, and `torch.Generator`; `build` puts them together again. Everything else is
refused with the place where it stands. Knows nothing of processes or digests.
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

# What a node of the tree is: a plain value, or a list of its kind's letter and its parts.
Tree: TypeAlias = Any
# Keys and indices, from the outermost in.
Path: TypeAlias = tuple[Any, ...]

_PLAIN = (type(None), bool, float, str, bytes)
_INT64 = 1 << 63
DEPTH_MAX = 64
_VALUES = methodcaller("values")
_A_KEY = "(a key)"
_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
# Buffers and objects are pointers; dates and records never are training state.
_ARRAY_KINDS = "biufcSU"
# As numpy.dtype.str has it.
_ARRAY_DTYPE = re.compile(rf"[<>|=][{_ARRAY_KINDS}][0-9]{{1,9}}")
# The tensors that a tree refers to by number, and that are not yet in their places.
Given: TypeAlias = dict[int, torch.Tensor]


class Parts(NamedTuple):
    """What `flatten` makes: the tree as bytes, and the tensors that it refers to by number.

    `paths` say where each tensor stands, by keys and indices: the same in every process.
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
    taker = _Taker()
    tree = taker.take(state, ())
    return Parts(msgspec.msgpack.encode(tree), taker.tensors, taker.paths)


class Flattening:
    """One state taken apart again and again: mostly nothing but its values has changed since.

    Then what surrounds them is kept, and a mapping that holds the very tensors that it held before,
    as that of an optimizer's state does, is not looked into.
    """

    def __init__(self, state: object) -> None:
        taker = _Taker()
        self._tree = taker.take(state, ())
        self.tensors, self.paths = taker.tensors, taker.paths
        self.has_new = True  # tensors that were not looked at before
        self._known: dict[int, _Known] = {}  # by the identity of a list of the tree, which stays

    @property
    def parts(self) -> Parts:
        """What `flatten` gives, of the state that was taken apart last."""
        return Parts(msgspec.msgpack.encode(self._tree), self.tensors, self.paths)

    def again(self, state: object) -> bool:
        """Take `state` apart in the place of the one before.

        False, and nothing is of use, where it is made of other things.
        """
        self.tensors, self.has_new = [], False
        try:
            self._tree = self._refilled(self._tree, state)
        except _DiffersError:
            return False
        return True

    def _refilled(self, node: Tree, value: Any) -> Tree:
        """Return `node` with the values that `value` has now; its lists are changed in place."""
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
    """What a mapping of tensors, or of mappings of tensors, consisted of.

    It is compared by identity, at the pace of C. `depth` is 1 or 2, or 0 for any other mapping.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._keys: list[Any] = []
        self._kinds: list[type] = []
        self._inner: list[Any] = []
        self._held: list[torch.Tensor] = []
        self.tensors: list[torch.Tensor] = []  # as they are in `Parts`
        self._aliases: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []

    def has(self, value: dict[Any, Any]) -> bool:
        """Tell whether `value` is the same, down to the last tensor."""
        if not self.tensors:
            return False
        if self.depth == 1:
            is_same = _same(value.values(), self._held) and self._has_keys([*value])
        else:
            inner = [*value.values()]
            is_same = (
                [*map(type, inner), *map(len, inner)] == self._inner
                and _same(chain.from_iterable(map(_VALUES, inner)), self._held)
                and self._has_keys([*chain(value, *inner)])
            )
        if not is_same:
            return False
        try:
            # A parameter may hold other memory by now: weights were exchanged for averages.
            return all(map(torch.Tensor.is_set_to, *self._aliases))
        except RuntimeError:
            return False  # It is on a device now that cannot tell.

    def take(self, value: dict[Any, Any], tensors: list[torch.Tensor]) -> None:
        """Take in a mapping, whose tensors are these in `Parts`."""
        if not self.depth:
            return
        inner = [*value.values()] if self.depth == 2 else []
        held = chain.from_iterable(map(_VALUES, inner)) if inner else value.values()
        self._held, self.tensors = [*held], tensors
        pairs = zip(tensors, self._held, strict=True)
        aliases = [(alias, own) for alias, own in pairs if alias is not own]
        self._aliases = [alias for alias, _ in aliases], [own for _, own in aliases]
        self._inner = [*map(type, inner), *map(len, inner)]
        self._keys = [*chain(value, *inner)]
        self._kinds = [*map(type, self._keys)]

    def _has_keys(self, keys: list[Any]) -> bool:
        # They may be made anew each time. Of other types they would be others.
        is_same = len(keys) == len(self._keys) and _same(keys, self._keys)
        return is_same or ([*map(type, keys)] == self._kinds and keys == self._keys)


def _depth(pairs: list[list[Tree]]) -> int:
    """Return how deep a mapping's tensors lie, if it has no others: 1, 2, else 0."""
    found = set()
    for _key, node in pairs:
        letter = node[0] if type(node) is list else ""
        below = _depth(node[1]) if letter in _MAPPINGS.values() else 0
        found.add(1 if letter == "T" else 2 if below == 1 else 0)
    return found.pop() if len(found) == 1 else 0


def _same(one: Iterable[Any], other: list[Any]) -> bool:
    """Whether both are the same objects; as many of them, or what there are more does not count."""
    return all(map(is_, one, other))


def _are_ints(parts: list[Tree], value: Sequence[Any]) -> bool:
    """Whether a sequence is the same whole numbers, as an optimizer's of its parameters are."""
    kinds = {*map(type, parts), *map(type, value)}
    return kinds == {int} and parts == [*value]


class _DiffersError(Exception):
    """A state has not the structure that it had."""


def _alias(value: Any) -> torch.Tensor:
    """Return a tensor as it is in `Parts`."""
    if not _is_dense(value):
        raise _DiffersError
    tensor: torch.Tensor = value
    return tensor.detach() if tensor.requires_grad else tensor


def _is_dense(value: Any) -> bool:
    return type(value) in _TENSORS and value.layout == torch.strided and not value.is_nested


def spelled(path: Path) -> str:
    """Return where something stands in a state, as Python would write it."""
    return "state" + "".join(f"[{key!r}]" for key in path)


def build(tree: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """The state of which `flatten` made this; raises StateError where the bytes are not that."""
    try:
        # Each is taken out where it is put: a tree that names one twice could have it copied for
        # ever, and a negative number is none.
        return _put(msgspec.msgpack.decode(tree), dict(enumerate(tensors)))
    except (
        *(msgspec.DecodeError, ValueError, TypeError, LookupError, RuntimeError, RecursionError),
    ) as error:
        raise StateError(
            f"a state cannot be read: {error}",
            slug="state-wire",
            expected="what another worker of this version of elastane sends",
            next_step="run the same version on all nodes",
        ) from error


class _Taker:
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
            return ["g", str(value.device), self._number(value.get_state(), path)]
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
        f"{where} is no state that can be kept or sent: {why}",
        slug="state-kind",
        expected="None, bool, int, float, str, bytes, list, tuple, dict, tensor, NumPy array or"
        " scalar, torch.Generator",
        next_step=f"let state_dict() give one of these in place of {type(value).__name__}",
    )


_SEQUENCES: dict[type, str] = {list: "l", tuple: "t", torch.Size: "z"}
# A MultiStepLR holds its milestones in a Counter.
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
