"""A replicator, a replica server and another node's memory in one process, with faults."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading

import pytest
from process_harness import DEADLINE_S, until
from rpc_support import make_papers

from elastane.protocol.checkpoints import Key
from elastane.snapshots import connection, replication
from elastane.snapshots.messages import (
    TO_SENDER,
    HeldPiece,
    Replica,
    ReplicaOffer,
    ReplicaStored,
    ReplicationSettings,
    SnapshotDescription,
)
from elastane.snapshots.replication import (
    ReplicaStore,
    Replicator,
    ReplicaTransfer,
    SnapshotListener,
)
from elastane.snapshots.rules.slot_table import Name
from elastane.snapshots.shared_memory import Source

ABOUT = ReplicationSettings("job", (b"secret" * 6,), "127.0.0.1")


class Between:
    """A replicator that sends copies through a replica server to another node's memory."""

    def __init__(self, folder):
        self.replicas = ReplicaStore()
        self.listener = SnapshotListener(ABOUT, self.replicas.accept)
        self.at = self.listener.open()
        self.ended = threading.Semaphore(0)
        self.arrived = None
        self.replicator = Replicator("me", lambda: ABOUT, self._ended)
        self.folder = folder

    def _ended(self, name, arrived):
        self.replicator.table.ended(name, arrived=arrived)
        self.arrived = arrived
        self.ended.release()

    def bring(self, step, data, safe="", known=None, at=""):
        name = Name(Key(0, 1, 0, step), f"{step:08x}")
        self.replicator.begin(
            name,
            Replica(at or self.at, "g", safe),
            [name],
            lambda name, replica: ReplicaTransfer(
                name, replica, words(name, len(data)), (self.source(data),), known
            ),
        )
        assert self.ended.acquire(timeout=DEADLINE_S)
        return self.arrived

    def source(self, data):
        path = self.folder / "data"
        path.write_bytes(data)
        return Source(0, len(data), os.open(path, os.O_RDWR))

    def held(self):
        found = {}
        for what, fds in self.replicas.given():
            sizes = [piece.end - piece.first for piece in what.pieces]
            pairs = zip(fds, sizes, strict=True)
            found[what.key.step] = b"".join(os.pread(fd, size, 0) for fd, size in pairs)
            for fd in fds:
                with pytest.raises(OSError, match="Bad file descriptor"):
                    os.pwrite(fd, b"x", 0)
                os.close(fd)
        return found


def words(name, size):
    rest = {"locals": 1, "image_bytes": size, "replicated": False, "verified": False}
    rest |= {"layout": "", "layout_files": {}, "files": {"f": b"x"}, "streams": {0: b"s"}}
    return SnapshotDescription(key=name.key, nonce=name.nonce, pieces=(HeldPiece(0, size),), **rest)


@pytest.fixture
def between(tmp_path):
    return Between(tmp_path)


@pytest.mark.parametrize("size", [0, 1, 4096, (16 << 20) + 1, 40_000_001])
def test_a_replica_of_any_size_arrives_as_sent(between, size):
    data = os.urandom(size)
    assert between.bring(1, data)
    assert between.held() == {1: data}


def test_the_safe_replica_stays_and_others_make_room(between):
    assert between.bring(1, b"1" * 9000)
    assert between.bring(2, b"2" * 9000, safe="00000001")
    assert between.bring(3, b"3" * 9000, safe="00000001")
    assert sorted(between.held()) == [1, 3]
    assert between.bring(4, b"4" * 9000, safe="00000003")
    assert sorted(between.held()) == [3, 4]


def test_a_replica_that_was_given_out_is_not_overwritten(between):
    assert between.bring(1, b"1" * 9000)
    ((_, (fd,)),) = between.replicas.given()
    assert between.bring(2, b"2" * 9000)
    assert os.pread(fd, 9000, 0) == b"1" * 9000
    os.close(fd)
    assert between.held() == {2: b"2" * 9000}


def test_short_memory_is_logged_once_and_only_costs_replicas(between, monkeypatch, caplog):
    def short(size):
        raise OSError(
            errno.ENOMEM, f"a snapshot's slot of {size} bytes, with 7 bytes of memory left"
        )

    with monkeypatch.context() as patch:
        patch.setattr(replication, "make_slot", short)
        for step in (1, 2):
            assert not between.bring(step, b"x" * 5000)
    assert caplog.text.count("replicas of another node are not stored here: a snapshot's slot") == 1
    assert caplog.text.count("it declined the replica: a snapshot's slot of 5000 bytes") == 1
    assert between.bring(3, b"3" * 5000)
    assert between.held() == {3: b"3" * 5000}


def test_a_snapshot_that_changed_in_memory_is_not_replicated(between, caplog):
    assert not between.bring(1, b"1" * 5000, known=("another digest",))
    assert "changed in memory" in caplog.text
    until(lambda: between.replicas._table.arriving is None, "it is given up")
    assert between.held() == {}


@pytest.mark.parametrize("dies", ["before it has proved itself", "in the middle", "silently"])
def test_a_failing_peer_is_logged_and_the_next_replica_arrives(between, dies, caplog, monkeypatch):
    monkeypatch.setattr(connection, "REPLICA_STALL_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        released = threading.Event()

        def fail():
            end, _ = listener.accept()
            with end:
                if dies == "before it has proved itself":
                    end.recv(10)
                    return
                way = connection.answer(end, ABOUT, replication.TO_SENDER)
                way._end.recv(1000)
                if dies == "silently":
                    released.wait(DEADLINE_S)
                way.close()

        thread = threading.Thread(target=fail)
        thread.start()
        assert not between.bring(1, b"1" * 5000, at=f"127.0.0.1:{listener.getsockname()[1]}")
        released.set()
        thread.join()
    assert caplog.text.count("the snapshot of step 1 was not replicated") == 1
    assert between.bring(2, b"2" * 5000)
    assert between.held() == {2: b"2" * 5000}


def test_a_dying_sender_leaves_earlier_replicas(between):
    assert between.bring(1, b"1" * 5000)
    offer = ReplicaOffer("me", "g", Key(0, 1, 0, 2), "00000002", "00000001", 3, (5000,))
    with contextlib.closing(connection.dial(between.at, ABOUT, TO_SENDER)) as one:
        one.send(offer)
        one.receive()
        one.send_bytes(memoryview(b"abc"))
        one.send_bytes(memoryview(b"2" * 4000))
    until(lambda: between.replicas._table.arriving is None, "it is given up")
    assert between.held() == {1: b"1" * 5000}


def test_a_replica_stays_though_its_acknowledgement_is_lost(between):
    def deaf(offer, way):
        say = way.send

        def unheard(message):
            if isinstance(message, ReplicaStored):
                raise ConnectionResetError("it is gone")
            say(message)

        way.send = unheard
        take(offer, way)

    take, between.listener._offered = between.listener._offered, deaf
    data = os.urandom(70_000)
    assert not between.bring(1, data)
    assert between.held() == {1: data}
    between.listener._offered = take
    assert between.bring(2, data, safe="00000001")
    assert between.held() == {1: data, 2: data}


def test_the_secret_may_change_while_both_count(between, monkeypatch):
    new = ReplicationSettings("job", (b"new" * 11, *ABOUT.secrets), "127.0.0.1")
    between.listener.settings = new
    assert between.bring(1, b"1" * 100), "by the old one"
    monkeypatch.setattr(between.replicator, "_settings", lambda: new)
    assert between.bring(2, b"2" * 100)
    between.listener.settings = ABOUT
    assert not between.bring(3, b"3" * 100)


def test_with_tls_both_servers_verify_each_other(between, tmp_path):
    papers = make_papers(tmp_path)

    def about(own, authority):
        names = f"{own}.pem", f"{own}.key", f"{authority}.pem"
        return ReplicationSettings(
            "job", ABOUT.secrets, "", tuple(str(papers / name) for name in names)
        )

    between.listener.settings = good = about("node", "ca")
    for stranger in (ABOUT, about("other", "ca"), about("node", "other")):
        between.replicator._settings = lambda about=stranger: about
        assert not between.bring(1, b"1" * 100)
    between.replicator._settings = lambda: good
    data = os.urandom(20_000_000)
    assert between.bring(2, data)
    assert between.held() == {2: data}
    between.listener.settings = ABOUT
    assert not between.bring(3, b"3" * 100)


@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "TLS"])
def test_silent_connections_make_room_for_a_replica_and_leave_nothing_behind(
    tmp_path, monkeypatch, is_tls
):
    """Also connections in the handshake of TLS, which owns their socket."""
    monkeypatch.setattr(replication, "PEERS_UNPROVEN_MAX", 2)
    monkeypatch.setattr(replication, "UNPROVEN_TIMEOUT_S", 0.05)
    one = Between(tmp_path)
    if is_tls:
        papers = make_papers(tmp_path)
        names = tuple(str(papers / name) for name in ("node.pem", "node.key", "ca.pem"))
        one.listener.settings = about = ReplicationSettings("job", ABOUT.secrets, "", names)
        one.replicator._settings = lambda: about
    host, _, port = one.at.rpartition(":")
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            end = stack.enter_context(socket.create_connection((host, int(port)), DEADLINE_S))
            end.send(b"\x16\x03\x01" if is_tls else b"EL")
        assert one.bring(1, b"1" * 100)
        assert len(one.listener._unproven) <= 2
    until(lambda: not len(one.listener._unproven), "all are forgotten")
    assert one.bring(2, b"2" * 100)


def test_cycles_of_replication_leave_nothing_behind(between):
    def open_now():
        return len(os.listdir("/proc/self/fd"))

    def cycle(step):
        assert between.bring(step, os.urandom(50_000), safe=f"{step - 1:08x}")
        between.held()

    for step in range(1, 6):
        cycle(step)
    before = open_now()
    for step in range(6, 60):
        cycle(step)
    until(lambda: open_now() <= before, "descriptors")
    between.replicas.clear()
    until(lambda: open_now() <= before - 2, "the copies' own")
