"""A call of torch's for a collective, as its signature, its tensors, and a way to start it again.

Names and arguments are those of torch's ProcessGroup (2.13). A call with other arguments than these
raises ConfigurationError by the name of its method.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch.distributed import AllreduceOptions, ProcessGroup, ReduceOp, Work

from elastane.synchrony.operations import Identity, Signature, Site

_REDUCTIONS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR")
_IN_PLACE = frozenset(("allreduce", "allreduce_coalesced", "broadcast", "reduce"))
_ROOTED = frozenset(("broadcast", "reduce", "gather", "scatter"))
_ALL_GATHERS = frozenset(("allgather", "_allgather_base", "allgather_coalesced"))
# A sum of at most this many integers has counts or votes that a script reads beside its sums of
# floats or its world size: correct answers, samples, tokens. A larger one in an evaluation has
# counts of each class or pixel, read beside each other: rounding would distort the small ones.
_FEW_COUNTS_MAX = 8
# A larger sum of integers of one byte has no counts, which would overflow, but an encoded object.
_COUNT_BYTES_MIN = 2
# The forms of buckets whose signatures are kept; a model has a few, and may be one of several.
_BUCKETS_MAX = 1024


class ProgramStage(Enum):
    """What the script was doing when it called a collective.

    It decides how integers are read: as gradients in a backward pass, else as counts or labels.
    """

    EVALUATION = "an evaluation"
    TRAINING = "a training step, outside of its backward pass"
    BACKWARD = "a backward pass"


@dataclass(frozen=True, slots=True)
class Call:
    """One call. `inputs`: the tensors of its contribution. `outputs`: those of its result.

    `begin(group, root)` starts it over a group of torch, from a root of that rank.
    """

    signature: Signature
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    begin: Callable[[ProcessGroup, int | None], Work]


def call_of(
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    visible: Sequence[Identity],
    site: Site,
    stage: ProgramStage = ProgramStage.EVALUATION,
) -> Call:
    """Return the call of the method `name`; `visible`: the members that its ranks refer to.

    In a backward pass the integers of a script are gradients, which it may have divided.
    """
    options: Any = next((arg for arg in (*args, *kwargs.values()) if _is_options(arg)), None)
    tensors = [_tensors_of(arg) for arg in (*args, *kwargs.values()) if not _is_options(arg)]
    outputs = tensors[0] if tensors else []
    is_gather = name in _ALL_GATHERS or name.startswith(("allgather", "all_gather"))
    inputs = outputs if name in _IN_PLACE else [each for more in tensors[1:] for each in more]
    is_alike = name in _IN_PLACE or is_gather
    root = _root(name, options.rootRank, visible) if name in _ROOTED else None
    is_gradient = stage is ProgramStage.BACKWARD and site in (Site.SCRIPT, Site.FIRST_SIZE)
    is_whole = not any(t.is_floating_point() or t.is_complex() for t in outputs)
    counts = is_whole and not is_gradient
    signature = Signature(
        kind=name,
        layout=_layout(outputs) if is_alike else 0,
        elements=sum(each.numel() for each in outputs) if is_alike else 0,
        reduction=_reduction(options),
        root=root,
        shaped=_shaped(name, outputs, inputs, len(visible)),
        counts=counts,
        site=site,
        is_tally=counts and site is Site.FIRST_SIZE and _is_tally(outputs, stage),
    )

    def begin(group: ProcessGroup, rank: int | None) -> Work:
        if rank is not None:
            options.rootRank = rank
        work: Work = getattr(group, name)(*args, **kwargs)
        return work

    return Call(signature, inputs, outputs, begin)


def bucket_call(tensors: list[torch.Tensor], options: AllreduceOptions) -> Call:
    """Return the call of a reducer for one of its buckets, which is the only tensor.

    As `call_of` does, in a fifth of its time: a step has a call for each bucket.
    """
    [bucket] = tensors
    signature = _bucket_signature(bucket.dtype, bucket.numel(), _reduction(options))

    def begin(group: ProcessGroup, _rank: int | None) -> Work:
        return group.allreduce(tensors, options)

    return Call(signature, tensors, tensors, begin)


@functools.lru_cache(maxsize=_BUCKETS_MAX)
def _bucket_signature(dtype: torch.dtype, elements: int, reduction: str) -> Signature:
    form = _layout_of([(dtype, elements)])
    return Signature("allreduce", form, elements, reduction, site=Site.REDUCER)


def _root(name: str, rank: int, visible: Sequence[Identity]) -> Identity:
    if not 0 <= rank < len(visible):
        raise RuntimeError(f"{name}: the root is rank {rank}, in a world of {len(visible)}")
    return visible[rank]


def _is_tally(tensors: Sequence[torch.Tensor], stage: ProgramStage) -> bool:
    """Whether integers are counts that a script reads beside a world size or sums of floats."""
    is_few = sum(each.numel() for each in tensors) <= _FEW_COUNTS_MAX
    trains = stage is not ProgramStage.EVALUATION
    return is_few or (trains and all(t.element_size() >= _COUNT_BYTES_MIN for t in tensors))


def holds_counts(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether these are a few whole numbers, of any type, as counts of samples or tokens are."""
    if sum(each.numel() for each in tensors) > _FEW_COUNTS_MAX:
        return False
    floats = [each for each in tensors if each.is_floating_point()]
    return all(bool((each == each.round()).all()) for each in floats)


def _is_options(arg: object) -> bool:
    return type(arg).__name__.endswith("Options")


def _tensors_of(arg: object) -> list[torch.Tensor]:
    if isinstance(arg, torch.Tensor):
        return [arg]
    if isinstance(arg, list | tuple):
        return [tensor for each in arg for tensor in _tensors_of(each)]
    return []


def _layout(tensors: Iterable[torch.Tensor]) -> int:
    """Return a digest of types and element counts."""
    return _layout_of((tensor.dtype, tensor.numel()) for tensor in tensors)


def _layout_of(forms: Iterable[tuple[torch.dtype, int]]) -> int:
    return zlib.crc32(",".join(f"{dtype}{count}" for dtype, count in forms).encode())


def _reduction(options: Any) -> str:
    op = getattr(options, "reduceOp", None)
    if op is None:
        return ""
    for name in _REDUCTIONS:
        if op == getattr(ReduceOp, name):
            return name.lower()
    return "other"


def _shaped(
    name: str, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], size: int
) -> int:
    """Return the number of members that the buffers are for; 0: any."""
    if name in ("barrier", "reduce", *_IN_PLACE):
        return 0
    if name.startswith(("allgather", "all_gather", "_allgather")):
        own = sum(each.numel() for each in inputs)
        return sum(each.numel() for each in outputs) // own if own else 0
    return size
