"""The copy of console output in a file: bounded, never blocking, and read back in order."""

import asyncio
import os
import pty

import pytest

from elastane.observe.merge import LogCursor, Selection, find_streams
from elastane.process.streams import capture, group
from elastane.process.streams.capture import KeptFile, earlier
from elastane.process.streams.files import INDEX_SUFFIX
from elastane.process.streams.group import GroupStreams
from elastane.process.streams.plan import LogPlan
from elastane.protocol.model import Fence

DEADLINE_S = 30.0


@pytest.fixture
def failures():
    return []


@pytest.fixture
def keep(tmp_path, failures):
    folder = tmp_path / "round_1" / "attempt_0" / "rank_0"
    folder.mkdir(parents=True)
    file = KeptFile(folder / "stdout.log", lambda path, error: failures.append((path, error)))
    file.open()
    return file


def test_a_full_file_keeps_its_last_two_parts(keep, failures, tmp_path, monkeypatch):
    monkeypatch.setattr(capture, "KEPT_BYTES_MAX", 100)
    lines = [b"line %02d\n" % number for number in range(40)]
    for line in lines:
        keep.put(line)
    keep.close(DEADLINE_S)
    assert failures == []
    sizes = [path.stat().st_size for path in (earlier(keep.path), keep.path)]
    assert sizes[0] in range(90, 101) and 0 < sizes[1] <= 100
    streams = find_streams(tmp_path, Selection())
    read = [line.text + b"\n" for one in streams for line in LogCursor(one).read(partial=True)]
    assert read == lines[-len(read) :] and len(read) * 8 == sum(sizes)
    for path in (earlier(keep.path), keep.path):
        assert path.with_name(path.name + INDEX_SUFFIX).exists(), "times of its lines"


def test_a_reader_continues_after_a_full_file_was_replaced(keep, tmp_path, monkeypatch):
    monkeypatch.setattr(capture, "KEPT_BYTES_MAX", 100)
    keep.put(b"x" * 90 + b"\n")
    keep._writer.wait_empty(DEADLINE_S)
    [stream] = find_streams(tmp_path, Selection())
    cursor = LogCursor(stream)
    assert len([*cursor.read(partial=False)]) == 1
    keep.put(b"the next file begins\n")
    keep.close(DEADLINE_S)
    assert [line.text for line in cursor.read(partial=False)] == [b"the next file begins"]


def test_a_full_disk_is_reported_once(keep, failures, monkeypatch):
    def full(fd, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(capture.os, "write", full)
    for _ in range(3):
        keep.put(b"a line\n")
    keep.close(DEADLINE_S)
    assert [(path, error.errno) for path, error in failures] == [(keep.path, 28)]


def test_output_beyond_the_queue_is_reported_missing_in_the_copy(keep, monkeypatch):
    keep._write(b"then\n", 7)
    keep.close(DEADLINE_S)
    said = keep.path.read_bytes()
    assert said == b"[elastane: 7 pieces of output are missing here]\nthen\n"


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_on_a_terminal_a_worker_has_a_terminal_of_that_size_and_a_copy_is_kept(
    tmp_path, monkeypatch
):
    import fcntl
    import struct
    import termios

    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 91, 0, 0))
    monkeypatch.setitem(group._CONSOLE_FDS, group.StreamChoice.OUT, slave)
    consoles = {}
    monkeypatch.setattr(
        group, "process_console", lambda fd: consoles.setdefault(fd, group_console(fd))
    )
    streams = GroupStreams(LogPlan(str(tmp_path)), "job", "host-a", Fence(1, 0))

    async def scenario():
        opened = await streams.open_soon(0, 0, "default")
        size = tuple(os.get_terminal_size(opened.stdout))
        os.write(opened.stdout, b"10%\r20%\rdone\n")
        await streams.finish()
        return size, opened.stdout_path

    size, path = asyncio.run(scenario())
    assert size == (91, 33)
    with open(path, "rb") as file:
        assert file.read() == b"10%\r20%\rdone\n"
    assert os.read(master, 100) == b"10%\r20%\rdone\r\n", "the terminal itself adds the return"
    for fd in (master, slave):
        os.close(fd)


def group_console(fd):
    from elastane.process.streams.console import Console

    return Console(fd)
