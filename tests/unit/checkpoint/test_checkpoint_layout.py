"""Every value of a state has one place in the serialized layout, whichever rank holds it."""

import itertools
import random

import pytest
import torch

from elastane.checkpoint import layout as laying
from elastane.checkpoint.layout import Chunk, Layout, Tensor, dtype_of, lay_out, overlap
from elastane.checkpoint.plan import RankStatus, shares
from elastane.errors import CheckpointError


def covered(layout: Layout) -> None:
    """Assert that the pieces of each tensor cover it completely and once."""
    for number, tensor in enumerate(layout.tensors):
        count = torch.zeros(tensor.shape, dtype=torch.int64)
        for piece in layout.pieces:
            if piece.tensor == number:
                view = count
                for dim, (at, length) in enumerate(zip(piece.offsets, piece.shape, strict=True)):
                    view = view.narrow(dim, at, length)
                view += 1
        assert bool((count == 1).all()), tensor
    ends = [piece.at for piece in layout.pieces] + [layout.image_bytes]
    for piece, end in zip(layout.pieces, ends[1:], strict=True):
        assert 0 <= end - (piece.at + layout.frame(piece).size_bytes) < 2 * laying.PAGE_BYTES
    for piece in layout.pieces:
        if layout.is_paged(piece):
            assert layout.data_at(piece) % laying.PAGE_BYTES == 0
    assert not any(bound % laying.PAGE_BYTES for bound in layout.bounds)


def whole(number: int, shape: tuple[int, ...]) -> Chunk:
    return Chunk(number, (0,) * len(shape), shape)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(laying, "PIECE_BYTES", 1024)
    monkeypatch.setattr(laying, "PAGED_BYTES", 900)


SHAPES = [(), (1,), (7,), (5, 300), (1, 1, 4000), (3, 1, 700), (0, 4), (2, 3, 5, 7)]


def test_a_replicated_state_is_cut_into_pieces_that_cover_it():
    tensors = [Tensor(str(n), "float32", shape) for n, shape in enumerate(SHAPES)]
    chunks = [whole(n, shape) for n, shape in enumerate(SHAPES)]
    layout = lay_out(tensors, [chunks] * 3)
    assert layout.replicated
    covered(layout)
    largest = max(layout.frame(piece).data_bytes for piece in layout.pieces)
    assert largest <= 1024


@pytest.mark.parametrize("seed", range(30))
def test_each_chunk_of_a_sharded_state_is_written_once_by_a_holder(seed):
    rng = random.Random(seed)
    ranks = rng.randint(2, 5)
    tensors, held = [], [[] for _ in range(ranks)]
    for number in range(rng.randint(1, 12)):
        rows, columns = rng.randint(0, 40), rng.randint(1, 60)
        tensors.append(Tensor(str(number), "float64", (rows, columns)))
        if rng.random() < 0.4:  # all hold it, or some
            for rank in rng.sample(range(ranks), rng.randint(1, ranks)):
                held[rank].append(whole(number, (rows, columns)))
        else:
            step = -(-rows // ranks) or 1
            for rank, first in enumerate(range(0, rows, step)):
                held[rank].append(Chunk(number, (first, 0), (min(step, rows - first), columns)))
    layout = lay_out(tensors, held)
    covered(layout)
    if layout.replicated:
        return
    for rank, (first, end) in enumerate(itertools.pairwise(layout.bounds)):
        for piece in layout.within(first, end):
            boxes = [c for c in held[rank] if c.tensor == piece.tensor]
            assert any(overlap(piece, box) == (piece.offsets, piece.shape) for box in boxes) or (
                0 in piece.shape
            )


@pytest.mark.parametrize("seed", range(40))
def test_the_slots_of_a_node_and_the_files_of_a_place_hold_the_whole_image(seed):
    rng = random.Random(seed)
    sizes = [rng.randint(1, 5000) for _ in range(rng.randint(1, 30))]
    tensors = [Tensor(str(n), "float32", (size,)) for n, size in enumerate(sizes)]
    chunks = [whole(n, (size,)) for n, size in enumerate(sizes)]
    nodes = rng.randint(1, 5)
    survives = rng.random() < 0.7
    members = [
        RankStatus(f"k{node}", survives, f"p{rng.randint(0, 1) if seed % 3 == 0 else 0}")
        for node in range(nodes)
        for _ in range(rng.randint(1, 4))
    ]
    one_place = {m.server: m.place for m in members}
    members = [RankStatus(m.server, survives, one_place[m.server]) for m in members]
    rng.shuffle(members)
    layout = lay_out(tensors, [chunks] * len(members))
    found = shares(layout, members)
    for place in {m.place for m in members}:
        here = [n for n, m in enumerate(members) if m.place == place]
        written = sorted({r for n in here for r in found[n].ranges}, key=lambda r: r.first)
        assert [r.first for r in written] + [layout.image_bytes] == [0] + [r.end for r in written]
        assert {found[n].parts for n in here} == {len({members[n].server for n in here})}
        for n in here:
            assert sorted(found[n].all_ranges, key=lambda r: r.first) == written
    for server in {m.server for m in members}:
        local = [found[n] for n, m in enumerate(members) if m.server == server]
        assert sorted(share.local for share in local) == list(range(len(local)))
        spans = sorted((share.first, share.end) for share in local)
        ends = [first for first, _ in spans] + [spans[-1][1]]
        assert [end for _, end in spans] == ends[1:]
        wanted = [(r.first, r.end) for r in local[0].ranges]
        held = (spans[0][0], spans[-1][1])
        assert held == ((0, layout.image_bytes) if survives else (wanted[0][0], wanted[-1][1]))


def test_shares_are_even():
    tensors = [Tensor(str(n), "float32", (2000, 10)) for n in range(50)]
    chunks = [whole(n, (2000, 10)) for n in range(50)]
    layout = lay_out(tensors, [chunks])
    cuts = layout.cut(4, 0, layout.image_bytes)
    sizes = [end - first for first, end in itertools.pairwise(cuts)]
    assert max(sizes) - min(sizes) < 2 * laying.PAGE_BYTES


def test_a_dtype_that_torch_does_not_have_is_refused_by_name():
    with pytest.raises(CheckpointError, match="float99"):
        dtype_of("float99")
