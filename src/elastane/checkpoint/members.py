"""The ranks that save and restore together, and the collectives between them.

They use the script's process group: the job's own if it recovers in place, else the default one. If
that moves only GPU data, a gloo group is created besides. A process without a group is alone. How
it fails: as collectives fail, and then nothing was agreed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from elastane.comms.elastic import members_left

_log = logging.getLogger("elastane.checkpoint")
_WARN_S = 30.0


class PeerTimeout:
    """A context manager around each wait of one thread; warns once for each wait."""

    def __init__(self, warn_s: float = _WARN_S) -> None:
        self._warn_s = warn_s
        self._since_s: float | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        self._since_s = time.monotonic()
        if self._thread is None or not self._thread.is_alive():  # It is dead after a fork.
            self._thread = threading.Thread(target=self._watch, name="elastane-wait", daemon=True)
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._since_s = None

    def _watch(self) -> None:
        warned_s = None
        while True:
            time.sleep(self._warn_s / 4)
            since_s = self._since_s
            if since_s in (None, warned_s) or time.monotonic() - since_s < self._warn_s:
                continue
            warned_s = since_s
            _log.warning(
                "this rank has waited %.0f s for the others: restore(), maybe_save() and save() are"
                " called by all ranks, at the same steps [checkpoint-ranks]",
                self._warn_s,
            )


_TIMEOUT = PeerTimeout()


class Members(Protocol):
    """The collectives that saves and restores need; all ranks call them in the same order."""

    @property
    def rank(self) -> int:
        """The rank of this process."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Exchange equally many 64-bit integers; returns those of each rank.

        Ranks arrive here as their scripts let them: one that waits for long logs a warning.
        """

    def texts(self, said: bytes) -> list[bytes]:
        """Exchange bytes of any length; returns those of each rank."""

    def spread(self, data: torch.Tensor, source: int) -> None:
        """Broadcast the bytes of `source` to all ranks, in place."""


class SingleProcess:
    """The members of a save by one process alone: each collective returns at once."""

    rank, size = 0, 1

    def numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return its own numbers."""
        return [list(numbers)]

    def texts(self, said: bytes) -> list[bytes]:
        """Return its own bytes."""
        return [said]

    def spread(self, data: torch.Tensor, source: int) -> None:
        """Do nothing."""


class GroupMembers:
    """The ranks of a process group that accepts CPU tensors."""

    def __init__(self, group: Any, timeout: PeerTimeout = _TIMEOUT) -> None:
        self._group = group
        self._timeout = timeout

    @property
    def rank(self) -> int:
        """The rank of this process, which may change with the world of a job."""
        with members_left(self._group):
            return dist.get_rank(self._group)

    @property
    def size(self) -> int:
        """The number of ranks."""
        with members_left(self._group):
            return dist.get_world_size(self._group)

    def numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return each rank's numbers."""
        with self._timeout, members_left(self._group):
            return self._numbers(numbers)

    def _numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        said = torch.tensor(numbers, dtype=torch.int64)
        heard = [torch.zeros_like(said) for _ in range(self.size)]
        dist.all_gather(heard, said, group=self._group)
        return [each.tolist() for each in heard]

    def texts(self, said: bytes) -> list[bytes]:
        """Return each rank's bytes, by two collectives."""
        with members_left(self._group):
            lengths = [length for (length,) in self._numbers([len(said)])]
            own = torch.zeros(max(1, *lengths), dtype=torch.uint8)
            if said:
                own[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
            heard = [torch.zeros_like(own) for _ in lengths]
            dist.all_gather(heard, own, group=self._group)
        pairs = zip(heard, lengths, strict=True)
        return [bytes(each[:length].numpy()) for each, length in pairs]

    def spread(self, data: torch.Tensor, source: int) -> None:
        """Broadcast the bytes of `source` to all ranks, in place."""
        with members_left(self._group):
            dist.broadcast(data, group=self._group, group_src=source)


def members_of_process() -> Members:
    """Return the ranks of the default process group; collective if a gloo group must be created."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return SingleProcess()
    if "gloo" in str(dist.get_backend()):
        return GroupMembers(dist.group.WORLD)
    with _TIMEOUT:
        return GroupMembers(dist.new_group(backend="gloo"))
