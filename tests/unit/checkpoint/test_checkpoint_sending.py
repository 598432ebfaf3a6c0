"""A checkpoint is copied from one folder to others, over ranks that are threads here."""

import errno
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import elastane
from elastane.checkpoint.reading import CheckpointTransfer
from elastane.errors import CheckpointError
from elastane.observe import progress
from elastane.protocol.checkpoints import CHUNK_BYTES, MANIFEST
from elastane.storage import open_storage
from elastane.storage.repository import Repository

RANKS = 3
DEADLINE_S = 30.0


class Together:
    """Messages between threads, in turns."""

    def __init__(self):
        self.barrier = threading.Barrier(RANKS)
        self.said = [b""] * RANKS
        self.spread = 0


class Rank:
    """One thread's view of the exchange."""

    size = RANKS

    def __init__(self, together, rank):
        self.together, self.rank = together, rank

    def texts(self, said):
        self.together.said[self.rank] = said
        self.together.barrier.wait(DEADLINE_S)
        heard = [*self.together.said]
        self.together.barrier.wait(DEADLINE_S)
        return heard

    def spread(self, data, source):
        if self.rank == source:
            self.together.data = data
            self.together.spread += 1
        self.together.barrier.wait(DEADLINE_S)
        if self.rank != source:
            data.copy_(self.together.data)
        self.together.barrier.wait(DEADLINE_S)


@pytest.fixture
def folders(tmp_path):
    """Return a folder with a checkpoint of several chunks, and two without it."""
    values = CHUNK_BYTES * 6 // 4 + 12345
    state = {"x": torch.arange(values, dtype=torch.float32)}
    elastane.save_checkpoint(tmp_path / "0", state, step=3)
    for rank in (1, 2):
        (tmp_path / str(rank)).mkdir()
    return tmp_path


def brought(folders, storages=None):
    """Copy the checkpoint to ranks 1 and 2; return each rank's result."""
    name = next(path.name for path in (folders / "0").glob("step-*"))
    together = Together()
    storages = storages or [open_storage(str(folders / str(rank))) for rank in range(RANKS)]

    def one(rank):
        try:
            CheckpointTransfer(Rank(together, rank), storages[rank], name).run(0, [1, 2], 7)
        except CheckpointError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(RANKS) as pool:
        return [*pool.map(one, range(RANKS))], together, name


def test_a_checkpoint_is_copied_to_every_folder_that_lacks_it(folders):
    found, together, name = brought(folders)
    assert found == [""] * RANKS
    assert together.spread >= 7, "several chunks, and small files"
    files = sorted(path.name for path in (folders / "0" / name).iterdir())
    for rank in ("1", "2"):
        assert sorted(path.name for path in (folders / rank / name).iterdir()) == files
        for file in files:
            assert (folders / rank / name / file).read_bytes() == (
                folders / "0" / name / file
            ).read_bytes()
        repository = Repository(open_storage(str(folders / rank)))
        (published,) = repository.published()
        assert repository.verify(published, fresh=True) == ""


def test_the_first_rank_logs_how_much_was_copied(folders, monkeypatch, capsys):
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 0.0)
    brought(folders)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("elastane: copying step 7 to nodes: ") and " MB in " in line


def test_a_folder_that_fills_up_is_named_and_blocks_no_rank(folders):
    storages = [open_storage(str(folders / str(rank))) for rank in range(RANKS)]
    write = storages[1].write

    def full(path, regions, *more):
        if not path.endswith("__0_0.distcp"):
            return write(path, regions, *more)
        next(regions)
        raise OSError(errno.ENOSPC, "No space left on device", path)

    storages[1].write = full
    found, together, name = brought(folders, storages)
    assert together.spread >= 7, "the others heard it to its end"
    assert all("No space left" in each and "__0_0.distcp" in each for each in found)
    assert Repository(storages[1]).published() == []
    assert not (folders / "1" / name / MANIFEST).exists()


def test_an_unreadable_part_does_not_arrive_as_valid(folders):
    file = next((folders / "0").glob("step-*/__0_0.distcp"))
    with file.open("r+b") as data:
        data.truncate(CHUNK_BYTES * 3)
    found, _, _ = brought(folders)
    assert all("did not arrive as it was sent" in each for each in found)
    for rank in ("1", "2"):
        assert Repository(open_storage(str(folders / rank))).published() == []
