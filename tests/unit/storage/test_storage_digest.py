"""Digests are those of a file's chunks, for any layout of its bytes in memory."""

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from elastane.protocol.checkpoints import CHUNK_BYTES
from elastane.storage import digest
from elastane.storage.digest import chunks, digest_of, record_of

pieces = st.lists(st.binary(max_size=40), max_size=12)


@given(pieces)
def test_a_digest_is_of_the_bytes_and_not_of_how_they_come(regions):
    assert digest_of(regions) == xxhash.xxh3_128(b"".join(regions)).hexdigest()


@given(pieces, st.integers(1, 30))
def test_chunks_hold_all_bytes_in_order_each_full_but_the_last(regions, chunk_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digest, "CHUNK_BYTES", chunk_bytes)
        found = [b"".join(chunk) for chunk in chunks(regions)]
    whole = b"".join(regions)
    assert found == [whole[at : at + chunk_bytes] for at in range(0, len(whole), chunk_bytes)]


def test_a_record_has_a_digest_for_each_chunk():
    first, second = bytes(CHUNK_BYTES), b"tail"
    record = record_of("a", [first[:7], first[7:], second])
    assert record.size_bytes == CHUNK_BYTES + 4
    assert record.digests == (
        xxhash.xxh3_128(first).hexdigest(),
        xxhash.xxh3_128(second).hexdigest(),
    )
