"""The order of checkpoints, their names, and which records are valid."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastane.protocol.checkpoints import (
    CHUNK_BYTES,
    FORMAT,
    About,
    CheckpointPart,
    FileRecord,
    Key,
    Manifest,
    chunks_of,
    era_beyond,
    fault,
    folder_name,
    is_file_name,
    parse_folder,
    part_name,
)
from elastane.protocol.limits import COUNT_MAX, NAME_CHARS_MAX

ABOUT = About("job", 2, 0.0, {}, "step")
KEY = Key(0, 3, 1, 12800)
FOLDER = "step-000000012800.e0000.r000003.a01.4f3a9c21"
counts = st.integers(0, 1 << 40) | st.integers(0, 3)
keys = st.builds(Key, counts, counts, counts, counts)
nonces = st.text("0123456789abcdef", min_size=8, max_size=8)
DIGEST = "0" * 32


def test_the_order_is_of_era_round_attempt_and_step_and_of_nothing_else():
    newest_last = [Key(0, 1, 0, 900), Key(0, 1, 1, 5), Key(0, 2, 0, 3), Key(1, 1, 0, 1)]
    assert sorted([newest_last[at] for at in (2, 0, 3, 1)]) == newest_last
    assert Key(0, 2, 0, 3).fence == (0, 2, 0)


@given(keys, nonces)
def test_a_folder_name_is_parsed_back_to_its_key_and_nonce(key, nonce):
    assert parse_folder(folder_name(key, nonce)) == (key, nonce)


def test_the_name_of_a_folder_is_as_documented():
    assert folder_name(KEY, "4f3a9c21") == FOLDER
    assert part_name(0, 2) == "part-00000-of-00002.json"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "step-12800",
        "step-0000000012800.e0000.r000003.a01.4f3a9c21",  # a zero more: another name for it
        FOLDER.upper(),
        FOLDER + "\n",
        FOLDER + "/",
        "../" + FOLDER,
        FOLDER[:-1],
        FOLDER.replace("r000003", "r00000３"),
        f"step-{COUNT_MAX + 1:012d}.e0000.r000003.a01.4f3a9c21",
        "step--00000012800.e0000.r000003.a01.4f3a9c21",
    ],
)
def test_any_other_name_is_not_the_name_of_a_save(name):
    assert parse_folder(name) is None


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a/b", "/etc/passwd", "../x", "a\0b", "a\n", "a b", "ä", "x" * 201, "a\\b"],
)
def test_a_name_that_leads_to_another_folder_is_not_a_file_name(name):
    assert not is_file_name(name)
    record = {"name": name, "size_bytes": 0, "digests": []}
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(record, FileRecord)


@pytest.mark.parametrize(
    "name", [".metadata", "__0_0.distcp", "part-00000-of-00002.json", "...", "x" * NAME_CHARS_MAX]
)
def test_names_of_files_are_one_component_of_a_path(name):
    assert is_file_name(name)
    assert msgspec.convert({"name": name, "size_bytes": 0, "digests": []}, FileRecord).name == name


@pytest.mark.parametrize(
    "change",
    [
        {"size_bytes": -1},
        {"size_bytes": 1 << 60},
        {"size_bytes": 1.5},
        {"digests": ["0" * 31]},
        {"digests": ["G" * 32]},
        {"digests": ["0" * 32 + "\n"]},
        {"more": 1},
    ],
)
def test_a_record_of_impossible_values_is_refused(change):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"name": "a", "size_bytes": 0, "digests": []} | change, FileRecord)


def manifest(*files, key=KEY, nonce="4f3a9c21"):
    return Manifest(FORMAT, key, nonce, ABOUT, files)


def test_a_record_is_only_valid_in_its_own_folder():
    assert fault(manifest(), FOLDER) == ""
    assert "another folder" in fault(manifest(nonce="00000000"), FOLDER)
    assert "another folder" in fault(manifest(key=Key(0, 3, 1, 12801)), FOLDER)


def test_a_record_that_contradicts_itself_is_invalid():
    twice = FileRecord("a", 0, ())
    assert "twice" in fault(manifest(twice, twice), FOLDER)
    assert "twice" in fault(manifest(FileRecord("manifest.json", 0, ())), FOLDER)
    assert "digests" in fault(manifest(FileRecord("a", CHUNK_BYTES + 1, (DIGEST,))), FOLDER)
    assert fault(manifest(FileRecord("a", CHUNK_BYTES + 1, (DIGEST, DIGEST))), FOLDER) == ""
    part = CheckpointPart(2, 2, (), KEY, "4f3a9c21", ABOUT)
    assert "part 2 of only 2" in fault(part, FOLDER)


def test_a_file_has_a_digest_for_each_chunk_begun():
    sizes = (0, 1, CHUNK_BYTES, CHUNK_BYTES + 1)
    assert [chunks_of(size) for size in sizes] == [0, 1, 1, 2]


@given(st.none() | st.tuples(counts, counts, counts), counts, counts)
def test_a_run_gets_the_smallest_era_that_orders_it_after_published_checkpoints(
    newest, round, attempt
):
    era = era_beyond(newest, round, attempt)
    if newest is None:
        assert era == 0
    else:
        assert (era, round, attempt) > newest
        assert era == newest[0] or (newest[0], round, attempt) <= newest
