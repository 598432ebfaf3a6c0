"""The copy of a state into its slot: what a step may change at once, the rest behind the next step.

Parameters and the state of optimizers are changed by an optimizer's step alone, so they may be
copied while the next forward and backward run; `settle` waits for that, and is to be called before
anything changes them. Where something did change them unseen, by their version counters, what was
copied is thrown away, and from then on everything is copied at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

SLUG = "checkpoint-overlap"
_log = logging.getLogger("elastane.checkpoint")


class Copier:
    """One rank's; its thread is there from the first copy that is made behind a step."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None
        self.may_overlap = True

    def copy(
        self,
        places: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        late: Sequence[bool],
        done: Callable[[], None],
    ) -> None:
        """Copy each source into its place; those that are `late` after this has returned.

        `done` is called when all is copied, perhaps by another thread.
        """
        self.settle()
        pairs = [*zip(places, sources, late, strict=True)]
        overlaps = self.may_overlap and any(late)
        _copy([(place, source) for place, source, is_late in pairs if not (overlaps and is_late)])
        if not overlaps:
            done()
            return
        rest = [(place, source) for place, source, is_late in pairs if is_late]
        versions = [source._version for _, source in rest]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="elastane-copy")
        self._running = self._pool.submit(self._copy_rest, rest, versions, done)

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

    def _copy_rest(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        versions: Sequence[int],
        done: Callable[[], None],
    ) -> None:
        _copy(pairs)
        if [source._version for _, source in pairs] != versions:
            self.may_overlap = False
            _log.warning(
                "parameters were changed outside of an optimizer's step while they were saved:"
                " that save is dropped, and later ones are copied before the training goes on [%s]",
                SLUG,
            )
            return
        try:
            done()
        except OSError as error:
            _log.warning("a save is lost: %s [keeper-lost]", error)


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if pairs:
        with torch.no_grad():
            torch._foreach_copy_([place for place, _ in pairs], [source for _, source in pairs])
