"""The decisions of survivors from their tables, one rule for each test."""

import dataclasses

import pytest

from elastane.synchrony.operations import (
    Identity,
    Rule,
    Signature,
    Site,
    rule_of,
    why_parts_are_lost,
)
from elastane.synchrony.rules import (
    RefusedCall,
    Switch,
    Table,
    View,
    ViewMember,
    plan,
    why_not_issued,
)

A, B, C = (Identity(n) for n in (1, 2, 3))
FIRST = View((1, 0), (A, B, C))
MAX = Signature("allreduce", reduction="max")
SUM = Signature("allreduce", reduction="sum")
BUCKET = Signature("allreduce", reduction="sum", site=Site.REDUCER)
SHARDS = Signature("reduce_scatter", reduction="sum", shaped=3)
REFUSAL = RefusedCall("RuntimeError", "Invalid scalar type")


def table(identity, delivered, issued, *signatures, view=FIRST, **more):
    """Return a member that keeps all delivered results; `signatures` has its operations'."""
    kept = tuple(range(delivered))
    numbered = dict(enumerate(signatures))
    return Table(identity, view, 0, delivered, issued, kept=kept, signatures=numbered, **more)


def test_a_result_that_one_member_delivered_is_given_to_the_other():
    decided = plan([table(A, 2, 2, MAX, MAX), table(B, 1, 2, MAX, MAX)])
    assert [(g.number, g.giver, g.takers) for g in decided.gifts] == [(1, A, (B,))]
    assert decided.cut == 2 and decided.switches == (Switch(2, (A, B)),)


def test_an_undelivered_operation_runs_again_and_changes_the_size():
    decided = plan([table(A, 1, 2, MAX, BUCKET), table(C, 1, 1, MAX)])
    assert not decided.restart and not decided.gifts
    assert decided.switches == (Switch(1, (A, C)),)


def test_the_state_is_lost_with_its_last_holder():
    decided = plan([table(A, 0, 0, is_new=True), table(B, 0, 0, is_new=True)])
    assert decided.restart and decided.state_lost
    assert not plan([table(A, 0, 0), table(B, 0, 0, is_new=True)]).restart


def test_the_loss_of_rank_0_restarts_while_the_script_may_have_kept_its_rank():
    keeps = {"first": C, "keeps_ranks": True}
    assert "the worker of rank 0 is lost" in plan([table(A, 0, 0, **keeps)]).restart
    assert not plan([table(A, 0, 0, **{**keeps, "first": A})]).restart
    assert not plan([table(A, 0, 0, **{**keeps, "keeps_ranks": False})]).restart
    assert not plan([table(A, 0, 0, **keeps, all_ended=True), table(B, 0, 0, **keeps)]).restart


def test_the_loss_of_local_rank_0_restarts_while_others_of_its_node_are_left():
    keeps = {"first": A, "keeps_ranks": True}
    first, of_other_node = table(A, 0, 0, **keeps, node_first=A), {**keeps, "node_first": C}
    decided = plan([first, table(B, 0, 0, **of_other_node)])
    assert "the worker of local rank 0 on a node is lost" in decided.restart
    assert not plan([first, table(B, 0, 0, **{**keeps, "node_first": None})]).restart
    assert not plan([first, table(B, 0, 0, **{**of_other_node, "keeps_ranks": False})]).restart
    assert not plan([first]).restart, "the whole node is lost"


def test_a_call_that_torch_has_refused_to_all_survivors_does_not_restart():
    refused = {"refusals": {0: REFUSAL}}
    one, knows_of_all = table(A, 1, 1, MAX, **refused), Table(B, FIRST, 1, 1, 1)
    assert not plan([one, table(B, 1, 1, MAX, **refused)]).restart
    assert not plan([one, knows_of_all]).restart
    restart = plan([one, table(B, 1, 1, MAX)]).restart
    assert restart == (
        "allreduce (max) was refused by torch on some workers only: Invalid scalar type"
    )


@pytest.mark.parametrize("signature", [MAX, SUM, SHARDS])
@pytest.mark.parametrize("has_issued", [False, True])
def test_a_survivor_gets_the_error_of_a_call_that_torch_has_refused_to_another(
    signature, has_issued
):
    member = ViewMember(B)
    member.begin(FIRST)
    if has_issued:
        member.issue(signature)
    member.seal()
    decided = plan([table(A, 1, 1, signature, refusals={0: REFUSAL}), member.table()])
    assert not decided.restart and not decided.gifts and decided.refusals == {0: REFUSAL}
    starts = member.install(View((2, 0), (A, B)), decided)
    starts += [] if has_issued else [each for each in [member.issue(signature).start] if each]
    delivery = member.deliver()
    assert not starts and delivery is not None and delivery.refused == {0: REFUSAL}
    member.seal()
    assert member.table().refusals == {0: REFUSAL}


def test_a_refusal_that_another_has_told_is_void_once_that_member_is_lost():
    member = ViewMember(B)
    member.begin(FIRST)
    member.seal()
    member.install(
        View((2, 0), (A, B)), plan([table(A, 1, 1, MAX, refusals={0: REFUSAL}), member.table()])
    )
    member.seal()
    decided = plan([member.table()])
    assert not decided.restart and not decided.refusals
    assert not member.install(View((3, 0), (B,)), decided)
    assert member.issue(MAX).start is not None


def test_a_refused_call_that_was_not_delivered_is_made_again():
    member = ViewMember(B)
    member.begin(FIRST)
    member.issue(MAX)
    member.complete(0, FIRST, REFUSAL)
    member.seal()
    assert not member.table().refusals
    starts = member.install(View((2, 0), (A, B)), plan([table(A, 0, 0), member.table()]))
    assert [start.number for start in starts] == [0]


def test_a_call_that_torch_refuses_tells_nothing_about_the_other_members():
    stable = []
    for refusal in (None, REFUSAL):
        member = ViewMember(A)
        member.begin(FIRST)
        for number, why in enumerate((None, refusal)):
            member.issue(MAX)
            member.complete(number, FIRST, why)
            member.deliver()
            member.waited(number)
        stable.append(member.stable)
    assert stable == [1, 0]


def test_an_interrupted_sum_of_the_script_restarts():
    assert "allreduce (sum) was interrupted" in plan([table(A, 0, 1, SUM)]).restart


def test_a_sum_that_one_has_delivered_does_not_restart():
    assert not plan([table(A, 1, 1, SUM), table(B, 0, 1, SUM)]).restart


def test_a_private_result_that_only_some_have_restarts():
    decided = plan([table(A, 1, 1, SHARDS), table(B, 0, 1, SHARDS)])
    assert "no worker holds another's part" in decided.restart


def test_other_operations_of_the_same_number_restart():
    assert "do not run the same program" in plan([table(A, 0, 1, MAX), table(B, 0, 1, SUM)]).restart


def test_an_operation_that_waits_for_a_program_that_has_ended_restarts_with_its_name():
    waits, ended = table(A, 1, 2, MAX, BUCKET), table(B, 1, 1, MAX, leaves=True)
    assert (
        "after 1 collectives, and another waits in allreduce (sum)" in plan([waits, ended]).restart
    )
    assert not plan([table(A, 1, 1, MAX), ended]).restart, "it may end next"
    assert not plan([waits, table(B, 1, 1, MAX)]).restart


@pytest.mark.parametrize(
    ("site", "received", "goes_on"),
    [(Site.SCRIPT, (), False), (Site.SCRIPT, (0,), True), (Site.AUTHORITY, (), True)],
)
def test_a_broadcast_of_a_lost_member_needs_a_receiver_or_a_value_that_all_have(
    site, received, goes_on
):
    signature = Signature("broadcast", root=C, site=site)
    decided = plan([table(A, 0, 1, signature, received=received), table(B, 0, 1, signature)])
    assert bool(decided.restart) is not goes_on
    assert [gift.takers for gift in decided.gifts] == [(A, B)] * len(received)


def test_an_all_gather_that_one_has_received_counts_as_delivered_with_the_old_size():
    gather = Signature("allgather", shaped=3)
    decided = plan([table(A, 0, 1, gather, received=(0,)), table(B, 0, 1, gather)])
    assert decided.cut == 1 and decided.switches == (Switch(1, (A, B)),)
    assert "buffers are for 3 workers" in plan([table(A, 0, 1, gather)]).restart


def test_a_member_that_missed_the_last_view_continues_and_its_void_switches_do_not():
    second = View((2, 0), (A, B))
    late = table(B, 0, 1, MAX, switches=(Switch(0, (A, B, C)),))
    decided = plan([table(A, 1, 1, MAX, view=second, switches=(Switch(0, (A, B)),)), late])
    assert decided.survivors == (A, B) and not decided.left_out
    assert decided.switches == (Switch(0, (A, B)), Switch(1, (A, B)))


def test_a_member_that_was_left_out_of_a_view_is_not_taken_back():
    second = View((2, 0), (A, B))
    decided = plan([table(A, 1, 1, MAX, view=second), table(C, 0, 1, MAX)])
    assert decided.left_out == (C,) and decided.survivors == (A,)


@pytest.mark.parametrize(
    ("signature", "rule"),
    [
        (Signature("allreduce", reduction="sum", counts=True), Rule.REPEAT),
        (Signature("allreduce", reduction="product"), Rule.REFUSED),
        (Signature("allreduce", reduction="sum", site=Site.TRUE_SUM), Rule.REPEAT),
        (Signature("allreduce", reduction="sum", site=Site.HOOK), Rule.RESCALE),
        (Signature("allreduce", reduction="max", site=Site.HOOK), Rule.REPEAT),
        (Signature("allreduce", reduction="sum", site=Site.FIRST_SIZE), Rule.REPEAT),
        (Signature("reduce", reduction="sum", site=Site.FIRST_SIZE), Rule.PRIVATE),
        (Signature("reduce", reduction="sum", counts=True), Rule.PRIVATE),
        (Signature("reduce", reduction="sum"), Rule.REFUSED),
        (Signature("allreduce", reduction="sum", site=Site.FIRST_SIZE, counts=True), Rule.REPEAT),
        (Signature("allreduce", reduction="product", site=Site.FIRST_SIZE), Rule.REFUSED),
        (Signature("alltoall"), Rule.PRIVATE),
        (Signature("a_kind_of_a_later_torch"), Rule.REFUSED),
    ],
)
def test_the_table_of_operations(signature, rule):
    assert rule_of(signature) is rule


@pytest.mark.parametrize("kind", ["allreduce", "allreduce_coalesced", "reduce"])
def test_only_sums_of_floats_of_a_script_that_sees_its_first_size_are_scaled(kind):
    one = Signature(kind, reduction="sum", site=Site.FIRST_SIZE)
    assert one.is_scaled and one.may_be_divided and not one.depends_on_size
    for other in ({"counts": True}, {"reduction": "max"}, {"site": Site.SCRIPT}):
        assert not dataclasses.replace(one, **other).is_scaled
    assert dataclasses.replace(one, site=Site.SCRIPT).depends_on_size


@pytest.mark.parametrize(
    ("signature", "reason"),
    [
        (Signature("allgather", shaped=3), "has buffers for 3 workers, of whom 2 are left"),
        (Signature("allgather", shaped=2), ""),
        (Signature("broadcast", root=B), "has a lost worker as its root"),
        (Signature("broadcast", root=C), ""),
        (Signature("allreduce", reduction="sum", site=Site.FIRST_SIZE), ""),
    ],
)
def test_a_program_that_sees_lost_members_begins_nothing_that_needs_them(signature, reason):
    why = why_not_issued(signature, (A, C))
    assert reason in why and bool(why) is bool(reason)


@pytest.mark.parametrize(
    ("signature", "optimizer", "reason"),
    [
        (SHARDS, "", "reduce_scatter (sum) leaves a part of a sum on each worker"),
        (SUM, "Muon", "the optimizer Muon calls allreduce (sum) in its step"),
        (Signature("broadcast", root=B), "ZeroRedundancyOptimizer", "calls broadcast in its step"),
        (Signature("allgather", shaped=3, site=Site.FIRST_SIZE), "Muon", "calls allgather"),
        (SUM, "", ""),
        (MAX, "Muon", ""),
        (Signature("allreduce", reduction="avg"), "Muon", ""),
        (Signature("allreduce", reduction="sum", counts=True), "Muon", ""),
        (Signature("barrier"), "Muon", ""),
        (BUCKET, "Muon", ""),
    ],
)
def test_what_workers_exchange_in_a_step_may_be_parts_that_are_lost_with_them(
    signature, optimizer, reason
):
    why = why_parts_are_lost(signature, optimizer)
    assert reason in why and bool(why) is bool(reason)
