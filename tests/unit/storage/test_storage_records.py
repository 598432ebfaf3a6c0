"""Every change of any byte of a record is found."""

import msgspec
import pytest
from small_saves import ABOUT, key_of

from elastane.protocol.checkpoints import FORMAT, CheckpointPart, FileRecord, Manifest, folder_name
from elastane.storage.digest import digest_of
from elastane.storage.publishing import NewerFormatError, RecordError, decode, encode

KEY = key_of(12)
FOLDER = folder_name(KEY, "00c0ffee")
FILES = (FileRecord("__0_0.distcp", 7, ("0" * 32,)), FileRecord("empty", 0, ()))
MANIFEST = Manifest(FORMAT, KEY, "00c0ffee", ABOUT, FILES)
PART = CheckpointPart(0, 1, FILES, KEY, "00c0ffee", ABOUT)


def sealed(body):
    """Return a forged record with a right digest."""
    content = msgspec.json.encode(body)
    return b'{"digest":"%s","body":%s}' % (digest_of([content]).encode(), content)


def changed(**changes):
    return sealed(msgspec.to_builtins(MANIFEST) | changes)


@pytest.mark.parametrize("record", [MANIFEST, PART], ids=["manifest", "part"])
def test_a_record_comes_back_and_is_always_the_same_bytes(record):
    assert decode(encode(record), type(record), FOLDER) == record
    assert encode(decode(encode(record), type(record), FOLDER)) == encode(record)


@pytest.mark.parametrize("record", [MANIFEST, PART], ids=["manifest", "part"])
def test_every_bit_flipped_in_turn_is_found(record):
    content = bytearray(encode(record))
    for at in range(len(content)):
        for bit in range(8):
            content[at] ^= 1 << bit
            with pytest.raises(RecordError):
                decode(bytes(content), type(record), FOLDER)
            content[at] ^= 1 << bit
    assert decode(bytes(content), type(record), FOLDER) == record


@pytest.mark.parametrize("record", [MANIFEST, PART], ids=["manifest", "part"])
def test_a_record_that_is_cut_or_lengthened_anywhere_is_refused(record):
    content = encode(record)
    for length in range(len(content)):
        with pytest.raises(RecordError):
            decode(content[:length], type(record), FOLDER)
    for more in (b" ", b"\n", b"\0", b"}", content):
        with pytest.raises(RecordError):
            decode(content + more, type(record), FOLDER)


def test_a_record_in_another_folder_is_refused():
    other = folder_name(key_of(13), "00c0ffee")
    with pytest.raises(RecordError, match="lies in another folder"):
        decode(encode(MANIFEST), Manifest, other)


def test_a_part_is_no_manifest_and_the_reverse():
    with pytest.raises(RecordError):
        decode(encode(PART), Manifest, FOLDER)
    with pytest.raises(RecordError):
        decode(encode(MANIFEST), CheckpointPart, FOLDER)


def test_a_newer_format_is_named_whatever_else_it_holds():
    for body in ({"format": FORMAT + 1}, {"format": 99, "key": "of another kind", "more": []}):
        with pytest.raises(NewerFormatError, match="newer elastane"):
            decode(sealed(body), Manifest, FOLDER)


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "..", "a/b", "", "a\0", "manifest.json"]
)
def test_names_that_lead_elsewhere_are_refused_though_the_digest_is_right(name):
    with pytest.raises(RecordError):
        decode(changed(files=[{"name": name, "size_bytes": 0, "digests": []}]), Manifest, FOLDER)


@pytest.mark.parametrize(
    "file",
    [
        {"name": "a", "size_bytes": 1 << 62, "digests": []},
        {"name": "a", "size_bytes": 1 << 49, "digests": ["0" * 32]},
        {"name": "a", "size_bytes": -1, "digests": []},
        {"name": "a", "size_bytes": 10**30, "digests": []},
    ],
)
def test_huge_sizes_are_refused_before_anything_is_made_for_them(file):
    with pytest.raises(RecordError):
        decode(changed(files=[file]), Manifest, FOLDER)


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"[]",
        b"{" * 100_000,
        b'{"format":1}',
        b'{"format":"1"}',
        b'{"format":1e400}',
        b"\xff",
    ],
)
def test_garbage_with_a_right_digest_is_refused(body):
    with pytest.raises(RecordError):
        decode(b'{"digest":"%s","body":%s}' % (digest_of([body]).encode(), body), Manifest, FOLDER)
