"""Bodies of comms_crew's workers that transfer states and sum values."""

import errno
import functools
import itertools
import time

import msgspec
import torch
from comms_bodies import build

from elastane.comms import near, transfer
from elastane.comms.channel import GroupChannel
from elastane.comms.digest import probe, raw_bytes, state_digest
from elastane.comms.elastic import ElasticGroup
from elastane.comms.mean import Mean
from elastane.data.ledger import dealt_evenly
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


def channels_of(group, how, peers, giving):
    """Channels to `peers`: over the group, or through memory."""
    if how == "group":
        return [GroupChannel(group, peer) for peer in peers]
    meet = near.to_give if giving else near.to_take
    return [meet(group, peer) for peer in peers]


def transfers(worker, size, how):
    """Let the last ranks give state 5 to rank 0, which has another state, or half of it."""
    rank = worker.number
    elastic = ElasticGroup()
    elastic.replace(build(worker, "transfer", rank, size))
    if rank > 0:
        state = big_state(5)
        sent = transfer.give(*channels_of(elastic, how, [0], giving=True), state)
        worker.say((state_digest(state), sent))
        return
    into = big_state(1)
    del into["weights"][5], into["half"]
    channels = channels_of(elastic, how, range(1, size), giving=False)
    if how == "memory":
        assert all(isinstance(channel, near.NearChannel) for channel in channels)
    spare = torch.zeros(1_000_003, dtype=torch.bfloat16)
    found = transfer.take(channels, into, room=[spare])
    got = found.state
    assert got["weights"][3].data_ptr() == into["weights"][3].data_ptr()
    assert got["odd"].data_ptr() == into["odd"].data_ptr()
    assert got["half"].data_ptr() == spare.data_ptr()
    worker.say((state_digest(got), found.bytes_sent))


def transfer_of_some(worker, how):
    """Let rank 0 lack one number of rank 1's state; report the received bytes and tensors."""
    elastic = ElasticGroup()
    elastic.replace(build(worker, "some", worker.number, 2))
    state = big_state(5)
    if worker.number == 1:
        transfer.give(*channels_of(elastic, how, [0], giving=True), state)
        return
    state["weights"][2][300, 300] += 1  # Not where it is probed.
    state["weights"][4] = state["weights"][4].flip(0).flip(0)
    begun = []
    found = transfer.take(
        channels_of(elastic, how, [1], giving=False),
        state,
        when_writing=lambda: begun.append(float(state["weights"][2][300, 300])),
    )
    assert state_digest(found.state) == state_digest(big_state(5))
    worker.say((found.bytes_sent, found.differed, len(begun)))


def transfer_cut(worker, size, how, what):
    """Kill or stop the last rank while it gives, or rank 0 while it takes."""
    rank = worker.number
    elastic = ElasticGroup()
    elastic.replace(build(worker, "cut", rank, size))
    told = worker.when_told(elastic.abort)
    hit = (what == "giver" and rank == size - 1) or (what == "taker" and rank == 0)
    folded, fold = itertools.count(), transfer.fold

    def stumble(data):
        if hit and next(folded) == 2:
            worker.say("hit")
            time.sleep(60.0)  # The test kills or stops it.
        return fold(data)

    transfer.fold = stumble
    worker.say("in")
    peers = range(1, size) if rank == 0 else [0]
    try:
        channels = channels_of(elastic, how, peers, giving=rank > 0)
        if rank == 0:
            transfer.take(channels)
        else:
            transfer.give(*channels, big_state(5))
        worker.say("whole")
    except (RuntimeError, PeerLostError):
        worker.say("failed")
    told.join()


def transfer_spoilt(worker, how):
    """Let rank 1 send data that differs in one bit from its digest."""
    elastic = ElasticGroup()
    elastic.replace(build(worker, "spoilt", worker.number, 2))
    if worker.number == 1:
        channel = channels_of(elastic, how, [0], giving=True)[0]
        put = channel.put

        numbers = itertools.count()

        def spoil(seen, part):
            seen(torch.cat([part[:-1], part[-1:] ^ 4]) if next(numbers) == 2 else part)

        channel.put = lambda parts, seen: put(parts, functools.partial(spoil, seen))
        transfer.give(channel, big_state(5))
        worker.say("sent")
        return
    try:
        transfer.take(channels_of(elastic, how, [1], giving=False))
        worker.say("received")
    except StateError as error:
        worker.say(error.slug)


def transfer_without_memory(worker, how):
    """Keep rank 0 from reading rank 1's memory; the transfer then uses the group."""
    elastic = ElasticGroup()
    elastic.replace(build(worker, "without", worker.number, 2))
    giving = worker.number == 1

    def refused(*_args):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    near._read = refused if how == "refused" else lambda _pid, _address, room: room.zero_()
    (channel,) = channels_of(elastic, "memory", [1 - worker.number], giving)
    assert isinstance(channel, GroupChannel)
    state = {"w": torch.arange(5000.0)}
    if giving:
        transfer.give(channel, state)
        worker.say(state_digest(state))
    else:
        worker.say(state_digest(transfer.take([channel]).state))


def transfer_of_garbage(worker, what):
    """Let rank 1 send messages that no giver sends, or that are about other tensors."""
    elastic = ElasticGroup()
    elastic.replace(build(worker, "garbage", worker.number, 2))
    channel = GroupChannel(elastic, 1 - worker.number)
    if worker.number == 1:
        spec = {"spec": ["w", "float32", [-3], "cpu"], "kind": ["w", "Tensor", [3], "cpu"]}
        spec["huge"] = ["w", "uint8", [1 << 30, 1 << 30], "cpu"]
        if what == "bytes":
            channel.say(b"\xc1 nonsense")
        elif what == "length":
            elastic.send([torch.full((4096,), 255, dtype=torch.uint8)], 0, 0x5717).wait()
        elif what in spec:
            channel.say(msgspec.msgpack.encode([b"", [spec[what]], b"12345678"]))
        elif what == "probes":
            channel.say(msgspec.msgpack.encode([b"", [["w", "float32", [3], "cpu"]], b"123"]))
        elif what == "digests":
            mine = torch.arange(3.0)
            probes = probe(raw_bytes(mine))
            spec = ["state['w']", "float32", [3], "cpu"]
            channel.say(msgspec.msgpack.encode([b"", [spec], probes]))
            channel.hear()
            channel.say(b"too short")
        worker.hear()
        return
    try:
        transfer.take([channel], {"w": torch.arange(3.0)})
        worker.say("taken")
    except StateError as error:
        worker.say(error.slug)


def transfer_wanted(worker, pieces):
    """Let rank 0 request tensors that rank 1 does not have."""
    elastic = ElasticGroup()
    elastic.replace(build(worker, "wanted", worker.number, 2))
    channel = GroupChannel(elastic, 1 - worker.number)
    if worker.number == 0:
        channel.hear()
        channel.say(msgspec.msgpack.encode(pieces))
        worker.hear()
        return
    try:
        transfer.give(channel, {"w": torch.arange(3.0)})
        worker.say("given")
    except StateError as error:
        worker.say(error.slug)


def unevenly(shards, world_size):
    """As few shards to each rank as there can be, and the rest to the last but one."""
    ends = [*range(max(world_size - 1, 1)), *([shards - 1] if world_size > 1 else []), shards]
    return tuple(map(range, ends, ends[1:]))


def tree_means(worker, size, shards, count, by_collectives, uneven=False):
    """Report the bits of the tree's mean over gloo, twice in each world of up to `size`."""
    digests = []
    elastic = ElasticGroup()
    mean = Mean(count, torch.float32, torch.device("cpu"), shards)
    if by_collectives:
        mean._by_messages = mean._by_collectives
    for world_size in range(size, 0, -1):
        if worker.number >= world_size:
            break
        elastic.replace(build(worker, f"tree-{world_size}", worker.number, world_size))
        for turn in range(2):
            dealt = unevenly(shards, world_size) if uneven else dealt_evenly(shards, world_size)
            total = mean.begin(worker.number, dealt)
            for shard in dealt[worker.number]:
                vector = torch.randn(count, generator=torch.Generator().manual_seed(shard))
                total.add(lambda into, adds, v=vector: write(into[:count], adds, v))
            found = mean.finish(elastic)
            digests.append(state_digest({"mean": found}))
            expected = torch.stack([
                torch.randn(count, generator=torch.Generator().manual_seed(shard))
                for shard in range(shards)
            ]).mean(dim=0)  # fmt: skip
            torch.testing.assert_close(found, expected, msg=f"turn {turn}")
    worker.say(digests)


def write(into, adds, vector):
    """Write a shard's vector as a TreeSum asks for it."""
    into.add_(vector) if adds else into.copy_(vector)
