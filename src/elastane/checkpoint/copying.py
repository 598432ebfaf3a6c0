"""The copy of a state into its slot: what a step may change at once, the rest behind the next step.

Parameters and the state of optimizers are changed by an optimizer's step alone, so they may be
copied while the next forward and backward run; `settle` waits for that, and is to be called before
anything changes them. Where something did change them unseen, by their version counters, what was
copied is thrown away, and from then on everything is copied at once. Whether tensors still have
the shapes and types that they had is looked at behind the next step as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import compress, pairwise
from operator import attrgetter, not_

import torch

SLUG = "checkpoint-overlap"
# Less is copied sooner than another thread is awake.
_SHARE_BYTES_MIN = 8 << 20
_VERSION = attrgetter("_version")
_log = logging.getLogger("elastane.checkpoint")


class Copier:
    """One rank's; its threads are there from the first copy that wants them."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None
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
        """Copy each source into its place; those that are `late` after this has returned.

        `done` is called when all is copied, and told whether that is behind the training, in
        another thread; then `is_alike` is asked before, and nothing is copied where it is not.
        """
        self.settle()
        if not (self.may_overlap and any(late)):
            self._copy_now(places, sources)
            done(False)
            return
        rest = places, sources
        if not all(late):
            now = [*map(not_, late)]
            self._copy_now([*compress(places, now)], [*compress(sources, now)])
            rest = [*compress(places, late)], [*compress(sources, late)]
        versions = [*map(_VERSION, rest[1])]
        self._running = self._threads().submit(self._copy_rest, *rest, versions, done, is_alike)

    def settle(self) -> None:
        """Wait until the sources may change again."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """Wait, and end the thread."""
        self.settle()
        if self._pool is not None:
            self._pool.shutdown()

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            helpers = max(1, torch.get_num_threads() - 1)
            self._pool = ThreadPoolExecutor(helpers, thread_name_prefix="elastane-copy")
        return self._pool

    def _copy_now(self, places: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Copy in as many threads as torch has for one operation.

        torch would share out each tensor by itself, which gains nothing for tensors of some MB.
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
        versions: Sequence[int],
        done: Callable[[bool], None],
        is_alike: Callable[[], bool],
    ) -> None:
        if not is_alike():
            self.may_look_late = False
            _log.warning(
                "tensors have got another shape or type, in place: that save is dropped, the next"
                " is of what they are now [%s]",
                SLUG,
            )
            return
        _copy(places, sources)
        if [*map(_VERSION, sources)] != versions:
            self.may_overlap = False
            _log.warning(
                "parameters were changed outside of an optimizer's step while they were saved:"
                " that save is dropped, and later ones are copied before the training goes on [%s]",
                SLUG,
            )
            return
        try:
            done(True)
        except OSError as error:
            _log.warning("a save is lost: %s [keeper-lost]", error)


def _shares_of(tensors: list[torch.Tensor], count: int) -> list[slice]:
    """Cut tensors into so many neighbouring runs of some equal size, fewer where they are small."""
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
