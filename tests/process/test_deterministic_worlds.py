"""With deterministic=True a training is bitwise equal in every world."""

import pytest
from comms_crew import Crew

WORLDS = (5, 4, 3, 2, 1)


# An epoch has 22 steps.
@pytest.mark.parametrize("steps", [24, pytest.param(60, marks=pytest.mark.soak)])
def test_worlds_of_one_to_five_workers_are_bitwise_equal(steps):
    with Crew(5, "trains_in_worlds", WORLDS, steps) as crew:
        found = [crew.hear(worker) for worker in range(5) for size in WORLDS if worker < size]
    assert len(found) == 15
    assert all(made == steps for _, made, _ in found)
    assert len({digest for _, _, digest in found}) == 1, found


def test_a_slow_worker_has_fewer_shards_and_the_training_stays_bitwise_equal():
    steps = 56
    with Crew(3, "trains_beside_a_slow_worker", steps) as crew:
        _, digest, alone = crew.hear(0)
        world = crew.hear_all()
    assert alone == [8] * steps
    assert {(made, found) for made, found, _ in world} == {(steps, digest)}
    dealt = [*zip(*(had for _, _, had in world), strict=True)]
    assert all(sum(each) == 8 for each in dealt)
    assert dealt[0] == (2, 3, 3)
    assert dealt[-1][2] == 1, "the slow rank"


@pytest.mark.parametrize("name", ["threads", "seed"])
def test_a_member_with_another_setting_is_refused_by_the_settings_name(name):
    with Crew(2, "differs_in", name) as crew:
        for told in crew.hear_all():
            assert f"{name} is" in told and "deterministic-use" in told, told
