"""Whoever has committed more is right; who holds no state is never right."""

import pytest

from elastane.core.recovery import Healing, Standing, decide

J, T = Standing(0, False), Standing(7, False, torn=True)


def H(committed):  # noqa: N802 - a holder
    return Standing(committed, True)


@pytest.mark.parametrize(
    ("standings", "healing"),
    [
        ([J], Healing(0, 0, (), fresh=True)),
        ([J, J, J], Healing(0, 0, (1, 2), fresh=True)),
        ([H(5), H(5)], Healing(5, 0, (), fresh=False)),
        ([H(5), H(6), H(6)], Healing(6, 1, (0,), fresh=False)),
        ([H(6), J, H(5)], Healing(6, 0, (1, 2), fresh=False)),
        ([J, H(0)], Healing(0, 1, (0,), fresh=False)),
        ([T, H(3)], Healing(3, 1, (0,), fresh=False)),
        ([T, J], None),
        ([T], None),
    ],
)
def test_the_furthest_holder_is_right_and_the_lowest_of_them_gives(standings, healing):
    assert decide(standings) == healing
