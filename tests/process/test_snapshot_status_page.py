"""How a worker reads the state of its snapshot server from memory, and when it has to ask."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import pytest
from process_harness import DEADLINE_S, until
from snapshot_server_support import SLOT_BYTES, Node, Worker, persist_to, snapshot
from supervise import alive

from elastane.protocol.checkpoints import Key
from elastane.snapshots.channel import WORDS_BYTES_MAX, OwnStatusPage, SnapshotStatusPage
from elastane.snapshots.messages import Done, encode

FENCE = (1, 0)


@pytest.fixture
def node(tmp_path):
    with Node(tmp_path) as node:
        yield node


@pytest.fixture
def worker(node):
    """A worker that counts its requests."""
    worker = Worker()
    say, worker.asked = worker.client._send, []
    worker.client._send = lambda request: (
        worker.asked.append(type(request).__name__),
        say(request),
    )
    return worker


def test_a_status_page_is_readable_by_all_and_writable_only_by_its_owner():
    own = OwnStatusPage()
    pages = [SnapshotStatusPage(own.descriptor()) for _ in range(2)]
    assert [(page.number(), page.words(0)) for page in pages] == [(0, None)] * 2
    own.write(b"so it is")
    assert [(page.number(), page.words(1)) for page in pages] == [(1, b"so it is")] * 2
    assert pages[0].words(0) is None
    with pytest.raises(TypeError):
        pages[0]._memory[0] = 7
    descriptor = own.descriptor()
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)
    os.close(descriptor)
    pages[0].close()
    pages[0].close()
    assert pages[1].number() == 1


def test_a_status_page_shows_no_partial_content():
    own = OwnStatusPage()
    page = SnapshotStatusPage(own.descriptor())
    own.write(b"before")
    own.write(bytes(WORDS_BYTES_MAX + 1))
    assert page.number() == 2 and page.words(2) is None, "too long"
    longest = os.urandom(WORDS_BYTES_MAX)
    own.write(longest)
    assert page.words(3) == longest
    for at in range(32):  # Seen by a processor that sees one change and not yet another.
        own.write(b"so it is")
        own._memory[at] ^= 1
        assert page.number() != own._number or page.words(page.number()) is None, at


def test_a_page_that_cannot_be_mapped_leaves_no_descriptor(tmp_path):
    path = tmp_path / "short"
    path.write_bytes(b"")
    descriptor = os.open(path, os.O_RDONLY)
    with pytest.raises(ValueError, match="mmap"):
        SnapshotStatusPage(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_the_server_is_asked_once_in_a_round_and_publishes_changes(worker, tmp_path):
    client, key = worker.client, Key(0, 1, 0, 1)
    for _ in range(3):
        assert not client.progress(FENCE).busy
    assert worker.asked == ["WriteStatusQuery"]
    assert client.progress().published is None and worker.asked == ["WriteStatusQuery"], (
        "an older round"
    )
    assert not client.progress((2, 0)).busy and worker.asked == [
        "WriteStatusQuery",
        "WriteStatusQuery",
    ], "a later one"
    worker.asked.clear()
    worker.save(1, persist_to(tmp_path / "store"))
    until(lambda: client.progress(FENCE).published == key, "it is seen")
    until(lambda: not client.progress(FENCE).busy, "it has ended")
    worker.save(2)  # Nothing of it is written.
    for _ in range(3):
        assert client.progress(FENCE).published == key
    assert "Keep" in worker.asked and "WriteStatusQuery" not in worker.asked


@pytest.mark.parametrize("words", [None, b"?", encode(Done())], ids=["none", "odd", "another"])
def test_a_status_missing_from_the_page_is_requested(worker, monkeypatch, tmp_path, words):
    assert not worker.client.progress(FENCE).busy
    monkeypatch.setattr(SnapshotStatusPage, "words", lambda page, number: words)
    worker.asked.clear()
    worker.save(1, persist_to(tmp_path / "store"))
    until(lambda: worker.client.progress(FENCE).published == Key(0, 1, 0, 1), "it is seen")
    assert "WriteStatusQuery" in worker.asked


def test_failures_show_on_the_page(worker, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    assert not worker.client.progress(FENCE).failures
    worker.save(1, persist_to(tmp_path / "file" / "store"))
    until(lambda: worker.client.progress(FENCE).failures, "the failure")


def test_a_refusal_is_raised_by_the_next_request(worker):
    slot = worker.client.grant(DEADLINE_S)
    worker.client.keep(slot, snapshot(2, SLOT_BYTES * 2, None))
    with pytest.raises(ValueError, match=r"slot \d+ does not hold"):
        worker.client.progress(FENCE)
    assert not worker.client.progress(FENCE).busy
    with pytest.raises(ValueError, match=r"slot \d+ does not hold"):
        worker.client.keep(slot, snapshot(2, SLOT_BYTES * 2, None), heard=True)
    assert not worker.client.progress(FENCE).busy


def test_the_page_of_a_dead_server_is_not_believed(node, worker):
    worker.save(1)
    assert not worker.client.progress(FENCE).busy
    pid = node.server_pid
    os.kill(node.agent.pid, signal.SIGSTOP)  # It would start the next server.
    try:
        os.kill(pid, signal.SIGKILL)
        until(lambda: not alive(pid), "it is gone")
        for _ in range(2):
            with pytest.raises(ConnectionError, match=r"lost|gone"):
                worker.client.progress(FENCE)
    finally:
        os.kill(node.agent.pid, signal.SIGCONT)


def test_a_closed_client_unmaps_its_page(node):
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("elastane-page")

    gc.collect()  # Else it is whenever it is that workers of tests before this one go.
    before, descriptors = mapped(), len(os.listdir("/proc/self/fd"))
    workers = [Worker() for _ in range(3)]
    assert mapped() == before + 3
    for worker in workers:
        worker.client.close()
    assert mapped() == before
    for worker in workers:
        for slot in worker.slots:
            slot.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
