"""The samples that lost members had in a step are divided among the others in that step."""

from elastane.data.ledger import Ledger


def test_positions_that_lost_members_had_are_dealt_again_each_once():
    ledger = Ledger(90, 12)
    lost = ((12, 16), (20, 24))
    shares = [ledger.deal_again(8, lost, rank, 3) for rank in range(3)]
    dealt = [position for share in shares for span in share.spans for position in range(*span)]
    assert dealt == [*range(12, 16), *range(20, 24)]
    assert {share.epoch for share in shares} == {1}
    assert sum(share.weight for share in shares) == 3


def test_a_share_of_no_lost_positions_reads_one_of_them_with_weight_0():
    ledger = Ledger(90, 12)
    shares = [ledger.deal_again(0, ((5, 6),), rank, 2) for rank in range(2)]
    assert [share.samples for share in shares] == [0, 1]
    assert [share.reads for share in shares] == [((5, 6),), ((5, 6),)]
    assert shares[0].weight == 0
