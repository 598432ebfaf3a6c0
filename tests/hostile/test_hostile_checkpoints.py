"""A forged checkpoint with right digests is loaded whole or refused."""

from __future__ import annotations

import copy
import json
import os
import tracemalloc
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import elastane
from elastane.checkpoint.layout import Chunk, Tensor, lay_out, misfit
from elastane.checkpoint.small_files import LAYOUT, SMALL_BYTES_MAX, STATE, layout_from
from elastane.errors import CheckpointError, ElastaneError
from elastane.protocol.checkpoints import CHUNK_BYTES, FileRecord, Manifest, folder_name
from elastane.storage import Repository, open_storage
from elastane.storage.digest import digest_of, record_of
from elastane.storage.publishing import encode

SHAPES = {"w": (3, 4), "b": (5,), "scalar": (), "none": (0, 2)}
# Ten times what the small files of this checkpoint take when they are read.
PEAK_BYTES_MAX = 16 << 20


class Saved(dict[str, bytes]):
    """The files of a small checkpoint, by name."""

    def __repr__(self) -> str:
        return f"Saved({[*self]})"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    where = tmp_path_factory.mktemp("saved")
    state = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    elastane.save_checkpoint(where, {**state, "n": [1, "x"]}, step=3)
    (folder,) = where.glob("step-*")
    return Saved((path.name, path.read_bytes()) for path in folder.iterdir())


class Forger:
    """Writes checkpoints with any content and right digests."""

    def __init__(self, where: Path, files: dict[str, bytes]) -> None:
        self.where = where
        self._files = files
        body = json.loads(files["manifest.json"])["body"]
        self._manifest = msgspec.convert(body, Manifest)
        self.folder = where / folder_name(self._manifest.key, self._manifest.nonce)
        self.folder.mkdir()
        for name, content in files.items():
            (self.folder / name).write_bytes(content)

    def forge(self, **changed: bytes | FileRecord) -> None:
        """Replace files, named without their dots; the file of a FileRecord must exist already."""
        records = []
        for record in self._manifest.files:
            new = changed.get(record.name.partition(".")[0])
            if isinstance(new, bytes):
                (self.folder / record.name).write_bytes(new)
                new = record_of(record.name, [new])
            elif new is None and record.name in (LAYOUT, STATE):
                (self.folder / record.name).write_bytes(self._files[record.name])
            records.append(new or record)
        manifest = msgspec.structs.replace(self._manifest, files=tuple(records))
        (self.folder / "manifest.json").write_bytes(encode(manifest))

    def load(self) -> dict[str, object]:
        assert Repository(open_storage(str(self.where))).newest_valid().found is not None
        return elastane.load_checkpoint(self.where).state


@pytest.fixture
def forger(saved, tmp_path):
    return Forger(tmp_path, saved)


@pytest.fixture(scope="module")
def fuzzed(saved, tmp_path_factory):
    return Forger(tmp_path_factory.mktemp("fuzzed"), saved)


def layout_of(saved):
    return json.loads(saved[LAYOUT])


def test_pieces_that_overlap_leave_no_memory_unread(saved, forger):
    """Two halves become two copies of the first: sizes add up, and half the tensor is unread."""
    layout = layout_of(saved)
    _, b, scalar, none = layout["pieces"]
    layout["pieces"] = [[0, [0, 0], [3, 2], 0], [0, [0, 0], [3, 2], b[3]], b, scalar]
    b[3], scalar[3] = scalar[3], none[3]
    forger.forge(layout=json.dumps(layout).encode())
    with pytest.raises(CheckpointError) as refused:
        forger.load()
    assert refused.value.slug == "checkpoint-layout"


def test_a_file_of_one_gigabyte_without_content_costs_no_memory(forger):
    path = forger.folder / LAYOUT
    path.write_bytes(b"")
    os.truncate(path, 1 << 30)
    chunk = digest_of([bytes(CHUNK_BYTES)])
    forger.forge(layout=FileRecord(LAYOUT, 1 << 30, (chunk,) * ((1 << 30) // CHUNK_BYTES)))
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=str(SMALL_BYTES_MAX)):
            forger.load()
        assert tracemalloc.get_traced_memory()[1] < PEAK_BYTES_MAX
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "ranges",
    [
        [["../x", 0, 704]],
        [["__0_0.distcp", 0, 1 << 40]],
        [["__0_0.distcp", 100, 804]],
        [],
        [["layout.json", 0, 1]],
        [["manifest.json", 0, 1 << 60]],
    ],
)
def test_files_that_do_not_hold_the_image_are_refused(saved, forger, ranges):
    state = msgspec.msgpack.decode(saved[STATE])
    forger.forge(state=msgspec.msgpack.encode({**state, "ranges": ranges}))
    with pytest.raises(CheckpointError) as refused:
        forger.load()
    assert refused.value.slug == "checkpoint-layout"


@pytest.mark.parametrize(
    "kind", sorted(name for name, kind in vars(torch).items() if isinstance(kind, torch.dtype))
)
def test_a_tensor_of_any_kind_is_read_or_refused(saved, forger, kind):
    layout = layout_of(saved)
    layout["tensors"][0][1] = kind
    forger.forge(layout=json.dumps(layout).encode())
    accepted(forger)


def test_a_tree_that_copies_one_array_again_and_again_is_refused(saved, forger):
    state = msgspec.msgpack.decode(saved[STATE])
    array = ["a", "|u1", [48], 0]
    tree = msgspec.msgpack.encode(["d", [["x", ["l", [array] * 1000]]]])
    forger.forge(state=msgspec.msgpack.encode({**state, "tree": tree}))
    with pytest.raises(CheckpointError):
        forger.load()


NUMBERS = st.sampled_from(
    [-1, 0, 1, 2, 3, 4, 12, 64, 704, 4096, 1 << 40, 1 << 62, 1 << 63, 1 << 70]
)
TEXTS = st.sampled_from(["", "w", "float64", "qint8", "Tensor", "../x", "\0", "__0_0.distcp", "d"])
ANYTHING = st.one_of(
    NUMBERS, TEXTS, st.none(), st.booleans(), st.floats(), st.lists(NUMBERS, max_size=3)
)


def places(value, path=()):
    """Return the paths of all parts of a value."""
    found = [path] if path else []
    if isinstance(value, (dict, list)):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            found += places(each, (*path, key))
    return found


def mutated(data, value, packs=msgspec.json.encode):
    """Replace, repeat, exchange or remove some parts of a value."""
    value = copy.deepcopy(value)
    for _ in range(data.draw(st.integers(1, 3))):
        *path, last = data.draw(st.sampled_from(places(value)))
        holder = value
        for key in path:
            holder = holder[key]
        how = data.draw(st.sampled_from(["replace", "replace", "repeat", "remove"]))
        if how == "replace" or isinstance(holder, dict):
            holder[last] = data.draw(ANYTHING)
        elif how == "repeat":
            holder.insert(last, copy.deepcopy(holder[last]))
        else:
            del holder[last]
        if not places(value):
            break
    try:
        return packs(value)
    except (msgspec.MsgspecError, OverflowError):  # beyond what the format can say
        return b""


def accepted(forger):
    """Load a forged checkpoint; return False if it is refused with an error message."""
    try:
        state = forger.load()
    except ElastaneError as error:
        assert error.what and error.next_step
        return False
    assert isinstance(state, dict)
    return True


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_layout_is_refused_or_loads(saved, fuzzed, data):
    fuzzed.forge(layout=mutated(data, layout_of(saved)))
    accepted(fuzzed)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_state_beside_the_tensors_is_refused_or_loads(saved, fuzzed, data):
    state = msgspec.msgpack.decode(saved[STATE])
    state["tree"] = mutated(data, msgspec.msgpack.decode(state["tree"]), msgspec.msgpack.encode)
    if data.draw(st.booleans()):
        fuzzed.forge(state=msgspec.msgpack.encode(state))
    else:
        fuzzed.forge(state=mutated(data, state, msgspec.msgpack.encode))
    accepted(fuzzed)


@given(st.binary(max_size=200), st.sampled_from(["layout", "state"]))
@example(b"\xdd\xff\xff\xff\xff", "state")
@example(b"[" * 100_000, "layout")
@example(b"\x91" * 100_000, "state")
@settings(max_examples=50, deadline=None)
def test_any_bytes_are_refused_or_load(fuzzed, data, name):
    fuzzed.forge(**{name: data})
    accepted(fuzzed)


# The check of layouts alone.


def counted(layout):
    """Return, by counting, whether each value of each tensor lies in exactly one piece."""
    for number, tensor in enumerate(layout.tensors):
        count = torch.zeros(tensor.shape, dtype=torch.int64)
        for piece in layout.pieces:
            if piece.tensor == number:
                view = count
                for dim, (at, length) in enumerate(zip(piece.offsets, piece.shape, strict=True)):
                    view = view.narrow(dim, at, length)
                view += 1
        if not bool((count == 1).all()):
            return False
    return True


def grid(shape, rows, columns):
    """Return the chunks of a matrix on a mesh of workers."""
    high, wide = shape[0] // rows, shape[1] // columns
    places = [(r * high, c * wide) for r in range(rows) for c in range(columns)]
    return [[Chunk(0, place, (high, wide))] for place in places]


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_layout_that_is_accepted_holds_each_value_once(data):
    tensors = [Tensor("w", "float32", (6, 8))]
    layout = lay_out(tensors, grid((6, 8), *data.draw(st.sampled_from([(1, 1), (3, 2), (2, 4)]))))
    assert misfit(layout) == ""
    forged = mutated(data, msgspec.to_builtins(layout))
    try:
        found = layout_from(forged)
    except CheckpointError:
        return
    assert counted(found)


@pytest.mark.parametrize("at", range(6))
def test_a_piece_in_the_place_of_another_is_found(at):
    layout = lay_out([Tensor("w", "float32", (6, 8))], grid((6, 8), 3, 2))
    pieces = [*layout.pieces]
    other = pieces[(at + 1) % 6]
    pieces[at] = msgspec.structs.replace(pieces[at], offsets=other.offsets)
    forged = msgspec.structs.replace(layout, pieces=tuple(pieces))
    assert not counted(forged)
    assert "each of its values once" in misfit(forged)


def test_shards_that_overlap_are_refused_when_they_are_saved():
    halves = [[Chunk(0, (0, 0), (4, 8))], [Chunk(0, (2, 0), (4, 8))]]
    with pytest.raises(CheckpointError, match="each of its values once"):
        lay_out([Tensor("w", "float32", (6, 8))], halves)
