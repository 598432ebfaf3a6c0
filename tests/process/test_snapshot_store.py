"""A snapshot store with a storage that hangs, fails or is slow: no worker waits for it."""

from __future__ import annotations

import errno
import mmap
import os
import threading

import pytest
from process_harness import DEADLINE_S, until
from snapshot_server_support import SLOT_BYTES, persist_to, snapshot

from elastane.errors import CheckpointError
from elastane.protocol.checkpoints import Key
from elastane.snapshots import store, writer
from elastane.snapshots.client import SnapshotClient
from elastane.snapshots.limits import ORPHANED_S
from elastane.snapshots.messages import LayoutFiles, Replica, SaveFailed, Slots, WriteProgress
from elastane.snapshots.rules.slot_table import Name
from elastane.snapshots.store import SnapshotStore
from elastane.snapshots.writer import WriteFailure, Written

WORKER = 1


class Storage:
    """Replaces a Writer: each write waits until the test releases it, or fails."""

    def __init__(self):
        self.orders, self.flushes, self.pruned = [], [], []
        self.go = threading.Semaphore(0)
        self.failure = None

    def write(self, order):
        self.orders.append(order)
        assert self.go.acquire(timeout=DEADLINE_S)
        if self.failure is not None:
            raise self.failure
        return Written(123, (order.persist.part,))

    def flush(self, order):
        self.flushes.append(order)
        return self.write(order)

    def prune(self, persist):
        self.pruned.append(persist)


class One:
    """A snapshot store with one worker and the test's storage."""

    def __init__(self):
        self.storage = Storage()
        self.store = SnapshotStore(lambda: None)
        self.store._writer._writer = self.storage
        self.store.open()
        self.begin(WORKER)

    def begin(self, worker):
        self.store.joined(worker)
        numbers, fds = self.store.slots(worker, Slots(3, SLOT_BYTES))
        self.slots = {n: mmap.mmap(fd, SLOT_BYTES) for n, fd in zip(numbers, fds, strict=True)}
        for fd in fds:
            os.close(fd)

    def save(self, step, persist=False, worker=WORKER, **more):
        slot = self.store.grant(worker, overdue=False)
        assert slot is not None, f"step {step} waits"
        self.slots[slot][:] = bytes([step]) * SLOT_BYTES
        wish = persist_to("/nowhere") if persist else None
        self.store.keep(worker, slot, snapshot(step, SLOT_BYTES, wish, **more))

    def held(self, worker=WORKER):
        words, fds = self.store.read(worker)
        for held, fd in zip(words, fds, strict=True):
            assert os.pread(fd, SLOT_BYTES, 0) == bytes([held.key.step]) * SLOT_BYTES
            os.close(fd)
            self.store.release(worker, Name(held.key, held.nonce))
        return [(held.key.step, held.verified) for held in words]

    def let_go(self):
        self.storage.go.release()
        until(lambda: self.store.is_idle, "the writing ends")


@pytest.fixture
def one():
    one = One()
    yield one
    one.store.stop()
    one.storage.go.release(100)


def test_a_storage_that_hangs_makes_no_worker_wait(one):
    one.save(1, persist=True)
    for step in range(2, 30):
        one.save(step)
    progress = one.store.progress()
    assert progress.writing == Key(0, 1, 0, 1)
    assert progress.busy
    assert [step for step, _ in one.held()] == [29, 28, 1], "what is written stays as it was"
    one.let_go()
    assert one.store.progress().published == Key(0, 1, 0, 1)
    assert one.storage.pruned


def test_a_waiting_write_is_superseded_by_a_newer_snapshot(one):
    for step in (1, 2, 3):
        one.save(step, persist=True)
    progress = one.store.progress()
    assert (progress.writing.step, progress.waiting.step) == (1, 3)
    assert [(f.key.step, f.slug) for f in progress.failures] == [(2, "checkpoint-busy")]
    one.storage.go.release(2)
    until(lambda: one.store.is_idle, "both are written")
    assert one.store.progress().published.step == 3
    assert one.store.progress().failure_of(Key(0, 1, 0, 2)) is None, "a newer one is durable"


def test_a_failure_is_reported_and_the_next_save_tries_again(one, caplog):
    one.storage.failure = WriteFailure("No space left on device", slug="checkpoint-write")
    for step in (1, 2):
        one.save(step, persist=True)
        one.let_go()
    assert one.store.progress().failed.reason == "No space left on device"
    assert one.store.progress().failure_of(Key(0, 1, 0, 2)) is not None
    assert caplog.text.count("No space left") == 1, "said once"
    one.storage.failure = None
    one.save(3, persist=True)
    one.let_go()
    assert one.store.progress().published.step == 3


@pytest.mark.parametrize(("round_", "is_durable"), [(3, True), (2, False)])
def test_a_save_is_durable_once_a_later_round_of_the_same_workers_has_published(
    one, round_, is_durable
):
    """Workers that were replaced by that round have lost their save."""
    newer = Key(0, 3, 0, 9)
    one.storage.failure = WriteFailure("round 3 has published", "checkpoint-fenced", newer)
    one.save(7, persist=True)
    one.store.progress((round_, 0))
    one.let_go()
    assert (one.store.progress().failure_of(Key(0, 1, 0, 7)) is None) == is_durable


def test_an_error_of_another_kind_is_a_failure_too(one):
    one.storage.failure = RuntimeError("what nobody thought of")
    one.save(1, persist=True)
    one.let_go()
    assert "what nobody thought of" in one.store.progress().failed.reason


def test_short_memory_is_taken_from_replicas(one, monkeypatch):
    one.save(1)
    (name,) = one.store._table.whole()
    one.store._replicator.table.begin(name, [name], "peer")
    one.store._replicator.table.ended(name, arrived=True)
    one.store._table.pin(frozenset({name}))
    for step in (2, 3, 4):
        one.save(step, replica=Replica("", "g", ""))
    assert [step for step, _ in one.held()] == [4, 3, 1]
    make, times = store.make_slots, iter([True])

    def short(count, size_bytes):
        if next(times, False):
            raise OSError(errno.ENOMEM, "no memory")
        return make(count, size_bytes)

    monkeypatch.setattr(store, "make_slots", short)
    one.begin(2)
    assert [step for step, _ in one.held(2)] == [4, 3], "what was pinned made room"


def test_workers_with_contradicting_requests_get_an_error(one):
    one.begin(2)
    slot = one.store.grant(2, overdue=False)
    other = persist_to("/elsewhere")
    shares = {"locals": 2, "image_bytes": 2 * SLOT_BYTES}
    more = {**shares, "local": 1, "first": SLOT_BYTES, "end": 2 * SLOT_BYTES}
    one.store.keep(2, slot, snapshot(1, SLOT_BYTES, other, **more))
    one.begin(3)
    slot = one.store.grant(3, overdue=False)
    one.store.keep(3, slot, snapshot(1, SLOT_BYTES, persist_to("/nowhere"), **shares))
    assert "different checkpoints" in one.store.progress().failed.reason
    assert one.store.is_idle


def test_a_snapshot_is_checked_against_its_digest_before_it_is_given_out(one):
    for step in (1, 2):
        one.save(step)
        until(lambda: len(one.store._digests._known) == step, "its digest")  # noqa: B023
    assert one.held() == [(2, True), (1, False)]
    one.store.gone(WORKER)
    newest = one.store._table.slots_of(one.store._digests.newest)[0]
    one.slots[newest][12345] = 77  # What a worker may do in its last moment.
    one.store.joined(2)
    assert one.held(2) == [(1, True)]


def test_the_newest_is_checked_when_the_last_worker_is_gone_and_not_again_when_asked(
    one, monkeypatch
):
    sources, digested = one.store._sources, []
    monkeypatch.setattr(one.store, "_sources", lambda name: digested.append(1) or sources(name))
    one.save(1)
    until(lambda: one.store._digests._known, "its digest")
    one.store.joined(2)
    one.store.gone(WORKER)
    one.store.check_ahead()
    assert len(digested) == 1, "another worker is there, which may never ask"
    one.store.gone(2)
    one.store.check_ahead()
    one.store.joined(3)
    assert one.held(3) == [(1, True)] and len(digested) == 2
    one.store.gone(3)
    one.store.leave()
    until(lambda: one.store.is_idle, "it is over")
    one.store.check_ahead()
    assert len(digested) == 2, "nobody comes any more"


def test_a_changed_snapshot_is_not_flushed(one):
    one.store.add_layout(LayoutFiles("L", {}, persist_to("/nowhere")))
    one.save(1, layout="L")
    until(lambda: one.store._digests._known, "its digest")
    slot = one.store._table.slots_of(one.store._digests.newest)[0]
    one.slots[slot][1] = 77
    one.store.gone(WORKER)
    one.store.leave()
    until(lambda: one.store.is_idle, "it is over")
    assert not one.storage.orders
    assert one.store.progress().failed.slug == "snapshot-changed"


def test_the_final_flush_follows_the_layout_and_happens_once(one):
    wish = persist_to("/nowhere", reason="none of its own", wait_s=500.0)
    one.store.add_layout(LayoutFiles("L", {"layout.json": b"{}"}, wish))
    one.save(1, layout="L", streams=b"s")
    one.store.gone(WORKER)
    one.store.leave()
    one.let_go()
    (order,) = one.storage.flushes
    assert order.persist.reason == "final flush"
    assert order.persist.wait_s < 500
    assert dict(order.files) == {"layout.json": b"{}", "state.msgpack": b"1"}
    one.store.leave()
    assert one.store.is_idle
    assert len(one.storage.flushes) == 1


def test_without_a_destination_there_is_no_final_flush(one):
    one.save(1)
    one.store.gone(WORKER)
    one.store.leave()
    assert one.store.is_idle
    assert one.store.progress().failures == ()


def test_a_sole_writers_request_serves_for_the_final_flush(one):
    one.storage.failure = WriteFailure("away", slug="checkpoint-write")
    one.save(1, persist=True)
    one.let_go()
    one.storage.failure = None
    one.store.gone(WORKER)
    one.store.leave()
    one.let_go()
    assert one.store.progress().published.step == 1


def test_if_others_lack_the_newest_an_older_snapshot_is_flushed(one):
    error = CheckpointError("1 of 2 writers", slug="checkpoint-incomplete")
    one.storage.failure = WriteFailure(error.what, error.slug)
    one.store.add_layout(LayoutFiles("L", {}, persist_to("/nowhere", parts=2)))
    for step in (1, 2, 3):
        one.save(step, layout="L")
    one.store.gone(WORKER)
    one.store.leave()
    one.storage.go.release(2)
    until(lambda: one.store.is_idle, "it is over")
    assert [order.name.key.step for order in one.storage.flushes] == [3, 2]


@pytest.mark.parametrize(
    ("round_", "parts", "follows"), [(2, 1, True), (2, 2, True), (1, 1, False)]
)
def test_a_save_that_lacks_a_lost_nodes_part_is_followed_by_the_newest_snapshot(
    one, round_, parts, follows
):
    """Of a later round: no worker may save again."""
    one.store.add_layout(LayoutFiles("L", {}, persist_to("/nowhere", parts=parts)))
    one.save(1, persist=True, layout="L")
    one.save(2, key=Key(0, round_, 0, 2), layout="L")
    one.storage.failure = WriteFailure("1 of 2 writers", "checkpoint-incomplete")
    one.storage.go.release()
    until(lambda: one.store.progress().failures, "the first one fails")
    one.storage.failure = None
    one.let_go()
    assert [order.name.key.step for order in one.storage.flushes] == [2] * follows
    failure = one.store.progress().failure_of(Key(0, 1, 0, 1))
    assert (failure is None) == follows


@pytest.mark.parametrize(("round_", "follows"), [(2, True), (1, False)])
def test_a_save_that_lacks_an_ended_workers_piece_is_followed_by_the_next_snapshot(
    one, round_, follows
):
    """The other worker waits for that save, and no worker asks for another before they end."""
    other, late = WORKER + 1, WORKER + 2
    mine = one.slots
    one.begin(other)
    one.slots |= mine
    one.store.add_layout(LayoutFiles("L", {}, persist_to("/nowhere")))
    one.save(1, persist=True, layout="L", local=0, locals=2)
    one.store.gone(other)
    mine = one.slots
    one.begin(late)
    one.slots |= mine
    key = Key(0, round_, 0, 2)
    for local, worker in reversed([*enumerate((WORKER, late))]):
        one.save(2, worker=worker, key=key, layout="L", local=local, locals=2)
    (failure,) = one.store.progress().failures
    assert failure.key == Key(0, 1, 0, 1) and failure.slug == "checkpoint-incomplete"
    one.let_go()
    assert [order.name.key.step for order in one.storage.flushes] == [2] * follows
    failure = one.store.progress().failure_of(Key(0, 1, 0, 1))
    assert (failure is None) == follows


def test_a_wait_for_a_save_ends_though_a_worker_ended_before_it_kept_anything(one, monkeypatch):
    """The other worker waits for that save, and makes no later one."""
    other, mine = WORKER + 1, one.slots
    one.begin(other)
    one.slots |= mine
    one.store.add_layout(LayoutFiles("L", {}, persist_to("/nowhere")))
    one.save(1, persist=True, layout="L", local=0, locals=2)
    assert one.store.end_orphaned() is None, "the other one may keep its piece"
    one.store.gone(other)
    assert 50.0 < one.store.end_orphaned() <= ORPHANED_S
    assert not one.store.progress().failures
    monkeypatch.setattr(store, "ORPHANED_S", 0.0)
    assert one.store.end_orphaned() is None
    failure = one.store.progress().failure_of(Key(0, 1, 0, 1))
    assert failure.slug == "checkpoint-incomplete"
    assert not one.store.progress().may_follow(Key(0, 1, 0, 1)), "so that the wait ends"


def test_a_wait_for_a_failed_save_ends_with_the_newer_one_that_is_written_instead(monkeypatch):
    old, new = Key(0, 1, 0, 1), Key(0, 2, 0, 2)
    failures = (SaveFailed(old, "1 of 2 writers", "checkpoint-incomplete"),)
    news = [
        WriteProgress(writing=old),
        WriteProgress(writing=old, failures=failures),
        WriteProgress(writing=new, failures=failures),
        WriteProgress(published=new, failures=failures),
    ]
    client = SnapshotClient.__new__(SnapshotClient)
    monkeypatch.setattr(client, "progress", lambda: news.pop(0), raising=False)
    assert client.wait(old, DEADLINE_S).failure_of(old) is None
    news = [WriteProgress(writing=old, failures=failures), WriteProgress(failures=failures)]
    assert client.wait(old, DEADLINE_S).failure_of(old) is not None


def test_other_writers_are_waited_for_no_longer_once_a_later_round_saves(one, monkeypatch):
    monkeypatch.setattr(writer, "HURRY_S", 0.0)
    one.save(1, persist=True)
    until(lambda: one.storage.orders, "it is being written")
    (order,) = one.storage.orders
    assert not order.hurry()
    one.save(2)
    assert not order.hurry(), "the same round: they may be slow"
    one.save(3, key=Key(0, 2, 0, 3))
    assert order.hurry()
    assert not order.stop()
    one.store.stop()
    assert order.stop()


def test_other_writers_are_not_waited_for_once_a_later_round_asks_for_the_status(one, monkeypatch):
    monkeypatch.setattr(writer, "HURRY_S", 0.0)
    one.save(1, persist=True)
    until(lambda: one.storage.orders, "it is being written")
    (order,) = one.storage.orders
    one.store.progress((1, 0))
    assert not order.hurry(), "the same round"
    one.store.progress((1, 1))
    one.store.progress((1, 0))
    assert order.hurry()


def test_groups_of_slots_of_another_size_go_when_nothing_needs_them(one):
    one.save(1)
    numbers, fds = one.store.slots(WORKER, Slots(2, 2 * SLOT_BYTES))
    assert len(numbers) == 2
    assert [step for step, _ in one.held()] == [1], "it stays until there is a newer one"
    one.slots = {n: mmap.mmap(fd, 2 * SLOT_BYTES) for n, fd in zip(numbers, fds, strict=True)}
    for fd in fds:
        os.close(fd)
    for step in (2, 3):
        slot = one.store.grant(WORKER, overdue=False)
        more = {"end": 2 * SLOT_BYTES, "image_bytes": 2 * SLOT_BYTES}
        one.store.keep(WORKER, slot, snapshot(step, SLOT_BYTES, None, **more))
    assert {*one.store._memory} == {*numbers}
