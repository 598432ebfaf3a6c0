"""State as plain data and a list of tensors, so that nothing is ever unpickled.

`flatten` takes apart nested dict, list, tuple, None, bool, int, float, str, bytes, tensors, NumPy
arrays and scalars, and `torch.Generator`; `build` puts them together again. Everything else is
refused with the place where it stands. Knows nothing of processes or digests.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch

from elastane.errors import ConfigurationError, StateError

# What a node of the tree is: a plain value, or a list of its kind's letter and its parts.
Tree: TypeAlias = Any

_PLAIN = (type(None), bool, float, str, bytes)
_INT64 = 1 << 63
_DEPTH_MAX = 64
_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
# Buffers and objects are pointers; dates and records never are training state.
_ARRAY_KINDS = "biufcSU"


class Parts(NamedTuple):
    """What `flatten` makes: the tree as bytes, and the tensors that it refers to by number.

    `names` say where each tensor stands, as Python would write it: the same in every process.
    """

    tree: bytes
    tensors: list[torch.Tensor]
    names: list[str]


def flatten(state: object) -> Parts:
    """Take a state apart; the tensors are those of the state, not copies."""
    taker = _Taker()
    tree = taker.take(state, "state", 0)
    return Parts(msgspec.msgpack.encode(tree), taker.tensors, taker.names)


def build(tree: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """The state of which `flatten` made this; raises StateError where the bytes are not that."""
    try:
        return _put(msgspec.msgpack.decode(tree), tensors)
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
        self.names: list[str] = []

    def take(self, value: object, where: str, depth: int) -> Tree:
        if depth > _DEPTH_MAX:
            raise _refused(value, where, f"nested deeper than {_DEPTH_MAX}")
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, int) and kind is int:
            return value if -_INT64 <= value < _INT64 else ["i", str(value)]
        if isinstance(value, (list, tuple)) and kind in _SEQUENCES:
            parts = [
                self.take(each, f"{where}[{index}]", depth + 1) for index, each in enumerate(value)
            ]
            return [_SEQUENCES[kind], parts]
        if isinstance(value, dict) and kind in _MAPPINGS:
            pairs = [
                [
                    self.take(key, f"a key of {where}", depth + 1),
                    self._value(where, key, each, depth),
                ]
                for key, each in value.items()
            ]
            return [_MAPPINGS[kind], pairs]
        return self._leaf(value, where)

    def _value(self, where: str, key: object, value: object, depth: int) -> Tree:
        return self.take(value, f"{where}[{key!r}]", depth + 1)

    def _leaf(self, value: object, where: str) -> Tree:
        if isinstance(value, torch.Tensor):
            if type(value) not in _TENSORS or value.layout != torch.strided:
                raise _refused(value, where, "not a plain dense tensor")
            return ["T", self._number(value.detach(), where)]
        if isinstance(value, torch.Generator):
            return ["g", str(value.device), self._number(value.get_state(), where)]
        if isinstance(value, np.ndarray) and value.dtype.kind in _ARRAY_KINDS:
            raw = torch.from_numpy(np.frombuffer(value.tobytes(), dtype=np.uint8).copy())
            return ["a", value.dtype.str, list(value.shape), self._number(raw, where)]
        if isinstance(value, np.generic) and value.dtype.kind in _ARRAY_KINDS:
            return ["s", value.dtype.str, value.tobytes()]
        raise _refused(value, where, f"a {type(value).__module__}.{type(value).__qualname__}")

    def _number(self, tensor: torch.Tensor, where: str) -> int:
        self.tensors.append(tensor)
        self.names.append(where)
        return len(self.tensors) - 1


def _refused(value: object, where: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"{where} cannot be sent to another worker: {why}",
        slug="state-kind",
        expected="None, bool, int, float, str, bytes, list, tuple, dict, tensor, NumPy array or"
        " scalar, torch.Generator",
        next_step=f"let state_dict() give one of these in place of {type(value).__name__}",
    )


_SEQUENCES: dict[type, str] = {list: "l", tuple: "t", torch.Size: "z"}
_MAPPINGS: dict[type, str] = {dict: "d", defaultdict: "d", OrderedDict: "o"}


def _put(node: Tree, tensors: Sequence[torch.Tensor]) -> Any:
    if not isinstance(node, list):
        return node
    kind, *parts = node
    return _MAKERS[kind](tensors, *parts)


def _many(tensors: Sequence[torch.Tensor], parts: list[Tree]) -> list[Any]:
    return [_put(part, tensors) for part in parts]


def _pairs(tensors: Sequence[torch.Tensor], pairs: list[list[Tree]]) -> list[tuple[Any, Any]]:
    return [(_put(key, tensors), _put(value, tensors)) for key, value in pairs]


def _generator(tensors: Sequence[torch.Tensor], device: str, number: int) -> torch.Generator:
    generator = torch.Generator(device)
    generator.set_state(tensors[number])
    return generator


def _array(
    tensors: Sequence[torch.Tensor], dtype: str, shape: list[int], number: int
) -> np.ndarray[Any, Any]:
    data = tensors[number].cpu().numpy().tobytes()
    return np.frombuffer(data, dtype=_dtype(dtype)).reshape(shape).copy()


def _dtype(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.kind not in _ARRAY_KINDS:
        raise ValueError(f"arrays of {name}")
    return dtype


_MAKERS: dict[str, Callable[..., Any]] = {
    "i": lambda _tensors, text: int(text),
    "l": _many,
    "t": lambda tensors, parts: tuple(_many(tensors, parts)),
    "z": lambda tensors, parts: torch.Size(_many(tensors, parts)),
    "d": lambda tensors, pairs: dict(_pairs(tensors, pairs)),
    "o": lambda tensors, pairs: OrderedDict(_pairs(tensors, pairs)),
    "T": lambda tensors, number: tensors[number],
    "g": _generator,
    "a": _array,
    "s": lambda _tensors, dtype, raw: np.frombuffer(raw, dtype=_dtype(dtype))[0],
}
