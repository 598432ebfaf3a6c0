"""Copy-on-write restore: new tensors share the snapshot's memory until their pages are copied.

Reading into new memory costs clearing each page and copying into it. Instead the snapshot's pages
are mapped privately, so that the tensors exist at once, and a page is copied at its first write. A
thread copies all pages before the training would, after a short delay or when a caller waits. Until
then the snapshot must not change: the server holds it until it is released, or until the process
that reads it has ended. Why: docs/decisions/copy-on-write-restore.md.
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
    from elastane.checkpoint.reading import MemoryPieces
    from elastane.snapshots.client import HeldSnapshot, SnapshotClient

_log = logging.getLogger("elastane.checkpoint")
# The unit of copying: other changes of this process's maps wait for one unit, 0.1 ms.
_STRIDE_BYTES = 1 << 18
# The delay before copying starts unless a caller waits; earlier it would slow the script's start.
_REST_S = 1.0
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class _SharedRange(NamedTuple):
    """A range of a tensor's memory; the weak reference is dead once the tensor is."""

    memory: weakref.ref[memoryview]
    address: int
    size: int


class CopyOnWriteTensors:
    """Makes tensors that share the memory of a snapshot."""

    def __init__(self, layout: Layout, image: MemoryPieces) -> None:
        self._layout = layout
        self._image = image
        self._pieces: dict[int, list[TensorPiece]] = {}
        for piece in layout.pieces:
            self._pieces.setdefault(piece.tensor, []).append(piece)
        self._left: deque[_SharedRange] = deque()

    def tensor(self, number: int) -> torch.Tensor | None:
        """Return the tensor of this number, or None if its memory cannot be shared."""
        parts = self._mappings(number)
        if not parts or not is_supported():
            return None
        spec = self._layout.tensors[number]
        try:
            address, size = kernel.map_privately(parts)
        except OSError as error:  # The process has too many maps.
            _log.debug("%s is read: %s", spec.name, error)
            return None
        memory = memoryview((ctypes.c_ubyte * size).from_address(address))
        # Not at exit, since threads may use these tensors until the process ends.
        weakref.finalize(memory, kernel.unmap, address, size).atexit = False
        held = weakref.ref(memory)
        for at in range(0, size, _STRIDE_BYTES):
            self._left.append(_SharedRange(held, address + at, min(_STRIDE_BYTES, size - at)))
        return torch.frombuffer(memory, dtype=dtype_of(spec.dtype)).view(spec.shape)

    @property
    def has_shared(self) -> bool:
        """Whether some memory is still shared."""
        return bool(self._left)

    def copy_all(self) -> None:
        """Copy all pages of live tensors; raises OSError without memory.

        Several threads may call it together. It returns when no range is left to begin with.
        """
        with contextlib.suppress(IndexError):
            while True:
                part = self._left.popleft()
                memory = part.memory()  # Prevents the unmapping meanwhile.
                if memory is not None:
                    kernel.take_pages(part.address, part.size)

    def _mappings(self, number: int) -> Sequence[tuple[int, int, int]]:
        """Return where the data of a tensor lies, if it can be mapped page by page."""
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
                return ()  # The page holds several tensors, and would be mapped for each.
            parts.append((*found, size))
            before += size
        return parts


class CopyOnWriteRestore:
    """A snapshot whose memory tensors share until a thread has copied all pages."""

    def __init__(
        self, server: SnapshotClient, tensors: CopyOnWriteTensors, held: HeldSnapshot
    ) -> None:
        self._tensors = tensors
        self._server = server
        self._held = held
        self._awaited = threading.Event()
        self._helping = threading.Lock()
        self._fault = ""
        # The thread keeps the client open: closing it would release the snapshot.
        self._thread = threading.Thread(target=self._end, name="elastane-loan", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Help to copy until each tensor has its own memory."""
        with self._helping:
            self._awaited.set()
            self._copy_all()
        self._thread.join()

    def _copy_all(self) -> None:
        try:
            self._tensors.copy_all()
        except OSError as error:
            self._fault = str(error)

    def _end(self) -> None:
        self._awaited.wait(_REST_S)
        self._copy_all()
        with self._helping:  # A helper may still copy its last range.
            pass
        if self._fault:
            # Training and saving continue, with the other slots.
            _log.warning("restored tensors stay in the memory of their snapshot: %s", self._fault)
            return
        try:
            self._server.release(self._held)
        except OSError as error:
            _log.debug("a snapshot was not released: %s", error)


@functools.cache
def is_supported() -> bool:
    """Whether this kernel can populate private pages without changing their content.

    Returns False if new memory would be in huge pages, which are allocated and used faster.
    """
    try:
        is_huge = "[always]" in _HUGE_PAGES.read_text()
    except OSError:
        is_huge = False
    if is_huge or environment.get("THP_MEM_ALLOC_ENABLE") == "1":  # torch's own switch.
        return False
    memory = ctypes.create_string_buffer(PAGE_BYTES)
    try:
        kernel.take_pages(ctypes.addressof(memory), PAGE_BYTES)
    except OSError:
        return False
    return True
