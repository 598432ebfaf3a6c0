"""The slot table: refused requests, and important sequences as transcripts."""

from __future__ import annotations

import pytest

from elastane.protocol.checkpoints import Key
from elastane.snapshots.rules.slot_table import (
    Drop,
    Forget,
    LostSave,
    Name,
    SlotTable,
    SnapshotPiece,
    Superseded,
    Whole,
    Write,
)


def name(step, nonce="n", **at):
    return Name(Key(**{"era": 0, "round": 1, "attempt": 0, **at}, step=step), nonce)


class Desk:
    """A slot table with workers of three slots each: worker 1 has 10, 11, 12, and so on."""

    def __init__(self, *workers):
        self.table = SlotTable()
        for worker in workers:
            self.begin(worker)

    def begin(self, worker):
        self.table.joined(worker)
        mine, _ = self.table.own(worker, 1)
        if not mine:
            self.table.add(worker, 1, [10 * worker + n for n in range(3)])
        return mine

    def keep(self, worker, what, local=0, locals_=1, persist=False, together=""):
        slot, effects = self.table.grant(worker)
        assert slot is not None
        piece = SnapshotPiece(what, local, locals_, persist, together)
        return effects + self.table.keep(worker, slot, piece)


def test_a_snapshot_is_whole_once_all_workers_have_kept_their_pieces():
    desk = Desk(1, 2)
    assert desk.keep(1, name(1), 0, 2) == []
    assert desk.table.whole() == []
    assert desk.keep(2, name(1), 1, 2) == [Whole(name(1))]
    assert desk.table.slots_of(name(1)) == {0: 10, 1: 20}


def test_the_newest_is_by_key_and_not_by_arrival():
    desk = Desk(1)
    desk.keep(1, name(5, round=2))
    desk.keep(1, name(9, round=1))
    assert desk.table.whole() == [name(5, round=2), name(9, round=1)]


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (SnapshotPiece(name(1), 2, 2, persist=False), "worker 2 of 2"),
        (SnapshotPiece(name(1), -1, 2, persist=False), "worker -1 of 2"),
        (SnapshotPiece(name(1), 1, 3, persist=False), "worker 1 of 3, among 2"),
        (SnapshotPiece(name(1), 0, 2, persist=False), "has kept its piece"),
    ],
)
def test_a_piece_that_cannot_be_of_a_snapshot_is_refused_and_changes_nothing(piece, words):
    desk = Desk(1, 2)
    desk.keep(1, name(1), 0, 2)
    slot, _ = desk.table.grant(2)
    with pytest.raises(ValueError, match=words):
        desk.table.keep(2, slot, piece)
    assert desk.table.grant(2) == (slot, []), "the slot is granted still"
    assert desk.table.keep(2, slot, SnapshotPiece(name(1), 1, 2, persist=False)) == [Whole(name(1))]


@pytest.mark.parametrize("slot", [11, 20, 99])
def test_a_slot_that_was_not_granted_is_not_kept(slot):
    desk = Desk(1, 2)
    assert desk.table.grant(1) == (10, [])
    with pytest.raises(ValueError, match="not granted"):
        desk.table.keep(1, slot, SnapshotPiece(name(1), 0, 1, persist=False))


def test_one_snapshot_is_written_at_a_time_and_one_waits():
    desk = Desk(1)
    assert desk.keep(1, name(1), persist=True) == [Whole(name(1)), Write(name(1), final=False)]
    assert desk.keep(1, name(2), persist=True) == [Whole(name(2))]
    assert desk.table.waiting == name(2)
    assert Superseded(name(2)) in desk.keep(1, name(3), persist=True)
    assert not desk.table.is_idle
    assert desk.table.written(name(1)) == [Write(name(3), final=False), Forget(name(1))]
    desk.table.durable(name(3).key)
    assert desk.table.written(name(3)) == []
    assert desk.table.is_idle


def test_a_late_older_snapshot_does_not_push_out_the_newer_one_that_waits():
    desk = Desk(1)
    desk.keep(1, name(1), persist=True)
    desk.keep(1, name(9, round=2), persist=True)
    assert Superseded(name(5)) in desk.keep(1, name(5), persist=True)
    assert desk.table.waiting == name(9, round=2)


def test_only_snapshots_that_all_workers_ask_for_are_written():
    desk = Desk(1, 2)
    desk.keep(1, name(1), 0, 2, persist=True)
    assert desk.keep(2, name(1), 1, 2) == [Whole(name(1))]


def test_a_worker_inherits_a_dead_workers_slots_and_drops_other_sizes():
    desk = Desk(1)
    desk.keep(1, name(1))
    desk.table.grant(1)
    assert desk.table.gone(1) == []
    assert desk.begin(2) == [10, 11, 12]
    assert desk.table.own(2, 7) == ([], [Drop(11), Drop(12)])
    desk.table.add(2, 7, [20, 21])
    assert Drop(10) not in desk.keep(2, name(2))
    assert desk.table.whole() == [name(2), name(1)]
    assert desk.keep(2, name(3)) == [Whole(name(3)), Forget(name(1)), Drop(10)]


def test_a_snapshot_stays_while_it_is_read():
    desk = Desk(1)
    desk.keep(1, name(1))
    assert desk.table.read(1) == [name(1)]
    assert desk.table.read(1) == [name(1)]
    for step in (2, 3):
        desk.keep(1, name(step))
    assert name(1) in desk.table.whole()
    assert desk.table.release(1, name(1)) == []
    assert desk.table.release(1, name(1)) == [Forget(name(1))]
    assert desk.table.release(1, name(77)) == []


def test_an_overdue_grant_drops_an_incomplete_snapshot():
    desk = Desk(1, 2)
    for step in (1, 2, 3):
        desk.keep(1, name(step), 0, 2)
    assert desk.table.grant(1) == (None, [])
    assert desk.table.grant(1, overdue=True) == (10, [Forget(name(1))])


def test_a_snapshot_lacking_the_piece_of_a_worker_with_a_later_one_is_dropped():
    desk = Desk(1, 2)
    desk.keep(1, name(1), 0, 2)
    assert desk.keep(2, name(2), 1, 2) == [Forget(name(1))]
    assert desk.keep(1, name(2), 0, 2) == [Whole(name(2))]


def test_a_late_seen_death_does_not_drop_snapshots_of_replacements():
    desk = Desk(1, 2)
    desk.keep(1, name(1), 0, 2)
    desk.keep(2, name(1), 1, 2)
    desk.table.gone(2)
    desk.begin(3)
    desk.begin(4)
    desk.keep(3, name(2, attempt=1), 1, 2)
    assert desk.table.gone(1) == [], "its local was 0, which the new snapshot lacks"
    assert desk.keep(4, name(2, attempt=1), 0, 2)[0] == Whole(name(2, attempt=1))


def test_the_final_flush_writes_the_newest_snapshot_once():
    desk = Desk(1)
    assert desk.table.flush() == []
    desk.table.joined(2)
    desk.keep(1, name(1))
    desk.table.gone(1)
    assert desk.table.workers == 1
    assert desk.table.flush() == [Write(name(1), final=True)]
    assert desk.table.flush() == []
    assert desk.table.written(name(1)) == [], "it failed, and is not tried again and again ..."
    assert desk.table.flush() == []
    assert desk.table.flush(leaving=True) == [Write(name(1), final=True)], "... but once at the end"
    desk.table.durable(name(1).key)
    assert desk.table.written(name(1)) == []
    assert desk.table.flush(leaving=True) == []


def test_a_returning_worker_ends_the_final_flush():
    desk = Desk(1)
    desk.keep(1, name(1), persist=True)
    desk.keep(1, name(2))
    desk.table.gone(1)
    assert desk.table.flush() == []
    desk.table.joined(2)
    assert desk.table.written(name(1)) == []


def test_a_spoiled_snapshot_is_never_read_and_dropped_after_its_write():
    desk = Desk(1)
    for step in (1, 2):
        desk.keep(1, name(step), persist=True)
    assert desk.table.spoil(name(2)) == [Superseded(name(2)), Forget(name(2))]
    assert desk.table.spoil(name(1)) == []
    assert desk.table.whole() == []
    assert desk.table.written(name(1)) == [Forget(name(1))]
    assert desk.table.spoil(name(1)) == []


def test_ending_a_write_twice_is_an_assertion_error():
    with pytest.raises(AssertionError):
        Desk(1).table.written(name(1))


def test_a_step_that_is_saved_twice_is_two_snapshots():
    desk = Desk(1, 2)
    for nonce in "ab":
        desk.keep(1, name(1, nonce), 0, 2)
    assert desk.keep(2, name(1, "a"), 1, 2) == [Whole(name(1, "a"))]
    assert desk.keep(2, name(1, "b"), 1, 2) == [Whole(name(1, "b"))]


def test_a_slot_of_another_size_goes_also_while_it_is_filled():
    desk = Desk(1)
    slot, _ = desk.table.grant(1)
    _, effects = desk.table.own(1, 2)
    assert effects == [Drop(10), Drop(11), Drop(12)]
    with pytest.raises(ValueError, match="not granted"):
        desk.table.keep(1, slot, SnapshotPiece(name(1), 0, 1, persist=False))


def test_slots_without_an_owner_are_dropped_with_the_next_snapshot():
    desk = Desk(1, 2)
    desk.keep(1, name(1), 0, 1)
    desk.table.gone(1)
    effects = desk.keep(2, name(2), 0, 1)
    assert effects == [Whole(name(2)), Drop(11), Drop(12)]
    assert Drop(10) in desk.keep(2, name(3), 0, 1)


def test_a_waiting_write_is_superseded_before_a_worker_waits():
    desk = Desk(1)
    desk.keep(1, name(1), persist=True)
    desk.keep(1, name(2), persist=True)
    desk.keep(1, name(3))
    slot, effects = desk.table.grant(1)
    assert slot == 11
    assert effects == [Superseded(name(2)), Forget(name(2))]
    assert desk.table.whole() == [name(3), name(1)]


def test_a_spare_grant_never_drops_a_snapshot():
    desk = Desk(1)
    for step in (1, 2):
        desk.keep(1, name(step), persist=step == 1)
    assert desk.table.grant(1, spare=True) == (12, [])
    desk.table.keep(1, 12, SnapshotPiece(name(3), 0, 1, persist=False))
    assert desk.table.grant(1, spare=True) == (None, [])
    assert desk.table.whole() == [name(3), name(2), name(1)]
    assert desk.table.grant(1) == (11, [Forget(name(2))])


def test_the_last_save_that_all_nodes_have_stays_however_many_were_cut_short():
    desk = Desk(1)
    desk.keep(1, name(1))
    for attempt in (1, 2, 3):  # Each of them is whole here, and not where another worker died.
        desk.keep(1, name(2, f"torn{attempt}", attempt=attempt), together=name(1).nonce)
        assert desk.table.whole()[-1] == name(1)
    desk.keep(1, name(2, "kept by all", attempt=4))
    desk.keep(1, name(3, attempt=4), together="kept by all")
    assert name(1) not in desk.table.whole()


def test_the_last_save_of_all_nodes_is_dropped_last():
    desk = Desk(1)
    desk.keep(1, name(1))
    first = name(1).nonce
    writes = desk.keep(1, name(2, "w"), persist=True, together=first)
    assert Write(name(2, "w"), final=False) in writes
    desk.keep(1, name(3, "x"))
    slot, effects = desk.table.grant(1, together=first)
    assert slot is not None and effects == [Forget(name(3, "x"))], "storage has the one before"
    desk.table.keep(1, slot, SnapshotPiece(name(4, "y"), 0, 1, False))
    desk.table.read(1, 1)
    slot, effects = desk.table.grant(1)
    assert slot is not None and effects == [Forget(name(1))], "the newest is being read"


def test_a_save_that_lacks_the_piece_of_a_worker_that_ended_is_lost():
    desk = Desk(1, 2)
    for local, worker in enumerate((1, 2)):
        desk.keep(worker, name(1), local, 2)
    desk.keep(1, name(2), 0, 2, persist=True)
    assert desk.table.gone(2)[:2] == [LostSave(name(2)), Forget(name(2))]
    assert desk.table.is_idle


def test_a_save_of_which_a_worker_kept_a_newer_one_first_is_lost():
    desk = Desk(1, 2)
    desk.keep(1, name(1), 0, 2, persist=True)
    assert LostSave(name(1)) in desk.keep(2, name(2, round=2), 1, 2)


def test_a_save_is_orphaned_once_a_worker_that_had_kept_nothing_has_ended():
    desk = Desk(1, 2)
    desk.keep(1, name(1), 0, 2, persist=True)
    assert desk.table.orphaned() == [], "worker 2 may keep its piece"
    assert desk.table.gone(2) == []
    assert desk.table.orphaned() == [name(1)]
    assert desk.table.give_up(name(1)) == [LostSave(name(1)), Forget(name(1))]
    assert desk.table.orphaned() == []


def test_a_worker_that_joins_late_may_still_bring_the_missing_piece():
    desk = Desk(1)
    desk.keep(1, name(1), 0, 2, persist=True)
    desk.begin(2)
    assert desk.table.orphaned() == [name(1)]
    slot, _ = desk.table.grant(2)
    assert desk.table.orphaned() == [], "it fills a slot"
    desk.table.keep(2, slot, SnapshotPiece(name(1), 1, 2, persist=True))
    assert desk.table.orphaned() == []


def test_a_save_is_not_orphaned_without_workers_or_without_a_wish_to_write_it():
    desk = Desk(1)
    desk.keep(1, name(1), 0, 2)
    assert desk.table.orphaned() == []
    desk.keep(1, name(2), 0, 2, persist=True)
    desk.table.gone(1)
    assert desk.table.orphaned() == []


def test_a_snapshot_that_was_not_to_be_written_is_forgotten_and_not_lost():
    desk = Desk(1, 2)
    desk.keep(2, name(1), 1, 2)
    desk.keep(1, name(2), 0, 2)
    assert not [effect for effect in desk.table.gone(2) if isinstance(effect, LostSave)]


def test_a_whole_snapshot_is_written_instead_of_a_lost_one_unless_storage_is_busy():
    desk = Desk(1)
    desk.keep(1, name(1), persist=True)
    desk.keep(1, name(2))
    assert desk.table.write_instead(name(2)) == []
    desk.table.written(name(1))
    assert desk.table.write_instead(name(2)) == [Write(name(2), final=True)]
    desk.table.written(name(2))
    assert desk.table.write_instead(name(2)) == [], "once each"
