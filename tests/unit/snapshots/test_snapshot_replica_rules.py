"""Copies of snapshots on other nodes: one at a time, and what remains of an interrupted one."""

from elastane.protocol.checkpoints import Key
from elastane.snapshots.rules.replicas import IncomingReplicas, OutgoingReplicas, ReplicaName
from elastane.snapshots.rules.slot_table import Name


def name(step):
    return Name(Key(0, 1, 0, step), f"{step:08x}")


def test_a_snapshot_completed_during_a_transfer_is_not_sent():
    out = OutgoingReplicas()
    assert out.begin(name(1), [name(1)], "b")
    assert not out.begin(name(2), [name(1), name(2)], "b")
    assert out.copying == name(1)
    out.ended(name(1), arrived=True)
    assert out.there == (name(1),)
    out.set_safe(name(1).nonce)
    assert out.begin(name(3), [name(1), name(3)], "b")
    assert out.pinned == {name(1), name(3)}


def test_a_failed_replica_does_not_remove_the_one_that_replaced_it():
    here = IncomingReplicas()
    first, again = ReplicaName("a", name(1)), ReplicaName("a", name(2))
    assert here.offered(first, "") == ""
    assert here.offered(again, "") == ""
    here.failed(first)
    assert here.arriving == again
    assert not here.arrived(first)
    assert here.arrived(again)
    assert here.held == [again]


def test_a_failed_replica_makes_room_for_the_next():
    here = IncomingReplicas()
    first, other = ReplicaName("a", name(1)), ReplicaName("b", name(1))
    assert here.offered(first, "") == ""
    assert here.offered(other, "") == "another replica is arriving"
    here.failed(first)
    assert here.offered(other, "") == ""


def test_an_unknown_safe_save_leaves_the_known_one():
    out, here = OutgoingReplicas(), IncomingReplicas()
    out.begin(name(1), [name(1)], "b")
    out.ended(name(1), arrived=True)
    here.offered(ReplicaName("a", name(1)), "")
    here.arrived(ReplicaName("a", name(1)))
    for step, told in ((2, name(1).nonce), (3, "")):
        out.set_safe(told)
        assert out.begin(name(step), [name(1), name(step)], "b")
        assert out.pinned == {name(1), name(step)}
        out.ended(name(step), arrived=False)
        assert here.offered(ReplicaName("a", name(step)), told) == ""
        assert here.held == [ReplicaName("a", name(1))]
