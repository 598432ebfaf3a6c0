"""A node's snapshot server with real processes: snapshots survive workers, and nothing leaks.

Workers are this process, or scripts without torch: plain bytes in the slots.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from operator import le
from pathlib import Path

import pytest
from process_harness import DEADLINE_S, SCRIPTS, until
from snapshot_server_support import (
    SLOT_BYTES,
    Node,
    Worker,
    persist_to,
    published,
    snapshot,
    snapshot_servers,
    successor,
)
from supervise import alive

from elastane.protocol.checkpoints import Key
from elastane.snapshots import messages
from elastane.snapshots.channel import SnapshotChannel
from elastane.snapshots.client import SnapshotClient, SnapshotServerSilentError, connected
from elastane.snapshots.shared_memory import close_all


@pytest.fixture
def node(tmp_path):
    with Node(tmp_path) as one:
        yield one


def crew(node, lives, locals_, seed=1, slot_bytes=4 << 20):
    """Run workers that are killed repeatedly; return their output."""
    words = [str(n) for n in (lives, locals_, slot_bytes, seed)]
    done = subprocess.run(
        [sys.executable, SCRIPTS / "snapshot_server_workers.py", *words],
        env={**node.environment, "ELASTANE_SNAPSHOT_SERVER": str(node.path)},
        capture_output=True,
        timeout=DEADLINE_S * 20,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode() + node.words
    return json.loads(done.stdout)


@pytest.mark.parametrize("locals_", [1, 2])
def test_a_kept_snapshot_is_whole_after_a_sigkill_at_any_instant(node, locals_):
    told = crew(node, lives=40, locals_=locals_)
    assert told["copying"] > 0, "no worker was killed in the middle of a copy"
    assert told["steps"] >= 80


@pytest.mark.soak
def test_a_kept_snapshot_is_whole_after_a_thousand_sigkills(node):
    told = crew(node, lives=1000, locals_=3, seed=2)
    assert told["copying"] > 100


def test_a_snapshot_server_starts_with_the_first_worker_and_ends_with_the_agent(node):
    assert node.path.is_socket()
    assert node.path.parent.stat().st_mode & 0o077 == 0
    assert not snapshot_servers(node.agent.pid)
    worker = Worker()
    assert worker.client.survives
    pid = node.server_pid
    worker.client.close()
    node.leave()
    assert not alive(pid)
    assert not node.path.exists()


def test_a_snapshot_server_is_small_until_it_holds_a_snapshot(node):
    client = SnapshotClient.connect()
    status = Path(f"/proc/{node.server_pid}/status").read_text()
    held = int(re.search(r"VmRSS:\s+(\d+) kB", status)[1])
    assert held < 24 << 10, "20 MB, and a margin for another Python"
    client.close()


def test_a_restarted_worker_reads_its_predecessors_snapshot(node):
    first = Worker()
    first.client.layout("L", {"layout.json": b"{}", ".metadata": b"m"})
    for step in range(1, 6):
        first.save(step, layout="L", streams=b"random")
    first.client.close()
    second = successor().client
    newest, older = second.held()
    assert (newest.key.step, older.key.step) == (5, 4)
    assert newest.words.layout_files == {"layout.json": b"{}", ".metadata": b"m"}
    assert newest.words.files == {"state.msgpack": b"5"}
    assert newest.words.streams == {0: b"random"}
    (piece,) = newest.pieces
    assert os.pread(piece[2], 4, 0) == b"\x05" * 4
    # The memory of the dead is taken over, and what is in it is not written over.
    slots = second.slots(2, SLOT_BYTES)
    assert len(slots) == 3
    with pytest.raises(OSError, match="Operation not permitted"):
        os.ftruncate(slots[0], 1)  # Sealed, so that no mapping of it is cut off.
    second.grant(1.0)
    assert [held.key.step for held in second.held()] == [5, 4]


def test_a_socket_may_have_a_long_path_and_one_that_was_left_is_removed(tmp_path):
    folder = tmp_path / ("long" * 30) / ("path" * 30)
    folder.mkdir(parents=True)
    left = folder / "run" / "elastane" / "snapshots"
    left.mkdir(parents=True)
    for part in (folder / "run", left.parent, left):
        part.chmod(0o700)
    (left / "999999.0123456789ab.sock").touch()
    (left / "somebody's").touch()
    with Node(folder) as node:
        assert len(str(node.path)) > 107
        worker = Worker()
        worker.save(1)
        assert worker.steps() == [1]
        assert {path.name for path in left.iterdir()} == {node.path.name, "somebody's"}
        worker.client.close()
        node.leave()
        assert [path.name for path in left.iterdir()] == ["somebody's"]


def test_a_killed_snapshot_server_is_reported_and_replaced(node):
    worker = Worker()
    worker.save(1)
    was, pid = worker.client.id, node.server_pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ConnectionError, match="lost"):
        while worker.save(2):
            pass
    with pytest.raises(ConnectionError, match="the snapshot server is gone"):
        worker.client.progress()
    again = Worker()
    assert again.client.id != was
    assert again.steps() == []
    again.save(3)
    assert again.steps() == [3]
    assert "snapshot-server-lost" in node.words


def test_a_worker_waits_once_for_a_stopped_snapshot_server(node, monkeypatch):
    worker, waited = Worker(timeout_s=0.05), []
    channel, pid = worker.client._channel, node.server_pid
    is_ready = channel.is_ready
    worker.save(1)
    monkeypatch.setattr(channel, "is_ready", lambda s: waited.append(s) or is_ready(s))
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(SnapshotServerSilentError, match="does not answer"):
        while worker.save(2):
            pass
    assert waited.count(0.05) >= 1
    waited.clear()
    for ask in (worker.client.progress, lambda: worker.save(3), lambda: worker.client.slots(4, 1)):
        with pytest.raises(SnapshotServerSilentError):
            ask()
    assert waited == [0.0] * 3
    worker.client.report_restored(
        Key(0, 1, 0, 1), "memory"
    )  # The server reads that once it continues.
    os.kill(pid, signal.SIGCONT)
    until(lambda: _saves(worker, 4), "what was owed has come, and the connection is as before")
    # A busy server may answer later than the 0.05 s of this worker once more.
    until(lambda: _holds(worker, 4), "the snapshot is there")
    assert node.server_pid == pid


def _holds(worker, step):
    """Whether the server answers and holds the snapshot of this step."""
    try:
        return step in worker.steps()
    except SnapshotServerSilentError:
        return False


def _saves(worker, step):
    with contextlib.suppress(SnapshotServerSilentError):
        return worker.save(step)


def test_a_snapshot_server_stopped_by_a_signal_is_replaced(node):
    worker, pid = Worker(), node.server_pid
    os.kill(pid, signal.SIGSTOP)
    until(lambda: not alive(pid), "it is killed")
    assert Worker().client.id != worker.client.id
    assert "was stopped by a signal" in node.words


def test_the_answer_to_keep_is_received_later_and_names_the_next_slot(node):
    worker = Worker()
    worker.save(1)
    assert worker.client.grant(1.0) == worker.client.grant(1.0), "the same until it is kept"
    other = Worker()
    worker.save(2)
    worker.client.close()
    until(lambda: other.steps() == [2, 1], "what was said is heard")


def test_a_dying_workers_change_is_found_before_a_reader_asks(node):
    worker = Worker()
    worker.save(1)

    def is_digested() -> bool:
        (held,) = worker.client.held()
        worker.client.release(held)
        return held.verified

    until(is_digested, "its digest")
    for slot in worker.slots:
        slot[5] = 250
    worker.client.close()
    until(lambda: "snapshot of step 1 changed in memory" in node.words, "it is found")
    assert Worker().steps() == []


def test_an_interrupted_request_leaves_no_answer_for_the_next(node, monkeypatch):
    worker = Worker()
    worker.save(1)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(worker.client._channel, "receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            worker.client.held()
    with pytest.raises(ConnectionError, match="interrupted"):
        worker.client.progress()
    again = Worker()
    again.save(2)
    assert again.steps() == [2, 1]


def test_slots_that_memory_has_no_room_for_are_refused_in_words(node):
    client = SnapshotClient.connect()
    with pytest.raises(OSError, match="bytes of memory left") as caught:
        client.slots(1, 1 << 45)
    assert caught.value.errno == errno.ENOMEM
    assert len(client.slots(2, SLOT_BYTES)) == 2, "the worker goes on with less"


def test_slots_beyond_a_limit_of_the_process_are_refused(tmp_path):
    limit = SLOT_BYTES * 4
    resource_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource_limit[1]))
    try:
        stack = contextlib.ExitStack()
        stack.enter_context(Node(tmp_path))
        SnapshotClient.connect()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, resource_limit)
    with stack:
        client = SnapshotClient.connect()
        with pytest.raises(OSError, match="a snapshot's slot of"):
            client.slots(2, limit * 2)
        assert len(client.slots(2, limit // 2)) == 2


def test_a_full_disk_is_reported_and_training_continues(node, tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128k", "none", store], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting needs root")
    try:
        worker = Worker()
        for step in (1, 2):
            worker.save(step, persist_to(store))
            worker.client.wait(Key(0, 1, 0, step), DEADLINE_S)
        assert worker.client.progress().published == Key(0, 1, 0, 1)
        (failed,) = worker.client.progress().failures
        assert failed.key.step == 2
        assert "No space left on device" in failed.reason
        until(lambda: node.words.count("No space left") == 1, "it is said, once")
        assert published(store) == [(1, "step")]
        assert worker.steps() == [2, 1]
        subprocess.run(["mount", "-o", "remount,size=1m", store], check=True)
        worker.save(3, persist_to(store))
        worker.client.wait(Key(0, 1, 0, 3), DEADLINE_S)
        assert published(store)[0] == (3, "step")
    finally:
        subprocess.run(["umount", "-l", store], check=False)


GARBAGE = {
    "noise": b"\x00\x01\x02\xff" * 100,
    "too long": b"\xff\xff\xff\xff",
    "not hello": (1).to_bytes(4, "little") + b"\xc0",
    "half": (1000).to_bytes(4, "little") + b"half of it",
    "http": b"GET / HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("noise", GARBAGE.values(), ids=GARBAGE)
def test_garbage_ends_only_its_own_connection(node, noise):
    worker = Worker()
    worker.save(1)
    for hello in (b"", b"hello"):
        with connected(str(node.path)) as end:
            if hello:
                SnapshotChannel(end).send(messages.encode(messages.Hello(messages.VERSION)))
                SnapshotChannel(end).receive(1 << 20, DEADLINE_S)
                close_all(SnapshotChannel(end).receive_descriptors(1))
            end.sendall(noise)
            end.shutdown(socket.SHUT_WR)
            end.settimeout(DEADLINE_S)
            with contextlib.suppress(ConnectionResetError):
                assert end.recv(1) == b""
    worker.save(2)
    assert worker.steps() == [2, 1]


@pytest.mark.skipif(os.getuid() != 0, reason="to be another user needs root")
def test_a_connection_of_another_user_is_closed(node):
    Worker().save(1)
    node.path.chmod(0o666)
    code = (
        "import os, socket, sys; end = socket.socket(socket.AF_UNIX); os.fchdir(int(sys.argv[2]))\n"
        "os.setuid(65534); end.connect(sys.argv[1]); end.settimeout(30)\n"
        "sys.exit(0 if end.recv(1) == b'' else 1)"
    )
    folder = os.open(node.path.parent, os.O_RDONLY)
    try:
        os.fchmod(folder, 0o711)
        run = [sys.executable, "-c", code, node.path.name, str(folder)]
        done = subprocess.run(run, pass_fds=[folder], timeout=DEADLINE_S, check=False)
    finally:
        os.close(folder)
    assert done.returncode == 0
    assert Worker().steps() == [1]


def test_a_wrong_request_is_refused_and_the_worker_continues(node):
    worker = Worker()
    persist = persist_to("relative/folder")
    for wrong in (
        snapshot(1, SLOT_BYTES, persist),
        snapshot(1, SLOT_BYTES * 2, None),
        snapshot(1, SLOT_BYTES, None, first=10, end=5),
        snapshot(1, SLOT_BYTES, None, layout="never given"),
        snapshot(1, SLOT_BYTES, None, local=3, locals=2),
    ):
        slot = worker.client.grant(DEADLINE_S)
        worker.client.keep(slot, wrong)
        with pytest.raises(ValueError, match=r"\w"):
            worker.client.progress()
    worker.save(1)
    # It has another one by now, which came with the answer.
    worker.client.keep(slot, snapshot(2, SLOT_BYTES, None))
    with pytest.raises(ValueError, match="not granted"):
        worker.client.progress()
    assert worker.steps() == [1]


def test_a_worker_is_gone_with_its_process_though_a_child_holds_its_connection(node):
    code = (
        "import os, sys, time; from elastane.snapshots.client import SnapshotClient\n"
        "k = SnapshotClient.connect(); k.slots(3, 65536); k.grant(1.0)\n"
        "if os.fork() == 0: os.close(1); time.sleep(600)\n"
        "print('ready', flush=True); os._exit(0)"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**node.environment, "ELASTANE_SNAPSHOT_SERVER": str(node.path)},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert run.stdout.read() == b"ready\n"
    run.wait()
    try:
        successor()
    finally:
        os.killpg(run.pid, signal.SIGKILL)


def state_of(pid):
    """Return descriptors, threads and slots of a snapshot server."""
    targets = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            targets.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    slots = sum("elastane-slot" in target for target in targets)
    return len(targets), len(os.listdir(f"/proc/{pid}/task")), slots


def test_200_saves_and_20_restarts_leave_nothing_behind(node, tmp_path):
    store = tmp_path / "store"
    worker, step, early = Worker(), 0, ()
    for life in range(20):
        for _ in range(10):
            step += 1
            worker.save(step, persist_to(store) if step % 10 == 0 else None)
        until(lambda: not worker.client.progress().busy, "it is written")  # noqa: B023
        assert worker.steps()[0] == step
        if life == 3:
            until(lambda: state_of(node.server_pid)[2] == 3, "three slots")
            early = state_of(node.server_pid)
        if life < 19:
            worker.client.close()
            worker = successor()
    until(lambda: all(map(le, state_of(node.server_pid), early)), f"no more than {early}")
    assert [found[0] for found in published(store)] == [200, 190]
    assert len([*store.iterdir()]) == 3, "two folders, and the place's own file"
    worker.take(2, 2 * SLOT_BYTES)
    for more in range(2):
        worker.save(step + 1 + more)
    until(lambda: state_of(node.server_pid)[2] == 2, "slots of the old size are dropped")
