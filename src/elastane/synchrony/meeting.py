"""What the members of a new view exchange before they continue: tables and results.

Runs over the view's gloo group before any operation of the program does. A lost member fails it
with RuntimeError or PeerLostError; the caller then enters another view.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch.distributed import BroadcastOptions, Work

from elastane.comms.group import WorldGroup
from elastane.comms.works import Waited, WorkLog
from elastane.synchrony.rules import Table

# The dtypes of results that are handed over, by the name that torch prints.
_DTYPES = {str(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


class TensorForm(msgspec.Struct, frozen=True):
    """The type and shape of a tensor that follows."""

    dtype: str
    shape: tuple[int, ...]


class Meeting:
    """One meeting of the members of `world`; each method is a collective of all of them."""

    def __init__(self, world: WorldGroup, log: WorkLog) -> None:
        self.world = world
        self.log = log

    def come_together(self) -> None:
        """Wait until all members have called this."""
        self._gather(b"\0")

    def exchange(self, table: Table) -> list[Table]:
        """Return the tables of all members, in the order of their ranks."""
        received = self._gather(msgspec.msgpack.encode(table))
        return [msgspec.msgpack.decode(each, type=Table) for each in received]

    def gather_identities(self, identity: int) -> list[int]:
        """Return the identities of all members, in the order of their ranks."""
        return [
            int.from_bytes(each, "little") for each in self._gather(identity.to_bytes(8, "little"))
        ]

    def hand_over(self, rank: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors of the member of `rank`; what the others pass is not used."""
        is_giver = self.world.rank == rank
        forms = [TensorForm(str(t.dtype), tuple(t.shape)) for t in tensors] if is_giver else []
        sent = self._gather(msgspec.msgpack.encode(forms))[rank]
        if is_giver:
            own = [tensor.detach().contiguous() for tensor in tensors]
        else:
            forms = msgspec.msgpack.decode(sent, type=list[TensorForm])
            own = [torch.empty(form.shape, dtype=_DTYPES[form.dtype]) for form in forms]
        for tensor in own:
            options = BroadcastOptions()
            options.rootRank, options.rootTensor = rank, 0
            self._wait(self.world.group.broadcast([tensor], options))
        return own

    def _gather(self, sent: bytes) -> list[bytes]:
        size = self.world.size
        if size == 1:
            return [sent]
        lengths = torch.empty(size, dtype=torch.int64)
        own = torch.tensor([len(sent)], dtype=torch.int64)
        self._wait(self.world.group.allgather([[*lengths.view(size, 1)]], [own]))
        longest = int(lengths.max())
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(sent)] = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
        received = [torch.empty_like(padded) for _ in range(size)]
        self._wait(self.world.group.allgather([received], [padded]))
        pairs = zip(received, lengths.tolist(), strict=True)
        return [each[:length].numpy(force=True).tobytes() for each, length in pairs]

    def _wait(self, work: Work | Any) -> None:
        Waited(work, self.log, [], sliced=True).wait()
