"""How a worker's group ends: with the others, or alone if its program fails."""

from types import SimpleNamespace

import pytest

from elastane.synchrony.operations import Identity
from elastane.synchrony.ordered import OrderedGroup
from elastane.synchrony.rules import View


class Ended(Exception):
    """The group waits for the others, or reports its end."""


def group_of_two():
    def destroyed():
        raise Ended

    group = OrderedGroup(host=SimpleNamespace(destroyed=destroyed), keeps_ranks=False)
    group._member.begin(View((1, 0), (Identity(1), Identity(2))))
    return group


def shut_down_in(error):
    """Shut a group down in a `finally`, as `error` passes."""
    group = group_of_two()
    try:
        raise error
    finally:
        group.shutdown()


@pytest.mark.parametrize("error", [ValueError(), SystemExit(3), KeyboardInterrupt()])
def test_a_program_that_fails_destroys_its_group_without_the_others(error):
    with pytest.raises(type(error)):
        shut_down_in(error)


def test_a_program_that_ends_well_destroys_its_group_with_the_others():
    with pytest.raises(Ended):
        group_of_two().shutdown()
    with pytest.raises(Ended):
        shut_down_in(SystemExit(0))


def test_a_worker_whose_program_has_ended_waits_for_the_others_until_all_have_left():
    group = group_of_two()
    assert not group.in_flight
    group._member.leaves = True
    assert group.in_flight, "it is not busy: all may wait for one another"
    group._has_left = True
    assert not group.in_flight
