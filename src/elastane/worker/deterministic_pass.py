"""One pass over a step's virtual shards: collect gradients and buffer changes, and average them.

Each shard begins without gradients and with the buffers of the pass's beginning. At the end every
rank has the same mean over all shards of both. For a buffer this is the mean of its changes, so a
buffer that no shard changes keeps its bits. Integer buffers, such as a count of batches, take the
value of the first shard.

It does not know data or random streams. Fails as the group does, and by JobError for gradients that
are not dense tensors and for buffers that change their shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist

from elastane.comms.elastic import ElasticGroup
from elastane.comms.mean import Mean, TreeSum
from elastane.errors import JobError
from elastane.worker.undo import BufferStatus

# Tensors of one kind share a vector.
Kind: TypeAlias = tuple[torch.dtype, torch.device]


class Means:
    """The memory of a job's means, reused in each pass."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int, Kind, int], Mean] = {}

    def of(self, purpose: str, count: int, kind: Kind, shards: int) -> Mean:
        """Return a mean of `count` numbers of this kind."""
        key = purpose, count, kind, shards
        if key not in self._kept:
            self._kept[key] = Mean(count, *kind, shards)
        return self._kept[key]


class Pass:
    """One pass: `collect` after each of this rank's shards, in order, then `finish`.

    `dealt` has the shards of each rank.
    """

    def __init__(
        self,
        group: ElasticGroup,
        means: Means,
        dealt: Sequence[range],
        parameters: Iterable[torch.nn.Parameter],
        buffers: Iterable[BufferStatus],
    ) -> None:
        self._group = group
        self._means = means
        self._dealt = dealt
        self._parameters = [each for each in parameters if each.requires_grad]
        self._before = [each.grad for each in self._parameters]
        registered: dict[int, list[BufferStatus]] = {}
        for each in buffers:
            registered.setdefault(id(each.tensor), []).append(each)
        self._buffers = [_PassBuffer(registrations) for registrations in registered.values()]
        self._kinds = _by_kind(self._parameters) or {(torch.float32, torch.device("cpu")): []}
        self._vectors: list[_Vector] = []
        for kind, tensors in self._kinds.items():
            # The end of the first vector holds flags: which parameters and buffers any shard
            # touched.
            flags = [] if self._vectors else [self._flags(kind, [])]
            self._vectors.append(self._vector("gradients", kind, [*tensors, *flags]))
        self._drop_gradients()

    @torch.no_grad()
    def collect(self, weight: float, *, is_first: bool, is_last: bool) -> None:
        """Collect what one shard left in gradients and buffers.

        `is_first`: it is the first of all ranks' shards. `is_last`: it is this rank's last. Its
        buffers count with `weight` over the number of shards.
        """
        changed = [buffer.collect(weight, is_first=is_first) for buffer in self._buffers]
        touched = [each.grad is not None for each in self._parameters]
        for number, (kind, tensors) in enumerate(self._kinds.items()):
            values = [None if each.grad is None else _dense(each.grad) for each in tensors]
            flags = [] if number else [self._flags(kind, [*touched, *changed])]
            self._vectors[number].collect([*values, *flags])
        if not is_last:
            self._drop_gradients()
            for buffer in self._buffers:
                buffer.put_back()

    def wait_for_device(self) -> None:
        """Wait until a device has computed what this rank's shards left."""
        if any(device.type == "cuda" for _, device in self._kinds):
            torch.cuda.synchronize()

    @torch.no_grad()
    def finish(self) -> bool:
        """Write the means to gradients and buffers; return whether any shard had a gradient."""
        found: dict[int, torch.Tensor] = {}
        flags: list[float] = []
        for vector, tensors in zip(self._vectors, self._kinds.values(), strict=True):
            parts = vector.finish(self._group)
            flags = flags or parts[-1].tolist()
            found |= {id(each): part for each, part in zip(tensors, parts, strict=False)}
        count = len(self._parameters)
        self._write_gradients([found[id(each)] for each in self._parameters], flags[1 : 1 + count])
        changed = [
            each for each, flag in zip(self._buffers, flags[1 + count :], strict=True) if flag
        ]
        for buffer in self._buffers:
            buffer.put_back()
        self._finish_real([each for each in changed if each.is_real])
        self._finish_whole([each for each in changed if not each.is_real])
        return any(flags[1 : 1 + count])

    def _write_gradients(self, means: Sequence[torch.Tensor], flags: Sequence[float]) -> None:
        """Add the means to the earlier gradients; leave a gradient that no shard touched."""
        into, values = [], []
        for each, mean, before, flag in zip(
            self._parameters, means, self._before, flags, strict=True
        ):
            if flag and before is None:
                # Reuse the memory and layout of this rank's last shard's gradient.
                each.grad = torch.empty_like(each) if each.grad is None else each.grad
                into.append(each.grad)
                values.append(mean)
            else:
                each.grad = before.add_(mean) if flag and before is not None else before
        if into:
            torch._foreach_copy_(into, values)

    def _finish_real(self, buffers: list[_PassBuffer]) -> None:
        for kind, each in _by_kind([buffer.live for buffer in buffers]).items():
            chosen = [b for b in buffers if (b.live.dtype, b.live.device) == kind]
            vector = self._vector("buffers", kind, each)
            for changes in zip(*(buffer.changes for buffer in chosen), strict=True):
                vector.collect(changes)
            for buffer, mean in zip(chosen, vector.finish(self._group), strict=True):
                buffer.live.add_(mean)

    def _finish_whole(self, buffers: list[_PassBuffer]) -> None:
        for buffer in buffers:
            value = buffer.live if buffer.first is None else buffer.first
            value = value.to(torch.int64, copy=True)
            if self._group.size() > 1:
                dist.broadcast(value, 0, group=self._group)
            buffer.live.copy_(value)

    def _vector(self, purpose: str, kind: Kind, tensors: Sequence[torch.Tensor]) -> _Vector:
        count = sum(each.numel() for each in tensors)
        mean = self._means.of(purpose, count, kind, self._dealt[-1].stop)
        return _Vector(mean.begin(self._group.rank(), self._dealt), mean, tensors)

    def _flags(self, kind: Kind, touched: Sequence[bool]) -> torch.Tensor:
        """Return one number per parameter and buffer, and a first one, so that none is empty."""
        values = [True, *(touched or [False] * (len(self._parameters) + len(self._buffers)))]
        return torch.tensor(values, dtype=kind[0], device=kind[1])

    def _drop_gradients(self) -> None:
        for each in self._parameters:
            each.grad = None


class _Vector:
    """Tensors of one kind laid end to end, whose mean is computed as one tensor."""

    def __init__(self, tree: TreeSum, mean: Mean, like: Sequence[torch.Tensor]) -> None:
        self._tree = tree
        self._mean = mean
        self._shapes = [each.shape for each in like]
        self._lengths = [each.numel() for each in like]

    def collect(self, values: Sequence[torch.Tensor | None]) -> None:
        """Add the values of the next shard; None is zeros."""
        self._tree.add(lambda into, adds: self._write(into, values, adds))

    def finish(self, group: ElasticGroup) -> list[torch.Tensor]:
        """Return the means, in memory that the next pass reuses."""
        return self._parts(self._mean.finish(group))

    def _write(self, into: torch.Tensor, values: Sequence[torch.Tensor | None], adds: bool) -> None:
        parts = self._parts(into)
        pairs = [(p, v) for p, v in zip(parts, values, strict=True) if v is not None]
        if pairs:
            targets, sources = [p for p, _ in pairs], [v for _, v in pairs]
            torch._foreach_add_(targets, sources) if adds else torch._foreach_copy_(
                targets, sources
            )
        empty = [p for p, v in zip(parts, values, strict=True) if v is None]
        if empty and not adds:
            torch._foreach_zero_(empty)

    def _parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        parts = torch.split(flat[: sum(self._lengths)], self._lengths)
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


class _PassBuffer:
    """One buffer: its value when the pass began, and how each shard changed it.

    It is one tensor, registered once or more often. A shard may have registered another tensor.
    """

    def __init__(self, registered: list[BufferStatus]) -> None:
        self._registered = registered
        self.live = live = registered[0].tensor
        self.is_real = live.is_floating_point() or live.is_complex()
        self.changes: list[torch.Tensor | None] = []
        self.first: torch.Tensor | None = None
        self._before = live.detach().clone()
        self._is_before = True

    def collect(self, weight: float, *, is_first: bool) -> bool:
        """Record how a shard changed it; return whether it did."""
        self._adopt_replacement()
        self._is_before = torch.equal(self.live, self._before)
        if not self.is_real:
            self.first = self.live.clone() if is_first and not self._is_before else self.first
            return not self._is_before
        if self._is_before or not weight:
            self.changes.append(None)
            return False
        # An equal element is no change, even if it is infinite: inf - inf would be nan.
        same = self.live == self._before
        self.changes.append((self.live - self._before).masked_fill_(same, 0).mul_(weight))
        return True

    def _adopt_replacement(self) -> None:
        """Copy the value of a tensor that replaced the buffer into the buffer itself."""
        for place in self._registered:
            now = place.now
            if now is self.live:
                continue
            if now is None or (now.shape, now.dtype) != (self.live.shape, self.live.dtype):
                raise _changed(place)
            self.live.copy_(now)
            place.put_back()

    def put_back(self) -> None:
        """Restore the value of the pass's beginning."""
        if not self._is_before:
            self.live.copy_(self._before)


def _changed(place: BufferStatus) -> JobError:
    return JobError(
        f"the buffer {place.name} of a {type(place.module).__name__} has another shape or dtype"
        " than before the step",
        expected="buffers that keep both, with deterministic=True",
        next_step="keep what grows outside of the model's buffers",
        slug="deterministic-use",
    )


def _by_kind(tensors: Iterable[torch.Tensor]) -> dict[Kind, list[torch.Tensor]]:
    found: dict[Kind, list[torch.Tensor]] = {}
    for each in tensors:
        found.setdefault((each.dtype, each.device), []).append(each)
    return found


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    if gradient.layout is torch.strided:
        return gradient
    raise JobError(
        f"a gradient has the layout {gradient.layout}",
        expected="dense gradients, with deterministic=True",
        next_step="torch.nn.Embedding(..., sparse=False)",
        slug="deterministic-use",
    )
