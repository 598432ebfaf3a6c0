"""The stream between worker and snapshot server: frames, descriptors and their bounds."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest
from process_harness import DEADLINE_S

from elastane.snapshots import channel, shared_memory
from elastane.snapshots.channel import SnapshotChannel
from elastane.snapshots.digests import digests_of
from elastane.snapshots.shared_memory import Source, make_slot, room_bytes, viewed


@pytest.fixture
def ends():
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    yield [SnapshotChannel(end) for end in pair]
    for end in pair:
        end.close()


def test_frames_and_hundreds_of_descriptors_arrive_as_sent(ends):
    null = os.open(os.devnull, os.O_RDONLY)
    frame = os.urandom(3 << 20)
    sent = threading.Thread(target=ends[0].send, args=(frame, [null] * 450))
    sent.start()
    assert ends[1].receive(4 << 20, DEADLINE_S) == frame
    found = ends[1].receive_descriptors(450)
    sent.join()
    assert len({*found}) == 450
    assert all(os.path.samestat(os.fstat(fd), os.fstat(null)) for fd in found)
    for fd in (*found, null):
        os.close(fd)
    ends[0].send(b"next")
    assert ends[1].receive(10, DEADLINE_S) == b"next"


def test_a_frame_that_is_too_long_is_refused_before_it_is_read(ends):
    ends[0].send(b"x" * 100)
    with pytest.raises(ValueError, match="a frame of 100 bytes, of at most 99"):
        ends[1].receive(99, DEADLINE_S)


def test_an_end_between_frames_is_one_and_within_a_frame_is_a_fault(ends):
    ends[0].send(b"whole")
    ends[0]._end.sendall((100).to_bytes(4, "little") + b"half")
    ends[0].close()
    assert ends[1].receive(1000, DEADLINE_S) == b"whole"
    with pytest.raises(ConnectionResetError):
        ends[1].receive(1000, DEADLINE_S)
    with pytest.raises(EOFError):
        ends[1].receive(1000, DEADLINE_S)


def test_a_peer_that_stops_within_a_frame_times_out(ends, monkeypatch):
    monkeypatch.setattr(channel, "STALL_S", 0.05)
    with pytest.raises(TimeoutError):
        ends[1].receive(1000, 0.05)
    ends[0]._end.sendall((100).to_bytes(4, "little") + b"half")
    with pytest.raises(TimeoutError):
        ends[1].receive(1000, DEADLINE_S)


def test_descriptors_that_were_announced_and_do_not_come_are_a_fault(ends):
    null = os.open(os.devnull, os.O_RDONLY)
    ends[0].send(b"", [null])
    os.close(null)
    ends[1].receive(10, DEADLINE_S)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConnectionResetError, match="1 of 2 descriptors"):
        ends[1].receive_descriptors(2)
    assert len(os.listdir("/proc/self/fd")) <= before, "what came is closed again"


def test_data_sent_before_a_process_died_is_received():
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    read, write = os.pipe()
    heard = SnapshotChannel(mine, read)
    SnapshotChannel(its).send(b"last words")
    os.write(write, b"it has ended")
    assert heard.receive(100, DEADLINE_S) == b"last words"
    with pytest.raises(EOFError):
        heard.receive(100, None)  # `its` is open still: in a process that it forked, say.
    for fd in (read, write):
        os.close(fd)
    mine.close()
    its.close()


def test_a_view_of_a_slot_shows_its_bytes_and_leaves_no_mapping():
    slot = make_slot(1 << 20)
    os.pwrite(slot, b"abc", 0)
    maps = Path("/proc/self/maps").read_text().count("elastane-slot")
    with viewed(slot, 3) as view:
        assert bytes(view) == b"abc"
        with pytest.raises(TypeError):
            view[0] = 1
    assert Path("/proc/self/maps").read_text().count("elastane-slot") <= maps
    with viewed(slot, 0) as view:
        assert len(view) == 0
    os.close(slot)


def test_digests_are_the_same_with_any_number_of_threads_and_end_when_unwanted():
    slot = make_slot(50 << 20)
    os.pwrite(slot, os.urandom(1 << 20), 40 << 20)
    sources = [Source(0, 50 << 20, slot), Source(50 << 20, 50 << 20, slot)]
    one = digests_of(sources, lambda: True)
    assert one == digests_of(sources, lambda: True, threads=3)
    os.pwrite(slot, b"\xff", 33 << 20)
    assert one != digests_of(sources, lambda: True)
    assert digests_of(sources, lambda: False) is None
    os.close(slot)


@pytest.mark.parametrize(
    ("lines", "files"),
    [
        ("0::/job/step\n", ("memory.max", "memory.current")),
        (
            "9:cpu:/x\n4:memory:/job/step\n0::/\n",
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ),
    ],
    ids=["v2", "v1"],
)
def test_room_is_that_of_the_tightest_cgroup_on_the_way_up(tmp_path, monkeypatch, lines, files):
    root = tmp_path if files[0] == "memory.max" else tmp_path / "memory"
    for folder, limit, used in (("job", "5000", "1000"), ("job/step", "max", "500")):
        (root / folder).mkdir(parents=True)
        (root / folder / files[0]).write_text(limit)
        (root / folder / files[1]).write_text(used)
        (root / folder / "memory.stat").write_text("anon 7\ninactive_file 300\n")
    own = tmp_path / "cgroup"
    own.write_text(lines)
    monkeypatch.setattr(shared_memory, "_CGROUPS", tmp_path)
    monkeypatch.setattr(shared_memory, "_OWN_CGROUPS", own)
    assert room_bytes() == 5000 - (1000 - 300)
    with pytest.raises(OSError, match="with 4300 bytes of memory left"):
        make_slot(1)
