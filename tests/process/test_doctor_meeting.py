"""Nodes of `elastane doctor --nodes` meet, measure, and all get the results of all."""

import contextlib
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from jobs import until
from ports import free_port

from elastane.doctor import meeting, probes
from elastane.doctor.meeting import (
    MeetingBoard,
    MeetingRequest,
    PageAnswer,
    PageRequest,
    meet,
    phase_limit_s,
)
from elastane.doctor.network_rules import (
    CONNECTED,
    FULL,
    LOST,
    REFUSED,
    STRANGER,
    GlooPlace,
    NodePage,
    judge_nodes,
)
from elastane.doctor.rules import Level
from elastane.process.endpoint import Endpoint
from elastane.protocol.model import Versions

# Generous: a bound for a busy machine.
WAIT_S = 60.0


@pytest.fixture(autouse=True)
def short_transfers(monkeypatch):
    monkeypatch.setattr(probes, "TRANSFER_S", 0.02)


def page(name="n", **changes):
    facts = {
        "name": name,
        "versions": Versions(elastane="0.1.0", python="3.11"),
        "address": "",
        "probe_port": 0,
        "gloo": GlooPlace(chosen_by="GLOO_SOCKET_IFNAME=lo", address="127.0.0.1"),
        "interfaces": (("lo", ("127.0.0.1",)),),
        "ports": (32768, 60999),
        "endpoint": ("127.0.0.1",),
    }
    return NodePage(**{**facts, **changes})


def place(port, name="n", wanted=3, wait_s=WAIT_S, **changes):
    at = Endpoint("127.0.0.1", port)
    return MeetingRequest(
        endpoint=at, wanted=wanted, wait_s=wait_s, local_addr="", page=page(name, **changes)
    )


def silent(text):
    pass


def test_all_nodes_know_the_results_of_all():
    port = free_port()
    with ThreadPoolExecutor(3) as pool:
        found = [*pool.map(lambda name: meet(place(port, name), silent), "abc")]
    assert found[0].pages == found[1].pages == found[2].pages
    assert sorted(found[0].names) == ["a", "b", "c"]
    for number, one in enumerate(found[0].pages):
        assert [reach.to for reach in one.reaches] == [to for to in range(3) if to != number]
        assert {(reach.outcome, reach.gloo) for reach in one.reaches} == {(CONNECTED, CONNECTED)}
        assert all(reach.latency_s > 0 and abs(reach.offset_s) < 1 for reach in one.reaches)
        assert [speed.to for speed in one.speeds] == [*range(number + 1, 3)]
        assert all(speed.sent > 0 and speed.received > 0 for speed in one.speeds)
    faults = [one for one in judge_nodes(found[0]) if one.level is Level.FAULT]
    assert faults == []


def test_a_node_that_measures_for_long_keeps_its_place(monkeypatch):
    """A connection that is dropped takes seconds, and so does a resolver that is silent."""
    limit_s, measure = 1.0, meeting.measure_reach

    def slow(*words):
        begun_s = time.monotonic()
        until(lambda: time.monotonic() > begun_s + 1.5 * limit_s, "time passes", WAIT_S)
        return measure(*words)

    monkeypatch.setattr(meeting, "ANSWER_LIMIT_S", limit_s)
    monkeypatch.setattr(meeting, "measure_reach", slow)
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        found = [*pool.map(lambda name: meet(place(port, name, wanted=2), silent), "ab")]
    assert [one.error for one in found] == ["", ""] and None not in found[0].pages


def test_the_limit_of_silence_is_longer_than_any_phase():
    assert max(phase_limit_s(phase, meeting.NODES_MAX) for phase in (1, 2)) < meeting.SILENT_MAX_S


def test_another_process_at_the_port_of_gloo_is_reported():
    port = free_port()
    other = page().gloo
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        reach = probes.measure_reach(
            page(address="127.0.0.1", probe_port=stranger.getsockname()[1], gloo=other), b"k", 0, 1
        )
        assert reach.outcome == REFUSED
    server = probes.ProbeServer(b"one key.", ("127.0.0.1",))
    server.start()
    try:
        here = page(address="127.0.0.1", probe_port=server.ports[0])
        assert probes.measure_reach(here, b"another.", 0, 1).outcome == STRANGER
        gloo = msgspec.structs.replace(other, port=port)
        lost = probes.measure_reach(msgspec.structs.replace(here, gloo=gloo), b"one key.", 0, 1)
        assert (lost.outcome, lost.gloo) == (CONNECTED, REFUSED)
    finally:
        server.close()


def test_a_node_alone_and_one_without_a_meeting_end_in_time():
    alone = meet(place(free_port(), wanted=2, wait_s=0.2), silent)
    assert (alone.names, alone.error) == (("n",), "")
    away = place(free_port(), wait_s=0.2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", away.endpoint.port))  # so that this node does not listen there
        assert meet(away, silent).error == REFUSED


def test_another_program_at_the_endpoint_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as other:

        def speak():
            with other.accept()[0] as sock:
                sock.sendall(struct.pack("!I", 7) + b'{"a":1')

        threading.Thread(target=speak, daemon=True).start()
        assert meet(place(other.getsockname()[1]), silent).error == STRANGER


def test_a_meeting_whose_host_is_lost_is_told_from_another_program():
    with socket.create_server(("127.0.0.1", 0)) as host:

        def answer_once():
            with host.accept()[0] as sock:
                meeting._receive(sock)
                meeting._send(sock, PageAnswer(came=1))

        threading.Thread(target=answer_once, daemon=True).start()
        assert meet(place(host.getsockname()[1]), silent).error == LOST


def test_garbage_at_the_ports_of_a_node_ends_its_own_connection_alone():
    port = free_port()
    server = meeting.BoardServer(
        meeting.listen("127.0.0.1", port), MeetingBoard(1, WAIT_S, time.monotonic)
    )
    server.start()
    probe = probes.ProbeServer(b"k" * 8, ("127.0.0.1",))
    probe.start()
    try:
        for at in (port, probe.ports[0]):
            for garbage in (b"\xff" * 64, b"\x00\x00\x00\x02{}", b"GET / HTTP/1.1\r\n\r\n", b""):
                with socket.create_connection(("127.0.0.1", at), WAIT_S) as sock:
                    sock.settimeout(WAIT_S)
                    with contextlib.suppress(OSError):  # closed before, or reset
                        sock.sendall(garbage)
                        sock.shutdown(socket.SHUT_WR)
                    with contextlib.suppress(ConnectionResetError):
                        assert sock.recv(1) == b""
        assert meet(place(port, wanted=1), silent).names == ("n",)
    finally:
        server.close()
        probe.close()


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def asked(board, key, phase, *, posts=True, reached_at="127.0.0.1", **changes):
    posted = page(key.decode(), **changes) if posts else None
    return board.answer(PageRequest(key=key, phase=phase, page=posted), reached_at)


def test_a_phase_is_complete_when_all_have_posted():
    board = MeetingBoard(2, 100.0, Clock())
    assert asked(board, b"a", 0).pages is None
    assert asked(board, b"a", 0, posts=False).came == 1
    assert asked(board, b"b", 0).names == ("a", "b")
    assert asked(board, b"a", 0, posts=False).keys == (b"a", b"b")
    assert asked(board, b"a", 1).pages is None
    assert [one.name for one in asked(board, b"b", 1).pages] == ["a", "b"]
    assert asked(board, b"c", 0).is_full


def test_the_meeting_starts_without_late_nodes_and_continues_without_silent_ones():
    clock = Clock()
    board = MeetingBoard(3, 100.0, clock)
    asked(board, b"a", 0)
    asked(board, b"b", 0)
    clock.now_s = 101.0
    assert asked(board, b"a", 0, posts=False).names == ("a", "b")
    assert asked(board, b"c", 0).is_full
    assert asked(board, b"a", 1).pages is None
    clock.now_s += phase_limit_s(1, 2) + 1
    first, second = asked(board, b"a", 1, posts=False).pages
    assert first.name == "a" and second is None


def test_the_host_of_the_endpoint_has_the_address_at_which_others_reach_it():
    for order in ("ab", "ba"):
        board = MeetingBoard(2, 100.0, Clock())
        for name in order:
            here = name == "a"
            asked(board, name.encode(), 0, address="127.0.0.1" if here else "10.0.0.2",
                  reached_at="127.0.0.1" if here else "10.0.0.1")  # fmt: skip
        found = asked(board, b"a", 0, posts=False).pages
        assert {one.name: one.address for one in found} == {"a": "10.0.0.1", "b": "10.0.0.2"}


@pytest.mark.parametrize("phase", [-1, meeting.LAST_PHASE + 1])
def test_a_page_of_an_unknown_phase_is_refused(phase):
    raw = msgspec.json.encode(PageRequest(key=b"a", phase=phase, page=page()))
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(raw, type=PageRequest)


def test_a_surplus_node_is_refused_with_the_reason():
    port = free_port()
    board = MeetingBoard(1, WAIT_S, time.monotonic)
    server = meeting.BoardServer(meeting.listen("127.0.0.1", port), board)
    server.start()
    try:
        asked(board, b"a", 0)
        assert meet(place(port, wanted=1), silent).error == FULL
    finally:
        server.close()
