"""Which snapshots a server has verified, and when it discards a verification."""

from elastane.protocol.checkpoints import Key
from elastane.snapshots.digests import Digests
from elastane.snapshots.rules.slot_table import Name

ONE, TWO = (Name(Key(0, 1, 0, step), "") for step in (1, 2))


def known(*names):
    digests = Digests()
    for name in names:
        digests.add(name, ("as it was",))
        digests.newest = name
    return digests


def test_the_newest_snapshot_is_unverified_until_its_digest_matched():
    digests = known(ONE, TWO)
    doubt = digests.doubt()
    assert doubt is not None and (doubt.name, doubt.known) == (TWO, ("as it was",))
    digests.passed(doubt)
    assert digests.doubt() is None
    assert digests.is_checked(TWO) and not digests.is_checked(ONE)


def test_a_snapshot_without_a_digest_needs_no_verification():
    digests = Digests()
    assert digests.doubt() is None
    digests.newest = ONE
    assert digests.doubt() is None


def test_a_workers_end_discards_verifications():
    digests = known(ONE)
    digests.passed(digests.doubt())
    digests.worker_ended()
    assert not digests.is_checked(ONE)
    assert digests.doubt() is not None


def test_a_verification_during_a_workers_end_does_not_count():
    digests = known(ONE)
    doubt = digests.doubt()
    digests.worker_ended()
    digests.passed(doubt)
    assert not digests.is_checked(ONE)
    assert digests.doubt() is not None


def test_a_removed_snapshot_has_no_digest():
    digests = known(ONE)
    digests.passed(digests.doubt())
    digests.forget(ONE)
    assert digests.of(ONE) is None and not digests.is_checked(ONE)
    digests.newest = ONE
    assert digests.doubt() is None
