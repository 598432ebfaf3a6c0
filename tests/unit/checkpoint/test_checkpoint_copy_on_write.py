"""Tensors in a snapshot's memory have the saved values, and change independently of it."""

import errno
import gc
import itertools
import os
from pathlib import Path

import pytest
import torch

from elastane.checkpoint import copy_on_write
from elastane.checkpoint.capture import Captured
from elastane.checkpoint.copy_on_write import CopyOnWriteTensors
from elastane.checkpoint.copying import PreparedSlot
from elastane.checkpoint.layout import PAGE_BYTES, lay_out
from elastane.checkpoint.reading import MemoryPieces
from elastane.process import kernel

# Of one piece, of several, in one row of several, and of pieces that end within a page.
SHAPES = {"one": (1000, 700), "several": (3000, 1000), "row": (1, 3_000_001), "within": (999, 4097)}


@pytest.fixture(autouse=True)
def asked_anew():
    copy_on_write.is_supported.cache_clear()
    if not copy_on_write.is_supported():
        pytest.skip("the kernel has no MADV_POPULATE_WRITE, or gives huge pages to all")
    yield
    copy_on_write.is_supported.cache_clear()


class Image:
    """The serialized layout of a state, in the slots of some workers."""

    def __init__(self, state, slots=1):
        captured = Captured(state)
        self.layout = lay_out(captured.specs, [captured.chunks])
        self.numbers = {spec.name: number for number, spec in enumerate(captured.specs)}
        cuts = self.layout.cut(slots, 0, self.layout.image_bytes)
        self.pieces, self.slots = [], []
        for first, end in itertools.pairwise(cuts):
            fd = os.memfd_create("elastane-test-slot")
            os.ftruncate(fd, end - first)
            slot = PreparedSlot(os.dup(fd), self.layout, first, end)
            within = self.layout.within(first, end)
            for place, piece in zip(slot.places, within, strict=True):
                box = tuple(
                    slice(at, at + length)
                    for at, length in zip(piece.offsets, piece.shape, strict=True)
                )
                place.copy_(captured.tensors[piece.tensor][box])
            self.pieces.append((first, end, fd))
            self.slots.append(slot)

    def shared(self):
        return CopyOnWriteTensors(self.layout, MemoryPieces(self.pieces))

    def fill(self, value):
        """Fill the slots, as the next save does."""
        for slot in self.slots:
            for place in slot.places:
                place.fill_(value)

    def close(self):
        for _, _, fd in self.pieces:
            os.close(fd)


def mapped():
    return Path("/proc/self/maps").read_text().count("elastane-test-slot")


@pytest.mark.parametrize("slots", [1, 3])
def test_page_aligned_tensors_share_the_snapshots_memory(slots):
    state = {name: torch.randn(shape) for name, shape in SHAPES.items()} | {"few": torch.ones(9)}
    image = Image(state, slots)
    shared = image.shared()
    made = {name: shared.tensor(number) for name, number in image.numbers.items()}
    image.close()
    assert {name for name, tensor in made.items() if tensor is None} == {"few", "within"}
    for name in ("one", "several", "row"):
        tensor = made[name]
        assert torch.equal(tensor, state[name]) and tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == 4 * tensor.numel(), "what torch.save writes"
        assert not tensor.data_ptr() % PAGE_BYTES


def test_writes_to_a_shared_tensor_stay_in_this_process():
    image = Image({"one": torch.ones(1000, 700)})
    tensor = image.shared().tensor(0)
    tensor += 1
    assert bool((tensor == 2).all())
    assert bool((image.slots[0].places[0] == 1).all())
    assert torch.equal(image.shared().tensor(0), torch.ones(1000, 700))
    image.close()


def test_a_copied_tensor_does_not_see_later_writes_to_the_slot():
    state = {"several": torch.randn(3000, 1000), "one": torch.randn(1000, 700)}
    image = Image(state, 2)
    shared = image.shared()
    made = [shared.tensor(number) for number in range(2)]
    made[0][7] = 3.0
    shared.copy_all()
    image.fill(0.0)
    image.close()
    assert bool((made[0][7] == 3.0).all())
    made[0][7] = state["several"][7]
    assert torch.equal(made[0], state["several"]) and torch.equal(made[1], state["one"])


def test_a_dead_tensor_is_unmapped_and_not_copied(monkeypatch):
    before = mapped()
    image = Image({"one": torch.ones(1000, 700), "two": torch.ones(1000, 700)})
    own = mapped()
    shared = image.shared()
    one, two = shared.tensor(0), shared.tensor(1)
    view = two[5:]
    del one, two
    gc.collect()
    assert mapped() == own + 1, "a view holds its tensor's memory"
    taken = []
    monkeypatch.setattr(kernel, "take_pages", lambda *part: taken.append(part))
    shared.copy_all()
    first = view.data_ptr() - 5 * 700 * 4
    ends = [first, *(address + size for address, size in taken)]
    assert [address for address, _ in taken] == ends[:-1] and ends[-1] == first + 2_800_000
    del view
    image.slots.clear()
    image.close()
    gc.collect()
    assert mapped() == before


def test_nothing_is_shared_if_the_kernel_cannot_populate_pages(monkeypatch):
    def refuse(address, size):
        raise OSError(errno.EINVAL, "Invalid argument")

    copy_on_write.is_supported.cache_clear()
    monkeypatch.setattr(kernel, "take_pages", refuse)
    image = Image({"one": torch.ones(1000, 700)})
    assert image.shared().tensor(0) is None
    image.close()


@pytest.mark.parametrize("by", ["host", "torch"])
def test_nothing_is_shared_if_new_memory_is_in_huge_pages(monkeypatch, tmp_path, by):
    copy_on_write.is_supported.cache_clear()
    if by == "host":
        (tmp_path / "enabled").write_text("[always] madvise never\n")
        monkeypatch.setattr(copy_on_write, "_HUGE_PAGES", tmp_path / "enabled")
    else:
        monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")
    image = Image({"one": torch.ones(1000, 700)})
    assert image.shared().tensor(0) is None
    image.close()


def test_a_process_at_its_limit_of_maps_reads_instead(monkeypatch):
    def refuse(parts):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(kernel, "map_privately", refuse)
    image = Image({"one": torch.ones(1000, 700)})
    shared = image.shared()
    assert shared.tensor(0) is None and not shared.has_shared
    image.close()


def test_parts_that_cannot_be_mapped_leave_nothing_mapped():
    image = Image({"one": torch.ones(1000, 700)})
    fd = image.pieces[0][2]
    before = mapped()
    with pytest.raises(OSError, match="Invalid argument"):
        kernel.map_privately([(fd, 0, PAGE_BYTES), (fd, 1, PAGE_BYTES)])
    assert mapped() == before
    image.close()
