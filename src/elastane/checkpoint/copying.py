"""Copies a state into its slot of shared memory: partly at once, the rest during the next step.

Only an optimizer's step changes parameters and optimizer state. Hence they may be copied during the
next forward and backward, and `finish` waits for that before any change. Version counters and two
numbers of each tensor reveal other changes: the copy is then dropped, and all later copies happen
at once. Shapes and dtypes are also checked during the next step.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import compress, pairwise
from operator import attrgetter, not_

import torch

from elastane.checkpoint.capture import Captured, held_of
from elastane.checkpoint.layout import Layout, TensorPiece, dtype_of, part_of
from elastane.checkpoint.samples import Sample, Samples, is_plain

SLUG = "checkpoint-overlap"
# Less is copied sooner than another thread wakes up.
_SHARE_BYTES_MIN = 8 << 20
_VERSION = attrgetter("_version")
_log = logging.getLogger("elastane.checkpoint")


class PreparedSlot:
    """One slot, prepared for the range [first, end) of one layout; closes the descriptor.

    The bytes around each piece are written here, so that a save copies only data, at the speed of
    memory. All pages are touched: otherwise the first copy would take sixteen times as long.
    """

    def __init__(self, fd: int, layout: Layout, first: int, end: int) -> None:
        self._memory = mmap.mmap(fd, max(1, end - first), mmap.MAP_SHARED | mmap.MAP_POPULATE)
        os.close(fd)
        image = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.places = []
        for piece in layout.within(first, end):
            frame, at = layout.frame(piece), piece.at - first
            data = at + len(frame.head)
            self._memory[at:data] = frame.head
            behind = data + frame.data_bytes
            self._memory[behind : behind + len(frame.tail)] = frame.tail
            dtype = dtype_of(layout.tensors[piece.tensor].dtype)
            self.places.append(image[data:behind].view(dtype).view(piece.shape))


class CopySources:
    """The parts of a state's tensors in a slot, in the order of the slot's places."""

    def __init__(
        self,
        pieces: Sequence[TensorPiece],
        captured: Captured,
        optimizers: Iterable[torch.optim.Optimizer],
    ) -> None:
        self._numbers = [piece.tensor for piece in pieces]
        offsets = {chunk.tensor: chunk.offsets for chunk in captured.chunks}
        self._parts = [
            (at, piece, offsets[piece.tensor])
            for at, piece in enumerate(pieces)
            if tuple(captured.tensors[piece.tensor].shape) != piece.shape
        ]
        stepped = _stepped(optimizers)
        on_cpu = all(tensor.device.type == "cpu" for tensor in captured.tensors)
        is_stepped = [tensor.data_ptr() in stepped for tensor in captured.tensors]
        # Changed only by an optimizer's step.
        self.late = [on_cpu and is_stepped[number] for number in self._numbers]
        # Must be known to have their shapes and dtypes before they are copied or cut.
        at_once = [n for n, late in zip(self._numbers, self.late, strict=True) if not late]
        self.doubtful = sorted({*at_once, *(piece.tensor for _, piece, _ in self._parts)})

    def views(
        self, tensors: Sequence[torch.Tensor], others: Mapping[int, torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the parts of `tensors`; `others`, by number, replace some of those."""
        if others:
            tensors = [others.get(number, own) for number, own in enumerate(tensors)]
        found = [tensors[number] for number in self._numbers]
        for at, piece, offsets in self._parts:
            found[at] = part_of(found[at], piece, offsets)
        return found


def _stepped(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """Return the addresses of the tensors that optimizers change in their steps."""
    found = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {}).values()
                tensors = [each for each in state if isinstance(each, torch.Tensor)]
                found |= {held_of(each).data_ptr() for each in (parameter, *tensors)}
    return found


class StateCopier:
    """The copier of one rank; its threads start with the first copy that needs them."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None
        self._samples = Samples()
        self.may_overlap = True
        self.may_look_late = True

    def copy(
        self,
        places: list[torch.Tensor],
        sources: list[torch.Tensor],
        late: Sequence[bool],
        done: Callable[[bool], None],
        is_alike: Callable[[], bool],
    ) -> None:
        """Copy each source into its place; the `late` ones after this has returned.

        `done` is called when all is copied, with True if that is in the background thread. In that
        thread `is_alike` is called first, and nothing is copied if it returns False.
        """
        self.finish()
        if not (self.may_overlap and any(late)):
            self._copy_now(places, sources)
            done(False)
            return
        rest = places, sources
        if not all(late):
            now = [*map(not_, late)]
            self._copy_now([*compress(places, now)], [*compress(sources, now)])
            rest = [*compress(places, late)], [*compress(sources, late)]
        self._samples.follow([*filter(is_plain, rest[1])])
        before = [*map(_VERSION, rest[1])], self._samples.take()
        self._running = self._threads().submit(self._copy_rest, *rest, before, done, is_alike)

    def finish(self) -> None:
        """Wait until the sources may change."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """Wait, and end the threads."""
        self.finish()
        if self._pool is not None:
            self._pool.shutdown()

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            helpers = max(1, torch.get_num_threads() - 1)
            self._pool = ThreadPoolExecutor(helpers, thread_name_prefix="elastane-copy")
        return self._pool

    def _copy_now(self, places: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Copy in as many threads as torch uses for one operation.

        torch would split each tensor, which gains nothing for tensors of some MB.
        """
        first, *others = _shares_of(sources, torch.get_num_threads())
        jobs = [self._threads().submit(_copy, places[each], sources[each]) for each in others]
        try:
            _copy(places[first], sources[first])
        finally:
            wait(jobs)
        for job in jobs:
            job.result()

    def _copy_rest(
        self,
        places: list[torch.Tensor],
        sources: list[torch.Tensor],
        before: tuple[list[int], Sample],
        done: Callable[[bool], None],
        is_alike: Callable[[], bool],
    ) -> None:
        if not is_alike():
            self.may_look_late = False
            _log.warning(
                "the shape or dtype of tensors changed in place: that save is dropped, the next"
                " saves their new form [%s]",
                SLUG,
            )
            return
        _copy(places, sources)
        versions, sample = before
        if [*map(_VERSION, sources)] != versions or self._samples.differ(sample):
            self.may_overlap = False
            _log.warning(
                "parameters were changed outside of an optimizer's step while they were saved:"
                " that save is dropped, and later ones are copied before training continues [%s]",
                SLUG,
            )
            return
        try:
            done(True)
        except OSError as error:
            _log.warning("a save is lost: %s [snapshot-server-lost]", error)


def _shares_of(tensors: list[torch.Tensor], count: int) -> list[slice]:
    """Cut tensors into `count` runs of similar size, or fewer if they are small."""
    sizes = [tensor.nbytes if tensor.device.type == "cpu" else 0 for tensor in tensors]
    share_bytes = max(_SHARE_BYTES_MIN, sum(sizes) / count)
    cuts, filled = [0], 0
    for number, size in enumerate(sizes):
        if len(cuts) < count and filled >= share_bytes * len(cuts):
            cuts.append(number)
        filled += size
    return [slice(*ends) for ends in pairwise([*cuts, len(tensors)])]


def _copy(places: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if places:
        with torch.no_grad():
            torch._foreach_copy_(places, sources)
