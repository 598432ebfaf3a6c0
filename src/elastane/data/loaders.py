"""The iterator of a torch DataLoader under a feed, and its worker processes.

Owns all knowledge of DataLoader's internals: which loaders keep the order of batches, how to start
an iterator without a draw from the program's random stream, how to abandon it midway, and whether
its workers can be used again. Names with an underscore are torch's own (2.4 to 2.13 have all of
them). If one is missing, workers end as torch's garbage collection ends them.

It gets steps and ranks only from the cursor. How it fails: ConfigurationError.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sized
from typing import Any

from elastane.data.position import DataPosition
from elastane.errors import ConfigurationError

END = object()
# torch waits 5 s for each worker in the middle of a sample before it kills it.
_WORKER_END_S = 6.0


def cursor_of(loader: Any) -> DataPosition:
    """Return a loader's sampler or shards; raises ConfigurationError for other loaders."""
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
    """Starts and abandons iterators of one loader, one at a time."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._iterator: Any = None
        self._ending: list[tuple[threading.Thread, Any]] = []

    def begin(self, words: tuple[int, ...]) -> Iterator[Any]:
        """Start a new iterator; its workers' random streams are seeded by `words`.

        torch draws the workers' seed from the program's random stream. That stream is restored,
        since the number of restarts must not change the training. If the loader has its own
        generator, the seed is drawn from it.
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
            # A worker died after the check: torch notices within 5 s, while it waits for an answer.
            self._end(kept)
            self._iterator = iter(self.loader)
        return self._iterator  # type: ignore[no-any-return]

    def abandon(self, keep_workers: bool) -> None:
        """Abandon the iterator; persistent workers stay if `keep_workers`.

        The call does not wait for workers that end: a worker in the middle of a slow sample ends
        after it in the background, or is killed after 5 s.
        """
        # If a start failed midway, the loader may have an iterator that it has not returned.
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
        """Abandon the iterator, and wait until this loader has no worker process left."""
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
