"""Many histories, in one process or several; the first failure ends the batch."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import msgspec

from simulation.history import History, HistoryFailedError
from simulation.setup import setup_of

# Seeds of one task: about a second of work.
_CHUNK = 200


class BatchTally(msgspec.Struct, kw_only=True):
    """Counts of the histories so far; `failed` is a seed and whether its job had a store."""

    histories: int = 0
    worlds: int = 0
    steps: int = 0
    messages: int = 0
    restarts: int = 0
    failed: tuple[int, bool] | None = None

    def add(self, other: BatchTally) -> None:
        """Count what `other` counted."""
        self.histories += other.histories
        self.worlds += other.worlds
        self.steps += other.steps
        self.messages += other.messages
        self.restarts += other.restarts
        self.failed = self.failed or other.failed


def play(seeds: range, modes: Sequence[bool], jobs: int = 1, **drawn: Any) -> BatchTally:
    """Play each seed with a store (True) or without (False), as `modes` says.

    `drawn`: what else `setup_of` takes, such as `in_place`.
    """
    total = BatchTally()
    for tally in _chunks(seeds, modes, jobs, drawn):
        total.add(tally)
        if total.failed:
            break
    return total


def _chunks(
    seeds: range, modes: Sequence[bool], jobs: int, drawn: dict[str, Any]
) -> Iterator[BatchTally]:
    tasks = [
        (seeds[at : at + _CHUNK], store_backed, drawn)
        for at in range(0, len(seeds), _CHUNK)
        for store_backed in modes
    ]
    if jobs <= 1:
        yield from (_play_chunk(*task) for task in tasks)
        return
    # Each process is a new interpreter: nothing is forked that may hold a lock.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        act: Callable[[range, bool, dict[str, Any]], BatchTally] = _play_chunk
        yield from pool.map(act, *zip(*tasks, strict=True))


def _play_chunk(seeds: range, store_backed: bool, drawn: dict[str, Any]) -> BatchTally:
    tally = BatchTally()
    for seed in seeds:
        tally.histories += 1
        try:
            result = History(setup_of(seed, store_backed=store_backed, **drawn)).run()
        except HistoryFailedError:
            tally.failed = (seed, store_backed)
            return tally
        tally.worlds += result.worlds
        tally.steps += result.steps
        tally.messages += result.messages
        tally.restarts += result.restarts_used
    return tally
