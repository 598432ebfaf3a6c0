"""When the writer of a last gasp stands in for others, whose parts it has copies of."""

import pytest
from keeper_support import SLOT_BYTES, persist_to, published

from elastane.core.checkpoints import Key
from elastane.core.snapshots import Name
from elastane.keeper.arena import close_all, make_slot
from elastane.keeper.writing import Failure, Order, Source, Writer, Written


@pytest.fixture
def order(tmp_path):
    made = []

    def make(part, *others, past=False):
        begin, end = part * SLOT_BYTES, (part + 1) * SLOT_BYTES
        share = {"part": part, "parts": 2, "small": part == 0, "wait_s": 0.05}
        ranges = ((f"__{part}_0.distcp", begin, end),)
        made.append(make_slot(SLOT_BYTES))
        return Order(
            name=Name(Key(0, 1, 0, 7), "00000007"),
            persist=persist_to(tmp_path, ranges=ranges, **share),
            sources=(Source(begin, end, made[-1]),),
            files={"state.msgpack": b"7"},
            streams=b"",
            stop=lambda: False,
            hurry=lambda: False,
            is_past=lambda: past,
            others=others,
        )

    yield make
    close_all(made)


def parts_in(folder):
    return sorted(path.name for path in folder.glob("step-*/*.distcp"))


def test_who_has_a_copy_writes_the_part_that_has_not_come(order, tmp_path):
    size = 2 * SLOT_BYTES + len(b"7")
    assert Writer().gasp(order(0, order(1))) == Written(size, (0, 1))
    assert published(tmp_path) == [(7, "step")]


def test_nobody_stands_in_where_workers_have_gone_on_from_it(order, tmp_path):
    with pytest.raises(Failure) as failed:
        Writer().gasp(order(0, order(1), past=True))
    assert failed.value.slug == "checkpoint-incomplete"
    assert parts_in(tmp_path) == ["__0_0.distcp"]


def test_nobody_stands_in_for_one_that_has_come(order, tmp_path):
    with pytest.raises(Failure):
        Writer().gasp(order(1))
    written = Writer().gasp(order(0, order(1)))
    assert written.parts == (0,) and published(tmp_path) == [(7, "step")]
