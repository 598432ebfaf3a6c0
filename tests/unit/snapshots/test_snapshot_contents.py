"""The pieces of local workers make one snapshot; inconsistent pieces are refused."""

from __future__ import annotations

import msgspec
import pytest

from elastane.protocol.checkpoints import Key
from elastane.snapshots import messages
from elastane.snapshots.contents import Contents, Layouts
from elastane.snapshots.limits import LAYOUTS_MAX
from elastane.snapshots.messages import (
    LayoutFiles,
    PersistRequest,
    SaveFailed,
    Snapshot,
    WriteProgress,
)


def persist(**more):
    given = {"where": "/ckpt", "job": "j", "world": 2, "versions": {}, "reason": "step"}
    return PersistRequest(**{**given, "ranges": (("a.distcp", 0, 10),), **more})


def piece(local=0, **more):
    given = {"key": Key(0, 1, 0, 7), "nonce": "0000abcd", "local": local, "locals": 2}
    given |= {"first": local * 10, "end": local * 10 + 10, "image_bytes": 20}
    return Snapshot(**{**given, **more})


def contents(*pieces):
    made = Contents()
    for one in pieces:
        made.pieces[one.local] = one
    return made


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"first": 5, "end": 4}, "bytes 5 to 4"),
        ({"end": 21}, "of an image of 20"),
        ({"layout": "unknown"}, "was not given before"),
        ({"persist": persist(where="here")}, "no absolute path"),
        ({"image_bytes": 30}, "disagree"),
        ({"locals": 3}, "disagree"),
        ({"replicated": False}, "disagree"),
    ],
)
def test_an_inconsistent_piece_is_refused(wrong, words):
    made, layouts = contents(piece(0)), Layouts()
    made.check(piece(1), layouts)
    with pytest.raises(ValueError, match=words):
        made.check(piece(1, **wrong), layouts)


@pytest.mark.parametrize("where", ["s3://bucket/run", "/nfs/run", "file:///run"])
def test_a_place_is_absolute_or_a_url(where):
    contents(piece(0)).check(piece(1, persist=persist(where=where)), Layouts())


def test_the_small_files_of_all_workers_are_put_together():
    layouts = Layouts()
    layouts.add(LayoutFiles("L", {"layout.json": b"l", "both": b"of the layout"}))
    made = contents(
        piece(0, layout="L", files={"state": b"0"}), piece(1, files={"state": b"1", "more": b"1"})
    )
    assert made.files(layouts) == {
        "layout.json": b"l",
        "both": b"of the layout",
        "state": b"0",
        "more": b"1",
    }
    assert made.own_files() == {"state": b"0", "more": b"1"}
    assert made.layout_files(layouts) == {"layout.json": b"l", "both": b"of the layout"}
    assert contents(piece(0)).layout_files(layouts) == {}
    assert made.layouts == {"L"}


def test_the_ranges_of_all_workers_are_written_each_once():
    made = contents(
        piece(0, persist=persist(ranges=(("a", 0, 5), ("b", 5, 10)))),
        piece(1, persist=persist(ranges=(("b", 5, 10), ("c", 10, 20)))),
    )
    assert made.persist().ranges == (("a", 0, 5), ("b", 5, 10), ("c", 10, 20))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"where": "/other"}, "different checkpoints"),
        ({"part": 1, "parts": 2}, "different checkpoints"),
        ({"ranges": (("a.distcp", 3, 9),)}, "different ranges into one file"),
    ],
)
def test_contradicting_write_requests_are_refused(other, words):
    made = contents(piece(0, persist=persist()), piece(1, persist=persist(**other)))
    with pytest.raises(ValueError, match=words):
        made.persist()


def test_the_final_flush_is_given_by_the_layout_or_a_sole_writers_request():
    layouts = Layouts()
    asked = contents(piece(0, persist=persist()), piece(1, persist=persist()))
    assert asked.flush_request(layouts) == persist()
    shared = persist(part=0, parts=2)
    assert (
        contents(piece(0, persist=shared), piece(1, persist=shared)).flush_request(layouts) is None
    )
    assert contents(piece(0, persist=persist()), piece(1)).flush_request(layouts) is None
    layouts.add(LayoutFiles("L", {}, None))
    assert contents(piece(0, layout="L"), piece(1)).flush_request(layouts) is None
    layouts.add(LayoutFiles("L", {}, shared))
    assert contents(piece(0, layout="L"), piece(1)).flush_request(layouts) == shared


@pytest.mark.parametrize(
    ("span", "is_enough"),
    [((0, 20), True), ((5, 15), True), ((20, 20), True), ((0, 21), False), ((19, 30), False)],
)
def test_the_final_flush_needs_all_its_bytes(span, is_enough):
    layouts, wish = Layouts(), persist(ranges=(("a.distcp", *span),))
    layouts.add(LayoutFiles("L", {}, wish))
    found = contents(piece(0, layout="L"), piece(1)).flush_request(layouts)
    assert found == (wish if is_enough else None)


def test_layouts_are_kept_while_snapshots_refer_to_them_and_a_few_more():
    layouts = Layouts()
    for number in range(3 * LAYOUTS_MAX):
        layouts.add(LayoutFiles(str(number), {}))
        layouts.trim({"0", "1"})
    assert layouts.get("0") is not None
    assert layouts.get("1") is not None
    assert layouts.get("2") is None
    assert layouts.get(str(3 * LAYOUTS_MAX - 1)) is not None
    assert len(layouts._by_digest) == LAYOUTS_MAX + 2


def test_progress_reports_the_failure_of_a_step():
    one, two = Key(0, 1, 0, 1), Key(0, 1, 0, 2)
    assert WriteProgress().failed is None
    assert not WriteProgress().busy
    assert WriteProgress(waiting=one).busy
    progress = WriteProgress(failures=(SaveFailed(one, "x", "s"), SaveFailed(two, "y", "s")))
    assert progress.failed.reason == "y"
    assert progress.failure_of(one).reason == "x"
    assert progress.failure_of(Key(0, 1, 0, 3)) is None
    done = msgspec.structs.replace(progress, published=two)
    assert done.failure_of(one) is None


@pytest.mark.parametrize(
    "request_",
    [
        messages.Slots(0, 1),
        messages.Slots(1 << 20, 1),
        messages.Slots(1, -1),
        messages.Keep(-1, piece(0)),
        messages.Keep(0, piece(0, nonce="../x")),
        messages.Keep(0, piece(0, files={"../x": b""})),
        messages.Keep(0, piece(0, files={"..": b""})),
        messages.Keep(0, piece(0, persist=persist(ranges=(("/etc/x", 0, 1),)))),
        messages.Keep(0, piece(0, persist=persist(parts=0))),
        messages.Keep(0, piece(0, persist=persist(wait_s=float("nan")))),
        messages.Keep(0, piece(0, first=-1)),
        messages.LayoutFiles("L" * 1000, {}),
        messages.Hello(1, "x" * 10_000),
    ],
    ids=lambda request: type(request).__name__,
)
def test_a_request_out_of_bounds_is_refused(request_):
    with pytest.raises(ValueError, match="no request of this version"):
        messages.request_of(messages.encode(request_))


def test_requests_and_answers_survive_encoding():
    for request in (messages.Hello(1), messages.Keep(3, piece(0, persist=persist()))):
        assert messages.request_of(messages.encode(request)) == request
    answer = messages.SnapshotRefused(12, "no room")
    assert messages.answer_of(messages.encode(answer)) == answer
    with pytest.raises(ValueError, match="no answer"):
        messages.answer_of(b"\xc1")
