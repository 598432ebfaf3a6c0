"""A script that does not ask for its rank after the loss of rank 0 is warned of, once."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from elastane.synchrony.operations import Identity
from elastane.synchrony.ordered import OrderedGroup
from elastane.synchrony.rank_reads import STEPS_MIN, RankReads
from elastane.synchrony.rules import Table, View

A, B = Identity(1), Identity(2)


def reads_after(*asked, lost=10):
    """Return the reads of a program that read its rank in these steps, and then lost rank 0."""
    reads = RankReads()
    for steps in asked:
        reads.asked(steps)
    reads.first_lost(lost)
    return reads


def test_a_script_that_asks_only_before_its_steps_is_warned_of_once():
    reads = reads_after(0)
    assert reads.warning(9 + STEPS_MIN) == ""
    assert f"lost {STEPS_MIN} steps ago" in reads.warning(10 + STEPS_MIN)
    assert reads.warning(1000) == ""


def test_a_script_that_asks_in_each_epoch_has_the_time_of_two_more():
    reads = reads_after(0, 500, 1000, lost=1200)
    assert reads.warning(1200 + STEPS_MIN + 999) == ""
    assert reads.warning(1200 + STEPS_MIN + 1000)


def test_a_question_after_the_loss_ends_the_wait():
    reads = reads_after(0)
    reads.asked(20)
    assert reads.warning(5000) == reads.warning(5000, ends=True) == ""


def test_a_script_that_ends_without_a_question_is_warned_of_at_once():
    assert reads_after(0).warning(12, ends=True)
    assert RankReads().warning(12, ends=True) == ""


def group_of(members, **host):
    group = OrderedGroup(SimpleNamespace(follows=False, **host), keeps_ranks=False)
    group._member.begin(View((1, 0), members))
    return group


def test_only_questions_of_the_script_count(monkeypatch):
    group = group_of((A, B))
    asked = []
    monkeypatch.setattr(group._reads, "asked", asked.append)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: group)
    monkeypatch.setattr(dist.distributed_c10d, "_rank_not_in_group", lambda _: False)
    dist.get_rank()
    assert len(asked) == 1
    exec("group.rank()", {"__name__": "torch.utils.data.distributed", "group": group})
    exec("group.rank()", {"__name__": "elastane.comms.elastic", "group": group})
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("stepped", "resumed", "is_missed"),
    [(False, False, False), (True, False, True), (False, True, True)],
)
def test_rank_0_is_missed_at_the_end_once_it_may_have_saved(stepped, resumed, is_missed):
    group = group_of((A, B), has_resumed=resumed)
    group._has_stepped = stepped
    group._note_lost_first(View((2, 0), (B,)), [Table(B, View((1, 0), (A, B)), 0, 0, 0)])
    assert group._lacks_first is is_missed
