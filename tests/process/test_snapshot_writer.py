"""The writer of a snapshot server: it writes copied parts for lost nodes, and is fenced off."""

import os

import pytest
from small_saves import opened, save
from snapshot_server_support import SLOT_BYTES, persist_to, published

from elastane.protocol.checkpoints import Key, part_name
from elastane.snapshots.messages import STREAMS_FILE
from elastane.snapshots.rules.slot_table import Name
from elastane.snapshots.shared_memory import Source, close_all, make_slot
from elastane.snapshots.writer import CheckpointWriter, WriteFailure, WriteOrder, Written


@pytest.fixture
def order(tmp_path):
    made = []

    def make(part, *others, past=False, **asked):
        begin, end = part * SLOT_BYTES, (part + 1) * SLOT_BYTES
        share = {"part": part, "parts": 2, "small": part == 0, "wait_s": 0.05}
        ranges = ((f"__{part}_0.distcp", begin, end),)
        made.append(make_slot(SLOT_BYTES))
        return WriteOrder(
            name=Name(Key(0, 1, 0, 7), "00000007"),
            began_s=0.0,
            persist=persist_to(tmp_path, ranges=ranges, **share),
            sources=(Source(begin, end, made[-1]),),
            files={"state.msgpack": b"7"},
            streams=b"",
            is_past=lambda: past,
            others=others,
            **{"stop": lambda: False, "hurry": lambda: False, **asked},
        )

    yield make
    close_all(made)


def parts_in(folder):
    return sorted(path.name for path in folder.glob("step-*/*.distcp"))


def test_the_holder_of_a_replica_writes_the_missing_part(order, tmp_path):
    size = 2 * SLOT_BYTES + len(b"7")
    assert CheckpointWriter().flush(order(0, order(1))) == Written(size, (0, 1))
    assert published(tmp_path) == [(7, "step")]


def test_no_missing_part_is_written_after_workers_continued(order, tmp_path):
    with pytest.raises(WriteFailure) as failed:
        CheckpointWriter().flush(order(0, order(1), past=True))
    assert failed.value.slug == "checkpoint-incomplete"
    assert parts_in(tmp_path) == ["__0_0.distcp"]


def test_a_part_that_has_come_is_not_written_from_a_replica(order, tmp_path):
    with pytest.raises(WriteFailure):
        CheckpointWriter().flush(order(1))
    written = CheckpointWriter().flush(order(0, order(1)))
    assert written.parts == (0,) and published(tmp_path) == [(7, "step")]


@pytest.mark.parametrize("during", ["mkdir", "stop", "hurry"])
def test_a_save_removed_by_a_later_round_is_fenced(order, tmp_path, monkeypatch, during):
    """The error is neither a missing file nor an unfinished writer: the round of the save is over.

    The save is removed after its folder is made, while its files are written, and after that.
    """
    repository, seen, mkdir = opened(tmp_path), [], os.mkdir
    repository.storage.place()

    def remove(*made, **where):
        if made:
            mkdir(*made, **where)
        if not seen:
            seen.append([path.name for path in tmp_path.glob("step-*/*")])
            save(repository, 3, round=2)
            repository.prune(1)
        return False

    if during == "mkdir":
        monkeypatch.setattr(os, "mkdir", remove)
    with pytest.raises(WriteFailure) as failed:
        CheckpointWriter().write(order(0, **({} if during == "mkdir" else {during: remove})))
    assert failed.value.slug == "checkpoint-fenced"
    assert failed.value.newer == Key(0, 2, 0, 3)
    all_of_it = ["__0_0.distcp", part_name(0, 2), "state.msgpack", STREAMS_FILE.format(0)]
    written = {"mkdir": [], "stop": all_of_it[:1], "hurry": all_of_it}
    assert sorted(seen[0]) == written[during]
    assert published(tmp_path) == [(3, "step")]
