"""Bytes cut into console lines, and the time index of a file."""

from hypothesis import given
from hypothesis import strategies as st

from elastane.process.streams.bounds import INDEX_EPOCH_ENTRIES, LINE_BYTES_MAX, PARTIAL_WAIT_S
from elastane.process.streams.files import IndexWriter, TimeIndex
from elastane.process.streams.tailer import LONG_LINE_MARK, LineCutter

SECOND_NS = 10**9


def test_lines_come_whole_each_with_the_prefix():
    cutter = LineCutter(b"[0] ")
    assert cutter.feed(b"one\ntw", 0.0) == b"[0] one\n"
    assert cutter.feed(b"o\n\n", 0.1) == b"[0] two\n[0] \n"


def test_line_without_its_end_is_shown_after_a_wait_and_only_once():
    cutter = LineCutter(b"[0] ")
    assert cutter.feed(b"prompt> ", 10.0) == b""
    assert cutter.flush(10.0 + PARTIAL_WAIT_S / 2) == b""
    assert cutter.flush(10.0 + PARTIAL_WAIT_S) == b"[0] prompt> \n"
    assert cutter.flush(100.0, final=True) == b""


def test_wait_for_the_end_of_a_line_begins_with_that_line():
    cutter = LineCutter(b"")
    cutter.feed(b"old", 0.0)
    cutter.feed(b" done\nnew", 5.0)
    assert cutter.flush(5.1) == b""


def test_progress_bar_is_shown_in_its_last_state():
    cutter = LineCutter(b"[0] ")
    assert cutter.feed(b"10%\r50%\r100%\nwindows\r\n", 0.0) == b"[0] 100%\n[0] windows\n"


def test_long_line_is_cut_with_a_mark_and_held_in_bounded_memory():
    cutter = LineCutter(b"[0] ")
    shown = cutter.feed(b"x" * (3 * LINE_BYTES_MAX + 5), 0.0) + cutter.feed(b"\n", 0.0)
    lines = shown.splitlines()
    assert [line.endswith(LONG_LINE_MARK) for line in lines] == [True, True, True, False]
    assert sum(line.count(b"x") for line in lines) == 3 * LINE_BYTES_MAX + 5
    assert cutter.feed(b"y" * (10 * LINE_BYTES_MAX), 0.0)
    assert cutter.pending_bytes <= LINE_BYTES_MAX


@given(st.lists(st.binary(max_size=50), max_size=20))
def test_any_split_of_the_bytes_gives_the_same_lines(pieces):
    cutter = LineCutter(b"> ")
    shown = b"".join(cutter.feed(piece, 0.0) for piece in pieces) + cutter.flush(0.0, final=True)
    data = b"".join(pieces)
    together = LineCutter(b"> ")
    assert shown == together.feed(data, 0.0) + together.flush(0.0, final=True)
    has_partial = data != b"" and not data.endswith(b"\n")
    assert shown.count(b"\n") == data.count(b"\n") + has_partial


def test_index_gives_the_time_of_a_byte(tmp_path):
    log = tmp_path / "stdout.log"
    index = IndexWriter(log, 0.1)
    index.open()
    index.note(100, 1 * SECOND_NS)
    index.note(300, 2 * SECOND_NS)
    index.close()
    read = TimeIndex.load(log)
    assert [read.time_ns(offset) for offset in (0, 99, 100, 299, 300)] == [
        SECOND_NS,
        SECOND_NS,
        2 * SECOND_NS,
        2 * SECOND_NS,
        2 * SECOND_NS,
    ]


def test_torn_index_and_a_clock_set_back_only_make_times_coarser(tmp_path):
    log = tmp_path / "stdout.log"
    index = IndexWriter(log, 0.1)
    index.open()
    index.note(100, 5 * SECOND_NS)
    index.note(200, 3 * SECOND_NS, final=True)
    index.close()
    with (tmp_path / "stdout.log.idx").open("ab") as file:
        file.write(b"torn")
    read = TimeIndex.load(log)
    assert read.time_ns(150) == 5 * SECOND_NS


def test_missing_index_gives_the_time_of_the_last_change(tmp_path):
    log = tmp_path / "stdout.log"
    log.write_text("x\n")
    assert TimeIndex.load(log).time_ns(0) == log.stat().st_mtime_ns


def test_index_of_a_file_that_grows_for_ever_thins_out(tmp_path):
    log = tmp_path / "stdout.log"
    index = IndexWriter(log, 0.1)
    index.open()
    looks = 16 * INDEX_EPOCH_ENTRIES
    noted = sum(index.note(look + 1, look * SECOND_NS // 10) for look in range(looks))
    index.close()
    assert noted < 5 * INDEX_EPOCH_ENTRIES
    assert (tmp_path / "stdout.log.idx").stat().st_size == 16 * noted
