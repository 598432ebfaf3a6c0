"""The rank and world size as the program sees them, for frameworks that keep or need them.

They change when a collective returns, at the same place of the program on all members. So a
framework that is notified in `show` changes with the program, and all members decide alike whether
a function was interrupted by a change.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from elastane.comms.elastic import ElasticGroup, members_left
from elastane.synchrony.calls import holds_counts
from elastane.synchrony.contributions import overwrite

T = TypeVar("T")


class VisibleWorld:
    """What the program sees of the world; one for each process.

    `first_rank` and `first_size`: those with which the process began; None before the first world.
    `restart` restarts all workers of the job, and does not return.
    """

    def __init__(self, restart: Callable[[str], NoReturn]) -> None:
        self.restart = restart
        self.rank = 0
        self.size = 1
        self.first_rank: int | None = None
        self.first_size: int | None = None
        self._changes = 0
        self._followers: list[Callable[[], None]] = []

    def show(self, rank: int, size: int) -> None:
        """Change rank and size, and call the functions registered by `on_change`."""
        self.rank, self.size = rank, size
        if self.first_rank is None:
            self.first_rank, self.first_size = rank, size
        self._changes += 1
        for call in self._followers:
            call()

    def on_change(self, call: Callable[[], None]) -> None:
        """Call `call` at each change, also at the first."""
        self._followers.append(call)

    def whole(
        self,
        call: Callable[[], T],
        restore: Callable[[], None] = lambda: None,
        *,
        waits: bool = False,
    ) -> T:
        """Return `call()`, with all its collectives over the same members.

        `call` sees the members that are left. It runs again, after `restore`, if the world has
        changed in it; its result in the smaller world is discarded. An all-gather in it is made as
        a sum of integers, which survivors repeat: its own buffers are for workers that may be lost.
        A barrier comes first, so that most losses fall into none of the collectives. `waits`: also
        wait until all members have made it, if only one of them acts, such as in a save.
        """
        with members_left(c10d._get_default_group()):
            return self._repeated(call, restore, waits=waits)

    def _repeated(self, call: Callable[[], T], restore: Callable[[], None], *, waits: bool) -> T:
        while True:
            dist.barrier()
            before = self._changes
            try:
                with _gathers_as_sums():
                    result = call()
                if waits:
                    dist.barrier()
            except Exception:
                # After a change it may have read void values, such as an object of no bytes.
                if self._changes == before:
                    raise
            else:
                if self._changes == before:
                    return result
            restore()

    def reduced(
        self,
        call: Callable[[], T],
        data: object,
        restore: Callable[[], None] = lambda: None,
        *,
        is_sum: bool,
    ) -> T:
        """Return `call()`, which reduces the tensors in `data`, as `whole` does.

        A sum of floats may be of parts that the program has divided by the world size, so it is not
        made again: all workers restart if the world changes in it. A program that sees its first
        world gets all sums for that size, like those that it makes itself. The loss may be divided
        by a few counts, so the size that belongs to them has to be asked after them.
        """
        if not is_sum:
            return self.whole(call, restore)
        group, before = c10d._get_default_group(), self._changes
        leaves = [*_leaves(data)]
        is_count = holds_counts(leaves)
        if not any(each.is_floating_point() or each.is_complex() for each in leaves) and not (
            getattr(group, "sees_first", False)
        ):
            result = self.whole(call, restore)
        else:
            result = call()
            if self._changes != before:
                self.restart(
                    "a sum of floats was interrupted, and the script may have divided its parts by"
                    " the world size"
                )
        if is_count and isinstance(group, ElasticGroup):
            group.counted(interrupted=self._changes != before)
        return result

    def gathered(self, call: Callable[[], T], data: object) -> T:
        """Return `call()`, which gathers `data` for the script by functions that are made whole.

        The script may sum what it gets. So one number of each member counts as a sum in `reduced`,
        if it is an integer or a whole float that is no rounded loss.
        """
        group, before = c10d._get_default_group(), self._changes
        is_count = _is_one_count([*_leaves(data)])
        result = call()
        if is_count and isinstance(group, ElasticGroup):
            group.counted(interrupted=self._changes != before)
        return result

    def asked_size(self) -> None:
        """Record that the script, or a framework for itself, has read the size of this world."""
        group = c10d._get_default_group() if dist.is_initialized() else None
        if isinstance(group, ElasticGroup):
            group.asked_size()

    @contextlib.contextmanager
    def first_alone(self) -> Iterator[None]:
        """Run the block on rank 0, then on all others.

        If a worker is lost before rank 0 has completed it, the next rank 0 runs it alone: what the
        lost worker has left may be half. Another rank 0 may run it once more for that.
        """
        is_first = self.rank == 0
        while not is_first and not self._passes_barrier():
            is_first = self.rank == 0
        yield
        while is_first and not self._passes_barrier():
            pass

    def _passes_barrier(self) -> bool:
        """Wait for all members; return whether the world has not changed meanwhile."""
        before = self._changes
        dist.barrier()
        return self._changes == before

    def make_whole(
        self, owner: Any, name: str, *, waits: bool = False, only_following: bool = False
    ) -> None:
        """Let the function `name` of a class or module always run as `whole` does.

        `only_following`: not while the program sees its first world. The ranks that it gives and
        the parts that it gets are then for that world.
        """
        function = getattr(owner, name)

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            if only_following and getattr(c10d._get_default_group(), "sees_first", False):
                return function(*args, **kwargs)
            return self.whole(lambda: function(*args, **kwargs), waits=waits)

        is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        setattr(owner, name, staticmethod(called) if is_static else called)


# A loss of these types is often a whole number.
_ROUNDED = (torch.float16, torch.bfloat16)


def _is_one_count(leaves: Sequence[torch.Tensor]) -> bool:
    """Whether these are one number above zero, as a count of tokens is."""
    if len(leaves) != 1 or leaves[0].numel() != 1 or leaves[0].dtype in _ROUNDED:
        return False
    return holds_counts(leaves) and bool(leaves[0] > 0)


def _leaves(data: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of nested lists and dictionaries, and their numbers as tensors."""
    if isinstance(data, Mapping):
        data = [*data.values()]
    if isinstance(data, list | tuple):
        for each in data:
            yield from _leaves(each)
    elif isinstance(data, torch.Tensor):
        yield data.detach()
    elif isinstance(data, int | float):
        yield torch.tensor(data)


# The alignment of every dtype.
_ALIGNED_BYTES = 16


@contextlib.contextmanager
def _gathers_as_sums() -> Iterator[None]:
    """Make each all-gather of torch as a sum of integers, meanwhile."""
    modules: tuple[Any, ...] = (dist, c10d)
    before = [module.all_gather for module in modules]
    for module in modules:
        module.all_gather = functools.partial(_all_gather, before[0])
    try:
        yield
    finally:
        for module, function in zip(modules, before, strict=True):
            module.all_gather = function


def _all_gather(
    torchs: Callable[..., Any],
    tensor_list: Sequence[torch.Tensor],
    tensor: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Gather as torch's function does; on the CPU by one sum, to which each rank gives its place.

    The sum is exact: each of its bytes is from one rank, and zero on the others.
    """
    is_plain = tensor.device.type == "cpu" and tensor.layout is torch.strided
    same = all(each.numel() == tensor.numel() for each in tensor_list)
    if async_op or not (is_plain and same) or group not in (None, c10d._get_default_group()):
        return torchs(tensor_list, tensor, group, async_op)
    own = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    width = max(own.numel() + -own.numel() % _ALIGNED_BYTES, _ALIGNED_BYTES)
    places = torch.zeros(len(tensor_list), width, dtype=torch.uint8)
    places[dist.get_rank(), : own.numel()] = own
    dist.all_reduce(places.view(torch.int64))
    for place, output in zip(places, tensor_list, strict=True):
        overwrite(output, place[: own.numel()].view(tensor.dtype).reshape(output.shape))
    return None
