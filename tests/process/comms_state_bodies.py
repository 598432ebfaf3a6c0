"""What the workers of comms_crew do with states and sums."""

import os
import signal
import statistics
import time

import torch
from comms_bodies import build

from elastane.comms import reduction, transfer
from elastane.comms.digest import state_digest
from elastane.comms.elastic import ElasticGroup
from elastane.errors import PeerLostError, StateError


def big_state(seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        "step": seed,
        "weights": [torch.randn(1000, 1000, generator=generator) for _ in range(6)],
        "odd": torch.randn(33, 7, generator=generator).t(),
        "half": torch.randn(1_000_003, generator=generator).bfloat16(),
        "flags": torch.tensor([True, False, True]),
        "nothing": torch.empty(0),
        "generator": torch.Generator().manual_seed(seed),
    }


def transfers(worker, size):
    """The last rank has state 5 and gives it to all others; they have none, or state 1."""
    rank, donor = worker.number, size - 1
    elastic = ElasticGroup()
    elastic.replace(build(worker, "transfer", rank, size))
    if rank == donor:
        state = big_state(5)
        paces = []
        started = time.monotonic()
        sent = transfer.send(elastic, state, range(donor), pace=paces.append)
        took = time.monotonic() - started
        assert sum(paces) == sent
        worker.say((state_digest(state), sent / took))
        return
    into = big_state(1) if rank == 0 else None
    got = transfer.receive(elastic, donor, into)
    if into is not None:
        assert got["weights"][3].data_ptr() == into["weights"][3].data_ptr()
        assert got["odd"].data_ptr() == into["odd"].data_ptr()
    worker.say((state_digest(got), 0.0))


def transfer_cut(worker):
    """Rank 1 dies while it sends; rank 0 must not believe that it has the state."""
    rank = worker.number
    elastic = ElasticGroup()
    elastic.replace(build(worker, "cut", rank, 2))
    if rank == 1:
        calls = iter(range(100))

        def die(_bytes):
            if next(calls) == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        transfer.send(elastic, big_state(5), [0], pace=die)
    told = worker.when_told(elastic.abort)
    worker.say("in")
    try:
        transfer.receive(elastic, 1)
        worker.say("received")
    except (RuntimeError, PeerLostError):
        worker.say("failed" if elastic.failed else "not noticed")
    told.join()


def transfer_spoilt(worker):
    """Rank 1 sends one wrong bit."""
    rank = worker.number
    world = build(worker, "spoilt", rank, 2)
    if rank == 1:
        count = 0
        group = world.group

        class Spoiler:
            def send(self, tensors, dst, tag):
                nonlocal count
                count += 1
                if count == 3:
                    tensors = [tensors[0].clone()]
                    tensors[0][12345] ^= 4
                return group.send(tensors, dst, tag)

        transfer.send(Spoiler(), big_state(5), [0])
        worker.say("sent")
        return
    try:
        transfer.receive(world.group, 1)
        worker.say("received")
    except StateError as error:
        worker.say(error.slug)


def tree_sums(worker, size, shards, count):
    """The bits of the tree's sum over gloo, in worlds of `size` and fewer."""
    digests = []
    elastic = ElasticGroup()
    for world_size in range(size, 0, -1):
        if worker.number >= world_size:
            break
        elastic.replace(build(worker, f"tree-{world_size}", worker.number, world_size))
        held = reduction.shards_of(worker.number, world_size, shards)
        vectors = (
            torch.randn(count, generator=torch.Generator().manual_seed(shard)) for shard in held
        )
        digests.append(state_digest({"sum": reduction.tree_sum(elastic, vectors, shards)}))
    worker.say(digests)


def times_of_sums(worker, size, shards, count, repeats):
    """Median seconds of an all-reduce, and of the tree's sum of blocks that are there already."""
    elastic = ElasticGroup()
    elastic.replace(build(worker, "times", worker.number, size))
    held = reduction.shards_of(worker.number, size, shards)
    blocks = [torch.ones(count) for _ in reduction.blocks_of(held, shards)]
    medians = []
    for action in (
        lambda: elastic.allreduce([torch.ones(count)]).wait(),
        lambda: reduction.reduce_blocks(elastic, blocks, shards),
    ):
        times = []
        for _ in range(repeats + 1):
            elastic.barrier().wait()
            started = time.monotonic()
            action()
            times.append(time.monotonic() - started)
        medians.append(statistics.median(times[1:]))
    worker.say(tuple(medians))
    worker.hear()
