"""Workers that snapshot back to back and are killed at random instants, one set after the other.

Forks them from itself, which has imported everything, so that a life costs milliseconds. Each set
of workers is looked after by its successors, who must find the newest snapshot that all had kept,
or a newer one, whole. What came of it is one line of JSON.
"""

import json
import mmap
import os
import random
import signal
import struct
import sys
import time

from elastane.process.kernel import die_with_parent
from elastane.protocol.checkpoints import Key
from elastane.snapshots.client import SnapshotClient
from elastane.snapshots.messages import Snapshot

LIVES, LOCALS, SLOT_BYTES, SEED = map(int, sys.argv[1:5])
# What a worker tells by memory that outlives it: the step it has kept, and whether it copies now.
TOLD = struct.Struct("qq")


def look(client, kept):
    """Return the newest step, after comparing every byte of every snapshot."""
    found = client.held()
    steps = [held.key.step for held in found]
    assert steps == sorted(steps, reverse=True), steps
    assert not found or found[0].verified is not None
    for held in found:
        assert held.words.image_bytes == LOCALS * SLOT_BYTES
        assert [piece[:2] for piece in held.pieces] == [
            (n * SLOT_BYTES, (n + 1) * SLOT_BYTES) for n in range(LOCALS)
        ]
        for local, (_, _, fd) in enumerate(held.pieces):
            pattern = bytes([held.key.step % 251, local]) * (SLOT_BYTES // 2)
            assert os.pread(fd, SLOT_BYTES, 0) == pattern, (held.key.step, local)
            assert held.words.streams[local] == b"%d" % held.key.step
        client.release(held)
    newest = steps[0] if steps else 0
    assert newest >= kept, (newest, kept)
    return newest, bool(found and found[0].verified)


def work(local, life, start, told):
    client = SnapshotClient.connect()
    fds = client.slots(3, SLOT_BYTES)
    slots = [mmap.mmap(fd, SLOT_BYTES) for fd in fds]
    step = start
    while True:
        step += 1
        slot = client.grant(30.0)
        told[local] = (step - 1, 1)
        pattern = bytes([step % 251, local]) * (SLOT_BYTES // 8)
        for part in range(4):  # So that it may be killed between two of them.
            slots[slot][part * len(pattern) : (part + 1) * len(pattern)] = pattern
        told[local] = (step - 1, 0)  # Its `keep` was answered: `grant` came after it.
        client.keep(
            slot,
            Snapshot(
                key=Key(0, life, 0, step),
                nonce=f"{step:08x}",
                local=local,
                locals=LOCALS,
                first=local * SLOT_BYTES,
                end=(local + 1) * SLOT_BYTES,
                image_bytes=LOCALS * SLOT_BYTES,
                streams=b"%d" % step,
            ),
        )


class Told:
    def __init__(self):
        self.memory = mmap.mmap(-1, mmap.PAGESIZE)

    def __getitem__(self, local):
        return TOLD.unpack_from(self.memory, local * TOLD.size)

    def __setitem__(self, local, value):
        TOLD.pack_into(self.memory, local * TOLD.size, *value)


def fork(work, *args):
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent(parent)
            work(*args)
        finally:
            os._exit(1)
    return pid


def main():
    die_with_parent(os.getppid())
    chance = random.Random(SEED)
    start = copying = verified = 0
    anchor = (
        SnapshotClient.connect()
    )  # A snapshot server whose workers are all gone would write, after a while.
    for life in range(1, LIVES + 1):
        told = Told()
        pids = [fork(work, local, life, start, told) for local in range(LOCALS)]
        until_s = time.monotonic() + 90
        while min(told[n][0] for n in range(LOCALS)) < start + 2:
            assert time.monotonic() < until_s, "the workers make no snapshot"
            time.sleep(0.0005)
        time.sleep(chance.uniform(0, 0.02))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            if chance.random() < 0.5:
                os.waitpid(pid, 0)
        for pid in pids:
            try:
                os.waitpid(pid, 0)
            except ChildProcessError:
                continue
        copying += any(told[n][1] for n in range(LOCALS))
        # A piece that one has kept is none of a whole snapshot until all have.
        start, sound = look(anchor, min(told[n][0] for n in range(LOCALS)))
        verified += sound
    print(json.dumps({"lives": LIVES, "copying": copying, "steps": start, "verified": verified}))


main()
