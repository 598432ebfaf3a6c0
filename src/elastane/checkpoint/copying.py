"""Copies a state into its slot: partly at once, the rest during the next step.

Only an optimizer's step changes parameters and optimizer state. Hence they may be copied during the
next forward and backward, and `finish` waits for that before any change. Version counters reveal
other changes: the copy is then dropped, and all later copies happen at once. Shapes and dtypes are
also checked during the next step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import compress, pairwise
from operator import attrgetter, not_

import torch

SLUG = "checkpoint-overlap"
# Less is copied sooner than another thread wakes up.
_SHARE_BYTES_MIN = 8 << 20
_VERSION = attrgetter("_version")
_log = logging.getLogger("elastane.checkpoint")


class StateCopier:
    """The copier of one rank; its threads start with the first copy that needs them."""

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
        versions = [*map(_VERSION, rest[1])]
        self._running = self._threads().submit(self._copy_rest, *rest, versions, done, is_alike)

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
        versions: Sequence[int],
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
