"""Snapshots and their copies under random orders of events: any one node may be lost.

Three nodes with the real books; what workers agree on before a save is done here as they do it.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from elastane.core.checkpoints import Key
from elastane.core.replicas import COPIES_MAX, Copy, Incoming, Outgoing
from elastane.core.snapshots import WHOLE_MAX, Name, Piece, Snapshots, Whole, Write

NODES = range(3)
SLOTS = 4


class Node:
    def __init__(self, number):
        self.number = number
        self.books, self.out, self.incoming = Snapshots(), Outgoing(), Incoming()
        self.writing = None
        self.begin(1)
        self.books.own(1, 1)
        self.books.add(1, 1, range(SLOTS))

    def begin(self, worker):
        self.worker = worker
        self.books.came(worker)

    def seen(self, effects):
        whole = []
        for effect in effects:
            match effect:
                case Whole(name):
                    whole.append(name)
                case Write(name, _):
                    assert self.writing is None
                    self.writing = name
        return whole


class Cluster(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.nodes = [Node(number) for number in NODES]
        self.step, self.round, self.safe = 0, 1, ""
        self.has_been_safe = self.has_been_saved = False
        self.torn = 0  # saves in a row that not all nodes have

    def peer(self, node):
        return self.nodes[(node.number + 1) % len(self.nodes)]

    @rule(persist=st.booleans(), order=st.permutations(NODES))
    def a_step_is_saved(self, persist, order):
        self.save(persist, order)

    @rule(persist=st.booleans(), order=st.permutations(NODES), count=st.integers(1, 2))
    def a_worker_dies_while_a_step_is_saved(self, persist, order, count):
        """Some nodes have kept it, and their copies may have come, or come still."""
        self.save(persist, order[:count])
        self.all_workers_are_started_anew()

    def save(self, persist, order):
        self.step += 1
        if common := set.intersection(*({*node.out.there} for node in self.nodes)):
            self.safe = max(common).nonce
        is_copied = not any(node.out.copying for node in self.nodes)
        durable = persist and not any(node.writing or node.books.waiting for node in self.nodes)
        name = Name(Key(0, self.round, 0, self.step), f"{self.step:08x}")
        for number in order:
            self.keep(self.nodes[number], name, durable, is_copied)
        is_torn = len(order) < len(self.nodes)
        self.has_been_saved |= not is_torn
        self.torn = self.torn + 1 if is_torn else 0

    def keep(self, node, name, durable, is_copied):
        slot, effects = node.books.grant(node.worker)
        node.seen(effects)
        assert slot is not None, "four slots are enough for that a grant never waits"
        effects = node.books.keep(node.worker, slot, Piece(name, 0, 1, durable))
        whole = node.seen(effects)
        assert whole == [name]
        if is_copied and node.out.whole(name, self.safe, node.books.whole(), "peer"):
            copy = Copy(f"keeper{node.number}", name)
            assert self.peer(node).incoming.offered(copy, self.safe) == ""
        node.seen(node.books.pin(node.out.pinned))

    @precondition(lambda self: any(node.out.copying for node in self.nodes))
    @rule(data=st.data(), arrives=st.sampled_from([True, True, True, False]))
    def a_copying_ends(self, data, arrives):
        node = data.draw(st.sampled_from([n for n in self.nodes if n.out.copying]))
        name = node.out.copying
        copy = Copy(f"keeper{node.number}", name)
        if arrives:
            assert self.peer(node).incoming.arrived(copy)
        else:
            self.peer(node).incoming.failed(copy)
        node.out.ended(name, arrived=arrives)
        node.seen(node.books.pin(node.out.pinned))
        self.has_been_safe |= all(name in n.out.there for n in self.nodes)

    @precondition(lambda self: any(node.writing for node in self.nodes))
    @rule(data=st.data(), durable=st.booleans())
    def a_writing_ends(self, data, durable):
        node = data.draw(st.sampled_from([n for n in self.nodes if n.writing]))
        name, node.writing = node.writing, None
        if durable:
            node.books.durable(name.key)
        node.seen(node.books.written(name))

    @rule()
    def all_workers_are_started_anew(self):
        """They know of the last safe save what the keepers say, and go on from the newest."""
        self.round += 1
        self.safe = ""
        for node in self.nodes:
            node.seen(node.books.gone(node.worker))
            node.begin(node.worker + 1)
            node.books.own(node.worker, 1)

    @invariant()
    def whichever_node_is_lost_there_is_a_save_that_the_others_have(self):
        if not self.has_been_safe:
            return
        for lost in self.nodes:
            others = [{*node.books.whole()} for node in self.nodes if node is not lost]
            origin = f"keeper{lost.number}"
            copies = {c.name for c in self.peer(lost).incoming.held if c.origin == origin}
            assert copies & set.intersection(*others)

    @invariant()
    def all_workers_may_be_lost(self):
        if self.has_been_safe or (self.has_been_saved and self.torn < WHOLE_MAX):
            wholes = [{*node.books.whole()} for node in self.nodes]
            assert set.intersection(*wholes)

    @invariant()
    def no_more_is_held_than_is_needed(self):
        for node in self.nodes:
            assert len(node.incoming.held) + bool(node.incoming.arriving) <= COPIES_MAX
            assert len(node.out.pinned) <= 2


def test_any_one_node_may_be_lost_at_any_moment():
    few = settings(max_examples=150, stateful_step_count=50, deadline=None)
    run_state_machine_as_test(Cluster, settings=few)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_any_one_node_may_be_lost_at_any_moment_of_long_histories():
    many = settings(max_examples=2000, stateful_step_count=100, deadline=None)
    run_state_machine_as_test(Cluster, settings=many)


def copy(step, origin="k", round_=1):
    return Copy(origin, Name(Key(0, round_, 0, step), f"{step:08x}"))


def test_a_copy_of_a_round_that_is_over_is_not_taken():
    held = Incoming()
    held.offered(copy(5, round_=2), "")
    assert "later round" in held.offered(copy(9, origin="old"), "")
    held.arrived(copy(5, round_=2))
    assert "later round" in held.offered(copy(9, origin="old"), "")


def test_two_neighbours_take_turns_and_one_that_begins_anew_does_not_wait_for_itself():
    held = Incoming()
    assert held.offered(copy(1), "") == ""
    assert "another copy" in held.offered(copy(1, origin="other"), "")
    assert held.offered(copy(2), "") == ""
    assert not held.arrived(copy(1)), "what came by the first connection is not wanted any more"
    assert held.arrived(copy(2))
    assert held.offered(copy(2), "") == "it is here already"


def test_what_the_safe_save_has_of_a_lost_node_stays_while_its_successor_copies():
    held = Incoming()
    held.offered(copy(1, origin="lost"), "")
    held.arrived(copy(1, origin="lost"))
    safe = copy(1).name.nonce
    assert held.offered(copy(2, origin="new", round_=2), safe) == ""
    assert held.held == [copy(1, origin="lost")]
    held.failed(copy(2, origin="new", round_=2))
    assert held.held == [copy(1, origin="lost")]


def test_nothing_is_held_once_no_copies_are_wanted():
    held, out = Incoming(), Outgoing()
    held.offered(copy(1), "")
    held.arrived(copy(1))
    held.over()
    assert (held.held, held.arriving) == ([], None)
    name = copy(1).name
    assert out.whole(name, "", [name], "peer")
    out.over()
    assert out.pinned == {name}, "it is being copied"
    out.ended(name, arrived=True)
    assert out.pinned == frozenset()
