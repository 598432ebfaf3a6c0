"""Reading the ring of collectives, also while it is written or after it was damaged."""

from __future__ import annotations

import os
import random
import sys

import pytest

from elastane.process.collective_ring import CallSites, write_board
from elastane.process.status_page import StatusPage, WorkerPage
from elastane.protocol.ring import (
    BOARD_AT,
    GROUP_SHIFT,
    OPERATIONS,
    RECORD,
    RECORDS,
    RING_BYTES,
    SITE_BYTES,
    SITE_SHIFT,
    SITES,
    SITES_AT,
    Board,
    GroupBoard,
    Position,
    ranks_of,
    read_ring,
    spans,
)


def record(memory, number, *, operation=1, returned=0, group=0, site=0):
    which = group << GROUP_SHIFT | site << SITE_SHIFT | operation
    at = number % RECORDS * RECORD.size
    RECORD.pack_into(memory, at, number, which, 28, number, 100 + number, returned, 0, number)


def test_the_last_calls_are_read_in_their_order():
    memory = bytearray(RING_BYTES)
    for number in range(1, RECORDS + 10):
        record(memory, number, returned=number, group=3)
    calls = read_ring(bytes(memory), RECORDS + 9).calls
    assert [call.number for call in calls] == [*range(10, RECORDS + 10)]
    last = calls[-1]
    assert (last.operation, last.nbytes, last.group, last.count) == (
        "all_reduce",
        28,
        3,
        last.number,
    )
    assert (last.entered_ns, last.returned_ns) == (100 + last.number, last.number)


def test_a_record_that_was_being_written_is_left_out():
    """The writer may be killed after any byte of it."""
    for cut in range(RECORD.size):
        memory = bytearray(RING_BYTES)
        record(memory, 5)
        before = bytes(memory)
        record(memory, 5 + RECORDS, operation=2)
        at = 5 * RECORD.size
        torn = memory[: at + cut] + before[at + cut :]
        calls = read_ring(bytes(torn), 5 + RECORDS).calls
        whole = [call.operation for call in calls]
        assert whole == (["broadcast"] if torn == memory else []), cut


def test_a_faulty_worker_can_write_anything():
    random_bytes = random.Random(5).randbytes
    for _ in range(50):
        ring = read_ring(random_bytes(RING_BYTES), 1 << 40)
        assert not ring.calls
        assert ring.board == Board()
    memory = bytearray(RING_BYTES)
    record(memory, 1, operation=len(OPERATIONS))
    record(memory, 2, site=SITES + 1)
    [call] = read_ring(bytes(memory), 2).calls
    assert (call.number, call.site) == (2, "")


@pytest.mark.parametrize("damage", [0, 8, 20])
def test_a_board_is_read_whole_or_not_at_all(damage):
    memory = bytearray(RING_BYTES)
    board = Board(groups={"0": GroupBoard(position=Position(7, 6), ranks="0-3")}, where="here")
    assert write_board(memoryview(memory), board)
    assert read_ring(bytes(memory), 0).board == board
    memory[BOARD_AT + damage] ^= 1
    assert read_ring(bytes(memory), 0).board == Board()


def test_a_board_that_is_too_long_is_not_written():
    memory = bytearray(RING_BYTES)
    names = {f"{number:0180}": GroupBoard(position=Position(1, 1)) for number in range(400)}
    assert not write_board(memoryview(memory), Board(groups=names))
    assert read_ring(bytes(memory), 0).board == Board()


def test_the_agent_reads_what_the_worker_wrote():
    page = StatusPage.create()
    worker = WorkerPage.open(os.dup(page.fd))
    assert worker.records
    record(worker.ring_memory, 1, site=CallSites(worker.ring_memory).number(sys._getframe()))
    worker.ring_words[0] = 1
    [call] = page.ring().calls
    assert call.site.startswith("test_ring.py:")
    assert page.moves[0] == 1
    page.close()


@pytest.mark.parametrize(
    ("name", "place"), [("__main__", "train.py:2"), ("lib.train", "test_ring.py")]
)
def test_a_library_that_is_the_program_has_the_line_that_calls(name, place):
    """Started by -m; the frames above it are of the interpreter. Other libraries have a caller."""
    frames = []
    library = {"__name__": name, "note": lambda: frames.append(sys._getframe(1))}
    code = compile("\nnote()", "/usr/lib/python3.11/site-packages/lib/train.py", "exec")
    exec(code, library)
    memory = memoryview(bytearray(RING_BYTES))
    CallSites(memory).number(frames[-1])
    shown = bytes(memory[SITES_AT + SITE_BYTES : SITES_AT + 2 * SITE_BYTES])
    assert shown.startswith(place.encode())


def test_more_lines_than_the_table_has_rows_have_no_site():
    sites = CallSites(memoryview(bytearray(RING_BYTES)))
    numbers = [sites._add(f"train.py:{line}") for line in range(SITES + 5)]
    assert numbers[: SITES - 1] == [*range(1, SITES)]
    assert not any(numbers[SITES - 1 :])
    assert sites._add("train.py:0") == 1


def test_spans_name_ranks_both_ways():
    for ranks in ([], [3], [0, 1, 2], [0, 2, 3, 9]):
        assert ranks_of(spans(ranks), 10) == (frozenset(ranks) or frozenset(range(10)))
    assert spans([5, 0, 2, 1]) == "0-2,5"
    assert ranks_of("0-99999999999", 4) == {0, 1, 2, 3}
    assert ranks_of("a-b", 4) == frozenset()
