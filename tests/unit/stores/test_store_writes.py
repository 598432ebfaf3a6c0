"""`write_expecting`: a write whose refusal does not hold the current entry."""

import asyncio

import pytest

from elastane.errors import StoreError
from elastane.stores import ConflictError, Entry, write_expecting


def written(expected_version, writes, reads):
    """The result of a write against a store that gives these answers, in this order."""
    answers, entries = iter(writes), iter(reads)

    async def write():
        return next(answers)

    async def get():
        return next(entries)

    return asyncio.run(write_expecting(expected_version, write, get, "job/record", "a store"))


def test_a_refused_creation_is_retried_if_the_key_is_gone_by_then():
    assert written(0, [None, Entry(b"ours", 7)], [None]) == Entry(b"ours", 7)


@pytest.mark.parametrize(
    ("expected_version", "current"), [(0, Entry(b"theirs", 5)), (4, Entry(b"theirs", 5)), (4, None)]
)
def test_a_conflict_holds_the_current_entry_and_is_not_retried(expected_version, current):
    with pytest.raises(ConflictError) as failed:
        written(expected_version, [None], [current])
    assert failed.value.current == current


def test_a_key_that_others_create_and_delete_without_end_is_reported_as_busy():
    with pytest.raises(StoreError, match="creates and deletes job/record again and again") as one:
        written(0, [None] * 1000, [None] * 1000)
    assert one.value.slug == "store-busy"
