"""What a keeper knows of the bytes of its snapshots, and what it forgets of that when."""

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


def test_the_newest_is_in_doubt_until_it_has_passed():
    digests = known(ONE, TWO)
    doubt = digests.doubt()
    assert doubt is not None and (doubt.name, doubt.known) == (TWO, ("as it was",))
    digests.passed(doubt)
    assert digests.doubt() is None
    assert digests.is_checked(TWO) and not digests.is_checked(ONE)


def test_what_has_no_digest_cannot_be_in_doubt():
    digests = Digests()
    assert digests.doubt() is None
    digests.newest = ONE
    assert digests.doubt() is None


def test_after_a_worker_has_ended_what_had_passed_is_in_doubt_again():
    digests = known(ONE)
    digests.passed(digests.doubt())
    digests.worker_ended()
    assert not digests.is_checked(ONE)
    assert digests.doubt() is not None


def test_what_passes_while_a_worker_ends_may_have_been_changed_after_it_was_read():
    digests = known(ONE)
    doubt = digests.doubt()
    digests.worker_ended()
    digests.passed(doubt)
    assert not digests.is_checked(ONE)
    assert digests.doubt() is not None


def test_what_is_forgotten_comes_back_unknown():
    digests = known(ONE)
    digests.passed(digests.doubt())
    digests.forget(ONE)
    assert digests.of(ONE) is None and not digests.is_checked(ONE)
    digests.newest = ONE
    assert digests.doubt() is None
