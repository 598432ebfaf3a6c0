"""Ratios of sums in an evaluation: floats are scaled to the first size, and many counts are not."""

from elastane.synchrony.evaluation_sums import EvaluationSums
from elastane.synchrony.operations import Signature, Site

FLOATS = Signature("allreduce", elements=20, reduction="sum", site=Site.FIRST_SIZE)
COUNTS = Signature("allreduce", elements=20, reduction="sum", counts=True, site=Site.FIRST_SIZE)
OTHERS = Signature("allreduce", elements=2, reduction="sum", site=Site.FIRST_SIZE)
LABELS = Signature("allreduce", elements=20, reduction="max", counts=True, site=Site.FIRST_SIZE)


def reasons(*signatures, is_smaller=True):
    sums = EvaluationSums()
    return [sums.why_not_summed(each, is_smaller=is_smaller) for each in signatures]


def test_a_sum_of_floats_and_as_many_counts_are_a_ratio_in_either_order():
    for pair in ((FLOATS, COUNTS), (COUNTS, FLOATS)):
        first, second = reasons(*pair)
        assert not first and "20 floats and as many counts" in second
        assert not any(reasons(*pair, is_smaller=False))


def test_other_sums_of_an_evaluation_are_none():
    assert not any(reasons(COUNTS, OTHERS, COUNTS))
    assert not any(reasons(FLOATS, LABELS, FLOATS))
    sums = EvaluationSums()
    for each in (FLOATS, COUNTS):
        assert not sums.why_not_summed(each, is_smaller=True)
        sums.left()
