"""The events that a snapshot server sends to its agent, without loss or waits."""

from __future__ import annotations

import socket

import pytest

from elastane.agent.snapshot_server import snapshot_event
from elastane.protocol.checkpoints import Key
from elastane.protocol.log_events import EventKind
from elastane.snapshots import server
from elastane.snapshots.messages import (
    SNAPSHOT_NEWS,
    CopiesHeld,
    PersistFailed,
    RestoredEvent,
    Saved,
)
from elastane.snapshots.rules.copy_times import CopyTime
from elastane.snapshots.server import EventReporter, newest_held


def saved(step, where="/ck"):
    return Saved(Key(0, 1, 0, step), where, "step", 1000, 0.5, began_s=0.0)


@pytest.fixture
def line():
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with mine, its:
        mine.setblocking(False)
        yield mine, its


def heard(mine):
    found = []
    while True:
        try:
            found.append(SNAPSHOT_NEWS.decode(mine.recv(65536)))
        except BlockingIOError:
            return found


def test_of_saves_in_close_succession_the_first_and_the_last_are_reported(line, monkeypatch):
    now_s = [1000.0]
    monkeypatch.setattr(server.time, "monotonic", lambda: now_s[0])
    mine, its = line
    reporter = EventReporter(its)
    assert reporter.left_s() is None
    for step in range(1, 6):
        reporter.report(saved(step))
    assert [(each.key.step, each.saves) for each in heard(mine)] == [(1, 1)]
    assert reporter.left_s() == server.SAVED_EVENT_S
    now_s[0] += server.SAVED_EVENT_S
    reporter.flush()
    assert [(each.key.step, each.saves) for each in heard(mine)] == [(5, 4)]
    reporter.report(saved(6))
    reporter.flush()
    assert heard(mine) == []
    reporter.flush(last=True)
    assert [each.key.step for each in heard(mine)] == [6]


def test_saves_of_two_checkpointers_are_reported_beside_each_other(line, monkeypatch):
    now_s = [1000.0]
    monkeypatch.setattr(server.time, "monotonic", lambda: now_s[0])
    mine, its = line
    reporter = EventReporter(its)
    for step in range(1, 5):
        reporter.report(saved(step, "/generator"))
        reporter.report(saved(10 * step, "/critic"))
    first = [(1, "/generator", 1), (10, "/critic", 1)]
    assert [(each.key.step, each.place, each.saves) for each in heard(mine)] == first
    now_s[0] += server.SAVED_EVENT_S
    reporter.flush()
    last = [(4, "/generator", 3), (40, "/critic", 3)]
    assert [(each.key.step, each.place, each.saves) for each in heard(mine)] == last


def test_of_two_checkpointers_the_newest_copy_of_each_kind_counts():
    often = CopiesHeld(memory=CopyTime(90, 900.0, 0.1, 10.0), storage=CopyTime(80, 800.0, 1.0))
    seldom = CopiesHeld(memory=CopyTime(95, 950.0, 0.2), replicated=False)
    assert newest_held([often, seldom]) == CopiesHeld(
        memory=seldom.memory, storage=often.storage, replicated=False
    )
    assert newest_held([seldom]) == seldom


def test_of_the_copies_held_the_agent_gets_the_newest_once_a_second(line, monkeypatch):
    now_s = [1000.0]
    monkeypatch.setattr(server.time, "monotonic", lambda: now_s[0])
    mine, its = line
    reporter = EventReporter(its)
    held = [CopiesHeld(memory=CopyTime(step, 0.0, 0.1)) for step in range(4)]
    assert [reporter.report(each) for each in held] == [False, True, False, False]
    assert heard(mine) == held[:1]
    now_s[0] += 0.4
    assert reporter.left_s() == pytest.approx(0.6)
    now_s[0] += 0.6
    reporter.flush()
    assert heard(mine) == held[3:]
    assert reporter.left_s() is None


def test_failures_and_restores_are_reported_at_once(line):
    mine, its = line
    reporter = EventReporter(its)
    failed, restored = (
        PersistFailed(Key(0, 1, 0, 3), "/ck", "full", "s"),
        RestoredEvent(Key(0, 1, 0, 3), "x"),
    )
    reporter.report(failed)
    reporter.report(restored)
    assert heard(mine) == [failed, restored]


def test_an_agent_that_does_not_read_blocks_nothing(line):
    mine, its = line
    reporter = EventReporter(its)
    for _ in range(10_000):
        reporter.report(RestoredEvent(Key(0, 1, 0, 3), "x" * 4000))
    assert heard(mine)
    mine.close()
    reporter.report(RestoredEvent(Key(0, 1, 0, 3), "x"))
    EventReporter(None).report(saved(1))


def test_each_becomes_an_event_with_step_and_place():
    notes = [
        snapshot_event(each, "n")
        for each in (
            saved(7),
            PersistFailed(Key(0, 1, 0, 7), "/ck", "No space left", "checkpoint-write"),
            RestoredEvent(Key(0, 1, 0, 7), "memory"),
        )
    ]
    kinds = [EventKind.CHECKPOINT_SAVED, EventKind.CHECKPOINT_FAILED, EventKind.RESTORED]
    assert [note.kind for note in notes] == kinds
    assert [note.data["step"] for note in notes] == [7, 7, 7]
    assert [note.data["location"] for note in notes] == ["/ck", "/ck", "memory"]
    assert notes[0].data["age_s"] > 0
    assert notes[1].reason == "step 7: No space left"
    assert notes[1].data["slug"] == "checkpoint-write"
