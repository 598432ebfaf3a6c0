"""The destinations of copies, their addresses, and which save is safe."""

from __future__ import annotations

import pytest

from elastane.checkpoint.layout import Chunk, Tensor, lay_out
from elastane.checkpoint.plan import RankStatus, ring, shares
from elastane.checkpoint.saving import SaveProposal, Saver, replica_address_of, without_copies


def standing(server, replica_address=True):
    return RankStatus(
        server, True, "p", f"{server}:1" if replica_address else "", f"group of {server}"
    )


def sharded(ranks):
    held = [[Chunk(0, (n, 0), (1, 2))] for n in range(ranks)]
    return lay_out([Tensor("x", "float32", (ranks, 2))], held)


def test_snapshot_servers_form_a_ring():
    members = [standing(server) for server in ("a", "a", "b", "c", "c")]
    found = shares(sharded(5), members)
    assert [share.replica_address for share in found] == ["b:1", "b:1", "c:1", "a:1", "a:1"]
    assert [share.group for share in found][::2] == ["group of b", "group of c", "group of a"]


def test_replicated_state_is_not_replicated_again():
    replicated = lay_out([Tensor("x", "float32", (2, 2))], [[Chunk(0, (0, 0), (2, 2))]] * 2)
    assert {
        share.replica_address for share in shares(replicated, [standing("a"), standing("b")])
    } == {""}
    assert {
        share.replica_address for share in shares(sharded(2), [standing("a"), standing("a")])
    } == {""}
    assert ring([standing("a"), standing("b", replica_address=False)]) == {}


def test_nodes_without_the_option_are_left_out_of_the_ring():
    members = [standing("a"), standing("b", replica_address=False), standing("c")]
    assert [share.replica_address for share in shares(sharded(3), members)] == ["c:1", "", "a:1"]


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([standing("a", replica_address=False), standing("b", replica_address=False)], None),
        ([standing("a"), standing("b")], None),
        ([standing("a"), standing("a")], "all workers are on one node"),
        ([standing("a"), standing("b", replica_address=False)], "1 of 2 nodes have none"),
    ],
)
def test_impossible_replication_is_a_warning(members, words):
    said = without_copies(members)
    assert (words in said) if words else not said


class Kept:
    def __init__(self, replica_address):
        self.replica_address = replica_address


@pytest.mark.parametrize(
    ("replica_address", "master", "node_rank", "found"),
    [
        ("", "127.0.0.1", "0", ""),
        (":7", "10.9.8.7", "0", "10.9.8.7:7"),
        (":7", "fe80::1", "0", "[fe80::1]:7"),
        (":7", "127.0.0.1", "3", "127.0.0.1:7"),
        (":7", "", "", "127.0.0.1:7"),
        (":7", "no such host.invalid", "1", ""),
        ("here:7", "10.9.8.7", "1", "here:7"),
        ("[::1]:7", "10.9.8.7", "1", "[::1]:7"),
    ],
)
def test_a_nodes_address_is_the_one_from_which_it_reaches_the_first_node(
    replica_address, master, node_rank, found, monkeypatch
):
    monkeypatch.setenv("MASTER_ADDR", master)
    monkeypatch.setenv("GROUP_RANK", node_rank)
    assert replica_address_of(Kept(replica_address)) == found


def heard(*rows):
    base = {"step": 1, "identity": 0, "standing": 0, "planned": 0, "busy": 0, "copying": 0}
    base |= {"nonce": 0, "word": 0, "copies": 1, "copied": 0, "copied_before": 0}
    base |= {"kept": 0, "safe": 0, "together": 0}
    return [SaveProposal(**base | row) for row in rows]


def copied(*rows):
    return heard(
        *(dict(zip(("copies", "copied", "copied_before"), row, strict=True)) for row in rows)
    )


def test_the_safe_save_is_the_last_that_all_nodes_have_copied():
    saver = Saver(None, Kept("x:1"), "/nowhere", None)

    def safe(*rows):
        saver._update_safe(copied(*rows))
        return saver._safe

    assert safe((1, 0, 0), (1, 0, 0)) == 0
    assert safe((1, 5, 0), (1, 0, 0)) == 0
    assert safe((1, 5, 0), (1, 5, 0), (0, 0, 0)) == 5
    assert safe((1, 9, 5), (1, 5, 0)) == 5, "9 came from one of them only"
    assert safe((1, 9, 5), (1, 9, 5)) == 9
    assert safe((1, 12, 9), (1, 11, 0)) == 9, "it is what was safe last"


def test_the_last_save_that_all_have_is_the_last_that_each_has_kept():
    saver = Saver(None, Kept(""), "/nowhere", None)

    def together(*kept):
        saver._update_safe(heard(*({"kept": each} for each in kept)))
        return saver._together

    assert together(0, 0) == 0, "nobody has saved yet"
    assert together(7, 7) == 7
    assert together(8, 7) == 7, (
        "one of them has lost its snapshot server, or the save was cut short"
    )
    assert together(0, 8) == 7, "one has just come"
    assert together(9, 9) == 9


def test_a_joining_rank_adopts_the_safe_save_of_the_others():
    saver = Saver(None, Kept("x:1"), "/nowhere", None)
    saver._update_safe(heard({}, {"safe": 5, "together": 6}))
    assert (saver._safe, saver._together) == (5, 6)


@pytest.mark.parametrize(("missed", "safe"), [(True, 255), (False, 0)])
def test_a_restored_save_is_safe_if_a_node_lacked_it(missed, safe):
    saver = Saver(None, Kept("x:1"), "/nowhere", None)
    saver.continue_from("000000ff", missed=missed)
    assert (saver._safe, saver._together) == (safe, 255)
