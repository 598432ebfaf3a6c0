"""New tensors of a restore, which lie in the memory of the snapshot until they have their own.

What is read into new memory costs the clearing of each page and a copy into it. Here the pages of
the snapshot are mapped instead, for this process alone: the tensors are there at once, and a page
is copied when it is first written to. That is done for all of them before the training does it:
by whoever waits for it, and by a thread that begins by itself after a while.
Until then the snapshot has to stay as it is: the keeper holds it until it is released, or until the
process that reads it has ended, also where the line to it broke.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from elastane.checkpoint.layout import PAGE_BYTES, Layout, TensorPiece, dtype_of
from elastane.process import environment, kernel

if TYPE_CHECKING:
    from elastane.checkpoint.reading import Pieces
    from elastane.snapshots.client import HeldSnapshot, Keeper

_log = logging.getLogger("elastane.checkpoint")
# Given pages at a time: others that change this process's maps wait so long, a tenth of a
# millisecond.
_STRIDE_BYTES = 1 << 18
# Until it is begun with, unless somebody waits: what a script does first would be held up by it.
_REST_S = 1.0
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class _Lent(NamedTuple):
    """Some of the memory of a tensor: there for as long as that is."""

    memory: weakref.ref[memoryview]
    address: int
    size: int


class Lender:
    """Makes tensors of what lies in the pieces of an image."""

    def __init__(self, layout: Layout, image: Pieces) -> None:
        self._layout, self._image = layout, image
        self._pieces: dict[int, list[TensorPiece]] = {}
        for piece in layout.pieces:
            self._pieces.setdefault(piece.tensor, []).append(piece)
        self._left: deque[_Lent] = deque()

    def tensor(self, number: int) -> torch.Tensor | None:
        """Return the tensor of this number; None where it does not lie so, and has to be read."""
        parts = self._parts(number)
        if not parts or not can_lend():
            return None
        spec = self._layout.tensors[number]
        try:
            address, size = kernel.map_privately(parts)
        except OSError as error:  # More maps than a process may have.
            _log.debug("%s is read: %s", spec.name, error)
            return None
        memory = memoryview((ctypes.c_ubyte * size).from_address(address))
        # Not at exit: threads may be in these tensors until the process ends.
        weakref.finalize(memory, kernel.unmap, address, size).atexit = False
        held = weakref.ref(memory)
        for at in range(0, size, _STRIDE_BYTES):
            self._left.append(_Lent(held, address + at, min(_STRIDE_BYTES, size - at)))
        return torch.frombuffer(memory, dtype=dtype_of(spec.dtype)).view(spec.shape)

    @property
    def has_lent(self) -> bool:
        """Whether there are tensors that lie in the snapshot."""
        return bool(self._left)

    def settle(self) -> None:
        """Give all that still live memory of their own; OSError where there is none.

        Several threads may do so together: this returns when there is nothing left to begin with.
        """
        with contextlib.suppress(IndexError):
            while True:
                lent = self._left.popleft()
                memory = lent.memory()  # Held, so that it is not unmapped meanwhile.
                if memory is not None:
                    kernel.take_pages(lent.address, lent.size)

    def _parts(self, number: int) -> Sequence[tuple[int, int, int]]:
        """Return where the data of a tensor lies, if that is one page behind the other."""
        parts, before = [], 0
        spec = self._layout.tensors[number]
        strides = torch.empty(spec.shape, device="meta").stride()
        pieces = self._pieces.get(number, [])
        for place, piece in enumerate(pieces, 1):
            size = self._layout.frame(piece).data_bytes
            found = self._image.place(self._layout.data_at(piece), size)
            item_bytes = dtype_of(spec.dtype).itemsize
            first = sum(map(int.__mul__, piece.offsets, strides)) * item_bytes
            is_in_pages = place == len(pieces) or not size % PAGE_BYTES
            if found is None or first != before or not (is_in_pages and not found[1] % PAGE_BYTES):
                return ()
            if not self._layout.is_paged(piece) and place == 1:
                return ()  # A page holds several; each would be mapped for each.
            parts.append((*found, size))
            before += size
        return parts


class Loan:
    """A snapshot that tensors lie in, until they do not."""

    def __init__(self, keeper: Keeper, lender: Lender, held: HeldSnapshot) -> None:
        self._lender, self._keeper, self._held = lender, keeper, held
        self._awaited, self._helping, self._fault = threading.Event(), threading.Lock(), ""
        # It holds the keeper: were that closed, the snapshot would be let go of.
        self._thread = threading.Thread(target=self._end, name="elastane-loan", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Help, until each tensor has memory of its own."""
        with self._helping:
            self._awaited.set()
            self._settle()
        self._thread.join()

    def _settle(self) -> None:
        try:
            self._lender.settle()
        except OSError as error:
            self._fault = str(error)

    def _end(self) -> None:
        self._awaited.wait(_REST_S)
        self._settle()
        with self._helping:  # Who helps has its last part in hand.
            pass
        if self._fault:
            # Training goes on, and saves: into the other slots.
            _log.warning("what was restored stays in the memory of its snapshot: %s", self._fault)
            return
        try:
            self._keeper.release(self._held)
        except OSError as error:
            _log.debug("a snapshot was not released: %s", error)


@functools.cache
def can_lend() -> bool:
    """Whether this kernel gives a process its own pages without a change of what is in them.

    And new memory would not be in huge pages, which are there sooner, and quicker ever after.
    """
    try:
        is_huge = "[always]" in _HUGE_PAGES.read_text()
    except OSError:
        is_huge = False
    if is_huge or environment.get("THP_MEM_ALLOC_ENABLE") == "1":  # torch's own switch
        return False
    memory = ctypes.create_string_buffer(PAGE_BYTES)
    try:
        kernel.take_pages(ctypes.addressof(memory), PAGE_BYTES)
    except OSError:
        return False
    return True
