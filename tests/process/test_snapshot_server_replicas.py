"""Copies between snapshot servers arrive unchanged, and servers of other jobs are refused."""

from __future__ import annotations

import contextlib
import os
import signal
import socket

import pytest
from process_harness import DEADLINE_S, until
from snapshot_server_support import (
    SLOT_BYTES,
    Node,
    Worker,
    persist_to,
    published,
    snapshot_servers,
)

from elastane.protocol.checkpoints import Key, folder_name
from elastane.protocol.messages import NodeCopies
from elastane.snapshots import connection
from elastane.snapshots.messages import (
    FINAL_FLUSH,
    TO_SENDER,
    PeerProof,
    Replica,
    ReplicaOffer,
    ReplicationSettings,
)
from elastane.storage.digest import digest_of

ABOUT = ReplicationSettings("job", (b"secret" * 6,), "127.0.0.1")


# Real snapshot servers, each of an agent of its own.


@pytest.fixture
def pair(tmp_path):
    """Yield two nodes with a worker on each."""
    with contextlib.ExitStack() as stack:
        nodes = []
        for name in "ab":
            (tmp_path / name).mkdir()
            node = Node(tmp_path / name, TEST_NEIGHBOURS="s" * 32)
            stack.enter_context(node)
            nodes.append((node, Worker(slots=4, group="g")))
        yield nodes


def save(worker, step, peer, safe="", local=0, nodes=2, **more):
    """Save this node's part, with a copy to `peer`; return its nonce."""
    replica_address = peer.client.replica_address if peer else ""
    replica = Replica(replica_address, "g", safe)
    at = {"first": local * SLOT_BYTES, "end": (local + 1) * SLOT_BYTES}
    at["image_bytes"] = nodes * SLOT_BYTES
    worker.save(step, replica=replica, replicated=False, **at, **more)
    return f"{step:08x}"


def copied(worker, *nonces):
    def there():
        progress = worker.client.progress()
        return not progress.copying and progress.copied == nonces

    until(there, f"{nonces} are copied")


def held(worker):
    """Return what a worker receives, (step, pieces), after checking the bytes."""
    found = []
    for one in worker.client.held():
        for first, end, fd in one.pieces:
            assert os.pread(fd, end - first, 0) == bytes([one.key.step % 251]) * (end - first)
        found.append((one.key.step, [(first, end) for first, end, _ in one.pieces]))
        worker.client.release(one)
    return found


def test_replicas_are_read_together_with_the_nodes_own_part(pair):
    (_, a), (_, b) = pair
    for step in (1, 2, 3):
        safe = f"{step - 1:08x}" if step > 1 else ""
        save(a, step, b, safe, local=0)
        save(b, step, a, safe, local=1)
        both = tuple(f"{n:08x}" for n in (step - 1, step) if n)
        copied(a, *both), copied(b, *both)
    whole = [(0, SLOT_BYTES), (SLOT_BYTES, 2 * SLOT_BYTES)]
    assert held(a) == [(3, whole), (2, whole)]
    assert held(b) == [(3, whole[::-1]), (2, whole[::-1])]


def test_the_agent_knows_how_old_the_copies_are_and_how_long_they_took(pair, tmp_path):
    (node, a), (_, b) = pair
    assert node.copies() == NodeCopies()
    save(a, 1, b, persist=persist_to(tmp_path / "store"), took_s=30.0)
    until(lambda: node.copies().storage and node.copies().replica, "all three copies")
    found = node.copies()
    assert not found.replicated
    assert [each.step for each in (found.memory, found.replica, found.storage)] == [1, 1, 1]
    assert all(30 < each.age_s < 90 for each in (found.memory, found.replica, found.storage))
    assert 30 <= found.memory.took_s <= found.replica.took_s < 90 and found.storage.took_s < 30
    save(a, 2, None)
    until(lambda: node.copies().memory.step == 2, "the copy in memory is newer")
    assert node.copies().replica.step == 1 and node.copies().memory.age_s < 30
    assert node.copies().memory.every_s > 30 and node.copies().replica.every_s is None
    os.kill(node.server_pid, signal.SIGKILL)
    until(lambda: node.copies().memory is None, "its memory is lost")
    assert node.copies().replica is None and node.copies().storage.step == 1


def test_the_replica_of_a_lost_nodes_part_is_given_to_new_workers(pair):
    (gone, a), (_, b) = pair
    copied(a, save(a, 7, b))
    os.kill(gone.server_pid, signal.SIGKILL)
    assert held(b) == [(7, [(0, SLOT_BYTES)])]


def final_flushes(pair, store):
    """Save two halves, each with a copy on the other node, for the final flush of both.

    Each server waits half a second for the other.
    """
    for part, (_, worker) in enumerate(pair):
        ranges = ((f"__{part}_0.distcp", part * SLOT_BYTES, (part + 1) * SLOT_BYTES),)
        share = {"ranges": ranges, "part": part, "parts": 2, "small": part == 0, "wait_s": 0.5}
        worker.client.layout("L", {"layout.json": b"{}"}, persist_to(store, **share))
        save(worker, 7, pair[1 - part][1], local=part, layout="L")
    for _, worker in pair:
        copied(worker, f"{7:08x}")


@pytest.mark.parametrize("lost", [0, 1])
def test_the_final_flush_includes_a_lost_nodes_part_from_its_replica(pair, tmp_path, lost):
    store = tmp_path / "store"
    final_flushes(pair, store)
    os.kill(pair[lost][0].server_pid, signal.SIGKILL)
    left, worker = pair[1 - lost]
    worker.client.close()
    left.leave()
    assert published(store) == [(7, "final flush")]
    (folder,) = store.glob("step-*")
    images = {part: (folder / f"__{part}_0.distcp").read_bytes() for part in (0, 1)}
    assert images == dict.fromkeys((0, 1), bytes([7]) * SLOT_BYTES)
    assert (folder / "state.msgpack").read_bytes() == b"7"


def test_a_part_begun_by_its_owner_is_not_written_from_a_replica(pair, tmp_path):
    store = tmp_path / "store"
    final_flushes(pair, store)
    os.kill(pair[0][0].server_pid, signal.SIGKILL)
    nonce = digest_of([f"{7:08x} {FINAL_FLUSH}".encode()])[:8]
    begun = store / folder_name(Key(0, 1, 0, 7), nonce) / "__0_0.distcp"
    begun.parent.mkdir(parents=True)
    begun.write_bytes(b"half of it")
    left, worker = pair[1]
    worker.client.close()
    left.leave()
    assert published(store) == [] and "checkpoint-incomplete" in left.words
    assert begun.read_bytes() == b"half of it"


def test_a_killed_peer_costs_replicas_but_no_save_and_its_replacement_gets_them(pair):
    (_, a), (other, b) = pair
    copied(a, save(a, 1, b))
    old = b.client.replica_address
    os.kill(other.server_pid, signal.SIGKILL)
    save(a, 2, b, "00000001")
    until(lambda: not a.client.progress().copying, "it is given up")
    assert a.client.progress().copied == ("00000001",)
    os.environ["ELASTANE_SNAPSHOT_SERVER"] = str(other.path)
    b = Worker(slots=4, group="g")
    assert b.client.replica_address != old
    copied(a, save(a, 3, b))
    assert held(b) == [(3, [(0, SLOT_BYTES)])]
    assert next(step for step, _ in held(a)) == 3


def test_a_hanging_peer_blocks_nothing(pair):
    (_, a), (other, b) = pair
    os.kill(other.server_pid, signal.SIGSTOP)
    try:
        save(a, 1, b)
        for step in range(2, 30):
            save(a, step, None)
        assert a.client.progress().copying
        assert [step for step, _ in held(a)] == [29, 28, 1], "what is copied stays"
    finally:
        os.kill(other.server_pid, signal.SIGCONT)
    copied(a, "00000001")
    assert held(b) == [(1, [(0, SLOT_BYTES)])]


def test_without_replication_a_snapshot_server_listens_on_no_port(tmp_path):
    with Node(tmp_path):
        worker = Worker()
        assert worker.client.replica_address == ""
        worker.save(1, replica=Replica("127.0.0.1:9", "g", ""))
        assert not worker.client.progress().copying


def test_a_caller_without_the_secret_is_refused(pair):
    (_, a), (other, b) = pair
    host, _, port = b.client.replica_address.rpartition(":")
    for said in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(5000)):
        with socket.create_connection((host, int(port)), DEADLINE_S) as end:
            end.settimeout(DEADLINE_S)
            with contextlib.suppress(OSError):  # Garbage may be cut off before all of it was sent.
                end.sendall(said)
                end.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                assert end.recv(1) == b""
    of_other_job = ReplicationSettings("job", (b"guessed" * 5,), "")
    with pytest.raises(ConnectionError, match="another secret"):
        connection.dial(b.client.replica_address, of_other_job, TO_SENDER)
    with pytest.raises(ConnectionError, match="another job"):
        connection.dial(
            b.client.replica_address, ReplicationSettings("other", (b"s" * 32,), ""), TO_SENDER
        )
    copied(a, save(a, 1, b))
    assert held(b) == [(1, [(0, SLOT_BYTES)])]
    assert "snapshot-replicas" in other.words


def test_an_inconsistent_replica_is_not_stored(pair):
    (_, a), (_, b) = pair
    known = ReplicationSettings("job", (b"s" * 32,), "")
    offer = ReplicaOffer("other", "g", Key(0, 1, 0, 9), "00000009", "", 3, (5,))
    for proof in (PeerProof(("x", "y")), PeerProof(()), offer):
        with contextlib.closing(connection.dial(b.client.replica_address, known, TO_SENDER)) as one:
            one.send(offer)
            one.receive()
            one.send_bytes(memoryview(b"abc"))
            one.send_bytes(memoryview(b"abcde"))
            one.send(proof)
            with pytest.raises(ConnectionError):
                one.receive()
    with contextlib.closing(connection.dial(b.client.replica_address, known, TO_SENDER)) as one:
        one.send(offer)
        one.receive()
        digests = one.send_bytes(memoryview(b"abc")), one.send_bytes(memoryview(b"abcde"))
        one.send(PeerProof(digests))
        with pytest.raises(ConnectionError):  # The words are none, though they came whole.
            one.receive()
    assert held(b) == []
    copied(a, save(a, 1, b))
    assert held(b) == [(1, [(0, SLOT_BYTES)])]


def test_snapshot_servers_end_with_their_agents_during_a_transfer(pair):
    (one, a), (other, b) = pair
    pids = one.server_pid, other.server_pid
    os.kill(other.server_pid, signal.SIGSTOP)
    save(a, 1, b)
    until(lambda: a.client.progress().copying, "it is on its way")
    a.client.close(), b.client.close()
    one.leave()
    assert not snapshot_servers(one.agent.pid)
    os.kill(pids[1], signal.SIGCONT)
