"""Worlds that end again and again without a loss restart the job."""

from elastane.synchrony.operations import Identity
from elastane.synchrony.ordered import _VAIN_WORLDS_MAX, OrderedGroup
from elastane.synchrony.rules import View

A, B = Identity(1), Identity(2)


def group_in(*members):
    group = OrderedGroup(host=None, keeps_ranks=False)
    group._member.begin(View((1, 0), members))
    return group


def refused_after(group, worlds):
    for _ in range(worlds):
        group._refuse_vain_worlds(RuntimeError("no loss"))
    return group._member.refused


def test_the_job_restarts_with_the_last_error_once_too_many_worlds_have_ended_in_vain():
    group = group_in(A, B)
    assert refused_after(group, _VAIN_WORLDS_MAX) == ""
    assert "the last error: no loss" in refused_after(group, 1)


def test_another_membership_begins_the_count_again():
    group = group_in(A, B)
    for number in range(3):
        assert refused_after(group, _VAIN_WORLDS_MAX) == ""
        group._member.view = View((2 + number, 0), (A,) * (1 + number % 2))
