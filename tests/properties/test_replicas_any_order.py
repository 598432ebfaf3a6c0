"""Snapshots and their replicas under random orders of events survive the loss of any node.

Three nodes have real slot tables. The test makes the agreement of workers before a save.
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

from elastane.protocol.checkpoints import Key
from elastane.snapshots.rules.replicas import (
    COPIES_MAX,
    IncomingReplicas,
    OutgoingReplicas,
    ReplicaName,
)
from elastane.snapshots.rules.slot_table import Name, SlotTable, SnapshotPiece, Whole, Write

NODES = range(3)


class Node:
    def __init__(self, number, slots, life=1):
        self.number, self.life = number, life
        self.origin = f"server{number}.{life}"
        self.table, self.out, self.incoming = SlotTable(), OutgoingReplicas(), IncomingReplicas()
        self.writing = None
        self.begin(1)
        self.table.own(1, 1)
        self.table.add(1, 1, range(slots))

    def begin(self, worker):
        self.worker = worker
        self.table.joined(worker)

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
    slots, copies = 4, True

    def __init__(self):
        super().__init__()
        self.nodes = [Node(number, self.slots) for number in NODES]
        self.step, self.round, self.safe, self.together = 0, 1, "", ""
        self.has_been_safe = self.has_been_saved = False
        self.kept = [""] * len(self.nodes)  # the last snapshot that the workers of each node kept
        self.replaced = None  # the new node, the only one that may be lost now

    def peer(self, node):
        return self.nodes[(node.number + 1) % len(self.nodes)]

    @rule(persist=st.booleans(), order=st.permutations(NODES))
    def a_step_is_saved(self, persist, order):
        self.save(persist, order)

    @rule(persist=st.booleans(), order=st.permutations(NODES), count=st.integers(1, 2))
    def a_worker_dies_while_a_step_is_saved(self, persist, order, count):
        """Some nodes have kept the snapshot. Their replicas may be complete or on their way."""
        self.save(persist, order[:count])
        self.all_workers_are_started_anew()

    def save(self, persist, order):
        self.step += 1
        if common := set.intersection(*({*node.out.there} for node in self.nodes)):
            self.safe = max(common).nonce
        if len({*self.kept}) == 1 and self.kept[0]:
            self.together = self.kept[0]
        is_copied = self.copies and not any(node.out.copying for node in self.nodes)
        durable = persist and not any(node.writing or node.table.waiting for node in self.nodes)
        name = Name(Key(0, self.round, 0, self.step), f"{self.step:08x}")
        for number in order:
            self.keep(self.nodes[number], name, durable, is_copied)
        self.has_been_saved |= len(order) == len(self.nodes)

    def keep(self, node, name, durable, is_copied):
        slot, effects = node.table.grant(node.worker, together=self.together)
        node.seen(effects)
        assert slot is not None, "a grant waits, though there are enough slots"
        self.kept[node.number] = name.nonce
        effects = node.table.keep(
            node.worker, slot, SnapshotPiece(name, 0, 1, durable, self.together)
        )
        whole = node.seen(effects)
        assert whole == [name]
        door = self.peer(node).origin
        node.out.set_safe(self.safe)
        if is_copied and node.out.begin(name, node.table.whole(), door):
            copy = ReplicaName(node.origin, name)
            assert self.peer(node).incoming.offered(copy, node.out.safe) == ""
        node.seen(node.table.pin(node.out.pinned))

    @precondition(lambda self: any(node.out.copying for node in self.nodes))
    @rule(data=st.data(), arrives=st.sampled_from([True, True, True, False]))
    def a_copying_ends(self, data, arrives):
        node = data.draw(st.sampled_from([n for n in self.nodes if n.out.copying]))
        name = node.out.copying
        copy = ReplicaName(node.origin, name)
        if arrives:
            assert self.peer(node).incoming.arrived(copy)
        else:
            self.peer(node).incoming.failed(copy)
        node.out.ended(name, arrived=arrives)
        node.seen(node.table.pin(node.out.pinned))
        if all(name in n.out.there for n in self.nodes):
            self.has_been_safe, self.replaced = True, None

    @precondition(lambda self: any(node.writing for node in self.nodes))
    @rule(data=st.data(), durable=st.booleans())
    def a_writing_ends(self, data, durable):
        node = data.draw(st.sampled_from([n for n in self.nodes if n.writing]))
        name, node.writing = node.writing, None
        if durable:
            node.table.durable(name.key)
        node.seen(node.table.written(name))

    @rule()
    def all_workers_are_started_anew(self):
        self.begin_from(self.restorable())

    @precondition(lambda self: self.has_been_safe)
    @rule(data=st.data())
    def a_node_is_lost_and_another_comes_in_its_place(self, data):
        """No other node may be lost until all have replicas again."""
        number = data.draw(st.sampled_from([*NODES] if self.replaced is None else [self.replaced]))
        lost, before = self.nodes[number], self.nodes[number - 1]
        if lost.out.copying:
            self.peer(lost).incoming.failed(ReplicaName(lost.origin, lost.out.copying))
        if before.out.copying:
            before.out.ended(before.out.copying, arrived=False)
        self.nodes[number] = Node(number, self.slots, lost.life + 1)
        self.replaced = number
        self.begin_from(self.restorable())

    def copies_of(self, node):
        copies = self.peer(node).incoming.held
        return {c.name for c in copies if c.origin.split(".")[0] == f"server{node.number}"}

    def restorable(self):
        """Return the snapshots whose parts all exist, on their nodes or as replicas."""
        return set.intersection(*({*n.table.whole()} | self.copies_of(n) for n in self.nodes))

    def begin_from(self, common):
        """Continue all nodes from the newest save. It counts as safe if a node lacks it."""
        self.round += 1
        self.safe = self.together = ""
        if common:
            self.together = max(common).nonce
            missed = any(max(common) not in node.table.whole() for node in self.nodes)
            self.safe = self.together if missed else ""
        self.kept = [""] * len(self.nodes)
        for node in self.nodes:
            node.seen(node.table.gone(node.worker))
            node.begin(node.worker + 1)
            node.table.own(node.worker, 1)

    @invariant()
    def whichever_node_is_lost_there_is_a_save_that_the_others_have(self):
        if not self.has_been_safe:
            return
        for lost in self.nodes if self.replaced is None else [self.nodes[self.replaced]]:
            others = [{*node.table.whole()} for node in self.nodes if node is not lost]
            assert self.copies_of(lost) & set.intersection(*others)

    @invariant()
    def all_workers_may_be_lost(self):
        if self.has_been_saved:
            assert self.restorable()

    @invariant()
    def no_more_is_held_than_is_needed(self):
        for node in self.nodes:
            assert len(node.incoming.held) + bool(node.incoming.arriving) <= COPIES_MAX
            assert len(node.out.pinned) <= 2


class WithoutCopies(Cluster):
    """Without replicas, the last save that all workers kept exists, also after cut saves."""

    slots, copies = 3, False


FEW = settings(max_examples=75, stateful_step_count=50, deadline=None)
MANY = settings(max_examples=2000, stateful_step_count=100, deadline=None)


@pytest.mark.parametrize("cluster", [Cluster, WithoutCopies])
def test_the_loss_of_one_node_or_of_all_workers_is_survived_at_any_time(cluster):
    run_state_machine_as_test(cluster, settings=FEW)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cluster", [Cluster, WithoutCopies])
def test_the_loss_of_one_node_or_of_all_workers_is_survived_in_long_histories(cluster):
    run_state_machine_as_test(cluster, settings=MANY)


def copy(step, origin="k", round_=1):
    return ReplicaName(origin, Name(Key(0, round_, 0, step), f"{step:08x}"))


def test_a_replica_of_an_earlier_round_is_declined():
    held = IncomingReplicas()
    held.offered(copy(5, round_=2), "")
    assert "later round" in held.offered(copy(9, origin="old"), "")
    held.arrived(copy(5, round_=2))
    assert "later round" in held.offered(copy(9, origin="old"), "")


def test_two_senders_alternate_and_a_restarted_transfer_is_not_blocked_by_itself():
    held = IncomingReplicas()
    assert held.offered(copy(1), "") == ""
    assert "another replica" in held.offered(copy(1, origin="other"), "")
    assert held.offered(copy(2), "") == ""
    assert not held.arrived(copy(1)), "the receiver wants pieces of the first connection"
    assert held.arrived(copy(2))
    assert held.offered(copy(2), "") == "it is here already"


def test_a_lost_nodes_safe_replica_stays_while_its_replacement_replicates():
    held = IncomingReplicas()
    held.offered(copy(1, origin="lost"), "")
    held.arrived(copy(1, origin="lost"))
    safe = copy(1).name.nonce
    assert held.offered(copy(2, origin="new", round_=2), safe) == ""
    assert held.held == [copy(1, origin="lost")]
    held.failed(copy(2, origin="new", round_=2))
    assert held.held == [copy(1, origin="lost")]


def test_replication_that_stops_releases_all_slots():
    held, out = IncomingReplicas(), OutgoingReplicas()
    held.offered(copy(1), "")
    held.arrived(copy(1))
    held.clear()
    assert (held.held, held.arriving) == ([], None)
    name = copy(1).name
    assert out.begin(name, [name], "peer")
    out.stop()
    assert out.pinned == {name}, "a slot is reused during its transfer"
    out.ended(name, arrived=True)
    assert out.pinned == frozenset()
