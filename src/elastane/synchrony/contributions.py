"""What a member contributes to a collective, kept until its result is delivered.

gloo reduces in place, so a contribution is a copy, with one exception: while a reduction of
DistributedDataParallel's gradients is open, `p.grad` still holds what was put into the bucket, and
no copy is made. A copy of 100 MB takes 15 to 25 ms here, of a step of 50 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel


def overwrite(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy `value` into a tensor of the program, in any thread.

    torch refuses to change a tensor that was made in inference mode outside of it.
    """
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.copy_(value)


class Contribution(Protocol):
    """What one member put into an operation."""

    def restore(self, divided_by: int, divisor: int) -> None:
        """Put it into the operation's tensors again, divided by `divisor` in total.

        It was divided by `divided_by` when it was kept. Zeros: it is not divided.
        """


class Copied:
    """A copy of the tensors as they were when the operation was issued."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self.copies = [tensor.detach().clone() for tensor in tensors]

    def restore(self, divided_by: int, divisor: int) -> None:
        """Copy them back, scaled to the divisor."""
        is_scaled = divisor and divisor != divided_by
        for tensor, copy in zip(self._tensors, self.copies, strict=True):
            overwrite(tensor, copy * (divided_by / divisor) if is_scaled else copy)


@dataclass(frozen=True, slots=True)
class BucketSlice:
    """Where the gradient of one parameter lies in its bucket, in elements.

    `strides` are the parameter's: a bucket holds a gradient in the same order of memory.
    """

    parameter: torch.Tensor
    start: int
    strides: tuple[int, ...]

    def of(self, bucket: torch.Tensor) -> torch.Tensor:
        """Return the part of `bucket` that holds the gradient."""
        start = bucket.storage_offset() + self.start
        return bucket.as_strided(self.parameter.shape, self.strides, start)


class Gradients:
    """The gradients from which a bucket was filled: they are in `p.grad` until its delivery."""

    def __init__(self, bucket: torch.Tensor, slices: Sequence[BucketSlice]) -> None:
        self._bucket = bucket
        self._slices = slices

    def restore(self, divided_by: int, divisor: int) -> None:
        """Fill the bucket again, divided by `divisor`."""
        with torch.no_grad():
            for each in self._slices:
                place, grad = each.of(self._bucket), each.parameter.grad
                if grad is None:  # No sample of this member used it.
                    place.zero_()
                else:
                    place.copy_(grad).div_(divisor)


class BucketLayout:
    """The buckets of one DistributedDataParallel, in the order in which they are reduced.

    torch rebuilds them after the first backward pass. `refresh` is called between passes: in a
    backward pass the reducer holds its lock.
    """

    def __init__(self) -> None:
        self._key: tuple[int, bool] | None = None
        self._buckets: list[tuple[int, torch.dtype, list[BucketSlice]]] = []
        self._next = 0
        # Whether the reducer reduces everything at the end of the coming backward pass, and waits
        # for it there: the first pass of a static graph.
        self.is_delayed = False

    @property
    def is_known(self) -> bool:
        """Whether a bucket of this module can be told from other tensors."""
        return bool(self._buckets)

    def refresh(self, module: DistributedDataParallel) -> None:
        """Read the layout if it has changed; begin with its first bucket."""
        self._next = 0
        ddp: Any = module
        self.is_delayed = ddp.static_graph and not ddp._static_graph_delay_allreduce_enqueued
        key = (id(ddp.reducer), bool(ddp._has_rebuilt_buckets))
        if key == self._key or self.is_delayed:
            return
        self._key = key
        self._buckets = []
        if ddp.gradient_as_bucket_view or ddp.mixed_precision is not None:
            return  # `p.grad` is a part of the bucket, or of another type
        if ddp._delay_all_reduce_params or getattr(ddp, "_comm_hooks", None):
            return
        if any(ddp._build_params_for_reducer()[1]):
            return  # the bucket of a sparse gradient has no tensor between passes
        for bucket in ddp.reducer._get_zeros_like_grad_buckets():
            self._buckets.append(_slices_of(bucket))

    def has(self, bucket: torch.Tensor) -> bool:
        """Whether one of its buckets has the length and type of `bucket`."""
        form = bucket.numel(), bucket.dtype
        return any((length, dtype) == form for length, dtype, _ in self._buckets)

    def take(self, bucket: torch.Tensor) -> list[BucketSlice] | None:
        """Return the slices of the bucket that is reduced next; None if `bucket` is another one."""
        if self._next >= len(self._buckets):
            return None
        length, dtype, slices = self._buckets[self._next]
        if bucket.numel() != length or bucket.dtype != dtype or bucket.is_sparse:
            return None
        if any(each.parameter.dtype != dtype for each in slices):
            return None
        self._next += 1
        return slices


def slices_among(
    layouts: Sequence[BucketLayout], bucket: torch.Tensor
) -> tuple[bool, list[BucketSlice] | None]:
    """Return whether a tensor is a bucket of one of the layouts, and its slices if they are known.

    Two modules of the same shape have buckets of the same length, and one backward pass may reduce
    them in any order. Then nothing tells whose gradients are in it, so it has to be copied. The
    buckets of a layout that is not known may have any length.
    """
    # Most programs have one layout, and each step calls this for each bucket.
    if len(layouts) == 1 and layouts[0].is_known:
        slices = layouts[0].take(bucket)
        return slices is not None, slices
    owners = [layout for layout in layouts if layout.has(bucket)]
    has_unknown = not all(layout.is_known for layout in layouts)
    if len(owners) > 1 or (owners and has_unknown):
        return True, None
    slices = owners[0].take(bucket) if owners else None
    return slices is not None or has_unknown, slices


def _slices_of(bucket: Any) -> tuple[int, torch.dtype, list[BucketSlice]]:
    buffer = bucket.buffer()
    slices = [
        BucketSlice(parameter, view.storage_offset() - buffer.storage_offset(), view.stride())
        for parameter, view in zip(bucket.parameters(), bucket.gradients(), strict=True)
    ]
    return buffer.numel(), buffer.dtype, slices
