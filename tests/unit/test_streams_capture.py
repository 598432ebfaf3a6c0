"""Captured stderr: every byte reaches the console in order, and its tail is kept."""

import asyncio
import os
import pty
import threading
import time
from types import SimpleNamespace

import pytest

from elastane.process.streams import group
from elastane.process.streams.bounds import CAPTURE_TAIL_BYTES, PIPE_BYTES
from elastane.process.streams.capture import Capture, Pump
from elastane.process.streams.console import Console
from elastane.process.streams.files import last_lines
from elastane.process.streams.group import GroupStreams
from elastane.process.streams.plan import LogPlan
from elastane.protocol.model import Fence

DEADLINE_S = 90.0


@pytest.fixture
def sink():
    """A console that is a pipe, with a thread that reads it."""
    read, write = os.pipe()
    got = []
    gate = threading.Event()
    gate.set()

    def drain():
        while gate.wait(DEADLINE_S) and (data := os.read(read, 1 << 20)):
            got.append(data)

    thread = threading.Thread(target=drain, daemon=True)
    thread.start()
    console = Console(write)
    yield console, got, gate
    console.close(1.0)
    os.close(write)
    thread.join(DEADLINE_S)
    os.close(read)


def finish(pump):
    done = threading.Event()
    pump.stop(done.set)
    assert done.wait(DEADLINE_S)


def until(condition):
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def test_every_byte_arrives_in_order_and_memory_stays_bounded(sink):
    console, got, _ = sink
    pump, capture = Pump("test"), Capture(console)
    write = capture.open()
    pump.add(capture)
    block = b"".join(b"%06d a line of a certain length, and its end\n" % n for n in range(20_000))
    sent = 0
    for _ in range(16):
        at = 0
        while at < len(block):
            at += os.write(write, block[at:])
        sent += len(block)
    os.close(write)
    assert pump.drain(capture)
    tail = os.stat(capture.tail_path)
    assert tail.st_size == sent
    assert tail.st_blocks * 512 <= 4 * CAPTURE_TAIL_BYTES, "what was shown takes no memory"
    assert last_lines(capture.tail_path).endswith(
        "019999 a line of a certain length, and its end\n"
    )
    finish(pump)
    until(lambda: b"".join(got) == block * 16)


def test_a_line_without_its_end_is_shown_soon(sink):
    console, got, _ = sink
    pump, capture = Pump("test"), Capture(console)
    write = capture.open()
    pump.add(capture)
    os.write(write, b"password: ")
    until(lambda: b"".join(got) == b"password: ")
    os.close(write)
    finish(pump)


def test_lines_of_two_workers_do_not_tear_each_other(sink, monkeypatch):
    # On a loaded machine a line's end may come late, and its beginning is then displayed alone.
    monkeypatch.setattr("elastane.process.streams.capture.CAPTURE_PARTIAL_S", DEADLINE_S)
    console, got, _ = sink
    pump = Pump("test")
    captures = [Capture(console) for _ in range(2)]
    ends = [capture.open() for capture in captures]
    for capture in captures:
        pump.add(capture)

    def write(fd, letter):
        for _ in range(3000):
            os.write(fd, letter * 30)
            os.write(fd, letter * 30 + b"\n")
        os.close(fd)

    threads = [
        threading.Thread(target=write, args=(fd, letter))
        for fd, letter in zip(ends, (b"a", b"b"), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    finish(pump)
    # The console's queue is empty then; its reader may be behind.
    until(lambda: b"".join(got).count(b"\n") == 6000)
    lines = b"".join(got).splitlines()
    assert sorted(set(lines)) == [b"a" * 60, b"b" * 60] and len(lines) == 6000


def test_a_partial_line_waits_for_its_end_even_after_a_long_pause():
    shown = []
    console = SimpleNamespace(
        fd=-1, spare_bytes=PIPE_BYTES, offer=lambda data: shown.append(data) or True
    )
    capture = Capture(console)
    write = capture.open()
    os.write(write, b"half of ")
    capture.copy(1000.0)
    capture.flush(1000.01)
    os.write(write, b"a line\nand the next ")
    capture.copy(1000.02)
    capture.flush(1000.03)
    assert shown == [b"half of a line\n"]
    capture.flush(1001.0)
    assert shown[1:] == [b"and the next "]
    os.close(write)
    capture.close()


def test_a_full_console_blocks_the_worker_and_loses_nothing(sink):
    console, got, gate = sink
    gate.clear()
    pump, capture = Pump("test"), Capture(console)
    write = capture.open()
    pump.add(capture)
    os.set_blocking(write, False)
    sent = b""
    end_s = time.monotonic() + DEADLINE_S
    quiet = 0
    while quiet < 50:
        assert time.monotonic() < end_s
        line = b"%08d\n" % len(sent) * 100
        try:
            sent += line[: os.write(write, line)]
            quiet = 0
        except BlockingIOError:
            quiet += 1
            time.sleep(0.005)
    assert len(sent) < 3 * PIPE_BYTES
    # A worker that ends now is still drained, within a bound, so its last lines are known.
    os.close(write)
    assert not pump.drain(capture)
    with open(capture.tail_path, "rb") as tail:
        assert tail.read()[-1000:] == sent[-1000:]
    gate.set()
    finish(pump)
    until(lambda: b"".join(got) == sent)


def test_a_stuck_console_does_not_block_the_end(sink):
    console, got, gate = sink
    gate.clear()
    pump, capture = Pump("test"), Capture(console)
    write = capture.open()
    pump.add(capture)
    until(lambda: os.write(write, b"x" * 4095 + b"\n") and console.spare_bytes == 0)
    os.write(write, b"y" * 65536 + b"\n")
    os.close(write)
    finish(pump)
    gate.set()
    until(lambda: console.wait_empty(0.1))
    # If the console is full, the notice is counted as lost or displayed.
    assert b"".join(got)


def test_without_a_console_only_the_tail_is_kept():
    pump, capture = Pump("test"), Capture(None)
    write = capture.open()
    pump.add(capture)
    for number in range(1000):
        os.write(write, b"%d\n" % number)
    os.close(write)
    assert pump.drain(capture)
    assert last_lines(capture.tail_path).endswith("998\n999\n")
    finish(pump)
    assert not capture.is_open


def test_no_descriptor_and_no_thread_is_left():
    before = len(os.listdir("/proc/self/fd"))
    pump = Pump("test-left")
    for _ in range(8):
        capture = Capture(None)
        os.close(capture.open())
        pump.add(capture)
    finish(pump)
    until(lambda: "test-left" not in [thread.name for thread in threading.enumerate()])
    # descriptors of an earlier test may have been closed
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_limit_on_file_sizes_loses_the_tail_and_no_output(sink, monkeypatch):
    console, got, _ = sink
    pump, capture = Pump("test"), Capture(console)
    write = capture.open()

    def full(fd, end):
        raise OSError(27, "File too large")

    monkeypatch.setattr("elastane.process.streams.capture.punch_hole", full)
    pump.add(capture)
    data = b"0123456789\n" * 30_000
    os.write(write, data[: PIPE_BYTES // 2])
    os.close(write)
    finish(pump)
    until(lambda: b"".join(got) == data[: PIPE_BYTES // 2])


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_stays_the_workers_own(monkeypatch, terminal):
    master, slave = pty.openpty() if terminal else os.pipe()
    monkeypatch.setitem(group._CONSOLE_FDS, group.StreamChoice.ERR, slave)
    streams = GroupStreams(LogPlan("/dev/null"), "job", "host-a", Fence(1, 0))

    async def scenario():
        opened = await streams.open_soon(0, 0, "default")
        is_terminal = os.isatty(opened.stderr)
        await streams.finish()
        return opened, is_terminal

    opened, is_terminal = asyncio.run(scenario())
    assert is_terminal == terminal
    assert (opened.stderr == slave) == terminal
    assert bool(opened.stderr_tail) != terminal
    for fd in (master, slave):
        os.close(fd)


def test_a_flood_leaves_room_for_the_agents_own_lines(sink):
    console, got, gate = sink
    gate.clear()
    while console.offer(b"x" * 1023 + b"\n"):
        pass
    assert console.spare_bytes == 0
    assert console.put(b"the agent says\n")
    gate.set()
    until(lambda: b"".join(got).endswith(b"the agent says\n"))
    assert b"lost" not in b"".join(got)


def test_waking_an_ended_thread_writes_to_no_other_descriptor(monkeypatch):
    """`stop` asks the thread to end, then wakes it; the thread may have ended already."""
    pump, capture = Pump("test-race"), Capture(None)
    os.close(capture.open())
    pump.add(capture)
    wake, done = pump._wake, threading.Event()

    def late():
        wake()
        assert done.wait(DEADLINE_S)
        wake()

    monkeypatch.setattr(pump, "_wake", late)
    pump.stop(done.set)
    assert not capture.is_open
