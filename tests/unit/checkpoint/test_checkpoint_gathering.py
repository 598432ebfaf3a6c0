"""Ranks get missing pieces of a sharded state from their holders, once, at the right places."""

from __future__ import annotations

import itertools
import random
import threading

import pytest
import torch

from elastane.checkpoint.layout import Chunk, Tensor, lay_out
from elastane.checkpoint.reading import Destination, ReceivedBytes, gather, memory_of, parcels
from elastane.errors import CheckpointError
from elastane.observe.progress import ShownProgress


class Room:
    """Ranks as threads that exchange messages and broadcasts."""

    def __init__(self, size):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=30)
        self.said = [None] * size
        self.spread_bytes = 0

    def members(self, rank):
        return Ranked(self, rank)


class Ranked:
    def __init__(self, room, rank):
        self.room, self.rank, self.size = room, rank, room.size

    def texts(self, said):
        self.room.said[self.rank] = said
        self.room.barrier.wait()
        heard = [*self.room.said]
        self.room.barrier.wait()
        return heard

    def spread(self, data, source):
        heard = self.texts(data.clone() if self.rank == source else len(data))
        assert {len(h) if torch.is_tensor(h) else h for h in heard} == {len(data)}
        data.copy_(heard[source])
        self.room.spread_bytes += len(data) if self.rank == source else 0


def together(room, each):
    """Run `each(rank)` of all ranks at once; return their exceptions."""
    raised = [None] * room.size

    def one(rank):
        try:
            each(rank)
        except Exception as error:
            raised[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(room.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


class State:
    """A tensor of rows, sharded over `ranks`, and its serialized layout."""

    def __init__(self, rows, ranks):
        self.whole = torch.arange(rows * 7, dtype=torch.float32).reshape(rows, 7)
        cuts = [rows * n // ranks for n in range(ranks + 1)]
        pairs = [*itertools.pairwise(cuts)]
        held = [[Chunk(0, (a, 0), (b - a, 7))] for a, b in pairs]
        self.layout = lay_out([Tensor("x", "float32", (rows, 7))], held)
        self.image = ReceivedBytes(self.layout.image_bytes)
        for piece in self.layout.pieces:
            at, first = self.layout.data_at(piece), piece.offsets[0]
            data = self.whole[first : first + piece.shape[0]].contiguous()
            size = data.numel() * 4
            memory_of(self.image.data)[at : at + size] = memory_of(data)

    def wants(self, first, end):
        return Destination(0, (first, 0), torch.zeros(end - first, 7))


@pytest.mark.parametrize("seed", range(20))
def test_every_rank_gets_the_pieces_that_it_lacks(seed):
    rng = random.Random(seed)
    old, new, rows = rng.randint(2, 4), rng.randint(1, 4), rng.randint(8, 40)
    state, room = State(rows, old), Room(new)
    bounds = state.layout.bounds
    spans = [[] for _ in range(new)]
    for n in range(old):  # each part is on one of the nodes, or on two
        for rank in rng.sample(range(new), rng.randint(1, min(2, new))):
            spans[rank].append((bounds[n], bounds[n + 1]))
    wanted = [state.wants(rows * n // new, rows * (n + 1) // new) for n in range(new)]

    def one(rank):
        own = state.image if spans[rank] else None
        gather(state.layout, own, spans, [wanted[rank]], room.members(rank))

    assert together(room, one) == [None] * new
    assert torch.equal(torch.cat([each.tensor for each in wanted]), state.whole)


def test_read_and_received_pieces_of_a_rank_add_up_to_its_part():
    state, room = State(8, 2), Room(2)
    spans = [[(0, state.layout.bounds[1])], [(state.layout.bounds[1], state.layout.image_bytes)]]
    wanted = [state.wants(0, 8), state.wants(4, 8)]
    shown = [ShownProgress("restoring step 3", 100) for _ in wanted]

    def one(rank):
        gather(state.layout, state.image, spans, [wanted[rank]], room.members(rank), shown[rank])

    assert together(room, one) == [None] * 2
    assert [each._done_bytes for each in shown] == [each.tensor.nbytes for each in wanted]


def test_nothing_is_sent_if_no_rank_lacks_a_piece():
    state, room = State(8, 2), Room(2)
    cut = state.layout.bounds[1]
    spans = [[(0, cut)], [(cut, state.layout.image_bytes)]]
    wanted = [state.wants(0, 4), state.wants(4, 8)]
    together(
        room,
        lambda rank: gather(state.layout, state.image, spans, [wanted[rank]], room.members(rank)),
    )
    assert room.spread_bytes == 0
    assert torch.equal(torch.cat([each.tensor for each in wanted]), state.whole)


def test_all_ranks_fail_if_one_cannot_use_the_layout():
    state, room = State(8, 2), Room(2)
    spans = [[(0, state.layout.image_bytes)], []]
    wanted = [state.wants(0, 4), state.wants(4, 12)]
    raised = together(
        room,
        lambda rank: gather(
            state.layout, None if rank else state.image, spans, [wanted[rank]], room.members(rank)
        ),
    )
    assert [type(error) for error in raised] == [CheckpointError] * 2
    assert "4 of its" in str(raised[0]) or "28 of its" in str(raised[0])


def test_an_unreadable_source_fails_after_the_collective():
    class Broken(ReceivedBytes):
        def read_into(self, at, memory):
            raise OSError("memory is gone")

    state, room = State(8, 2), Room(2)
    spans = [[(0, state.layout.image_bytes)], []]
    wanted = [Destination(0, (0, 0), torch.zeros(0, 7)), state.wants(0, 8)]
    broken = Broken(state.layout.image_bytes)
    raised = together(
        room,
        lambda rank: gather(
            state.layout, None if rank else broken, spans, [wanted[rank]], room.members(rank)
        ),
    )
    assert [type(error) for error in raised] == [OSError, type(None)]


def test_a_piece_without_a_holder_is_an_error():
    state = State(8, 2)
    at = state.layout.pieces[-1].at
    with pytest.raises(CheckpointError, match="in no node's memory"):
        [*parcels(state.layout, {at}, [[(0, at)], []])]
