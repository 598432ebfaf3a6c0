"""Copies of snapshots at other nodes: one at a time, and what is left of one that is cut short."""

from elastane.protocol.checkpoints import Key
from elastane.snapshots.rules.replicas import Copy, Incoming, Outgoing
from elastane.snapshots.rules.snapshots import Name


def name(step):
    return Name(Key(0, 1, 0, step), f"{step:08x}")


def test_what_becomes_whole_while_another_is_being_copied_waits_for_its_turn():
    out = Outgoing()
    assert out.whole(name(1), [name(1)], "b")
    assert not out.whole(name(2), [name(1), name(2)], "b")
    assert out.copying == name(1)
    out.ended(name(1), arrived=True)
    assert out.there == (name(1),)
    out.hear(name(1).nonce)
    assert out.whole(name(3), [name(1), name(3)], "b")
    assert out.pinned == {name(1), name(3)}


def test_a_copy_that_fails_after_another_took_its_place_leaves_the_other():
    here = Incoming()
    first, again = Copy("a", name(1)), Copy("a", name(2))
    assert here.offered(first, "") == ""
    assert here.offered(again, "") == ""
    here.failed(first)
    assert here.arriving == again
    assert not here.arrived(first)
    assert here.arrived(again)
    assert here.held == [again]


def test_a_copy_that_fails_makes_room_for_the_next():
    here = Incoming()
    first, other = Copy("a", name(1)), Copy("b", name(1))
    assert here.offered(first, "") == ""
    assert here.offered(other, "") == "another copy is arriving"
    here.failed(first)
    assert here.offered(other, "") == ""


def test_who_does_not_know_which_save_is_safe_leaves_it_as_it_was():
    out, here = Outgoing(), Incoming()
    out.whole(name(1), [name(1)], "b")
    out.ended(name(1), arrived=True)
    here.offered(Copy("a", name(1)), "")
    here.arrived(Copy("a", name(1)))
    for step, told in ((2, name(1).nonce), (3, "")):
        out.hear(told)
        assert out.whole(name(step), [name(1), name(step)], "b")
        assert out.pinned == {name(1), name(step)}
        out.ended(name(step), arrived=False)
        assert here.offered(Copy("a", name(step)), told) == ""
        assert here.held == [Copy("a", name(1))]
