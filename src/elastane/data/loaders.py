"""One torch DataLoader under a feed: its iterator, and the worker processes behind that.

Owns all that is known here of the inside of torch's DataLoader: which loaders keep the order of
their batches, how an iterator is begun without a draw from the program's random stream, how it is
given up in the middle, and whether its workers can be used again. Names with an underscore are
torch's own (all of 2.4 to 2.13 have them); where one is missing, the workers end as torch's
garbage collection ends them.

Must not know of steps and ranks beyond the cursor it is given. Fails by ConfigurationError.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sized
from typing import Any

from elastane.data.cursor import DataPosition
from elastane.errors import ConfigurationError

__all__ = ["END", "LoaderHandle", "cursor_of"]

END = object()
# torch waits 5 s for a worker that is in the middle of a sample before it kills it, one by one.
_WORKER_END_S = 6.0


def cursor_of(loader: Any) -> DataPosition:
    """Return the sampler or the shards of a loader; ConfigurationError for a loader of others."""
    sampler = getattr(loader, "batch_sampler", None)
    dataset = getattr(loader, "dataset", None)
    if not getattr(loader, "in_order", True):
        raise _refused("the loader has in_order=False", "batches in the order of the sampler")
    if isinstance(sampler, DataPosition):
        length = len(dataset) if isinstance(dataset, Sized) else sampler.ledger.n
        if length < sampler.ledger.n:
            what = f"the dataset has {length} samples, and its sampler deals {sampler.ledger.n}"
            raise _refused(what, "a dataset that has all of them")
        return sampler
    if isinstance(dataset, DataPosition) and getattr(loader, "batch_size", None) is None:
        return dataset
    kinds = type(sampler).__name__, type(dataset).__name__
    what = "the loader has batch_sampler {}, dataset {}".format(*kinds)
    raise _refused(what, "an ElasticBatchSampler, or ElasticShards with batch_size=None")


def _refused(what: str, expected: str) -> ConfigurationError:
    return ConfigurationError(
        what,
        expected=expected,
        next_step="DataLoader(dataset, batch_sampler=ElasticBatchSampler(len(dataset), ...))",
        slug="data-loader",
    )


class LoaderHandle:
    """Begins and gives up iterators of one loader, one at a time."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._iterator: Any = None
        self._ending: list[tuple[threading.Thread, Any]] = []

    def begin(self, words: tuple[int, ...]) -> Iterator[Any]:
        """Make a new iterator; its workers' random streams come from `words`.

        torch draws the workers' seed from the program's own stream. Here that stream stays as it
        was: how often a loader was begun anew must leave no trace in the training. Where the
        loader has a generator of its own, the seed is drawn from that, as the user asked.
        """
        import torch

        from elastane.data.permutation import mixed

        if getattr(self.loader, "generator", None) is not None:
            return self._begun()
        stream = torch.random.get_rng_state()
        try:
            torch.default_generator.manual_seed(mixed(*words) >> 1)
            return self._begun()
        finally:
            torch.random.set_rng_state(stream)

    def _begun(self) -> Iterator[Any]:
        kept = getattr(self.loader, "_iterator", None)
        if kept is not None and not all(worker.is_alive() for worker in _workers(kept)):
            self._end(kept)
            kept = None
        try:
            self._iterator = iter(self.loader)
        except RuntimeError:
            if kept is None:
                raise
            # A worker died after we looked: torch notices within 5 s, while it waits for an answer.
            self._end(kept)
            self._iterator = iter(self.loader)
        return self._iterator  # type: ignore[no-any-return]

    def abandon(self, keep_workers: bool) -> None:
        """Give the iterator up; workers that outlive one stay, if so wished.

        Does not wait for the others: a worker in the middle of a slow sample ends after it, in
        the background, or is killed after 5 s.
        """
        # A loader whose begin failed half-way may hold an iterator that was never given to us.
        persistent = getattr(self.loader, "_iterator", None)
        iterator = persistent if self._iterator is None else self._iterator
        self._iterator = None
        if iterator is not None and not (keep_workers and persistent is not None):
            self._end(iterator)

    def _end(self, iterator: Any) -> None:
        """End the workers of an iterator, in the background."""
        self._ending = [(thread, old) for thread, old in self._ending if thread.is_alive()]
        if getattr(self.loader, "_iterator", None) is iterator:
            self.loader._iterator = None
        end = getattr(iterator, "_shutdown_workers", None)
        if end is not None and _workers(iterator):
            thread = threading.Thread(target=end, name="elastane-loader-end", daemon=True)
            thread.start()
            self._ending.append((thread, iterator))

    def close(self) -> None:
        """Give the iterator up, and wait until no worker process of this loader is left."""
        self.abandon(keep_workers=False)
        for thread, iterator in self._ending:
            workers = _workers(iterator)
            thread.join(_WORKER_END_S * (len(workers) + 1))
            for worker in workers:
                if worker.is_alive():
                    worker.kill()
                    worker.join(_WORKER_END_S)
        self._ending = []


def _workers(iterator: Any) -> list[Any]:
    return list(getattr(iterator, "_workers", ()))
